"""``Connections``: who is connected to a bound socket, where ZeroMQ itself does not say who sent what."""

from __future__ import annotations

from typing import Final

import zmq

from enginewire.transport.monitor import Monitor

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Connections:
    """The connections of one bound socket, by descriptor.

    Attributes:
        monitor: tells who came and went.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.monitor = Monitor(socket, EVENTS)
        # Those that exist are not listed: a peer may have connected before anybody watched.
        self._closed: set[int] = set()

    def take_closed(self) -> list[int]:
        """Return the connections that were closed since the last call. A number may be back in use by now."""
        closed: list[int] = []
        for event, descriptor in self.monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._closed.discard(descriptor)
            else:
                self._closed.add(descriptor)
                closed.append(descriptor)
        return closed

    def is_open(self, descriptor: int) -> bool:
        """Whether a connection that a message came on still exists, as of the last :meth:`take_closed`."""
        return descriptor not in self._closed


def connection_of(frame: zmq.Frame) -> int:
    """Return the connection that a received frame came on."""
    return int(frame.get(zmq.SRCFD))
