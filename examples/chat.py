"""Ask a model two questions, the second about its first answer: ``python examples/chat.py [MODEL]``."""

import sys

from enginewire import LLM, SamplingParams

conversation = [{"role": "system", "content": "Answer in one short sentence."}]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for question in ("What is the capital of France?", "What is it famous for?"):
        conversation.append({"role": "user", "content": question})
        (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=48))
        answer = output.outputs[0].text
        conversation.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
