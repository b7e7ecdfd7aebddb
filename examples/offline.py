"""Complete a batch of prompts: ``python examples/offline.py [MODEL]``."""

import sys

from enginewire import LLM, SamplingParams

prompts = [
    "The capital of France is",
    "The three primary colours are",
    "Water boils at",
]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
        completion = output.outputs[0]
        print(f"{output.prompt}{completion.text} [{completion.finish_reason}]")
