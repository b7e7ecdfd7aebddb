"""``Monitor``: what ZeroMQ tells of the connections of one socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

from enginewire.transport.sockets import has_message


class Monitor:
    """Reads one socket's events. Used by one thread at a time, and read often: unread ones stop ZeroMQ's I/O thread.

    Args:
        watched: the socket.
        events: which, combined: ``zmq.EVENT_ACCEPTED | …``.

    Attributes:
        readable: a socket that can be read when something has happened.
    """

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self.readable = watched.get_monitor_socket(events)

    def take(self) -> Iterator[tuple[int, int]]:
        """Yield what has happened since the last time, in order: an event, and the connection's descriptor."""
        # Asked first: there is rarely anything, and to be told so by an exception takes ten times as long.
        while not self.readable.closed and has_message(self.readable):  # closed by whoever takes these
            event, descriptor = struct.unpack("=HI", self.readable.recv_multipart(zmq.NOBLOCK)[0])
            yield event, descriptor

    def close(self) -> None:
        """Stop watching, before the socket is closed. Otherwise it ends with the socket, and with its context."""
        self._watched.disable_monitor()  # first: nobody would read what comes now
        self.readable.close(linger=0)
