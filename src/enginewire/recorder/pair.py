"""``Pair``: two sockets that are joined, one for an engine and one for its peer.

When one side's connection ends, the pair ends the other's, so that both sides notice what they would notice without a
relay, and it joins them again when both are back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from enginewire.recorder.entry import Entry
from enginewire.recorder.loop import MESSAGES_AT_ONCE, Context, Loop, Socket, received, send
from enginewire.transport.sockets import (
    bind_publisher,
    bind_pull,
    bind_router,
    connect_dealer,
    connect_push,
    connect_xsub,
)

ANY_SIZE: Final = -1
"""Nothing is refused here: what is too large for a peer is for the peer to refuse."""


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of pair.

    Attributes:
        bind: makes the socket that an engine connects to, and its address.
        connect: makes the socket that connects to the frontend or coordinator, with an engine's identity.
        from_engine, to_engine: the directions of what passes.
        is_routed: the engine's side shows identities.
    """

    name: str
    bind: Callable[[Context, str, int], tuple[Socket, str]]
    connect: Callable[[Context, str, bytes], Socket]
    from_engine: str
    to_engine: str
    is_routed: bool = False


INPUT: Final = Route(
    "input",
    bind_router,
    lambda context, address, identity: connect_dealer(context, address, identity, ANY_SIZE),
    "engine->frontend (input socket)",
    "frontend->engine (input socket)",
    is_routed=True,
)
OUTPUT: Final = Route(
    "output",
    bind_pull,
    lambda context, address, _: connect_push(context, address),
    "engine->frontend (output socket)",
    "",
)
COORDINATOR_INPUT: Final = Route(
    "coordinator_input",
    bind_publisher,
    lambda context, address, identity: connect_xsub(context, address, ANY_SIZE, identity),
    "engine->coordinator (XSUB)",
    "coordinator->engine (XPUB)",
)
COORDINATOR_OUTPUT: Final = Route(
    "coordinator_output",
    bind_pull,
    lambda context, address, _: connect_push(context, address),
    "engine->coordinator (PUSH)",
    "",
)


@dataclass(frozen=True, slots=True)
class Taps:
    """Who is told what happens: each message after it has been passed on, and what befalls connections, in words."""

    message: Callable[[Entry], None]
    notice: Callable[[str], None]


class Pair:
    """Two sockets that are joined: ``near``, bound for an engine, and ``far``, connected to its peer."""

    def __init__(self, loop: Loop, taps: Taps, route: Route, peer: str, host: str, identity: bytes, group: str) -> None:
        self._loop, self._taps, self._route = loop, taps, route
        self._peer, self._host, self._identity, self._group = peer, host, identity, group
        self._near: Socket | None = None
        self._far: Socket | None = None
        self._engines: set[int] = set()
        """Descriptors of the connections on the engine's side."""
        self._near, self.address = self._unused_near()
        """``address`` is what the engine connects to, now and again."""
        self._loop.watch(self._near, self._from_engine)

    def close(self) -> None:
        """Close both sides. Idempotent."""
        self._close_near()
        self._close_far()

    def _unused_near(self) -> tuple[Socket, str]:
        """Make a socket at a new address. No engine knows it before its connections are watched, so none is missed."""
        near, address = self._route.bind(self._loop.context, f"{self._host}:*", ANY_SIZE)
        self._loop.watch_connections(near, self._on_near_event)
        return near, address

    def _reopen_near(self) -> None:
        """Listen at the old address again, as soon as the system lets us."""
        if self._near is not None or self._far is None:
            return
        near, address = self._unused_near()
        try:
            near.bind(self.address)
        except zmq.ZMQError:
            self._loop.close(near)
            self._loop.retry(self._reopen_near)
            return
        near.unbind(address)
        self._near = near
        self._loop.watch(near, self._from_engine)

    def _close_near(self) -> None:
        near, self._near = self._near, None
        self._engines.clear()
        if near is not None:
            self._loop.close(near)

    def _open_far(self) -> Socket:
        self._far = far = self._route.connect(self._loop.context, self._peer, self._identity)
        self._loop.watch_connections(far, self._on_far_event)
        return far

    def _close_far(self) -> None:
        far, self._far = self._far, None
        if far is not None:
            self._loop.close(far)

    def _on_near_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:  # may come after the next one: ZeroMQ has two threads
            self._engines.add(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # now it can be sent to; this event has no descriptor
            self._say("connected by the engine")
            self._loop.watch(self._far or self._open_far(), self._to_engine)
        else:
            self._engines.discard(descriptor)
            if not self._engines and self._far is not None:
                self._say("left by the engine")
                self._from_engine(limit=None)
                self._close_far()

    def _on_far_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._near is None:
                self._say(f"{self._peer} is back")
                self._reopen_near()
        elif event == zmq.EVENT_DISCONNECTED and self._near is not None:
            self._say(f"{self._peer} is gone")
            self._to_engine(limit=None)
            if self._far is not None:
                self._loop.forget(self._far)  # what comes once it is back waits for the engine
            self._close_near()

    def _from_engine(self, limit: int | None = MESSAGES_AT_ONCE) -> None:
        for frames in received(self._near, limit):
            arrived = self._loop.now()
            if self._route.is_routed and frames[0] != self._identity:
                self._say(f"a message of a stranger, {frames[0][:16].hex()}, is dropped")
                continue
            send(self._far or self._open_far(), frames[1:] if self._route.is_routed else frames)
            payload_frame = 1 if self._route.is_routed else 0
            self._record(self._route.from_engine, frames, payload_frame, arrived)

    def _to_engine(self, limit: int | None = MESSAGES_AT_ONCE) -> None:
        if not self._route.to_engine:
            return  # a PUSH cannot be read
        for frames in received(self._far, limit):
            arrived = self._loop.now()
            shown = [self._identity, *frames] if self._route.is_routed else frames
            if self._near is None or not send(self._near, shown):
                self._say("a message for the engine is lost: it is not connected")
            # Identity and type, a type alone, or neither: READY is one frame.
            self._record(self._route.to_engine, shown, min(2 if self._route.is_routed else 1, len(shown) - 1), arrived)

    def _record(self, direction: str, frames: list[bytes], payload_frame: int, t: float) -> None:
        self._taps.message(
            Entry(direction=direction, frames=frames, payload_frame=payload_frame, t=t, group=self._group)
        )

    def _say(self, what: str) -> None:
        self._taps.notice(f"{self._group} {self._route.name}: {what}")
