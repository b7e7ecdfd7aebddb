"""``Relay``: sits between engines and their frontends, and passes on what they say, both ways and unchanged.

Engines say HELLO here instead of to the frontend's handshake socket. The INIT that comes back names the frontend's
sockets; the engine is given sockets of the relay's own in their place, one pair for each:

    engine DEALER ──► ROUTER │ pair │ DEALER ──► ROUTER frontend        (input)
    engine PUSH   ──► PULL   │ pair │ PUSH   ──► PULL   frontend        (output)
    engine XSUB   ──► XPUB   │ pair │ XSUB   ──► XPUB   coordinator
    engine PUSH   ──► PULL   │ pair │ PUSH   ──► PULL   coordinator

Towards the frontend a pair has the engine's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, decode_schemaless
from enginewire.recorder.kinds import type_of
from enginewire.recorder.loop import MESSAGES_AT_ONCE, Loop, Socket, received, send
from enginewire.recorder.pair import (
    ANY_SIZE,
    COORDINATOR_INPUT,
    COORDINATOR_OUTPUT,
    INPUT,
    OUTPUT,
    Pair,
    Route,
    Taps,
)
from enginewire.transport.sockets import bind_router, connect_dealer, connect_push, connect_xsub
from enginewire.wire.frames import engine_index_of


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
        for identity, *frames in received(self._handshake, MESSAGES_AT_ONCE):
            arrived = self._loop.now()
            type_ = type_of(
                Entry(direction="engine->frontend (handshake)", frames=[identity, *frames], payload_frame=1)
            )
            if type_ == "HELLO" or identity not in self._dealers:
                self._open_handshake(identity)
            send(self._dealers[identity], frames)
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
        for frames in received(dealer, MESSAGES_AT_ONCE):
            arrived = self._loop.now()
            send(self._handshake, [identity, *frames[:-1], self._with_own_addresses(identity, frames[-1])])
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
            for frames in received(socket, MESSAGES_AT_ONCE):
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
