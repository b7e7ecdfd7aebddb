"""``Loop``: sockets, and what to do when one of them can be read or one of its connections begins or ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from enginewire.transport.monitor import Monitor
from enginewire.transport.sockets import make_context, receive_message, send_message

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

LINGER_MS: Final = 2000
"""For what was passed on to leave after its socket is closed."""

MESSAGES_AT_ONCE: Final = 200
"""From one socket before the others have their turn."""

RETRY_S: Final = 0.1
"""How soon a port that is still taken by the socket that was closed is tried again."""

_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Loop:
    """Sockets and what to do when one of them can be read. Used by one thread."""

    def __init__(self) -> None:
        self.context: Context = make_context()
        self.started = time.monotonic()
        self._poller = zmq.Poller()
        self._handlers: dict[Socket, Callable[[], None]] = {}
        self._monitors: dict[Socket, Monitor] = {}
        self._retries: list[Callable[[], None]] = []

    def watch(self, socket: Socket, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever ``socket`` can be read. Idempotent."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def forget(self, socket: Socket) -> None:
        """Leave a socket alone from now on. Idempotent."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def retry(self, what: Callable[[], None]) -> None:
        """Call ``what`` in a moment, once."""
        self._retries.append(what)

    def watch_connections(self, socket: Socket, handler: Callable[[int, int], None]) -> None:
        """Call ``handler`` with event and descriptor whenever a connection is established or ends."""
        self._monitors[socket] = monitor = Monitor(socket, _EVENTS)

        def drain() -> None:
            for event, descriptor in monitor.take():
                handler(event, descriptor)

        self.watch(monitor.readable, drain)

    def close(self, socket: Socket, linger_ms: int = LINGER_MS) -> None:
        """Close a socket and its monitor."""
        if (monitor := self._monitors.pop(socket, None)) is not None:
            self.forget(monitor.readable)
            monitor.close()
        self.forget(socket)
        socket.close(linger_ms)

    def run_once(self, timeout_s: float) -> None:
        """Wait for one of the sockets, and handle those that can be read."""
        timeout_s = min(timeout_s, RETRY_S) if self._retries else timeout_s
        for socket, _ in self._poller.poll(int(timeout_s * 1000)):
            if (handler := self._handlers.get(socket)) is not None:  # not closed by another one's
                handler()
        retries, self._retries = self._retries, []
        for retry in retries:
            retry()

    def now(self) -> float:
        """Return seconds since the start."""
        return round(time.monotonic() - self.started, 6)


def received(socket: Socket | None, limit: int | None) -> Sequence[list[bytes]]:
    """Receive what is there, up to ``limit`` messages."""
    found: list[list[bytes]] = []
    while socket is not None and (limit is None or len(found) < limit):
        try:
            found.append(receive_message(socket))
        except zmq.Again:
            break
    return found


def send(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Send one message; return whether there is somebody to send it to."""
    if not frames:
        return True  # a message of nothing cannot be passed on
    try:
        send_message(socket, frames)
    except zmq.ZMQError:
        return False
    return True
