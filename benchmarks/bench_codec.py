"""What encoding requests and decoding outputs costs, in microseconds of CPU time per message.

    python benchmarks/bench_codec.py [--quick] [--out FOLDER]

Compared with msgspec alone, which knows no arrays, checks nothing beyond types and keeps one damaged output from no
other. Medians of rounds; the garbage collector is frozen, as a server does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from harness import Suite, arguments_for, finish

from enginewire.wire.arrays import LogprobsLists
from enginewire.wire.codec import MsgpackEncoder, OutputsDecoder, RequestDecoder
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from enginewire.wire.sampling import SamplingParams

OURS, RAW = "ours", "msgspec"
TOP_LOGPROBS = 5
RAW_VIEW = 3
"""The extension that array bytes travel in."""


def microseconds(function: Callable[[], object], seconds: float) -> float:
    """Return the CPU time of one call, of as many as take so long."""
    function()
    calls = 1
    while (spent := _run(function, calls)) < seconds / 8:
        calls *= 4
    calls = max(1, int(calls * seconds / spent))
    return _run(function, calls) / calls * 1e6


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


def raw_hook(array: Any) -> object:
    """Encode an array with the least code."""
    return array.dtype.str, array.shape, msgspec.msgpack.Ext(RAW_VIEW, array.tobytes())


def measure(suite: Suite, seconds: float) -> None:
    """Measure one round."""

    def compare(row: str, ours: Callable[[], object], raw: Callable[[], object] | None = None) -> None:
        suite.add(row, OURS, microseconds(ours, seconds), lower_is_better=True)
        if raw is not None:
            suite.add(row, RAW, microseconds(raw, seconds), lower_is_better=True)

    encoder, requests, decoder = MsgpackEncoder(), RequestDecoder(), OutputsDecoder()
    encode = msgspec.msgpack.Encoder(enc_hook=raw_hook).encode
    decode = msgspec.msgpack.Decoder().decode
    compare("SamplingParams(…)", lambda: SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9))
    for num_tokens in (32, 1024, 32768):
        message = request(num_tokens)
        frames = encoder.encode(message)
        name = f"request, {num_tokens} tokens"
        compare(f"encode {name}", lambda m=message: encoder.encode(m), lambda m=message: encode(m))
        compare(f"decode {name}", lambda f=frames: requests.decode(f), lambda f=frames: decode(f[0]))
    for batch in (1, 8, 64, 256):
        plain, rich = outputs(batch, logprobs=False), outputs(batch, logprobs=True)
        plain_frames, rich_frames = encoder.encode(plain), encoder.encode(rich)

        def read(frames: list[Any] = rich_frames) -> object:
            return [output.new_logprobs for output in decoder.decode(frames).outputs]

        name = f"outputs, B={batch}"
        compare(f"encode {name}", lambda m=plain: encoder.encode(m), lambda m=plain: encode(m))
        compare(f"decode {name}", lambda f=plain_frames: decoder.decode(f), lambda f=plain_frames: decode(f[0]))
        compare(f"encode {name}, logprobs", lambda m=rich: encoder.encode(m), lambda m=rich: encode(m))
        untouched = f"decode {name}, logprobs untouched"
        compare(untouched, lambda f=rich_frames: decoder.decode(f), lambda f=rich_frames: decode(f[0]))
        compare(f"decode {name}, logprobs read", read)


def main() -> None:
    """Measure, print, save."""
    parser = arguments_for(__doc__, quick="one short round")
    arguments = parser.parse_args()
    gc.freeze()
    suite = Suite("codec", bases={OURS: [RAW]})
    for _ in range(1 if arguments.quick else 5):
        measure(suite, 0.02 if arguments.quick else 0.05)
    finish(suite, arguments)


if __name__ == "__main__":
    main()
