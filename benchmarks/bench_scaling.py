"""How the frontend's cost grows: with requests in flight, engines, the prompt's length, streams, server processes.

    python benchmarks/bench_scaling.py [--quick] [--rounds 3] [--out FOLDER]

CPU time of the frontend's process or processes, whatever the engines use. Behind the points of each course is its
exponent: the slope of a line through them, on logarithmic scales. Of a cost that is the whole, 1 is in proportion and
more is worse than that; of a cost that is one item's share, 0 is what does not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import load
import uvloop
from bench_serve import PACE_S, Level, Server, ours
from harness import Suite, arguments_for, finish

from enginewire.config import EngineConfig
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server.run import keep_collections_rare
from enginewire.testing import free_tcp_port
from enginewire.wire.sampling import RequestOutputKind, SamplingParams

HERE = Path(__file__).parent
OURS, PROPORTION = "enginewire", "in proportion"
IN_FLIGHT, ENGINES, PROMPTS = (1, 8, 64, 512, 4096), (1, 4, 16, 64), (1, 32, 1024, 8192, 32_768)
STREAMS, PROCESSES = (1, 4, 16, 64, 256), (1, 2, 4, 8)
TOKENS = 32
LEAST_TOKENS = 1024
"""Of a measurement, so that it takes milliseconds at least: fewer requests are made again and again."""


def exponent(points: dict[int, float]) -> float:
    """Return the slope of the line through points, on logarithmic scales; not below 0.01, as ratios are made of it."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    return max(0.01, statistics.linear_regression(xs, ys).slope)


class Course:
    """The points of one course, over all rounds.

    Args:
        name: with a place for what grows.
        unit: of what is measured.
        is_share: the points are one item's share of the cost, and should not grow; else they are the whole.
    """

    def __init__(self, suite: Suite, name: str, unit: str, *, is_share: bool = False) -> None:
        self._suite = suite
        self._name = name
        self._unit = unit
        self._is_share = is_share
        self._points: dict[int, list[float]] = {}

    def add(self, size: int, value: float, items: int = 1) -> None:
        """Note a point, which is shown as the share of ``items``."""
        self._points.setdefault(size, []).append(value)
        self._suite.add(f"{self._name.format(size)}: {self._unit}", OURS, value / items, lower_is_better=True)
        print(f"{self._name.format(size)}: {value / items:.1f} {self._unit}", flush=True)

    def end(self) -> None:
        """Note the exponent, over all points and between the last two, where what is fixed counts least."""
        medians = {size: statistics.median(values) for size, values in self._points.items()}
        last = dict(list(medians.items())[-2:])
        for what, points in (("exponent", medians), ("exponent at the end", last)):
            row = f"{self._name.format('N')}: {what} of {'a share' if self._is_share else 'the whole'}"
            self._suite.add(row, OURS, exponent(points), lower_is_better=True)
            if not self._is_share:
                self._suite.add(row, PROPORTION, 1.0, lower_is_better=True)


# The frontend as a library.


async def complete(llm: AsyncLLM, prompt: Any, num_tokens: int) -> None:
    """Stream one completion to its end."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for _ in llm.generate(prompt, params):
        pass


async def cpu_of(llm: AsyncLLM, prompt: Any, num_requests: int, num_tokens: int) -> float:
    """Return the CPU microseconds of so many completions side by side."""
    repeats = max(1, LEAST_TOKENS // (num_requests * num_tokens))
    start = time.process_time()
    for _ in range(repeats):
        await asyncio.gather(*(complete(llm, prompt, num_tokens) for _ in range(num_requests)))
    return (time.process_time() - start) * 1e6 / repeats


async def requests_in_flight(suite: Suite, rounds: int) -> None:
    """Measure one to many requests side by side, of so many tokens each."""
    course = Course(suite, "{} in flight", "CPU µs per token")
    # So slow that every token is a message of its own, as with a real engine.
    pace = {"step_time_s": 0.01}
    async with await AsyncLLM.create("echo", max_num_seqs=max(IN_FLIGHT), executor_options=pace) as llm:
        await cpu_of(llm, "warm-up", 64, TOKENS)
        for _ in range(rounds):
            for count in IN_FLIGHT:
                course.add(count, await cpu_of(llm, "Once upon a time", count, TOKENS), count * TOKENS)
    course.end()


async def prompts(suite: Suite, rounds: int) -> None:
    """Measure short to long prompts, given as text and as tokens; two requests after each other."""
    courses = {
        kind: Course(suite, f"a prompt of {{}} tokens, as {kind}", "CPU µs per request") for kind in ("text", "tokens")
    }
    async with await AsyncLLM.create("echo") as llm:
        await cpu_of(llm, "warm-up", 64, TOKENS)
        for _ in range(rounds):
            for length in PROMPTS:
                for kind, prompt in (("text", "x" * length), ("tokens", {"prompt_token_ids": [120] * length})):
                    courses[kind].add(length, await cpu_of(llm, prompt, 1, 16))
    for course in courses.values():
        course.end()


@contextlib.asynccontextmanager
async def over_mock_engines(count: int) -> AsyncIterator[AsyncLLM]:
    """Make a frontend whose engines are all in one other process."""
    port = free_tcp_port()
    config = EngineConfig.create(
        "echo", data_parallel_size=count, data_parallel_size_local=0, data_parallel_rpc_port=port
    )
    command = [sys.executable, str(HERE / "mock_engines.py"), str(port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            async with await AsyncLLM.create(config=config) as llm:
                yield llm
        finally:
            process.terminate()


async def engines(suite: Suite, rounds: int) -> None:
    """Measure the same requests over one to many engines."""
    course = Course(suite, "256 requests over {} engines", "CPU µs per request", is_share=True)
    for _ in range(rounds):
        for count in ENGINES:
            async with over_mock_engines(count) as llm:
                await cpu_of(llm, "warm-up", 256, 1)
                course.add(count, await cpu_of(llm, "Once upon a time", 256, 8) / 256)
    course.end()


# The server.


def measured(server: Server, level: Level) -> float:
    """Return the CPU microseconds of the server's processes for one level."""
    start = server.cpu_s()
    load.run(server.port, level.requests(server.model))
    return (server.cpu_s() - start) * 1e6


def warm_up(server: Server) -> None:
    """Have all processes of a server serve something; the first to start answers before the last has."""
    deadline = time.monotonic() + 60
    while True:
        try:
            load.run(server.port, Level(64, TOKENS).requests(server.model))
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def streams(suite: Suite, rounds: int) -> None:
    """Measure one to many streams of the server, paced."""
    course = Course(suite, "{} streams, paced", "CPU µs per token")
    with ours(None) as server:
        warm_up(server)
        for _ in range(rounds):
            for count in STREAMS:
                course.add(count, measured(server, Level(count, TOKENS, PACE_S)), count * TOKENS)
    course.end()


def processes(suite: Suite, rounds: int) -> None:
    """Measure the same streams of one to many server processes, paced and at full speed."""
    paced, fast = Level(256, 64, PACE_S), Level(256, 250)
    course = Course(suite, "256 streams over {} server processes, paced", "CPU µs per token", is_share=True)
    for _ in range(rounds):
        for count in PROCESSES:
            with ours(None, "--api-server-count", str(count)) as server:
                warm_up(server)
                course.add(count, measured(server, paced) / (paced.streams * paced.tokens))
                done = load.run(server.port, fast.requests(server.model))
                row = f"256 streams over {count} server processes, full speed: tokens/s"
                suite.add(row, OURS, done.tokens / done.elapsed)
    course.end()


def main() -> None:
    """Measure, print, save."""
    parser = arguments_for(__doc__, quick="one round, and only what is no server")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    suite = Suite("scaling", {OURS: [PROPORTION]})
    keep_collections_rare()  # as our server does
    for measure in (requests_in_flight, prompts, engines):
        uvloop.run(measure(suite, rounds))
    if not args.quick:
        streams(suite, rounds)
        processes(suite, rounds)
    finish(suite, args)


if __name__ == "__main__":
    main()
