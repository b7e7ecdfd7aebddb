"""What encoding requests and decoding outputs costs, in microseconds of CPU time per message.

    python benchmarks/bench_codec.py [--rounds 5]

Prints a table and, last, one line of JSON. Medians of rounds; the garbage collector is frozen, as a server does.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from enginewire.wire.arrays import LogprobsLists
from enginewire.wire.codec import MsgpackEncoder, OutputsDecoder, RequestDecoder
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from enginewire.wire.sampling import SamplingParams

ROUND_S = 0.05
TOP_LOGPROBS = 5


def microseconds(function: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time of one call."""
    function()
    calls = 1
    while True:
        elapsed = _run(function, calls)
        if elapsed > ROUND_S / 4:
            break
        calls *= 4
    calls = max(1, int(calls * ROUND_S / elapsed))
    return statistics.median(_run(function, calls) / calls for _ in range(rounds)) * 1e6


def _run(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start


def request(num_tokens: int) -> EngineCoreRequest:
    """Make a request with a prompt of so many tokens."""
    tokens = np.random.default_rng(0).integers(0, 50_000, num_tokens).tolist()
    return EngineCoreRequest("chatcmpl-0123456789abcdef", tokens, sampling_params=SamplingParams(max_tokens=64))


def outputs(batch: int, *, logprobs: bool) -> EngineCoreOutputs:
    """Make a step's message: one new token for each of ``batch`` requests."""
    rng = np.random.default_rng(0)

    def of_one() -> LogprobsLists:
        k = TOP_LOGPROBS + 1
        ids = rng.integers(0, 50_000, (1, k)).astype("<i4")
        return LogprobsLists(ids, rng.standard_normal((1, k)).astype("<f4"), np.ones(1, "<i8"))

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(f"chatcmpl-{i:016x}", [i * 7], new_logprobs=of_one() if logprobs else None)
            for i in range(batch)
        ],
        timestamp=1.0,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    gc.freeze()

    encoder, requests, decoder = MsgpackEncoder(), RequestDecoder(), OutputsDecoder()
    results = {
        "SamplingParams()": microseconds(lambda: SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9), rounds)
    }
    for num_tokens in (32, 1024, 32768):
        message = request(num_tokens)
        frames = encoder.encode(message)
        results[f"encode request, {num_tokens} tokens"] = microseconds(lambda m=message: encoder.encode(m), rounds)
        results[f"decode request, {num_tokens} tokens"] = microseconds(lambda f=frames: requests.decode(f), rounds)
    for batch in (1, 8, 64, 256):
        plain, rich = outputs(batch, logprobs=False), outputs(batch, logprobs=True)
        plain_frames, rich_frames = encoder.encode(plain), encoder.encode(rich)

        def read(frames: list = rich_frames) -> object:
            return [output.new_logprobs for output in decoder.decode(frames).outputs]

        results[f"encode outputs, B={batch}"] = microseconds(lambda m=plain: encoder.encode(m), rounds)
        results[f"decode outputs, B={batch}"] = microseconds(lambda f=plain_frames: decoder.decode(f), rounds)
        results[f"encode outputs, B={batch}, logprobs"] = microseconds(lambda m=rich: encoder.encode(m), rounds)
        results[f"decode outputs, B={batch}, logprobs untouched"] = microseconds(
            lambda f=rich_frames: decoder.decode(f), rounds
        )
        results[f"decode outputs, B={batch}, logprobs read"] = microseconds(read, rounds)

    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:{width}}  {value:10.2f} µs")
    figures = {name: round(value, 2) for name, value in results.items()}
    print(json.dumps({"bench": "codec", "python": platform.python_version(), "cpu_us": figures}))


if __name__ == "__main__":
    main()
