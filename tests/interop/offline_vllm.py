"""vLLM's offline ``LLM`` in front of an engine started elsewhere; run by a vLLM environment's Python.

``DIR/bin/python offline_vllm.py MODEL PORT`` prints one line of JSON: what came of each call.
"""

import importlib.metadata
import json
import sys

import vllm_cli

importlib.metadata.version = vllm_cli.version

from vllm import LLM, SamplingParams  # noqa: E402  (it reads its version when it is imported)


def answer(call):
    """Return a call's result, or the text of what it raised."""
    try:
        return call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def texts(outputs):
    """Return the texts and finish reasons of every output."""
    return [[(completion.text, completion.finish_reason) for completion in output.outputs] for output in outputs]


def main():
    """Make the calls."""
    llm = LLM(
        sys.argv[1],
        data_parallel_size_local=0,
        data_parallel_address="127.0.0.1",
        data_parallel_rpc_port=int(sys.argv[2]),
        max_model_len=1024,
        enforce_eager=True,
        dtype="bfloat16",
        disable_log_stats=False,
    )
    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=12)
    question = [{"role": "user", "content": "What is the capital of France?"}]

    def aborted():
        engine.add_request("long", "1, 2, 3,", SamplingParams(max_tokens=900, ignore_eos=True))
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
        engine.abort_request(["long"])
        return texts(llm.generate("The capital of France is", greedy))

    results = {
        "greedy": answer(lambda: texts(llm.generate(["The capital of France is", "Two plus two is"], greedy))),
        "chat": answer(lambda: texts(llm.chat(question, greedy))),
        "n": answer(lambda: texts(llm.generate("My name is", SamplingParams(n=2, seed=7, max_tokens=8)))),
        "is_sleeping": answer(engine.is_sleeping),
        "reset_prefix_cache": answer(llm.reset_prefix_cache),
        "after_abort": answer(aborted),
        "refused": answer(lambda: texts(llm.generate("x", SamplingParams(max_tokens=4, logit_bias={5: 1.0})))),
        "after_refusal": answer(lambda: texts(llm.generate("The capital of France is", greedy))),
    }
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
