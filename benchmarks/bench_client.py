"""What the clients cost: messages per second, delays, CPU time, blocked loops, memory.

    python benchmarks/bench_client.py [--quick] [--out FOLDER] [--vllm PYTHON]

A fake engine (``fake_engine.py``) is put against ``SyncMPClient``, ``AsyncMPClient`` on asyncio and on uvloop, the
least code that reads the same messages (pyzmq and msgspec, blocking or with zmq.asyncio), and the clients of vLLM
0.25.1 if the Python of an environment that has it is given. Each runs in a process of its own, all take turns, and the
garbage collector passes over what was there once they were connected. On a shared machine the same figure doubles
within a second, and two processes of the same code differ by up to 18 % for as long as they live: so turns are short,
there are many, and all contestants are started eight times.

Prints a table and saves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from client_contestants import CONTESTANTS
from fake_engine import FakeEngine, step_message
from harness import Suite, arguments_for, finish

BASES = {
    "sync": ["raw sync", "vLLM sync"],
    "async": ["raw async", "vLLM async"],
    "uvloop": ["raw async", "vLLM uvloop"],
}

DEFAULT_MODEL = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "enginewire/interop/hf"
"""Where the interop tests put the model that vLLM's configuration is made of. Nothing is loaded from it."""

BURSTS = {1: 10_000, 8: 3_000, 64: 1_000, 256: 250}
"""Messages per burst, by outputs per message."""

RICH, PACED, LATENCIES, ADDS = 200, 400, 100, 100
PACE_US = 1_000
BLOCKED = 2_500
UNREAD = 10_000
STARTS, ROUNDS = 8, 5
"""How often all are started, and how many rounds they run then."""


class Contestant:
    """A contestant's process, as the benchmark sees it."""

    def __init__(self, column: str, engine: FakeEngine, vllm: Path | None = None) -> None:
        ours, theirs = socket.socketpair()
        script = str(Path(__file__).parent / "client_course.py")
        python = vllm if column.startswith("vLLM") and vllm is not None else sys.executable
        command = [python, script, str(theirs.fileno()), column, *engine.addresses()]
        self.column = column
        began = time.monotonic()
        # A package that was installed has its bytecode, and so does a source tree from the second start on.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=sys.stderr, env=environment)
        theirs.close()
        self._lines = ours.makefile("rw")
        ours.close()  # the file has its own hold of it
        connected, self.memory_mb = self._answer()
        self.start_s = connected - began

    def measure(self, name: str, *arguments: Any) -> Any:
        """Have it take one measurement."""
        print(json.dumps([name, *arguments]), file=self._lines, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise SystemExit(f"{self.column} ended with exit code {self._process.wait()}; see above")
        return json.loads(line)

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(SystemExit, OSError):
            self.measure("close")
        self._lines.close()
        self._process.wait()


def measurements() -> Iterator[tuple[list[tuple[str, bool]], str, Sequence[Any]]]:
    """Yield names of rows and whether low is good, then the measurement that fills them and its arguments."""
    for batch, count in BURSTS.items():
        yield [(f"messages/s, B={batch}", False)], "rate", (count, batch, "plain")
    yield [("messages/s, B=64, with statistics", False)], "rate", (BURSTS[64], 64, "stats")
    yield [("messages/s, B=64, logprobs untouched", False)], "rate", (RICH, 64, "logprobs")
    yield [("messages/s, B=64, logprobs read", False)], "rate", (RICH, 64, "logprobs", True)
    pace = f"B=64, {1e6 / PACE_US:,.0f}/s"
    rows = [(f"{pace}: delay p50, µs", True), (f"{pace}: delay p99, µs", True), (f"{pace}: CPU per message, µs", True)]
    yield rows, "paced", (PACED, 64, PACE_US)
    for in_flight in (1, 64):
        row = f"add to first output, {in_flight} in flight, p50 µs"
        yield [(row, True)], "first_output", (LATENCIES * min(in_flight, 4), in_flight)
    yield [("utility call, p50 µs", True)], "utility", (LATENCIES,)
    for num_tokens, count in ((32, ADDS), (1_024, ADDS), (32_768, 20)):
        yield [(f"add_request, {num_tokens:,} tokens, CPU µs", True)], "add_cpu", (count, num_tokens)
    yield [("add_request, 16 MiB tensor, CPU µs", True)], "add_cpu", (4, 32, True)
    yield [("abort of 1,000, ms", True)], "abort", (1_000,)
    yield [("longest block of the loop in a burst, ms", True)], "longest_block", (BLOCKED,)


def run_once(suite: Suite, contestants: Sequence[Contestant]) -> None:
    """Take all measurements of a round, each with all contestants one after the other: what the machine does changes
    within seconds, and those who are compared shall see the same of it."""
    for rows, name, arguments in measurements():
        for contestant in contestants:
            if name == "longest_block" and "sync" in contestant.column.split():
                continue  # it has no loop
            values = contestant.measure(name, *arguments)
            for (row, lower_is_better), value in zip(rows, values if len(rows) > 1 else [values], strict=True):
                suite.add(row, contestant.column, value, lower_is_better=lower_is_better)


def note_start(suite: Suite, contestant: Contestant) -> None:
    """Note how long a new process took to connect, its memory then, and what that grows by if nobody reads.

    Growth is measured in a new process only: memory that was used and freed would hide what is needed.
    """
    for row, value in (
        ("process start to connected, s", contestant.start_s),
        ("resident memory, MB", contestant.memory_mb),
        ("growth per unread message, × its size", contestant.measure("growth", UNREAD, 64, len(step_message(64)))),
    ):
        suite.add(row, contestant.column, value, lower_is_better=True)


def run(columns: Sequence[str], *, starts: int, rounds: int, vllm: Path | None) -> Suite:
    """Measure, in so many rounds of each start."""
    suite = Suite("client", BASES)
    for _ in range(starts):
        with FakeEngine() as engine, contextlib.ExitStack() as stack:
            contestants = []
            for column in columns:
                contestants.append(stack.enter_context(Contestant(column, engine, vllm)))
                note_start(suite, contestants[-1])
            run_once(Suite("warm-up"), contestants)
            for _ in range(rounds):
                contestants.reverse()  # nobody always comes after the same other
                run_once(suite, contestants)
    return suite


def main() -> None:
    """Measure, print and save."""
    parser = arguments_for(__doc__, quick="one start, two rounds")
    parser.add_argument("--starts", type=int, help=f"default {STARTS}, or 1")
    parser.add_argument("--rounds", type=int, help=f"of each start; default {ROUNDS}, or 2")
    parser.add_argument("--vllm-model", default=str(DEFAULT_MODEL), help="a Hugging Face folder for its configuration")
    parser.add_argument("--only", help="columns, separated by commas, e.g. 'raw sync,sync'")
    arguments = parser.parse_args()
    os.environ.update(BENCH_HF_MODEL=arguments.vllm_model, VLLM_LOGGING_LEVEL="ERROR")
    wanted = arguments.only.split(",") if arguments.only else list(CONTESTANTS)
    columns = [each for each in CONTESTANTS if each in wanted and (arguments.vllm or not each.startswith("vLLM"))]
    starts = arguments.starts or (1 if arguments.quick else STARTS)
    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    suite = run(columns, starts=starts, rounds=rounds, vllm=arguments.vllm)
    finish(suite, arguments)


if __name__ == "__main__":
    main()
