"""What the clients cost: messages per second, latencies, CPU per request, blocked loops, memory.

    python benchmarks/bench_client.py [--rounds 3]

A fake engine in a process of its own (pyzmq and msgspec, messages encoded beforehand) is put against ``SyncMPClient``,
``AsyncMPClient`` on asyncio and on uvloop, and against the least code that reads the same messages: pyzmq and msgspec
in a loop (``raw sync``), and zmq.asyncio (``raw async``). All take turns, round by round; the figures are medians.
Prints a table and, last, one line of JSON. Less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

BURSTS = {1: 20_000, 8: 6_000, 64: 1_500, 256: 400}
"""Messages per burst, by outputs per message."""

LOGPROBS_BATCH, LOGPROBS_MESSAGES, TOP = 64, 600, 5
LATENCY_CALLS = 300
ADDS = 400
BLOCK_MESSAGES = 5_000
UNDELIVERED = 10_000

FINISHED = 1
READY = {
    "max_model_len": 4096, "num_gpu_blocks": 100, "block_size": 16, "dp_stats_address": None, "dtype": "float32",
    "vllm_version": "0.25.1", "world_size": 1, "data_parallel_size": 1, "kv_cache_size_tokens": 1600,
    "kv_cache_max_concurrency": 1.0,
}  # fmt: skip


class RawOutput(msgspec.Struct, array_like=True, gc=False):
    """The least that a frontend has to decode of an output."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    rest: Any = None


class RawOutputs(msgspec.Struct, array_like=True):
    """The least that a frontend has to decode of a message."""

    engine_index: int
    outputs: list[RawOutput]
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Any = None


# The fake engine.


def message(batch: int, *, logprobs: bool = False) -> bytes:
    """Encode one step's outputs, all fields written out as vLLM does."""
    array, ranks = (msgspec.msgpack.Ext(3, bytes(size)) for size in (4 * (TOP + 1), 8))
    of_one = [
        ["<i4", [1, TOP + 1], array],
        ["<f4", [1, TOP + 1], array],
        ["<i8", [1], ranks],
    ]
    empty = [None] * 9
    outputs = [
        [f"chatcmpl-{i:024x}", [50_000 + i], [*of_one, None] if logprobs else None, *empty, 0] for i in range(batch)
    ]
    return msgspec.msgpack.encode([0, outputs, None, 12345.678, None, None, None, None])


def run_engine(control_address: str) -> None:
    """Serve: finish each request with one output, answer each call, send bursts on command."""
    context = zmq.Context()
    control = context.socket(zmq.PAIR)
    control.connect(control_address)
    poller = zmq.Poller()
    poller.register(control, zmq.POLLIN)
    outputs: dict[Any, Any] = {}
    pushes = []
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[Any]).decode
    parent = os.getppid()
    while os.getppid() == parent:  # killed in the middle of a run, it cannot say stop
        for socket, _ in poller.poll(1000):
            if socket is control:
                command, *args = decode(control.recv())
                if command == "stop":
                    context.destroy(linger=0)
                    return
                if command == "connect":
                    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
                    dealer.setsockopt(zmq.IDENTITY, b"\0\0")
                    dealer.sndhwm = dealer.rcvhwm = push.sndhwm = 0
                    dealer.connect(args[0])
                    push.connect(args[1])
                    dealer.send(encode(READY))
                    poller.register(dealer, zmq.POLLIN)
                    outputs[dealer] = push
                    pushes.append(push)
                elif command == "burst":
                    which, count, batch, logprobs = args
                    payload, send = message(batch, logprobs=logprobs), pushes[which].send
                    for _ in range(count):
                        send(payload)
            else:
                kind, payload = socket.recv_multipart()[:2]
                if kind == b"\0":
                    output = [
                        decode(payload)[0],
                        [7],
                        None,
                        None,
                        None,
                        FINISHED,
                        None,
                        None,
                        None,
                        None,
                        None,
                        None,
                        0,
                    ]
                    outputs[socket].send(encode([0, [output], None, 1.5, None, None, None, None]))
                elif kind == b"\3":
                    call_id = decode(payload)[1]
                    outputs[socket].send(encode([0, [], None, 1.5, [call_id, None, [None, True]], None, None, None]))


class Engine:
    """The fake engine's process, as the benchmark sees it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="bench-")
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.PAIR)
        address = f"ipc://{self.folder}/control"
        self._control.bind(address)
        self._process = subprocess.Popen([sys.executable, __file__, "--engine", address])
        self._clients = 0

    def addresses(self) -> dict[str, str]:
        """Tell the engine to connect to two new addresses; they may be bound afterwards."""
        n = self._clients
        self._clients += 1
        found = {f"{name}_address": f"ipc://{self.folder}/{name}-{n}" for name in ("input", "output")}
        self._command("connect", *found.values())
        return found

    def burst(self, which: int, count: int, batch: int, *, logprobs: bool = False) -> None:
        """Have messages sent as fast as can be."""
        self._command("burst", which, count, batch, logprobs)

    def _command(self, *command: Any) -> None:
        self._control.send(msgspec.msgpack.encode(command))

    def close(self) -> None:
        """Stop the process and remove its folder."""
        self._command("stop")
        self._process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


# The contestants. Each measures a burst, a latency and CPU in its own way of calling.


def new_request(request_id: str) -> Any:
    """Make a request of 32 prompt tokens."""
    from enginewire.wire.messages import EngineCoreRequest
    from enginewire.wire.sampling import SamplingParams

    return EngineCoreRequest(request_id, list(range(1000, 1032)), sampling_params=SamplingParams(max_tokens=64))


def read_raw_logprobs(output: RawOutput) -> None:
    """Turn logprobs into numpy with the least code."""
    import numpy as np

    for dtype, shape, data in output.new_logprobs[:3]:
        np.frombuffer(data.data, dtype).reshape(shape)


def read_logprobs(output: Any) -> None:
    """Read logprobs through the client's types."""
    lists = output.new_logprobs
    _ = (lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)


class RawSync:
    """pyzmq and msgspec in a loop."""

    name = "raw sync"

    def __init__(self, engine: Engine, which: int) -> None:
        self.which = which
        addresses = engine.addresses()
        self.context = self._make_context()
        self.router, self.pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self.pull.rcvhwm = self.router.sndhwm = 0
        self.router.bind(addresses["input_address"])
        self.pull.bind(addresses["output_address"])
        zmq.Socket.shadow(self.router.underlying).recv_multipart()  # the ready response
        self.decode = msgspec.msgpack.Decoder(RawOutputs).decode
        self.encode = msgspec.msgpack.Encoder().encode
        self.calls = 0

    def _make_context(self) -> zmq.Context[Any]:
        return zmq.Context(io_threads=2)

    def burst(self, count: int, read: Callable[[Any], None] | None) -> float:
        pull, decode, get = self.pull, self.decode, zmq.NOBLOCK
        pull.poll()
        start = time.perf_counter()
        left = count
        while left:
            try:
                outputs = decode(pull.recv_multipart(get)[0]).outputs
            except zmq.Again:
                pull.poll()
                continue
            if read is not None:
                for output in outputs:
                    read(output)
            left -= 1
        return time.perf_counter() - start

    def send_add(self, request: Any) -> None:
        self.router.send_multipart((b"\0\0", b"\0", self.encode(request)))

    def add_and_get(self, request: Any) -> None:
        self.send_add(request)
        self.decode(self.pull.recv_multipart()[0])

    def call(self) -> None:
        self.calls += 1
        self.router.send_multipart((b"\0\0", b"\3", self.encode((0, self.calls, "is_sleeping", ()))))
        assert self.decode(self.pull.recv_multipart()[0]).utility_output[2][1]

    def latency(self, what: str, calls: int) -> list[float]:
        times = []
        for i in range(calls):
            request = new_request(f"r{i}") if what == "add" else None
            start = time.perf_counter()
            self.add_and_get(request) if what == "add" else self.call()
            times.append(time.perf_counter() - start)
        return times

    def add_cpu(self, count: int) -> float:
        requests = [new_request(f"r{i}") for i in range(count)]
        start = time.thread_time()
        for request in requests:
            self.send_add(request)
        spent = time.thread_time() - start
        self.drain(count)
        return spent / count

    def drain(self, count: int) -> None:
        for _ in range(count):
            self.pull.recv_multipart()

    def longest_block(self, engine: Engine) -> float | None:
        return None

    def close(self) -> None:
        self.context.destroy(linger=0)


class Sync(RawSync):
    """``SyncMPClient``."""

    name = "sync"

    def __init__(self, engine: Engine, which: int) -> None:
        from enginewire.client.sync_mp import SyncMPClient
        from enginewire.config import EngineConfig

        self.which = which
        self.client = SyncMPClient(EngineConfig.create("echo"), client_addresses=engine.addresses())

    def burst(self, count: int, read: Callable[[Any], None] | None) -> float:
        get = self.client.get_output
        get()
        start = time.perf_counter()
        for _ in range(count - 1):
            outputs = get().outputs
            if read is not None:
                for output in outputs:
                    read(output)
        return time.perf_counter() - start

    def send_add(self, request: Any) -> None:
        self.client.add_request(request)

    def add_and_get(self, request: Any) -> None:
        self.client.add_request(request)
        self.client.get_output()

    def call(self) -> None:
        self.client.call_utility("is_sleeping")

    def drain(self, count: int) -> None:
        for _ in range(count):
            self.client.get_output()

    def close(self) -> None:
        self.client.shutdown()


class Async(RawSync):
    """``AsyncMPClient`` on asyncio; what is measured runs in one coroutine."""

    name = "async"
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None

    def __init__(self, engine: Engine, which: int) -> None:
        self.which = which
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.runner.run(self._connect(engine))

    async def _connect(self, engine: Engine) -> None:
        from enginewire.client.async_mp import AsyncMPClient
        from enginewire.config import EngineConfig

        self.client = AsyncMPClient(EngineConfig.create("echo"), client_addresses=engine.addresses())
        self.get = self.client.get_output_async
        self.add = self.client.add_request_async

    def burst(self, count: int, read: Callable[[Any], None] | None) -> float:
        return self.runner.run(self._burst(count, read))

    async def _burst(self, count: int, read: Callable[[Any], None] | None) -> float:
        get = self.get
        await get()
        start = time.perf_counter()
        for _ in range(count - 1):
            outputs = (await get()).outputs
            if read is not None:
                for output in outputs:
                    read(output)
        return time.perf_counter() - start

    async def call_async(self) -> None:
        await self.client.call_utility_async("is_sleeping")

    def latency(self, what: str, calls: int) -> list[float]:
        return self.runner.run(self._latency(what, calls))

    async def _latency(self, what: str, calls: int) -> list[float]:
        times = []
        for i in range(calls):
            request = new_request(f"r{i}") if what == "add" else None
            start = time.perf_counter()
            if what == "add":
                await self.add(request)
                await self.get()
            else:
                await self.call_async()
            times.append(time.perf_counter() - start)
        return times

    def add_cpu(self, count: int) -> float:
        return self.runner.run(self._add_cpu(count))

    async def _add_cpu(self, count: int) -> float:
        requests = [new_request(f"r{i}") for i in range(count)]
        start = time.thread_time()
        for request in requests:
            await self.add(request)
        spent = time.thread_time() - start
        for _ in range(count):
            await self.get()
        return spent / count

    def longest_block(self, engine: Engine) -> float | None:
        return self.runner.run(self._longest_block(engine))

    async def _longest_block(self, engine: Engine) -> float:
        """Return the longest time between two turns of somebody else on the loop during a burst."""
        longest = 0.0
        done = False
        last = time.perf_counter()

        async def watch() -> None:
            nonlocal longest, last
            while True:
                now = time.perf_counter()
                longest = max(longest, now - last)
                last = now
                if done:
                    return
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        engine.burst(self.which, BLOCK_MESSAGES, 1)
        for _ in range(BLOCK_MESSAGES):
            await self.get()
        done = True
        await watching
        return longest

    def close(self) -> None:
        self.client.shutdown()
        self.runner.close()


class AsyncUvloop(Async):
    """``AsyncMPClient`` on uvloop."""

    name = "async uvloop"

    def __init__(self, engine: Engine, which: int) -> None:
        import uvloop

        self.loop_factory = uvloop.new_event_loop
        super().__init__(engine, which)


class RawAsync(Async):
    """zmq.asyncio and msgspec."""

    name = "raw async"

    async def _connect(self, engine: Engine) -> None:
        addresses = engine.addresses()
        self.context = zmq.asyncio.Context(io_threads=2)
        self.router, self.pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self.pull.rcvhwm = self.router.sndhwm = 0
        self.router.bind(addresses["input_address"])
        self.pull.bind(addresses["output_address"])
        await self.router.recv_multipart()
        self.decode = msgspec.msgpack.Decoder(RawOutputs).decode
        self.encode = msgspec.msgpack.Encoder().encode
        self.calls = 0

    async def get(self) -> Any:
        return self.decode((await self.pull.recv_multipart())[0])

    async def add(self, request: Any) -> None:
        await self.router.send_multipart((b"\0\0", b"\0", self.encode(request)))

    async def call_async(self) -> None:
        self.calls += 1
        await self.router.send_multipart((b"\0\0", b"\3", self.encode((0, self.calls, "is_sleeping", ()))))
        assert (await self.get()).utility_output[2][1]

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.runner.close()


CONTESTANTS = (RawSync, Sync, RawAsync, Async, AsyncUvloop)


# Memory, in a process of its own: what was freed before must not hide what is needed now.


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_growth(name: str) -> float:
    """Return by how much of its wire size a message that nobody takes makes the process grow."""
    engine = Engine()
    try:
        contestant = next(kind for kind in CONTESTANTS if kind.name == name)(engine, 0)
        size = len(message(64))
        before = resident_bytes()
        engine.burst(0, UNDELIVERED, 64)

        def settled() -> Iterator[None]:
            history = [0, 0]
            while history[-2:] != [now := resident_bytes()] * 2 or now < before + UNDELIVERED * size * 0.9:
                history.append(now)
                yield

        if isinstance(contestant, Async):

            async def idle() -> None:
                for _ in settled():
                    await asyncio.sleep(0.2)

            contestant.runner.run(idle())
        else:
            waiting = zmq.Poller()
            for _ in settled():
                waiting.poll(200)
        growth = (resident_bytes() - before) / UNDELIVERED / size
        contestant.close()
    finally:
        engine.close()
    return growth


# The course.


def measure(contestant: Any, engine: Engine, results: dict[str, dict[str, list[float]]]) -> None:
    """Run one contestant once over everything."""
    mine = results[contestant.name]
    for batch, count in BURSTS.items():
        engine.burst(contestant.which, count, batch)
        mine[f"messages/s, B={batch}"].append(count / contestant.burst(count, None))
    is_raw = isinstance(contestant, RawAsync) or type(contestant) is RawSync
    for label, read in (("untouched", None), ("read", read_raw_logprobs if is_raw else read_logprobs)):
        engine.burst(contestant.which, LOGPROBS_MESSAGES, LOGPROBS_BATCH, logprobs=True)
        rate = LOGPROBS_MESSAGES / contestant.burst(LOGPROBS_MESSAGES, read)
        mine[f"messages/s, B={LOGPROBS_BATCH}, logprobs {label}"].append(rate)
    mine["add to first output, p50 µs"].append(statistics.median(contestant.latency("add", LATENCY_CALLS)) * 1e6)
    mine["utility, p50 µs"].append(statistics.median(contestant.latency("utility", LATENCY_CALLS)) * 1e6)
    mine["add_request of 32 tokens, CPU µs"].append(contestant.add_cpu(ADDS) * 1e6)
    if (block := contestant.longest_block(engine)) is not None:
        mine[f"longest block in {BLOCK_MESSAGES} messages, ms"].append(block * 1e3)


def print_table(medians: dict[str, dict[str, float]]) -> None:
    """Print a row per figure: each contestant's value, and for the clients its ratio to the raw one of their kind."""
    names = [kind.name for kind in CONTESTANTS]
    rows = list(dict.fromkeys(row for name in names for row in medians[name]))
    width = max(map(len, rows))
    print(f"{'':{width}}" + "".join(f"{name:>20}" for name in names))
    for row in rows:
        cells = []
        for name in names:
            value = medians[name].get(row)
            base = medians["raw async" if name.startswith("async") else "raw sync"].get(row)
            ratio = f" ({value / base:.2f})" if value is not None and base and not name.startswith("raw") else ""
            text = "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
            cells.append(f"{text + ratio:>20}")
        print(f"{row:{width}}" + "".join(cells))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--growth", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="one contestant, e.g. 'sync', for profiling")
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(arguments.engine)
        return
    if arguments.growth:
        print(measure_growth(arguments.growth))
        return
    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    kinds = [kind for kind in CONTESTANTS if arguments.only in (None, kind.name)]
    engine = Engine()
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        contestants = []
        for which, kind in enumerate(kinds):
            contestants.append(kind(engine, which))
            stack.callback(contestants[-1].close)
        gc.collect()
        gc.freeze()
        for round_ in range(arguments.rounds + 1):
            for contestant in contestants:
                measure(contestant, engine, results if round_ else defaultdict(lambda: defaultdict(list)))
    for kind in kinds:
        command = [sys.executable, __file__, "--growth", kind.name]
        growth = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        results[kind.name]["growth per undelivered message, × wire size"].append(growth)
    medians = {name: {row: statistics.median(values) for row, values in rows.items()} for name, rows in results.items()}
    if not arguments.only:
        print_table(medians)
    rounded = {name: {row: float(f"{value:.4g}") for row, value in rows.items()} for name, rows in medians.items()}
    print(json.dumps({"bench": "client", "python": platform.python_version(), "cpus": os.cpu_count(), **rounded}))


if __name__ == "__main__":
    main()
