"""A relay in a thread of the test's own process, and what passed it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import zmq

from enginewire.recorder.entry import Entry
from enginewire.recorder.kinds import type_of
from enginewire.recorder.pair import Taps
from enginewire.recorder.relay import Relay
from enginewire.testing import free_tcp_port, wait_until

PATIENCE_S = 20.0


class Relayed:
    """Runs a relay between engines and the frontend at ``frontend_port``. A context manager."""

    def __init__(self, frontend_port: int) -> None:
        self.entries: list[Entry] = []
        self.notices: list[str] = []
        taps = Taps(self.entries.append, self.notices.append)
        self._relay = Relay(f"tcp://127.0.0.1:{free_tcp_port()}", f"tcp://127.0.0.1:{frontend_port}", taps)
        self.address = self._relay.address
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="test-relay")

    def __enter__(self) -> Relayed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_closing = True
        self._thread.join()
        self._relay.close()

    def _run(self) -> None:
        while not self._is_closing:
            self._relay.run_once(0.02)

    def types(self, group: str = "") -> list[str]:
        """Return the types of what has passed, in a group or in all."""
        return [type_of(entry) for entry in list(self.entries) if entry.group.startswith(group)]

    def wait_for(self, probe: Callable[[], Any], what: str) -> Any:
        """Wait until something has passed."""
        return wait_until(probe, PATIENCE_S, what)


class RawFrontend:
    """The frontends' and the coordinator's sockets, bare: whatever comes is looked at by the test.

    Args:
        ports: to bind again what an earlier one had bound.
    """

    def __init__(self, num_clients: int = 1, *, ports: Sequence[int] = (), coordinator: bool = False) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ports = list(ports) or [free_tcp_port() for _ in range(1 + 2 * num_clients + 2)]
        kinds = [zmq.ROUTER, *[zmq.ROUTER] * num_clients, *[zmq.PULL] * num_clients, zmq.XPUB, zmq.PULL]
        sockets = [self._bound(kind, port) for kind, port in zip(kinds, self.ports, strict=True)]
        self.handshake, self.xpub, self.reports = sockets[0], sockets[-2], sockets[-1]
        self.inputs, self.outputs = sockets[1 : 1 + num_clients], sockets[1 + num_clients : -2]
        addresses = [f"tcp://127.0.0.1:{port}" for port in self.ports]
        self.init = {
            "addresses": {
                "inputs": addresses[1 : 1 + num_clients],
                "outputs": addresses[1 + num_clients : -2],
                "coordinator_input": addresses[-2] if coordinator else None,
                "coordinator_output": addresses[-1] if coordinator else None,
                "frontend_stats_publish_address": None,
            },
            "parallel_config": {"unknown": 1},
        }

    def __enter__(self) -> RawFrontend:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.context.destroy(linger=0)

    def _bound(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.rcvhwm = socket.sndhwm = 0

        def bind() -> bool:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:  # the one before is still being closed
                return False
            return True

        wait_until(bind, PATIENCE_S, f"binding port {port}")
        return socket

    def welcome(self) -> bytes:
        """Answer the next HELLO with INIT; return who said it. READY in between needs no answer."""
        status = "READY"
        while status == "READY":
            identity, payload = receive(self.handshake)
            status = msgspec.msgpack.decode(payload)["status"]
        self.handshake.send_multipart([identity, msgspec.msgpack.encode(self.init)])
        return identity

    def send(self, identity: bytes, *frames: bytes, client: int = 0) -> None:
        """Send to an engine, as soon as it is connected."""

        def send() -> bool:
            try:
                self.inputs[client].send_multipart([identity, *frames])
            except zmq.ZMQError:  # no route yet
                return False
            return True

        wait_until(send, PATIENCE_S, f"connection of engine {identity!r}")


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive a message, under a deadline."""
    assert socket.poll(PATIENCE_S * 1000), "nothing came"
    return socket.recv_multipart()
