"""Noticing that a remote peer is gone: its kernel closed the connection, or its host is silent (heartbeat).

A process of ours that ends is seen by its manager; an engine that somebody else started is not (defect 22).
"""

from __future__ import annotations

import struct
from typing import Final

import zmq

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class PeerWatch:
    """Watches the connections of one bound tcp socket that has one peer worth watching.

    Connections are told apart by their descriptor. Those that exist when :meth:`settle` is called are the peer's, or
    the first one after that, as a PUSH may still be connecting then; strangers that come and go later do not count.

    Used by one thread at a time, and read often: a monitor that nobody drains stops ZeroMQ's I/O thread.

    Attributes:
        events: readable when something has happened.
        num_closed: how many connections, anybody's, have ended so far.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.num_closed = 0
        self.events = socket.get_monitor_socket(EVENTS)
        self._open: set[int] = set()
        self._peer: set[int] = set()
        self._is_settled = False
        self._is_lost = False

    def settle(self) -> None:
        """Take the connections there are for the peer's."""
        self._drain()
        self._is_settled = True
        self._peer = set(self._open)
        self._is_lost = False

    def has_lost_peer(self) -> bool:
        """Whether one of the peer's connections has been closed since."""
        self._drain()
        return self._is_lost

    def close(self) -> None:
        """Stop watching, before the socket is closed. Otherwise it ends with the socket, and with its context."""
        self._socket.disable_monitor()  # first: events that nobody reads would stop ZeroMQ's I/O thread
        self.events.close(linger=0)

    def _drain(self) -> None:
        while True:
            try:
                frames = self.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = struct.unpack("=HI", frames[0])
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                if self._is_settled and not self._peer:
                    self._peer.add(descriptor)
            else:
                self.num_closed += 1
                self._open.discard(descriptor)
                self._is_lost = self._is_lost or descriptor in self._peer


class ConnectionWatch:
    """Watches the connection of a socket that connects: an engine's to its frontend.

    Used by one thread, the socket's own, and read often, as above.

    Attributes:
        socket: readable when something has happened.
    """

    def __init__(self, connected: zmq.Socket[bytes]) -> None:
        self._connected = connected
        self.socket = connected.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def changes(self) -> list[bool]:
        """Return what has happened since the last call, in order: connected (``True``) or disconnected."""
        changes: list[bool] = []
        while True:
            try:
                event, _ = struct.unpack("=HI", self.socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return changes
            changes.append(event != zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        """Stop watching; before the socket that is watched is closed."""
        self._connected.disable_monitor()  # first: events that nobody reads would stop ZeroMQ's I/O thread
        self.socket.close(0)
