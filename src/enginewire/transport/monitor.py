"""``Monitor``: what ZeroMQ tells of the connections of one socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq


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
        while not self.readable.closed:  # by whoever takes these
            try:
                frames = self.readable.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = struct.unpack("=HI", frames[0])
            yield event, descriptor

    def close(self) -> None:
        """Stop watching, before the socket is closed. Otherwise it ends with the socket, and with its context."""
        self._watched.disable_monitor()  # first: nobody would read what comes now
        self.readable.close(linger=0)
