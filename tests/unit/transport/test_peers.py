"""``PeerWatch``: the loss of a peer's connection, and of nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from enginewire.testing import wait_until
from enginewire.transport.peers import PeerWatch
from enginewire.transport.sockets import bind_pull

PATIENCE_S = 5.0


class Bound:
    """A watched PULL, and those who connect to it."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._pushes: list[zmq.Socket[Any]] = []
        self.socket, self._address = bind_pull(context, "tcp://127.0.0.1:*", 1000)
        self.watch = PeerWatch(self.socket)

    def connect(self) -> zmq.Socket[Any]:
        """Connect and say something, and have it received."""
        push = self._context.socket(zmq.PUSH)
        push.connect(self._address)
        push.send(b"hello")
        self.socket.recv()
        self._pushes.append(push)
        return push


@pytest.fixture
def bound() -> Iterator[Bound]:
    context: zmq.Context[Any] = zmq.Context()
    yield Bound(context)
    context.destroy(linger=0)


def test_the_peers_loss_is_noticed(bound: Bound) -> None:
    """Defect 22."""
    peer = bound.connect()
    bound.watch.settle()
    assert not bound.watch.has_lost_peer()
    peer.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss")


def test_a_peer_that_connects_a_moment_later_is_watched_too(bound: Bound) -> None:
    """READY may overtake the engine's PUSH: its loss went unnoticed then."""
    bound.watch.settle()
    peer = bound.connect()
    assert not bound.watch.has_lost_peer()
    peer.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss")


def test_strangers_come_and_go(bound: Bound) -> None:
    bound.connect()
    bound.watch.settle()
    for _ in range(3):
        bound.connect().close()
        again = bound.connect()  # by now the one before has left
        assert not bound.watch.has_lost_peer()
        again.close()


def test_after_settling_anew_an_old_loss_does_not_count(bound: Bound) -> None:
    """Defect 21: an engine that registers anew leaves its old connections behind."""
    old = bound.connect()
    bound.watch.settle()
    bound.connect()
    old.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss")
    bound.watch.settle()
    assert not bound.watch.has_lost_peer()


def test_what_a_former_peer_left_behind_may_end_whenever_it_does(bound: Bound) -> None:
    """Defect 21: its end may be seen by nobody before its successor is there."""
    old = bound.connect()
    bound.watch.settle()
    new = bound.connect()
    bound.watch.starts_anew()
    bound.watch.settle()
    old.close()
    wait_until(lambda: has_ended(bound.watch, 1), PATIENCE_S, "its end")
    assert not bound.watch.has_lost_peer()
    new.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss")


def test_a_former_peers_descriptor_may_be_its_successors(bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives numbers out again, the lowest first."""
    events: list[tuple[int, int]] = []
    monkeypatch.setattr(bound.watch.monitor, "take", lambda: iter([events.pop(0) for _ in tuple(events)]))
    events.append((zmq.EVENT_ACCEPTED, 7))
    bound.watch.settle()
    bound.watch.starts_anew()
    events += [(zmq.EVENT_DISCONNECTED, 7), (zmq.EVENT_ACCEPTED, 7)]
    bound.watch.settle()
    assert not bound.watch.has_lost_peer()
    events.append((zmq.EVENT_DISCONNECTED, 7))
    assert bound.watch.has_lost_peer()


def test_a_peer_that_only_seemed_to_be_another_is_watched_as_before(bound: Bound) -> None:
    """It has no connection but those that it had; or one more is still on its way."""
    peer = bound.connect()
    bound.watch.settle()
    bound.watch.starts_anew()
    bound.watch.settle()
    late = bound.connect()
    assert not bound.watch.has_lost_peer()
    late.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss of the one")
    bound.watch.settle()
    peer.close()
    wait_until(bound.watch.has_lost_peer, PATIENCE_S, "the loss of the other")


def has_ended(watch: PeerWatch, count: int) -> bool:
    """Whether so many connections have ended, as far as the watch has been told."""
    watch.has_lost_peer()
    return watch.num_closed == count
