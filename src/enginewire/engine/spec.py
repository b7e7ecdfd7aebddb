"""``EngineSpec``: what a client tells the engine process it starts. ``DeathNote``: what that process says at its end.

Both travel on the *lifeline*: one end of a socket pair, whose descriptor is the process's only argument. The client
first sends the spec. After that the lifeline stays open and silent: its end is how the engine learns that its client is
gone. The engine writes at most two messages on it: ``READY``, and its note.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from enginewire.config import EngineConfig
from enginewire.engine.channel import Channel
from enginewire.errors import ConfigError, DecodeError, EncodeError, EngineClientError, ModelError

READY: Final = b""
"""What an engine says on its lifeline once it serves; for launchers that take no part in the handshake."""

TRACEBACK_LINES: Final = 20
"""Lines of traceback in a note: the frames next to the failure, without those of our own loop."""


class EngineSpec(Struct, kw_only=True):
    """Everything an engine process needs to know.

    Attributes:
        config: the settings.
        executor: reference of the executor, see :func:`~enginewire.engine.registry.find_executor`; default: the
            configuration's.
        executor_pickle: instead of a reference, the class itself by cloudpickle. Comes from our own parent over a
            private socket, never from the network.
        handshake_address: where to say HELLO.
        client_handshake_address: where to say it a second time: to the frontend of this node, which drives the engine,
            after that of rank 0, which only brings the ranks together (external and hybrid load balancing).
        parallel_config_hash: what READY of ranks in lock-step says; default: one of our own. A vLLM frontend compares
            it with its own, which it prints when they differ.
        engine_index: global rank.
        local, headless: as HELLO states them.
        sys_path: where the parent finds modules.
        cleanup_paths: socket files and folders to remove if the parent vanishes.
    """

    config: EngineConfig
    handshake_address: str = ""
    client_handshake_address: str = ""
    parallel_config_hash: str = ""
    engine_index: int = 0
    local: bool = True
    headless: bool = False
    log_stats: bool = True
    executor: str = ""
    executor_pickle: bytes | None = None
    sys_path: list[str] = field(default_factory=list)
    cleanup_paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.executor:
            self.executor = self.config.executor

    def encode(self) -> bytes:
        """Return the bytes for the lifeline.

        Raises:
            EncodeError: an executor option has no form outside this process.
        """
        try:
            return _spec_encoder.encode(self)
        except TypeError as exc:
            raise EncodeError(
                f"the settings of executor {self.executor!r} cannot be sent to the engine process: {exc}; "
                "use plain values, or run the engine in this process (multiprocess_mode=False)"
            ) from exc

    @staticmethod
    def decode(payload: bytes) -> EngineSpec:
        """Read a spec. Raises :class:`DecodeError`."""
        try:
            return msgspec.msgpack.decode(payload, type=EngineSpec)
        except msgspec.DecodeError as exc:
            raise DecodeError(f"not a valid EngineSpec: {exc}") from exc


class DeathNote(Struct, kw_only=True):
    """Why an engine process ends before it was told to.

    Attributes:
        stage: ``startup`` until the engine is ready.
        cause: one sentence, ``"ModelError: no such file: …"``.
        traceback_tail: the last lines of the traceback, newest last; none if the cause says it all.
    """

    stage: Literal["startup", "running"]
    cause: str
    traceback_tail: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, stage: Literal["startup", "running"], exc: BaseException) -> DeathNote:
        """Write the note for an exception. One that brings its own traceback from another process gives that."""
        remote: list[str] = getattr(exc, "traceback_tail", [])
        tail = remote if explains_itself(stage, exc) else tail_of(exc)
        return cls(stage=stage, cause=describe(exc), traceback_tail=tail)

    @classmethod
    def decode(cls, payload: bytes) -> DeathNote | None:
        """Read a note; ``None`` if it is none, or cut off: its writer was killed."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.DecodeError:
            return None

    def send(self, lifeline: Channel) -> None:
        """Send the note. A client that is gone does not read it."""
        with contextlib.suppress(OSError):  # nobody is left to tell; stderr has it too
            lifeline.send(msgspec.msgpack.encode(self))


def receive_death_note(lifeline: Channel) -> DeathNote | None:
    """Wait for an engine's note; ``None`` when it ends without one (orderly, or killed)."""
    while (payload := lifeline.receive()) == READY:
        pass
    return None if payload is None else DeathNote.decode(payload)


class AlreadyDescribed(Exception):
    """An exception whose text is the whole cause; its own class says nothing more (see :func:`describe`)."""


def describe(exc: BaseException) -> str:
    """Put an exception into one sentence: its class and its text, ``"ModelError: no such file"``."""
    text = str(exc)
    if isinstance(exc, AlreadyDescribed):
        return text
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def explains_itself(stage: Literal["startup", "running"], exc: BaseException) -> bool:
    """Tell whether a traceback adds nothing: a model or setting was refused, or another process has logged its own."""
    if isinstance(exc, AlreadyDescribed):
        return True
    return stage == "startup" and isinstance(exc, (ConfigError, ModelError)) and exc.__cause__ is None


def describe_failure(exc: BaseException) -> str:
    """Put an exception into the text of a failed utility call.

    Errors that explain themselves (ours, ``ValueError``, ``NotImplementedError``) give their text alone, as the
    reference does; others name their class, as ``KeyError('x')`` or an empty ``AssertionError`` would say nothing.
    """
    if str(exc) and isinstance(exc, (ValueError, NotImplementedError, EngineClientError)):
        return str(exc)
    return describe(exc)


def tail_of(exc: BaseException) -> list[str]:
    """Return the last lines of an exception's traceback."""
    lines = "".join(traceback.format_exception(exc)).splitlines()
    return lines[-TRACEBACK_LINES:]


def _enc_hook(value: Any) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a value of type {type(value).__qualname__} has no form outside this process")


_spec_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
