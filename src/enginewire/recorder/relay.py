"""``Relay``: sits between engines and their frontends, and passes on what they say, both ways and unchanged.

Engines say HELLO here instead of to the frontend's handshake socket. The INIT that comes back names the frontend's
sockets; the engine is given sockets of the relay's own in their place, one pair for each:

    engine DEALER ──► ROUTER │ pair │ DEALER ──► ROUTER frontend        (input)
    engine PUSH   ──► PULL   │ pair │ PUSH   ──► PULL   frontend        (output)
    engine XSUB   ──► XPUB   │ pair │ XSUB   ──► XPUB   coordinator
    engine PUSH   ──► PULL   │ pair │ PUSH   ──► PULL   coordinator

Towards the frontend a pair has the engine's identity. When one side's connection ends, the pair ends the other's, so
that both sides notice what they would notice without a relay, and it joins them again when both are back.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import msgspec
import zmq

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, decode_schemaless
from enginewire.recorder.reading import type_of
from enginewire.transport.sockets import (
    bind_pull,
    bind_router,
    bind_xpub,
    connect_dealer,
    connect_push,
    connect_xsub,
    make_context,
    receive_message,
    send_message,
)
from enginewire.wire.frames import engine_index_of

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

ANY_SIZE: Final = -1
"""Nothing is refused here: what is too large for a peer is for the peer to refuse."""

LINGER_MS: Final = 2000
"""For what was passed on to leave after its socket is closed."""

MESSAGES_AT_ONCE: Final = 200
"""From one socket before the others have their turn."""

RETRY_S: Final = 0.1
"""How soon a port that is still taken by the socket that was closed is tried again."""

_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


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
    bind_xpub,
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


class Loop:
    """Sockets and what to do when one of them can be read. Used by one thread."""

    def __init__(self) -> None:
        self.context: Context = make_context()
        self.started = time.monotonic()
        self._poller = zmq.Poller()
        self._handlers: dict[Socket, Callable[[], None]] = {}
        self._monitors: dict[Socket, Socket] = {}
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
        self._monitors[socket] = monitor = socket.get_monitor_socket(_EVENTS)

        def drain() -> None:
            while not monitor.closed and monitor.poll(0):
                handler(*struct.unpack("=HI", monitor.recv_multipart()[0]))

        self.watch(monitor, drain)

    def close(self, socket: Socket, linger_ms: int = LINGER_MS) -> None:
        """Close a socket and its monitor."""
        if (monitor := self._monitors.pop(socket, None)) is not None:
            self.forget(monitor)
            socket.disable_monitor()  # before its reader goes, or it blocks ZeroMQ's thread
            monitor.close(0)
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
        for frames in _received(self._near, limit):
            arrived = self._loop.now()
            if self._route.is_routed and frames[0] != self._identity:
                self._say(f"a message of a stranger, {frames[0][:16].hex()}, is dropped")
                continue
            _send(self._far or self._open_far(), frames[1:] if self._route.is_routed else frames)
            payload_frame = 1 if self._route.is_routed else 0
            self._record(self._route.from_engine, frames, payload_frame, arrived)

    def _to_engine(self, limit: int | None = MESSAGES_AT_ONCE) -> None:
        if not self._route.to_engine:
            return  # a PUSH cannot be read
        for frames in _received(self._far, limit):
            arrived = self._loop.now()
            shown = [self._identity, *frames] if self._route.is_routed else frames
            if self._near is None or not _send(self._near, shown):
                self._say("a message for the engine is lost: it is not connected")
            # Identity and type, a type alone, or neither: READY is one frame.
            self._record(self._route.to_engine, shown, min(2 if self._route.is_routed else 1, len(shown) - 1), arrived)

    def _record(self, direction: str, frames: list[bytes], payload_frame: int, t: float) -> None:
        self._taps.message(
            Entry(direction=direction, frames=frames, payload_frame=payload_frame, t=t, group=self._group)
        )

    def _say(self, what: str) -> None:
        self._taps.notice(f"{self._group} {self._route.name}: {what}")


class Relay:
    """Passes on what engines and frontends say. Used by one thread: :meth:`run_once` again and again.

    Args:
        listen: where engines say HELLO, a tcp address; other sockets are bound to the same host.
        frontend: the frontend's handshake socket.
        taps: who is told.

    Raises:
        OSError: ``listen`` cannot be bound, or ``frontend`` is no address.
    """

    def __init__(self, listen: str, frontend: str, taps: Taps) -> None:
        self._frontend, self._taps = frontend, taps
        self._loop = Loop()
        self._dealers: dict[bytes, Socket] = {}
        self._pairs: dict[bytes, list[Pair]] = {}
        self._num_hellos: dict[bytes, int] = {}
        self._listeners: dict[str, Socket] = {}
        try:
            self._handshake, self.address = bind_router(self._loop.context, listen, ANY_SIZE)
            connect_push(self._loop.context, frontend).close(0)  # tells what is wrong with it
        except OSError:
            self._loop.context.destroy(linger=0)
            raise
        self._host = self.address.rpartition(":")[0]
        self._loop.watch(self._handshake, self._on_handshake)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._loop.now()

    def run_once(self, timeout_s: float) -> None:
        """Pass on what there is; wait for something up to ``timeout_s``."""
        self._loop.run_once(timeout_s)

    def close(self) -> None:
        """Close everything; what was passed on still leaves. Idempotent."""
        if self._loop.context.closed:
            return
        for pairs in self._pairs.values():
            for pair in pairs:
                pair.close()
        for socket in (self._handshake, *self._dealers.values(), *self._listeners.values()):
            self._loop.close(socket)
        self._loop.context.term()

    def _on_handshake(self) -> None:
        for identity, *frames in _received(self._handshake, MESSAGES_AT_ONCE):
            arrived = self._loop.now()
            type_ = type_of(
                Entry(direction="engine->frontend (handshake)", frames=[identity, *frames], payload_frame=1)
            )
            if type_ == "HELLO" or identity not in self._dealers:
                self._open_handshake(identity)
            _send(self._dealers[identity], frames)
            self._record("engine->frontend (handshake)", identity, frames, arrived)
            if type_ == "READY":  # its last word there
                self._loop.close(self._dealers.pop(identity))

    def _open_handshake(self, identity: bytes) -> None:
        """Open a conversation about an engine's start. What an earlier start left stays until INIT: it may be alive."""
        if (old := self._dealers.pop(identity, None)) is not None:
            self._loop.close(old)
        self._num_hellos[identity] = self._num_hellos.get(identity, 0) + 1
        self._dealers[identity] = dealer = connect_dealer(self._loop.context, self._frontend, identity, ANY_SIZE)
        self._loop.watch(dealer, lambda: self._on_answer(identity, dealer))

    def _on_answer(self, identity: bytes, dealer: Socket) -> None:
        for frames in _received(dealer, MESSAGES_AT_ONCE):
            arrived = self._loop.now()
            _send(self._handshake, [identity, *frames[:-1], self._with_own_addresses(identity, frames[-1])])
            self._record("frontend->engine (handshake)", identity, frames, arrived)

    def _with_own_addresses(self, identity: bytes, payload: bytes) -> bytes:
        """Put sockets of the relay's own into an INIT in place of the frontend's and the coordinator's."""
        try:
            init = decode_schemaless(payload)
            addresses: dict[str, Any] = init["addresses"]
            inputs, outputs = list(addresses["inputs"]), list(addresses["outputs"])
        except (DecodeError, KeyError, TypeError) as exc:
            self._taps.notice(
                f"{self._group(identity)}: an INIT that names no addresses is passed on as it is: {exc!r}"
            )
            return payload
        for pair in self._pairs.pop(identity, ()):
            pair.close()
        self._pairs[identity] = pairs = []

        def pair_for(route: Route, peer: str, group: str) -> str:
            pairs.append(Pair(self._loop, self._taps, route, peer, self._host, identity, group))
            return pairs[-1].address

        group = self._group(identity)
        for name, route, peers in (("inputs", INPUT, inputs), ("outputs", OUTPUT, outputs)):
            addresses[name] = [pair_for(route, peer, f"{group}.frontend{n}") for n, peer in enumerate(peers)]
        for route in (COORDINATOR_INPUT, COORDINATOR_OUTPUT):
            if addresses.get(route.name) is not None:
                addresses[route.name] = pair_for(route, addresses[route.name], group)
        if (stats := addresses.get("frontend_stats_publish_address")) is not None:
            self._listen_to(stats)
        return msgspec.msgpack.encode(init)

    def _listen_to(self, address: str) -> None:
        """Hear what a coordinator tells frontends. INIT's address must stay: frontends compare it with their own."""
        if address in self._listeners:
            return
        self._listeners[address] = socket = connect_xsub(self._loop.context, address, ANY_SIZE)
        socket.send(b"\x01")

        def hear() -> None:
            for frames in _received(socket, MESSAGES_AT_ONCE):
                entry = Entry(
                    direction="coordinator->frontend (XPUB)", frames=frames, t=self._loop.now(), group="coordinator"
                )
                self._taps.message(entry)

        self._loop.watch(socket, hear)

    def _group(self, identity: bytes) -> str:
        index = engine_index_of(identity)
        name = f"peer-{identity.hex()}" if index is None else f"engine{index}"
        count = self._num_hellos.get(identity, 0)
        return name if count <= 1 else f"{name}-{count}"

    def _record(self, direction: str, identity: bytes, frames: Sequence[bytes], t: float) -> None:
        self._taps.message(
            Entry(direction=direction, frames=[identity, *frames], payload_frame=1, t=t, group=self._group(identity))
        )


def _received(socket: Socket | None, limit: int | None) -> Sequence[list[bytes]]:
    """Receive what is there, up to ``limit`` messages."""
    found: list[list[bytes]] = []
    while socket is not None and (limit is None or len(found) < limit):
        try:
            found.append(receive_message(socket))
        except zmq.Again:
            break
    return found


def _send(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Send one message; return whether there is somebody to send it to."""
    if not frames:
        return True  # a message of nothing cannot be passed on
    try:
        send_message(socket, frames)
    except zmq.ZMQError:
        return False
    return True
