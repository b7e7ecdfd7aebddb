"""``CoordinatorServer``: the coordinator's three sockets and the loop that serves them. Source: protocol A.2."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

import zmq
from msgspec import Struct

from enginewire.coordinator.core import Coordinator
from enginewire.engine.channel import Channel
from enginewire.transport.connections import Connections, connection_of
from enginewire.transport.sockets import bind_publisher, bind_pull, receive_frames
from enginewire.wire.frames import SUBSCRIBE_ALL

logger = logging.getLogger(__name__)

UNSUBSCRIBE_ALL: Final = b"\x00"

T = TypeVar("T")

MAX_FRAME_BYTES: Final = 1 << 20
"""Reports and requests to start have some hundred bytes."""

MESSAGES_PER_TURN: Final = 256
"""Messages read from one socket before the others get their turn."""


class CoordinatorAddresses(Struct, frozen=True, kw_only=True):
    """Where the coordinator binds, by the names that INIT has for them.

    Attributes:
        coordinator_input: engines subscribe here (READY, START_DP_WAVE).
        coordinator_output: engines report here.
        frontend_stats_publish_address: frontends subscribe here, and ask for waves.
    """

    coordinator_input: str
    coordinator_output: str
    frontend_stats_publish_address: str


class CoordinatorSpec(Struct, frozen=True, kw_only=True):
    """What a coordinator is to do: the arguments of :class:`Coordinator`, and where to bind.

    A tcp port ``*`` in an address is resolved by binding.
    """

    size: int
    lock_step: bool
    wire_version: str | None
    addresses: CoordinatorAddresses


class CoordinatorStarted(Struct, kw_only=True):
    """What a coordinator's process says first: where it has bound, or why it could not."""

    addresses: CoordinatorAddresses | None
    error: str = ""


class CoordinatorServer:
    """A coordinator on real sockets. Belongs to the thread that calls :meth:`run`, which closes it.

    Raises:
        OSError: an address cannot be bound.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        self.coordinator = Coordinator(
            spec.size,
            lock_step=spec.lock_step,
            wire_version=spec.wire_version,
            to_engines=lambda frames: self._engines.send_multipart(frames),
            to_frontends=lambda payload: self._frontends.send(payload),
        )
        wanted = spec.addresses
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._engines, engines = bind_publisher(self._context, wanted.coordinator_input, MAX_FRAME_BYTES)
            self._reports, reports = bind_pull(self._context, wanted.coordinator_output, MAX_FRAME_BYTES)
            front = wanted.frontend_stats_publish_address
            self._frontends, frontends = bind_publisher(self._context, front, MAX_FRAME_BYTES)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.addresses = CoordinatorAddresses(
            coordinator_input=engines, coordinator_output=reports, frontend_stats_publish_address=frontends
        )
        self._subscribers = Connections(self._engines)
        self._subscribed: set[int] = set()
        self._reporters = Connections(self._reports)
        self._connection_of: dict[int, int] = {}
        """By engine index: where its last report came from."""

    def run(self, lifeline: Channel) -> None:
        """Serve until the other end of ``lifeline`` hangs up. No message ends it (defect 30)."""
        try:
            self._serve(lifeline.fileno())
        finally:
            self._subscribers.monitor.close()
            self._reporters.monitor.close()
            self._context.destroy(linger=0)

    def _serve(self, lifeline: int) -> None:
        handlers = {self._engines: self._from_engine_subscription, self._reports: self._from_engine}
        poller = zmq.Poller()
        for readable in (lifeline, self._subscribers.monitor.readable, self._reporters.monitor.readable, *handlers):
            poller.register(readable, zmq.POLLIN)
        while True:
            wait_s = self.coordinator.next_publication(time.monotonic())
            for readable, _ in poller.poll(None if math.isinf(wait_s) else math.ceil(wait_s * 1000)):
                if readable == lifeline:
                    return
                if (handle := handlers.get(readable)) is not None:
                    self._drain(readable, handle)
                else:
                    self._note_closed()
            if self.coordinator.is_ready and self._frontends not in handlers:
                handlers[self._frontends] = self._from_frontend  # not before: there would be nobody to wake
                poller.register(self._frontends, zmq.POLLIN)
            if self.coordinator.next_publication(time.monotonic()) <= 0:
                self._guarded(self.coordinator.publish, time.monotonic())

    def _drain(self, socket: zmq.Socket[bytes], handle: Callable[[list[zmq.Frame]], None]) -> None:
        messages: list[list[zmq.Frame]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < MESSAGES_PER_TURN:
                messages.append(receive_frames(socket))
        if messages:
            self._note_closed()  # after receiving: what is known of a connection is at least as new as its messages
        for frames in messages:
            self._guarded(handle, frames)

    def _guarded(self, action: Callable[[T], None], argument: T) -> None:
        try:
            action(argument)
        except Exception:
            logger.exception("something could not be handled; the coordinator goes on")

    def _from_engine_subscription(self, frames: list[zmq.Frame]) -> None:
        """Count connections, not subscriptions: an engine may subscribe twice, or leave and come back (defect 29)."""
        if frames[0].bytes != SUBSCRIBE_ALL:
            return  # it leaves; its connection's end says so too
        connection = connection_of(frames[0])
        if self._subscribers.is_open(connection):
            self._subscribed.add(connection)
            self.coordinator.subscribed(len(self._subscribed), time.monotonic())

    def _from_engine(self, frames: list[zmq.Frame]) -> None:
        index = self.coordinator.reported([frame.bytes for frame in frames], time.monotonic())
        if index is None:
            return
        self._connection_of[index] = connection_of(frames[0])
        if not self._reporters.is_open(self._connection_of[index]):  # its last words
            self.coordinator.engine_gone(index, time.monotonic())

    def _from_frontend(self, frames: list[zmq.Frame]) -> None:
        payload = frames[0].bytes
        if payload == SUBSCRIBE_ALL:
            self.coordinator.frontend_joined(time.monotonic())
        elif payload != UNSUBSCRIBE_ALL:
            self.coordinator.asked(payload, time.monotonic())

    def _note_closed(self) -> None:
        self._subscribed.difference_update(self._subscribers.take_closed())
        if closed := self._reporters.take_closed():
            for index in [index for index, connection in self._connection_of.items() if connection in closed]:
                del self._connection_of[index]
                self.coordinator.engine_gone(index, time.monotonic())
