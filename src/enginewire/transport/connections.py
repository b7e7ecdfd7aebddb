"""``Connections``: who is connected to a bound socket, where ZeroMQ itself does not say who sent what."""

from __future__ import annotations

import struct
from typing import Final

import zmq

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Connections:
    """The connections of one bound socket, by descriptor, from the socket's monitor.

    Used by one thread, which polls :attr:`monitor` too: events that nobody reads stop ZeroMQ's I/O thread.

    Attributes:
        monitor: readable when somebody came or went.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.monitor = socket.get_monitor_socket(EVENTS)
        # Those that exist are not listed: a peer may have connected before anybody watched.
        self._closed: set[int] = set()

    def take_closed(self) -> list[int]:
        """Return the connections that were closed since the last call. A number may be back in use by now."""
        closed: list[int] = []
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return closed
            event, descriptor = struct.unpack("=HI", frames[0])
            if event == zmq.EVENT_ACCEPTED:
                self._closed.discard(descriptor)
            else:
                self._closed.add(descriptor)
                closed.append(descriptor)

    def is_open(self, descriptor: int) -> bool:
        """Whether a connection that a message came on still exists, as of the last :meth:`take_closed`."""
        return descriptor not in self._closed

    def close(self) -> None:
        """Stop watching, before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def connection_of(frame: zmq.Frame) -> int:
    """Return the connection that a received frame came on."""
    return int(frame.get(zmq.SRCFD))
