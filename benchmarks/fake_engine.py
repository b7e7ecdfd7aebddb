"""A fake engine in a process of its own: pyzmq and msgspec, messages encoded beforehand.

It serves any number of clients, each over two ipc addresses. What it does for a client is asked for by the id of a
request, so that all clients ask in the same way, through what is measured:

- ``hold…``: nothing; the request waits to be aborted.
- ``burst:N:BATCH:KIND:GAP_US``: N messages of a step's outputs, as fast as can be or with a gap from each to the next.
  Kinds are ``plain``, ``stats`` (with a scheduler's statistics) and ``logprobs``. Each message says in ``timestamp``
  (CLOCK_MONOTONIC, which all processes share) when it was sent; those without a gap say when the first one was.
- any other: one output, which ends it.

A burst's request is ended by one more message.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

import msgspec
import zmq

TOP_LOGPROBS = 5
FINISHED = 1
TIMESTAMP = 12345.678
"""Stands in an encoded message until it is sent."""

READY = {
    "max_model_len": 4096, "num_gpu_blocks": 100, "block_size": 16, "dp_stats_address": None, "dtype": "float32",
    "vllm_version": "0.25.1", "world_size": 1, "data_parallel_size": 1, "kv_cache_size_tokens": 1600,
    "kv_cache_max_concurrency": 1.0,
}  # fmt: skip

PREFIX_CACHE = {
    "reset": False, "requests": 3, "queries": 400, "hits": 128, "preempted_requests": 0, "preempted_queries": 0,
    "preempted_hits": 0,
}  # fmt: skip
STATS = {
    "num_running_reqs": 64, "num_waiting_reqs": 3, "num_skipped_waiting_reqs": 0, "step_counter": 0, "current_wave": 0,
    "kv_cache_usage": 0.4, "encoder_cache_usage": 0.0, "prefix_cache_stats": PREFIX_CACHE,
    "connector_prefix_cache_stats": None, "kv_cache_eviction_events": [], "spec_decoding_stats": None,
    "kv_connector_stats": None, "waiting_lora_adapters": {}, "running_lora_adapters": {}, "cudagraph_stats": None,
    "perf_stats": None,
}  # fmt: skip

_encode = msgspec.msgpack.encode


def step_message(batch: int, kind: str = "plain") -> bytes:
    """Encode one step's outputs, all fields written out as vLLM does."""
    array, ranks = (msgspec.msgpack.Ext(3, bytes(size)) for size in (4 * (TOP_LOGPROBS + 1), 8))
    shape = [1, TOP_LOGPROBS + 1]
    logprobs = [["<i4", shape, array], ["<f4", shape, array], ["<i8", [1], ranks], None]
    empty = [None] * 9
    outputs = [
        [f"chatcmpl-{i:024x}", [50_000 + i], logprobs if kind == "logprobs" else None, *empty, 0] for i in range(batch)
    ]
    return _encode([0, outputs, STATS if kind == "stats" else None, TIMESTAMP, None, None, None, None])


def last_output(request_id: str) -> bytes:
    """Encode the only output of a request."""
    output = [request_id, [7], None, None, None, FINISHED, None, None, None, None, None, None, 0]
    return _encode([0, [output], None, 1.5, None, None, None, None])


class _Connection:
    """The engine's sockets to one client."""

    def __init__(self, context: zmq.Context[Any], input_address: str, output_address: str) -> None:
        self.dealer, self._push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        self.dealer.setsockopt(zmq.IDENTITY, b"\0\0")
        for socket, address in ((self.dealer, input_address), (self._push, output_address)):
            socket.sndhwm = socket.rcvhwm = 0
            socket.reconnect_ivl = 1  # the client binds some time later, and how soon it goes on from there counts
            socket.connect(address)
        self.dealer.send(_encode(READY))
        self._decode_add = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode

    def serve_one(self) -> None:
        """Receive a message and do what it asks for."""
        kind, payload = self.dealer.recv_multipart()[:2]
        if kind == b"\0":
            request_id = msgspec.msgpack.decode(self._decode_add(payload)[0])
            if request_id.startswith("hold"):
                return
            if request_id.startswith("burst:"):
                count, batch, which, gap_us, *_ = request_id.split(":")[1:]
                self._burst(int(count), step_message(int(batch), which), int(gap_us) * 1e-6)
            self._push.send(last_output(request_id))
        elif kind == b"\3":
            call_id = msgspec.msgpack.decode(payload)[1]
            self._push.send(_encode([0, [], None, 1.5, [call_id, None, [None, True]], None, None, None]))

    def _burst(self, count: int, payload: bytes, gap_s: float) -> None:
        at, message, send = payload.index(struct.pack(">d", TIMESTAMP)), bytearray(payload), self._push.send
        due = time.monotonic()
        struct.pack_into(">d", message, at, due)
        for _ in range(count):
            if gap_s:
                due += gap_s
                time.sleep(max(0.0, due - time.monotonic()))
                struct.pack_into(">d", message, at, time.monotonic())
            send(message)


def serve(control_address: str) -> None:
    """Serve until told to stop, or until the parent is gone."""
    context = zmq.Context()
    control = context.socket(zmq.PAIR)
    control.connect(control_address)
    poller = zmq.Poller()
    poller.register(control, zmq.POLLIN)
    connections: dict[Any, _Connection] = {}
    parent = os.getppid()
    while os.getppid() == parent:
        for socket, _ in poller.poll(1000):
            if socket is not control:
                connections[socket].serve_one()
            elif addresses := msgspec.msgpack.decode(control.recv()):
                connection = _Connection(context, *addresses)
                connections[connection.dealer] = connection
                poller.register(connection.dealer, zmq.POLLIN)
            else:
                context.destroy(linger=0)
                return


class FakeEngine:
    """The process, as the benchmark sees it. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self._context: zmq.Context[Any] = zmq.Context()
        self._control = self._context.socket(zmq.PAIR)
        address = f"ipc://{self._folder}/control"
        self._control.bind(address)
        self._process = subprocess.Popen([sys.executable, __file__, address])
        self._ids = itertools.count()

    def addresses(self) -> tuple[str, str]:
        """Have it connect to two new addresses, for a client's input and output, which that binds afterwards."""
        number = next(self._ids)
        addresses = (f"ipc://{self._folder}/input-{number}", f"ipc://{self._folder}/output-{number}")
        self._control.send(_encode(addresses))
        return addresses

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.send(_encode(()))
        self._process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    serve(sys.argv[1])
