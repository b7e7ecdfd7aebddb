"""An engine of bare sockets: ZeroMQ, msgpack without a schema, and nothing of ours.

As a program, ``python raw_engine.py PORT``, it serves one frontend until it is killed: it answers every call with
``false`` and a request with one token at a time, four in all, and prints a line when it is ready.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq

PATIENCE_S = 20.0

ADD, ABORT, UTILITY = b"\0", b"\1", b"\3"

READY_0_25 = {
    "max_model_len": 1024,
    "num_gpu_blocks": 100,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.25.1",
    "world_size": 1,
    "data_parallel_size": 1,
    "kv_cache_size_tokens": 1600,
    "kv_cache_max_concurrency": 1.5,
}


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


class RawEngine:
    """One engine, driven by the test; its sockets belong to whoever uses it at the moment.

    Args:
        port: of the frontend's handshake socket on 127.0.0.1.
        index: its rank.
        through: what to connect to instead of an address that INIT names.
    """

    def __init__(self, port: int, index: int = 0, through: Callable[[str], str] = lambda address: address) -> None:
        self.index, self.identity = index, index.to_bytes(2, "little")
        self._through = through
        self._sockets: list[zmq.Socket[bytes]] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshake = self.connected(zmq.DEALER, f"tcp://127.0.0.1:{port}")
        self.addresses: dict[str, Any] = {}

    def __enter__(self) -> RawEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.context.destroy(linger=0)

    def connected(self, kind: int, address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.linger = 0
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self.identity if identity is None else identity)
        socket.connect(address)
        self._sockets.append(socket)  # left open until the end
        return socket

    def say(self, status: str) -> None:
        self.handshake.send(pack({"status": status, "local": False, "headless": True}))

    def say_hello(self) -> None:
        """HELLO, INIT, and connect to what INIT names."""
        self.say("HELLO")
        (init,) = receive(self.handshake)
        self.addresses = unpack(init)["addresses"]
        self.connect()

    def connect(self) -> None:
        self.input = self.connected(zmq.DEALER, self._through(self.addresses["inputs"][0]))
        self.output = self.connected(zmq.PUSH, self._through(self.addresses["outputs"][0]))

    def disconnect(self) -> None:
        """Drop both connections without a word, as a killed process does."""
        self.input.close(0)
        self.output.close(0)

    def start(self, ready: dict[str, Any] = READY_0_25) -> None:
        self.say_hello()
        self.input.send(pack(ready))
        self.say("READY")

    def next(self, type_: bytes, *, method: str | None = None) -> Any:
        """Return the payload of the next message of a type, or the next call of a method; others are passed over."""
        while True:
            kind, payload, *_ = receive(self.input)
            value = unpack(payload)
            if kind == type_ and (method is None or value[2] == method):
                return value

    def send(self, outputs: list[Any] = [], utility: Any = None, index: int | None = None) -> None:  # noqa: B006
        """Send a message of outputs in 0.25's layout."""
        message = [self.index if index is None else index, outputs, None, time.monotonic(), utility, None, None, None]
        self.output.send(pack(message))

    def token(self, request_id: str, *tokens: int, finish_reason: int | None = None) -> None:
        """Send tokens of one request; the reasons are 0 STOP, 1 LENGTH."""
        tail = [None, None, None, finish_reason, None, None, None, None, None, None, 0]
        self.send([[request_id, list(tokens), *tail]])

    def answer(self, call: Any, value: object = None) -> None:
        self.send(utility=[call[1], None, [None, value]])

    def fail(self, call: Any, text: str) -> None:
        self.send(utility=[call[1], text, None])


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive a message, under a deadline."""
    if not socket.poll(PATIENCE_S * 1000):
        raise TimeoutError("nothing came")
    return socket.recv_multipart()


def serve(engine: RawEngine) -> None:
    """Answer whatever comes, for ever."""
    while True:
        kind, payload, *_ = engine.input.recv_multipart()
        value = unpack(payload)
        if kind == UTILITY:
            engine.answer(value, False)
        elif kind == ADD:
            for n in range(4):
                engine.token(value[0], n, finish_reason=1 if n == 3 else None)


if __name__ == "__main__":
    with RawEngine(int(sys.argv[1])) as alone:
        alone.start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        serve(alone)
