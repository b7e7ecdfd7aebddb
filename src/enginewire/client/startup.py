"""The frontend's part of the start-up: HELLO, INIT, READY and the ready response of every engine.

:class:`EngineStartup` decides and has no socket; :func:`wait_for_engines` runs it on the real ones, under one deadline.
Source: protocol sections B.1 to B.5; C-24, C-25.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from enginewire.config import EngineConfig
from enginewire.errors import DecodeError, EngineDeath, EngineStartupError, EngineStartupTimeout, startup_error
from enginewire.transport.sockets import send_message
from enginewire.wire.capabilities import EVERYTHING
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import engine_index_of
from enginewire.wire.handshake import (
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    HandshakeMessage,
)

logger = logging.getLogger(__name__)

POLL_MS: Final = 100
"""How soon a process that ended during start-up is noticed."""

REPORT_EVERY_S: Final = 10.0
"""How often a long start-up says what it is waiting for."""


@dataclass(slots=True)
class _Engine:
    """How far one engine has come; HELLO, then READY and the ready response in either order."""

    said_hello: bool = False
    said_ready: bool = False
    has_responded: bool = False
    response: EngineCoreReadyResponse | None = None
    """``None`` after an empty one: there is nothing to apply."""

    @property
    def missing(self) -> str | None:
        if not self.said_hello:
            return "has not said HELLO"
        if not (self.said_ready and self.has_responded):
            return "has said HELLO and is not ready"
        return None


class EngineStartup:
    """Who said HELLO, who is ready. Takes messages, returns replies; no I/O.

    Args:
        engine_indexes: the engines to wait for.
        local: they were started by this process; otherwise they must be headless.
        addresses: what INIT tells them.
        handshake: do the handshake; otherwise somebody else does, and only ready responses are awaited.
        max_model_len: of the configuration; what holds if an engine's ready response is empty.
    """

    def __init__(
        self,
        engine_indexes: Collection[int],
        *,
        local: bool,
        addresses: EngineZmqAddresses,
        handshake: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        self._local = local
        self._max_model_len = max_model_len
        self._engines = {index: _Engine(not handshake, not handshake) for index in engine_indexes}
        self._init = msgspec.msgpack.encode(EngineHandshakeMetadata(addresses=addresses, parallel_config={}))
        self._handshake = MsgpackDecoder(HandshakeMessage)
        self._ready = MsgpackDecoder(EngineCoreReadyResponse)

    @property
    def is_complete(self) -> bool:
        """Whether every engine is ready."""
        return all(engine.missing is None for engine in self._engines.values())

    @property
    def everyone_said_hello(self) -> bool:
        """Whether every engine has been heard of."""
        return all(engine.said_hello for engine in self._engines.values())

    @property
    def responses(self) -> list[EngineCoreReadyResponse]:
        """The ready responses, by engine index."""
        return [engine.response for _, engine in sorted(self._engines.items()) if engine.response is not None]

    def missing(self) -> str:
        """Say which engines are missing, and what of them."""
        parts = [f"engine {index} {engine.missing}" for index, engine in self._engines.items() if engine.missing]
        return "; ".join(parts)

    def on_handshake(self, identity: bytes, payload: bytes) -> bytes | None:
        """Take a message of the handshake socket; return the reply, if it gets one.

        Raises:
            EngineStartupError: the engine contradicts what was agreed; start-up cannot succeed.
        """
        engine = self._known(identity, "handshake")
        if engine is None:
            return None
        try:
            message = self._handshake.decode([payload])
        except DecodeError as exc:
            logger.warning("ignored a handshake message of engine %s: %s", engine_index_of(identity), exc)
            return None
        self._check_origin(identity, message)
        if message.status == "HELLO" and not engine.said_hello:
            engine.said_hello = True
            return self._init
        if message.status == "READY" and engine.said_hello and not engine.said_ready:
            engine.said_ready = True
            return None
        raise EngineStartupError(
            f"unexpected {message.status} from engine {engine_index_of(identity)}, which "
            f"{engine.missing or 'is ready already'}; was it started twice?",
            stage="hello" if message.status == "HELLO" else "ready",
            engine_index=engine_index_of(identity),
        )

    def on_ready_response(self, identity: bytes, payload: bytes) -> None:
        """Take a message of the input socket. Another one of the same engine replaces the first."""
        engine = self._known(identity, "ready")
        if engine is None:
            return
        index = engine_index_of(identity)
        if not payload and self._max_model_len is None:
            raise EngineStartupError(
                f"engine {index} sent an empty ready response, so max_model_len is not known; "
                "set it in the configuration",
                stage="ready",
                engine_index=index,
            )
        try:
            response = self._ready.decode([payload]) if payload else None
        except DecodeError as exc:
            raise EngineStartupError(f"engine {index}: {exc}", stage="ready", engine_index=index) from exc
        if engine.has_responded:
            logger.warning("engine %s sent a second ready response, which replaces the first", index)
        engine.has_responded, engine.response = True, response

    def _known(self, identity: bytes, what: str) -> _Engine | None:
        index = engine_index_of(identity)
        engine = None if index is None else self._engines.get(index)
        if engine is None:
            expected = ", ".join(map(str, self._engines))
            logger.warning("ignored a %s message of unexpected identity %r; expected: %s", what, identity, expected)
        return engine

    def _check_origin(self, identity: bytes, message: HandshakeMessage) -> None:
        if message.local == self._local and (self._local or message.headless):
            return
        expected = "local=True" if self._local else "local=False, headless=True"
        raise EngineStartupError(
            f"engine {engine_index_of(identity)} says local={message.local}, headless={message.headless}, expected "
            f"{expected}; was it started for another deployment?",
            stage="hello",
            engine_index=engine_index_of(identity),
        )


def wait_for_engines(
    startup: EngineStartup,
    handshake_socket: zmq.Socket[bytes] | None,
    input_socket: zmq.Socket[bytes],
    *,
    started: float,
    ready_timeout_s: float,
    hello_timeout_s: float | None,
    first_death: Callable[[], EngineDeath | None],
    log_tail: Callable[[], tuple[str, ...]],
) -> None:
    """Drive ``startup`` until all engines are ready.

    Args:
        handshake_socket: ``None``: somebody else does the handshake, only ready responses are awaited.
        started: when the engines were launched, by the monotonic clock. Both limits count from then, and no message
            restarts them.
        ready_timeout_s: until everything is ready.
        hello_timeout_s: the tighter limit until every engine has been heard of; ``None``: there is none.
        first_death: tells of an engine process that has ended.
        log_tail: what the engines printed, for the error.

    Raises:
        EngineStartupTimeout: time ran out; says which engines are missing and which setting raises the limit.
        EngineStartupError: an engine ended, or contradicts the protocol.
    """
    next_report = started + REPORT_EVERY_S
    poller = zmq.Poller()
    for socket in filter(None, (handshake_socket, input_socket)):
        poller.register(socket, zmq.POLLIN)
    while not startup.is_complete:
        for socket, _ in poller.poll(POLL_MS):
            frames = socket.recv_multipart()
            if len(frames) != 2:
                logger.warning("ignored a start-up message of %d frames, expected 2", len(frames))
            elif socket is input_socket:
                startup.on_ready_response(*frames)
            elif (reply := startup.on_handshake(*frames)) is not None:
                try:
                    send_message(socket, (frames[0], reply))
                except zmq.ZMQError as exc:
                    logger.warning("engine %s is gone since its HELLO: %s", engine_index_of(frames[0]), exc.strerror)
        if (death := first_death()) is not None:
            raise startup_error(death)
        waited = time.monotonic() - started
        if waited > ready_timeout_s:
            raise EngineStartupTimeout(
                f"not ready within {ready_timeout_s:g} s: {startup.missing()}. Slow loading of weights is the usual "
                "cause; ready_timeout_s (environment: VLLM_ENGINE_READY_TIMEOUT_S) raises the limit",
                stage="ready",
                log_tail=log_tail(),
            )
        if hello_timeout_s is not None and waited > hello_timeout_s and not startup.everyone_said_hello:
            raise EngineStartupTimeout(
                f"no word from a local engine process within {hello_timeout_s:g} s: {startup.missing()}. It only has "
                "to start Python for that; hello_timeout_s raises the limit",
                stage="hello",
                log_tail=log_tail(),
            )
        if time.monotonic() > next_report:
            next_report += REPORT_EVERY_S
            logger.info("waiting for engines since %.0f s: %s", waited, startup.missing())


def apply_ready_responses(config: EngineConfig, responses: list[EngineCoreReadyResponse]) -> None:
    """Write what the engines turned out to be into the frontend's configuration (C-25).

    ``max_model_len`` takes the minimum, blocks are summed, capacity figures keep the first engine's.
    """
    if not responses:
        return
    config.num_gpu_blocks = sum(response.num_gpu_blocks for response in responses)
    lengths = [config.max_model_len, *(response.max_model_len for response in responses)]
    config.max_model_len = min(filter(None, lengths), default=None)
    for response in responses:
        config.block_size = response.block_size
        config.dtype = response.dtype
    first = responses[0]
    config.kv_cache_size_tokens = first.kv_cache_size_tokens
    config.kv_cache_max_concurrency = first.kv_cache_max_concurrency
    info = first.enginewire
    config.vocab_size = None if info is msgspec.UNSET else info.vocab_size
    config.capabilities = EVERYTHING if info is msgspec.UNSET else info.capabilities
