"""Noticing that a remote peer is gone: its kernel closed the connection, or its host is silent (heartbeat).

A process of ours that ends is seen by its manager; an engine that somebody else started is not (defect 22).
"""

from __future__ import annotations

from typing import Final

import zmq

from enginewire.transport.monitor import Monitor

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class PeerWatch:
    """Watches the connections of one bound tcp socket that has one peer worth watching.

    Connections are told apart by their descriptor; one that is back in use was reported closed before. Those that exist
    when :meth:`settle` is called are the peer's, or the first one after that, as a PUSH may still be connecting then;
    strangers that come and go later do not count, nor does what a former peer has left behind.

    Attributes:
        monitor: tells who came and went.
        num_closed: how many connections, anybody's, have ended so far.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.monitor = Monitor(socket, EVENTS)
        self.num_closed = 0
        self._open: set[int] = set()
        self._peer: set[int] = set()
        self._former: set[int] = set()
        self._is_awaited = False
        self._is_lost = False
        self._is_new = False

    def starts_anew(self) -> None:
        """Note that the peer is another process, with connections of its own: those it had until now are a former's.

        They may still be open, or seem so: their end may have been seen by nobody yet, or be stuck on the way.
        """
        self._drain()
        self._former |= self._peer

    def settle(self) -> None:
        """Take the connections there are for the peer's, but for those of a former one.

        If there are no others, these are taken too: what was taken for another process may be the same.
        """
        self._drain()
        self._is_awaited = self._open == self._former
        if self._is_awaited:
            self._former.clear()
        self._peer = self._open - self._former
        self._is_lost = self._is_new = False

    def has_lost_peer(self) -> bool:
        """Whether one of the peer's connections has been closed since."""
        self._drain()
        return self._is_lost

    def has_new_peer(self) -> bool:
        """Whether somebody has connected after that: the peer, most likely, and whatever it sent meanwhile is lost."""
        self._drain()
        return self._is_new

    def _drain(self) -> None:
        for event, descriptor in self.monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._is_new = self._is_lost
                self._open.add(descriptor)
                if self._is_awaited:
                    self._is_awaited = False
                    self._peer.add(descriptor)
            else:
                self.num_closed += 1
                self._is_lost = self._is_lost or descriptor in self._peer
                for known in (self._open, self._peer, self._former):
                    known.discard(descriptor)


class ConnectionWatch:
    """Watches the connection of a socket that connects: an engine's to its frontend.

    Attributes:
        monitor: tells that it came or went.
    """

    def __init__(self, connected: zmq.Socket[bytes]) -> None:
        self.monitor = Monitor(connected, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def changes(self) -> list[bool]:
        """Return what has happened since the last call, in order: connected (``True``) or disconnected."""
        return [event != zmq.EVENT_DISCONNECTED for event, _ in self.monitor.take()]
