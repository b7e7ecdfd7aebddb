"""``InputThread``: owns an engine's DEALER sockets, and turns what arrives into calls of a receiver.

No message can end it (defects 1, 2, 3, 5): what cannot be understood is answered if its sender can be told, else
logged and dropped.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import zmq

from enginewire.config import EngineConfig
from enginewire.engine.frontends import COORDINATOR, Frontend
from enginewire.errors import DecodeError, InvalidRequestError
from enginewire.transport.peers import ConnectionWatch
from enginewire.transport.sockets import connect_dealer, connect_xsub, inproc_pair
from enginewire.wire.codec import MsgpackDecoder, RequestDecoder, UtilityCallDecoder
from enginewire.wire.frames import (
    ABORT,
    ADD,
    ALL_ENGINES_LISTEN,
    REQUEST_TYPES,
    START_DP_WAVE,
    SUBSCRIBE_ALL,
    UTILITY,
    engine_identity,
    engine_index_of,
)
from enginewire.wire.messages import EngineCoreRequest, UtilityCall, UtilityOutput, utility_output
from enginewire.wire.profile import PROFILES, V0_25

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN: Final = 64
"""Messages read from one socket before the others get their turn."""

Actions = dict[zmq.Socket[bytes], Callable[[], None]]


class Receiver(Protocol):
    """Whom the messages are for. Called in the input thread."""

    def receive_request(self, request: EngineCoreRequest) -> None:
        """Take an ADD."""

    def receive_abort(self, request_ids: list[str]) -> None:
        """Take an ABORT."""

    def receive_utility(self, call: UtilityCall) -> None:
        """Take a UTILITY."""

    def receive_start_wave(self, wave: int, excluded: int | None) -> None:
        """Take a coordinator's START_DP_WAVE; the excluded rank has started already."""

    def frontend_lost(self, client_index: int) -> None:
        """Learn that a client is gone, and wants nothing any more."""

    def refuse_request(self, request_id: str, client_index: int, why: InvalidRequestError) -> None:
        """Tell a client that its request was not understood."""

    def answer_utility(self, client_index: int, answer: UtilityOutput) -> None:
        """Tell a client that its call was not understood."""

    def thread_failed(self, exc: BaseException) -> None:
        """Learn that this thread is gone."""


class InputThread(threading.Thread):
    """Connects one DEALER per frontend, sends the ready response on each, then reads.

    Args:
        addresses: of the frontends' ROUTERs; position is the client index.
        frontends: whose they are, in the same order.
        ready: the ready response.
        coordinator: address of the coordinator's publisher, if there is one.
        heartbeat_s: interval and time-out, over tcp; ``None``: none, and silence costs nothing.
        watch: notice frontends that are gone. Not needed for one whose end is this process's end.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        frontends: Sequence[Frontend],
        engine_index: int,
        ready: bytes,
        config: EngineConfig,
        receiver: Receiver,
        *,
        coordinator: str | None = None,
        heartbeat_s: tuple[float, float] | None = None,
        watch: bool = False,
    ) -> None:
        super().__init__(name="engine-input", daemon=True)
        self._context = context
        self._addresses = list(addresses)
        self._frontends = frontends
        self._identity = engine_identity(engine_index)
        self._ready = ready
        self._max_frame_bytes = config.max_frame_bytes
        self._max_frames = config.max_frames
        self._heartbeat_s = heartbeat_s
        self._receiver = receiver
        self._watch = watch
        self._coordinator = coordinator
        self._waves = MsgpackDecoder[Any](tuple[int, int | bytes | None])
        self._requests = {profile: RequestDecoder(profile.request) for profile in PROFILES}
        self._calls = UtilityCallDecoder(allow_pickle=config.allow_pickle)
        self._aborts = MsgpackDecoder[Any](list[str] | str)  # type: ignore[arg-type]  # a union is a form, not a type
        self.connected = threading.Event()
        """The sockets exist and the ready response is on its way."""
        self.all_listen = threading.Event()
        """The coordinator says that every engine listens to it."""
        self._stopper, self._stopped = inproc_pair(context, "stop-input")

    def stop(self) -> None:
        """End the thread and wait for it. Call once, from the thread that made it."""
        if self.ident is not None:
            self._stopper.send(b"")
            self.join()
        else:
            self._stopped.close()
        self._stopper.close()

    def run(self) -> None:
        """Read until stopped."""
        sockets: list[zmq.Socket[bytes]] = []
        watches: list[ConnectionWatch] = []
        try:
            actions = self._connect(sockets, watches)
            self.connected.set()
            self._read(actions)
        except BaseException as exc:  # noqa: BLE001 - an engine without ears must not look alive
            self._receiver.thread_failed(exc)
        finally:
            self.connected.set()
            self.all_listen.set()
            for watch in watches:
                watch.monitor.close()
            for socket in (self._stopped, *sockets):
                socket.close()

    def _connect(self, sockets: list[zmq.Socket[bytes]], watches: list[ConnectionWatch]) -> Actions:
        """Make the sockets, and return what is to be done when they are readable."""
        actions: Actions = {}
        if self._coordinator is not None:  # first: it waits for all engines, and they for it
            publisher = connect_xsub(self._context, self._coordinator, self._max_frame_bytes, self._identity)
            sockets.append(publisher)
            publisher.send(SUBSCRIBE_ALL)
            actions[publisher] = partial(self._drain, publisher, COORDINATOR)
        for client_index, address in enumerate(self._addresses):
            socket = connect_dealer(self._context, address, self._identity, self._max_frame_bytes, self._heartbeat_s)
            sockets.append(socket)
            actions[socket] = partial(self._drain, socket, client_index)
            if self._watch:
                watch = ConnectionWatch(socket)
                watches.append(watch)
                actions[watch.monitor.readable] = partial(self._look_at, watch, socket, client_index)
            socket.send(self._ready)
        return actions

    def _read(self, actions: Actions) -> None:
        poller = zmq.Poller()
        for socket in (self._stopped, *actions):
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is self._stopped:
                    return
                actions[socket]()

    def _drain(self, socket: zmq.Socket[bytes], client_index: int, most: int = MESSAGES_PER_TURN) -> None:
        for _ in range(most):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self.handle(frames, client_index)
            except Exception:
                logger.exception("client_index=%d sent a message that could not be handled; dropped", client_index)

    def _look_at(self, watch: ConnectionWatch, socket: zmq.Socket[bytes], client_index: int) -> None:
        frontend = self._frontends[client_index]
        for is_connected in watch.changes():
            if is_connected and not frontend.is_here:
                logger.info("client_index=%d is back", client_index)
                frontend.is_here = True
            elif frontend.is_here and not is_connected:
                logger.warning("client_index=%d is gone: the connection to its frontend was lost", client_index)
                # What it sent before it went is taken in first, so that it is among what is aborted now.
                self._drain(socket, client_index, most=sys.maxsize)
                frontend.lose()
                self._receiver.frontend_lost(client_index)

    def handle(self, frames: Sequence[bytes], client_index: int) -> None:
        """Take one message off the socket of ``client_index``."""
        if client_index == COORDINATOR:
            self._coordinator_says(frames)
            return
        kind, body = frames[0], frames[1:]
        if not body or len(body) > self._max_frames or kind not in REQUEST_TYPES:
            name = REQUEST_TYPES.get(kind, f"type {kind[:4].hex() or '(empty)'}")
            logger.warning("client_index=%d sent %s in %d frames; dropped", client_index, name, len(frames))
        elif kind == ADD:
            self._add(body, client_index)
        elif kind == ABORT:
            self._abort(body, client_index)
        elif kind == UTILITY:
            self._utility(body, client_index)
        else:
            logger.warning("client_index=%d sent START_DP_WAVE, a coordinator's message; dropped", client_index)

    def _coordinator_says(self, frames: Sequence[bytes]) -> None:
        if list(frames) == [ALL_ENGINES_LISTEN]:
            self.all_listen.set()
            return
        try:
            if frames[0] != START_DP_WAVE:
                raise DecodeError("neither READY nor START_DP_WAVE")
            wave, excluded = self._waves.decode(frames[1:])
            if isinstance(excluded, bytes):  # as the reference's frontends send it (defect 9)
                excluded = engine_index_of(excluded)
        except DecodeError as exc:
            logger.warning("the coordinator sent what cannot be read; dropped: %s", exc)
        else:
            self._receiver.receive_start_wave(wave, excluded)

    def _add(self, body: Sequence[bytes], client_index: int) -> None:
        try:
            profile = self._frontends[client_index].layout_of_request(body[0])
            request = profile.request_from(self._requests[profile].decode(body))
        except DecodeError as exc:
            self._refuse(body, client_index, exc)
            return
        if not self._is_client(request.client_index):
            # The socket it came on is a client's too, and most likely the one that waits.
            why = f"client_index must be below {len(self._addresses)}, got {request.client_index}"
            self._receiver.refuse_request(request.request_id, client_index, InvalidRequestError(why))
            return
        self._receiver.receive_request(request)

    def _refuse(self, body: Sequence[bytes], client_index: int, exc: DecodeError) -> None:
        sender = self._requests[V0_25].sender(body)  # what it looks at is alike in every version
        if sender is None:
            logger.warning("client_index=%d sent an ADD that cannot be read; dropped: %s", client_index, exc)
            return
        request_id, stated = sender
        receiver = stated if self._is_client(stated) else client_index
        self._receiver.refuse_request(request_id, receiver, InvalidRequestError(str(exc)))

    def _abort(self, body: Sequence[bytes], client_index: int) -> None:
        try:
            request_ids = self._aborts.decode(body)
        except DecodeError as exc:
            logger.warning("client_index=%d sent an ABORT that cannot be read; dropped: %s", client_index, exc)
            return
        self._receiver.receive_abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def _utility(self, body: Sequence[bytes], client_index: int) -> None:
        try:
            call = self._calls.decode(body)
        except DecodeError as exc:
            self._refuse_call(body, client_index, exc)
            return
        if not self._is_client(call.client_index):
            logger.warning("client_index=%d stated client_index=%d in a call", client_index, call.client_index)
            call.client_index = client_index
        self._receiver.receive_utility(call)

    def _refuse_call(self, body: Sequence[bytes], client_index: int, exc: DecodeError) -> None:
        logger.warning("client_index=%d sent a UTILITY that cannot be read: %s", client_index, exc)
        sender = self._calls.sender(body)
        if sender is not None:
            stated, call_id = sender
            answer = utility_output(call_id, failure_message=f"Call failed: {exc}")
            self._receiver.answer_utility(stated if self._is_client(stated) else client_index, answer)

    def _is_client(self, client_index: int) -> bool:
        return 0 <= client_index < len(self._addresses)
