"""A frontend of one engine process for measurements: raw pyzmq and msgspec, so that none of ours is measured along.

Everything that an engine sends is kept as it came, with the time of its arrival, and read when the measuring is over.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import zmq

from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.executors import EchoExecutor
from enginewire.testing.mock_frontend import LaunchedEngine
from enginewire.wire.messages import EngineCoreOutput

TIMEOUT_MS = 60_000
IDENTITY, ADD, ABORT, UTILITY = b"\0\0", b"\0", b"\1", b"\3"
SCHEDULED = 2
"""Of an output's events the one that says when its request was admitted."""

PROMPT = range(1000, 1032)
ENDLESS = 1 << 29

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class StampsAborts(EchoExecutor):
    """An echo that remembers when it was told to forget each request; ``collective_rpc("freed")`` hands them over."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._freed: dict[str, float] = {}

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests, and note when."""
        super().abort_requests(request_ids)
        self._freed.update(dict.fromkeys(request_ids, time.monotonic()))

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Also: ``freed``."""
        if method == "freed":
            return [self._freed]
        return super().collective_rpc(method, timeout, args, kwargs)


class HoldsLock(StampsAborts):
    """One whose steps hold the interpreter lock, as native code may; its engine gives it a process of its own."""

    holds_gil = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._sleep_us, self._options.step_time_s = int(self._options.step_time_s * 1e6), 0.0
        self._usleep = ctypes.PyDLL(None).usleep  # of the two foreign function interfaces the one that keeps the lock

    def step(self) -> list[EngineCoreOutput]:
        """Echo, slowly."""
        self._usleep(self._sleep_us)
        return super().step()


class Python(StampsAborts):
    """One whose steps are Python code, which shares the lock, but with reluctance."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._step_s, self._options.step_time_s = self._options.step_time_s, 0.0

    def step(self) -> list[EngineCoreOutput]:
        """Echo, slowly."""
        end = time.monotonic() + self._step_s
        while time.monotonic() < end:
            pass
        return super().step()


class Head(msgspec.Struct, array_like=True):
    """As much of a message as costs nothing to read: a driver that falls behind would measure itself."""

    engine_index: int
    outputs: msgspec.Raw
    scheduler_stats: msgspec.Raw
    timestamp: float
    utility_output: tuple[int, str | None, Any] | None


decode_head = msgspec.msgpack.Decoder(Head).decode


class Arrival(NamedTuple):
    """A message and when it came, on the clock of its own timestamp."""

    at: float
    payload: bytes

    def head(self) -> Head:
        """Read it, without its outputs."""
        return decode_head(self.payload)

    def outputs_of(self, request_id: bytes) -> list[list[Any]]:
        """Read what it says of a request."""
        if request_id not in self.payload:
            return []
        return [output for output in decode(self.payload)[1] if output[0] == request_id.decode()]


class CpuTime(NamedTuple):
    """CPU seconds of an engine process: its main thread, its I/O threads, ZeroMQ's own; and of its child processes."""

    main: float = 0.0
    io: float = 0.0
    zeromq: float = 0.0
    children: float = 0.0

    @classmethod
    def of(cls, pid: int) -> CpuTime:
        """Return what a process has used so far."""
        main, io, zeromq, children = cls()
        for task in Path(f"/proc/{pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if task.name == str(pid):
                main += seconds
            elif (task / "comm").read_text().startswith("ZMQ"):
                zeromq += seconds
            else:
                io += seconds
            children += sum(sum(cls.of(int(child))) for child in (task / "children").read_text().split())
        return cls(main, io, zeromq, children)

    def since(self, before: CpuTime) -> CpuTime:
        """Return what was spent after ``before``."""
        return CpuTime(*(now - then for now, then in zip(self, before, strict=True)))


class Engine:
    """An engine process that serves us alone.

    Args:
        executor: name or class.
        options: of the executor.
        settings: of :class:`EngineConfig`.
    """

    def __init__(self, executor: str | type = "echo", options: dict[str, Any] | None = None, **settings: Any) -> None:
        if isinstance(executor, type):
            executor = f"{Path(__file__).stem}:{executor.__name__}"
        self.folder = tempfile.mkdtemp(prefix="bench-")
        self.arrivals: list[Arrival] = []
        """What came, without the answers that :meth:`call` waited for."""
        self._context = zmq.Context()
        self._ids = itertools.count(1)
        places = {name: f"ipc://{self.folder}/{name}" for name in ("handshake", "input", "output")}
        handshake = self._bind(zmq.ROUTER, places["handshake"])
        self._input = self._bind(zmq.ROUTER, places["input"])
        self._output = self._bind(zmq.PULL, places["output"])
        config = EngineConfig.create("echo", executor=executor, executor_options=options or {}, **settings)
        spec = EngineSpec(
            config=config, handshake_address=places["handshake"], sys_path=[str(Path(__file__).resolve().parent)]
        )
        self._process = LaunchedEngine(spec, f"{self.folder}/log")
        try:
            identity, _ = handshake.recv_multipart()
            others = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
            addresses = {"inputs": [places["input"]], "outputs": [places["output"]], **dict.fromkeys(others)}
            handshake.send_multipart([identity, encode({"addresses": addresses, "parallel_config": {}})])
            self._input.recv_multipart()  # the ready response
            handshake.recv_multipart()  # READY
            handshake.close(0)
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvhwm = socket.sndhwm = 0
        socket.rcvtimeo = TIMEOUT_MS
        socket.bind(address)
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and remove what was made for it."""
        self._process.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    # What a frontend says.

    def add(self, request_id: str, max_tokens: int, prompt: Iterable[int] = PROMPT) -> float:
        """Send a request and return when."""
        params = {"max_tokens": max_tokens, "stop_token_ids": [5], "eos_token_id": 2}
        request = [request_id, list(prompt), None, params, None, 0.0, None, None, None, None, None, 0]
        return self._send(ADD, request)

    def abort(self, request_ids: Sequence[str]) -> float:
        """End requests and return when that was sent."""
        return self._send(ABORT, request_ids)

    def call(self, method: str, *args: object) -> tuple[Any, float]:
        """Call a utility; return its result and how many seconds that took."""
        call_id = next(self._ids)
        start = self._send(UTILITY, [0, call_id, method, args])
        while True:
            arrival = self._receive()
            if (answer := arrival.head().utility_output) is not None and answer[0] == call_id:
                break
            self.arrivals.append(arrival)
        _, failure, result = answer
        if failure is not None:
            raise RuntimeError(failure)
        return result[1], arrival.at - start

    def _send(self, kind: bytes, message: object) -> float:
        payload = encode(message)
        start = time.monotonic()
        self._input.send_multipart([IDENTITY, kind, payload])
        return start

    # What comes back.

    def receive(self, count: int) -> list[Arrival]:
        """Wait for so many messages, read nothing, and return them."""
        return [self._receive() for _ in range(count)]

    def receive_finished(self, request_id: str) -> float:
        """Wait for the last output of a request of one token; return when it was admitted."""
        while True:
            self.arrivals.append(arrival := self._receive())
            for output in arrival.outputs_of(request_id.encode()):
                return next(event["timestamp"] for event in output[7] if event["type"] == SCHEDULED)

    def listen(self, seconds: float) -> None:
        """Take what comes for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._output.poll(math.ceil(left * 1000)):
                self.arrivals.append(self._receive())

    def _receive(self) -> Arrival:
        payload = self._output.recv_multipart()[0]
        return Arrival(time.monotonic(), payload)

    def cpu_time(self) -> CpuTime:
        """Return what the process has used so far."""
        return CpuTime.of(self._process.pid)
