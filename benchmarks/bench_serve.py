"""What the server delivers: streamed tokens per second, time to the first token, and its own CPU time.

    python benchmarks/bench_serve.py [--engines echo echo-20ms smollm2-135m] [--streams 1 16 64 256]
                                     [--data-parallel-size N] [--api-server-count N]

``echo`` is an engine faster than any server, so that the server is what is measured; it merges what it cannot send one
by one. ``echo-20ms`` makes 50 tokens a second for each stream: every token is an event, and costs what it would with a
real engine of that speed.

Starts ``enginewire serve`` for each and opens the streams all at once, each over a connection of its own with a prompt
of its own. The load generator, the server and the engine share the machine's cores. Prints a table and, last, one line
of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LEAVE_S = 40.0
STREAM_S = 120.0


@dataclass(frozen=True, slots=True)
class Engine:
    """What is served, and how many tokens each of so many streams gets: seconds a level, two minutes in all."""

    arguments: list[str]
    tokens: dict[int, int]


ENGINES = {
    "echo": Engine(["echo"], {1: 20_000, 16: 4_000, 64: 1_000, 256: 250}),
    "echo-20ms": Engine(["echo", "--executor-option", "step_time_s=0.02"], {1: 100, 16: 100, 64: 100, 256: 100}),
    "smollm2-135m": Engine(["smollm2-135m"], {1: 128, 16: 64, 64: 32, 256: 16}),
}


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs; ``pids`` are those of its processes, without the engines'."""

    port: int
    pids: list[int]
    model: str

    def cpu_s(self) -> float:
        """Return the CPU time of its processes so far."""
        threads = (thread for pid in self.pids for thread in Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured with so many streams. Times are milliseconds; ``cpu_ms`` is the server's per 1,000 tokens."""

    engine: str
    streams: int
    tokens: int
    events: int
    tokens_per_s: float
    first_token_p50: float
    first_token_p99: float
    cpu_ms: float


async def stream(server: Server, index: int, max_tokens: int) -> tuple[int, int, float]:
    """Complete one prompt; return the number of tokens, of events, and the seconds until the first."""
    body = {
        "model": server.model,
        "prompt": f"{index} engines went down to the sea, and the first of them said:",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    start = time.perf_counter()
    first = 0.0
    num_events = 0
    tail = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(head.encode() + content)
        while data := await reader.read(1 << 16):
            num_events += data.count(b"\n\n") + (tail[-1:] == data[:1] == b"\n")
            tail = (tail + data)[-2000:]
            if not first and b"data: " in tail:
                first = time.perf_counter() - start
    finally:
        writer.close()
    if not first or b"data: [DONE]" not in tail:
        raise RuntimeError(f"stream {index} ended early: {tail.decode(errors='replace')}")
    usage = tail[tail.rindex(b'"completion_tokens"') :].partition(b":")[2]
    return int(usage.replace(b"}", b",").partition(b",")[0]), num_events, first


async def measure(server: Server, name: str, num_streams: int, max_tokens: int) -> Level:
    """Run streams side by side."""
    cpu, start = server.cpu_s(), time.perf_counter()
    async with asyncio.timeout(STREAM_S):
        done = await asyncio.gather(*(stream(server, index, max_tokens) for index in range(num_streams)))
    elapsed, cpu = time.perf_counter() - start, server.cpu_s() - cpu
    tokens = sum(num_tokens for num_tokens, _, _ in done)
    firsts = sorted(first * 1e3 for _, _, first in done)
    return Level(
        name,
        num_streams,
        tokens,
        sum(num_events for _, num_events, _ in done),
        round(tokens / elapsed, 1),
        round(statistics.median(firsts), 1),
        round(firsts[min(len(firsts) - 1, int(len(firsts) * 0.99))], 1),
        round(cpu * 1e6 / tokens, 1),
    )


@contextlib.contextmanager
def serving(engine: Engine, further: list[str]) -> Iterator[Server]:
    """Run ``enginewire serve`` as it is by default, with its access log, which goes to a file."""
    command = [sys.executable, "-m", "enginewire", "serve", *engine.arguments, "--port", "0", *further]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            ready = re.match(r"Serving (.+) at http://.+:(\d+)$", process.stdout.readline())
            if ready is None:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read()}")
            log.seek(0)
            children = [int(pid) for pid in re.findall(r"server process \d+ serves pid=(\d+)", log.read())]
            yield Server(int(ready[2]), [process.pid, *children], ready[1])
        finally:
            process.terminate()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def commit() -> str:
    """Return what is checked out, if that can be told."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run(server: Server, name: str, num_streams: list[int]) -> Iterator[Level]:
    """Warm the server up, then measure level by level."""
    asyncio.run(measure(server, name, 4, 16))
    for count in num_streams:
        max_tokens = ENGINES[name].tokens.get(count) or max(16, 4096 // count)
        level = asyncio.run(measure(server, name, count, max_tokens))
        print(
            f"{level.engine:<16}{level.streams:>8}{level.tokens:>9}{level.events:>9}{level.tokens_per_s:>11.0f}"
            f"{level.first_token_p50:>10.1f}{level.first_token_p99:>10.1f}{level.cpu_ms:>12.1f}",
            flush=True,
        )
        yield level


def main() -> None:
    """Print the table and the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256], metavar="N")
    parser.add_argument("--data-parallel-size", default="1", metavar="N", help="engines")
    parser.add_argument("--api-server-count", default="1", metavar="N", help="server processes")
    args = parser.parse_args()
    several = ["--data-parallel-size", args.data_parallel_size, "--api-server-count", args.api_server_count]

    print(f"{'':<53}{'first token, ms':>20}{'server CPU':>12}")
    print(
        f"{'engine':<16}{'streams':>8}{'tokens':>9}{'events':>9}{'tokens/s':>11}{'p50':>10}{'p99':>10}{'ms/1000':>12}"
    )
    levels: list[Level] = []
    for name in args.engines:
        with serving(ENGINES[name], several) as server:
            levels += run(server, name, args.streams)
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    result = {
        "what": "serve",
        "commit": commit(),
        "machine": machine,
        "engines": int(args.data_parallel_size),
        "processes": int(args.api_server_count),
        "levels": [asdict(level) for level in levels],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
