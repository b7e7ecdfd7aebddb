"""The channel between an engine and its executor's process."""

from __future__ import annotations

import socket
from contextlib import closing

from enginewire.engine.channel import Channel


def test_a_channel_knows_of_messages_that_came_along_with_one_that_was_received() -> None:
    """An executor takes in all that it was told before a step: an abort behind another message must not wait."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with closing(ours), closing(theirs):
        assert not theirs.is_readable()
        ours.send(b"first")
        ours.send(b"")
        ours.send(b"third" * 1000)
        for message in (b"first", b"", b"third" * 1000):
            assert theirs.is_readable()
            assert theirs.receive() == message
        assert not theirs.is_readable()


def test_the_end_of_a_peer_can_be_read() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with closing(theirs):
        ours.close()
        assert theirs.is_readable()
        assert theirs.receive() is None
