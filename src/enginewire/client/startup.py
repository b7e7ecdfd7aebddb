"""The frontend's part of the start-up: HELLO, INIT, READY and the ready response of every engine.

:class:`EngineStartup` decides and has no socket; :func:`wait_for_engines` runs it on the real ones, under one deadline.
Source: protocol sections B.1 to B.5; C-24, C-25.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq
from msgspec import UNSET

from enginewire.client.engines import Engine
from enginewire.config import EngineConfig
from enginewire.errors import DecodeError, EngineDeath, EngineStartupError, EngineStartupTimeout, startup_error
from enginewire.transport.sockets import HEARTBEAT_S, send_message
from enginewire.wire.capabilities import EVERYTHING
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import describe_identity, engine_index_of
from enginewire.wire.handshake import (
    MAX_HEARTBEAT_MS,
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    FrontendInfo,
    HandshakeMessage,
)
from enginewire.wire.profile import V0_25, WireProfile, decode_ready

logger = logging.getLogger(__name__)

POLL_MS: Final = 100
"""How soon a process that ended during start-up is noticed."""

given_up: Final[ContextVar[threading.Event | None]] = ContextVar("given_up", default=None)
"""Set by whoever makes a client on a thread and may stop wanting it: a thread cannot be stopped, but it can look."""

MAX_STRANGERS: Final = 8
"""So many that came without being expected are named; over tcp anybody may come."""

REPORT_EVERY_S: Final = 10.0
"""How often a long start-up says what it is waiting for."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is agreed with an engine.

    Attributes:
        addresses: what INIT tells it.
        is_local: it was started by this process and says so; otherwise it must say that it is headless.
        is_other_nodes: neither: it has a frontend of its own, and comes here only to meet the other ranks.
        parallel_config: of lock-step engines, see protocol B.2.
        heartbeat_s: interval and time-out of our sockets' heartbeat.
    """

    addresses: EngineZmqAddresses
    is_local: bool
    is_other_nodes: bool = False
    parallel_config: Mapping[str, Any] | None = None
    heartbeat_s: tuple[float, float] = HEARTBEAT_S

    def init(self, hello: HandshakeMessage) -> bytes:
        """Encode the INIT that answers ``hello``."""
        init = EngineHandshakeMetadata(addresses=self.addresses, parallel_config=dict(self.parallel_config or {}))
        if hello.enginewire is not UNSET:
            interval, timeout = (min(max(1, round(seconds * 1000)), MAX_HEARTBEAT_MS) for seconds in self.heartbeat_s)
            init.enginewire = FrontendInfo(heartbeat_ms=(interval, timeout))
        return msgspec.msgpack.encode(init)

    def check(self, index: int, message: HandshakeMessage) -> None:
        """Refuse an engine that was started for something else. Raises :class:`EngineStartupError`."""
        is_headless = not self.is_local and not self.is_other_nodes
        if message.local == self.is_local and (self.is_local or message.headless is is_headless):
            return
        expected = "local=True" if self.is_local else f"local=False, headless={is_headless}"
        raise EngineStartupError(
            f"engine {index} says local={message.local}, headless={message.headless}, expected {expected}; was it "
            "started for another deployment?",
            stage="hello",
            engine_index=index,
        )


def refusal(hello: HandshakeMessage, why: str) -> bytes | None:
    """Encode the answer to an engine that is not taken; ``None``: it is vLLM's, and would not understand."""
    if hello.status != "HELLO" or hello.enginewire is UNSET:
        return None
    nowhere = EngineZmqAddresses(inputs=[], outputs=[])
    info = FrontendInfo(refusal=why)
    return msgspec.msgpack.encode(EngineHandshakeMetadata(addresses=nowhere, parallel_config={}, enginewire=info))


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine said of itself.

    Attributes:
        profile: the layout it speaks.
        response: ``None`` after an empty one: there is nothing to apply.
        payload: the same as it came.
    """

    profile: WireProfile
    response: EngineCoreReadyResponse | None
    payload: bytes


@dataclass(slots=True)
class _Progress:
    """How far one engine has come; HELLO, then READY and the ready response in either order."""

    said_hello: bool = False
    said_ready: bool = False
    response: Ready | None = None
    is_other_nodes: bool = False

    @property
    def missing(self) -> str | None:
        if not self.said_hello:
            return "has not said HELLO"
        if not self.said_ready or (self.response is None and not self.is_other_nodes):
            return "has said HELLO and is not ready"
        return None


class EngineStartup:
    """Who said HELLO, who is ready. Takes messages, returns replies; no I/O.

    Args:
        expected: the engines to wait for, by rank; ``None``: somebody else shakes hands with it, and only its ready
            response is awaited.
        max_model_len: of the configuration; what holds if an engine's ready response is empty.
    """

    def __init__(self, expected: Mapping[int, Expected | None], *, max_model_len: int | None = None) -> None:
        self._expected = {index: agreed for index, agreed in expected.items() if agreed is not None}
        self._max_model_len = max_model_len
        self._engines = {
            index: _Progress(
                agreed is None, agreed is None, is_other_nodes=agreed is not None and agreed.is_other_nodes
            )
            for index, agreed in expected.items()
        }
        self._hashes: dict[int, str] = {}
        self._strangers: dict[str, None] = {}
        """Who came and is not waited for, in order."""
        self._handshake = MsgpackDecoder(HandshakeMessage)

    @property
    def is_complete(self) -> bool:
        """Whether every engine is ready."""
        return all(engine.missing is None for engine in self._engines.values())

    @property
    def all_local_said_hello(self) -> bool:
        """Whether every engine that this process started has been heard of."""
        return all(self._engines[index].said_hello or not agreed.is_local for index, agreed in self._expected.items())

    def ready_of(self, index: int) -> Ready:
        """Return what an engine that is ready said of itself."""
        ready = self._engines[index].response
        assert ready is not None, f"engine {index} is not ready"
        return ready

    def missing(self) -> str:
        """Say which engines are missing, and what of them."""
        parts = [f"engine {index} {engine.missing}" for index, engine in self._engines.items() if engine.missing]
        if parts and self._strangers:
            parts.append(f"came and is not expected here: {', '.join(self._strangers)}")
        return "; ".join(parts)

    def on_handshake(self, identity: bytes, payload: bytes) -> bytes | None:
        """Take a message of the handshake socket; return the reply, if it gets one.

        Raises:
            EngineStartupError: the engine contradicts what was agreed; start-up cannot succeed.
        """
        index = self._known(identity, "handshake")
        if index is not None and index not in self._expected:
            return None
        try:
            message = self._handshake.decode([payload])
        except DecodeError as exc:
            logger.warning("ignored a handshake message of %s: %s", describe_identity(identity), exc)
            return None
        if index is None:
            return refusal(message, not_expected(identity, self._engines))
        engine = self._engines[index]
        self._expected[index].check(index, message)
        if message.status == "HELLO" and not engine.said_hello:
            engine.said_hello = True
            return self._expected[index].init(message)
        if message.status == "READY" and engine.said_hello and not engine.said_ready:
            self._check_hash(index, message)
            engine.said_ready = True
            return None
        raise EngineStartupError(
            f"unexpected {message.status} from engine {index}, which "
            f"{engine.missing or 'is ready already'}; was it started twice?",
            stage="hello" if message.status == "HELLO" else "ready",
            engine_index=index,
        )

    def _check_hash(self, index: int, message: HandshakeMessage) -> None:
        """Refuse ranks in lock-step that were configured differently: they have to agree with each other (B.5)."""
        if isinstance(message.parallel_config_hash, str):
            self._hashes[index] = message.parallel_config_hash
        if len({*self._hashes.values()}) > 1:
            said = ", ".join(f"{rank}: {each}" for rank, each in sorted(self._hashes.items()))
            raise EngineStartupError(
                f"engines that run in lock-step are configured differently; the hashes of their settings are {said}",
                stage="ready",
                engine_index=index,
            )

    def on_ready_response(self, identity: bytes, payload: bytes) -> None:
        """Take a message of the input socket. Another one of the same engine replaces the first.

        Raises:
            EngineStartupError: it cannot be understood, or leaves out what has to be known.
        """
        index = self._known(identity, "ready")
        if index is None:
            return
        if not payload and self._max_model_len is None:
            raise EngineStartupError(
                f"engine {index} sent an empty ready response, so max_model_len is not known; "
                "set it in the configuration",
                stage="ready",
                engine_index=index,
            )
        try:
            profile, response = decode_ready([payload]) if payload else (V0_25, None)
        except DecodeError as exc:
            raise EngineStartupError(f"engine {index}: {exc}", stage="ready", engine_index=index) from exc
        if self._engines[index].response is not None:
            logger.warning("engine %s sent a second ready response, which replaces the first", index)
        self._engines[index].response = Ready(profile, response, payload)

    def _known(self, identity: bytes, what: str) -> int | None:
        index = engine_index_of(identity)
        if index in self._engines:
            return index
        expected, stranger = ", ".join(map(str, self._engines)), describe_identity(identity)
        logger.warning("ignored a %s message of unexpected %s; expected: %s", what, stranger, expected)
        if len(self._strangers) < MAX_STRANGERS:
            self._strangers[stranger] = None
        return None


def wait_for_engines(
    startup: EngineStartup,
    handshake_socket: zmq.Socket[bytes] | None,
    engines: Iterable[Engine],
    *,
    started: float,
    ready_timeout_s: float,
    hello_timeout_s: float,
    first_death: Callable[[], EngineDeath | None],
    log_tail: Callable[[], tuple[str, ...]],
    not_awaited: Collection[int] = (),
) -> list[list[bytes]]:
    """Drive ``startup`` until all engines are ready.

    Args:
        handshake_socket: ``None``: somebody else does the handshake, only ready responses are awaited.
        started: when the engines were launched, by the monotonic clock. Both limits count from then, and no message
            restarts them.
        ready_timeout_s: until everything is ready.
        hello_timeout_s: the tighter limit until every engine that this process started has been heard of.
        first_death: tells of an engine process that has ended.
        log_tail: what the engines printed, for the error.
        not_awaited: engines whose handshake is somebody else's business.

    Returns:
        what those said on the handshake socket.

    Raises:
        EngineStartupTimeout: time ran out; says which engines are missing and which setting raises the limit.
        EngineStartupError: an engine ended, or contradicts the protocol, or nobody wants the client any longer.
    """
    set_aside: list[list[bytes]] = []
    next_report = started + REPORT_EVERY_S
    links = {engine.link.input_socket: engine.link for engine in engines}
    poller = zmq.Poller()
    for socket in filter(None, (handshake_socket, *links)):
        poller.register(socket, zmq.POLLIN)
    while not startup.is_complete:
        for socket, _ in poller.poll(POLL_MS):
            frames = socket.recv_multipart()
            if len(frames) != 2:
                logger.warning("ignored a start-up message of %d frames, expected 2", len(frames))
            elif socket in links:
                if is_of(links[socket].engines, frames[0]):
                    startup.on_ready_response(*frames)
            elif engine_index_of(frames[0]) in not_awaited:
                set_aside.append(frames)
            elif (reply := startup.on_handshake(*frames)) is not None:
                try:
                    send_message(socket, (frames[0], reply))
                except zmq.ZMQError as exc:
                    logger.warning("engine %s is gone since its HELLO: %s", engine_index_of(frames[0]), exc.strerror)
        if (death := first_death()) is not None:
            raise startup_error(death)
        if (event := given_up.get()) is not None and event.is_set():
            raise EngineStartupError(f"given up while waiting: {startup.missing()}", stage="ready")
        waited = time.monotonic() - started
        if waited > ready_timeout_s:
            raise EngineStartupTimeout(
                f"not ready within {ready_timeout_s:g} s: {startup.missing()}. Slow loading of weights is the usual "
                "cause, or for engines elsewhere that nobody started them with this address; ready_timeout_s "
                "(environment: VLLM_ENGINE_READY_TIMEOUT_S) raises the limit",
                stage="ready",
                log_tail=log_tail(),
            )
        if waited > hello_timeout_s and not startup.all_local_said_hello:
            raise EngineStartupTimeout(
                f"no word from a local engine process within {hello_timeout_s:g} s: {startup.missing()}. It only has "
                "to start Python for that; hello_timeout_s raises the limit",
                stage="hello",
                log_tail=log_tail(),
            )
        if time.monotonic() > next_report:
            next_report += REPORT_EVERY_S
            logger.info("waiting for engines since %.0f s: %s", waited, startup.missing())
    return set_aside


def not_expected(identity: bytes, ranks: Iterable[int]) -> str:
    """Say why an engine is refused that has another rank than those expected."""
    expected = ", ".join(map(str, ranks))
    return (
        f"{describe_identity(identity)} is not expected here; expected: {expected} (data_parallel_size is the number)"
    )


def is_of(engines: Sequence[Engine], identity: bytes) -> bool:
    """Whether an identity is one of these engines'; says so in the log if it is not."""
    if engine_index_of(identity) in [engine.index for engine in engines]:
        return True
    expected = ", ".join(str(engine.index) for engine in engines)
    sender = describe_identity(identity)
    logger.warning("ignored a message of unexpected %s on an input socket; expected: %s", sender, expected)
    return False


def apply_ready_responses(
    config: EngineConfig, responses: Sequence[EngineCoreReadyResponse], *, max_model_len: int | None = None
) -> None:
    """Write what the engines turned out to be into the frontend's configuration (C-25).

    ``max_model_len`` takes the minimum, blocks are summed, capacity figures keep the first engine's. What an earlier
    call wrote is replaced.

    Args:
        max_model_len: what was asked for.
    """
    if not responses:
        return
    config.num_gpu_blocks = sum(response.num_gpu_blocks for response in responses)
    lengths = [max_model_len, *(response.max_model_len for response in responses)]
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
