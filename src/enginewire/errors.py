"""Every exception that enginewire raises on purpose.

::

    EngineClientError
    ├── EngineDeadError            the engine is gone for good, or all of several are; ``.death`` says why
    ├── EngineUnavailableError     no engine takes requests now, and one may come back; ``.death`` says why
    ├── EngineStartupError         launch or handshake failed; ``.stage``, ``.engine_index``
    │   ├── EngineStartupTimeout   … because time ran out (also a ``TimeoutError``)
    │   ├── EngineStartupModelError   … because of the model (also a ``ModelError``)
    │   └── EngineStartupConfigError  … because of a setting (also a ``ConfigError``)
    ├── ClientClosedError          used after ``shutdown()``
    ├── RequestError               one request was refused or failed, the engine is fine
    │   ├── InvalidRequestError    … because of what it asked for (also a ``ValueError``)
    │   ├── DuplicateRequestIdError  … because its id is still in use (also a ``ValueError``)
    │   ├── RequestLostError       … because the engine that ran it is gone
    │   └── EngineGenerateError    … because something broke while it ran
    ├── UtilityCallError           ``.method`` and the engine's message
    │   └── UtilityTimeoutError    … because no answer came in time (also a ``TimeoutError``)
    ├── WireError
    │   ├── EncodeError            our fault: a value that cannot go on the wire
    │   └── DecodeError            the peer's fault: bytes that are not the message they should be
    ├── ModelError                 a model file, folder or alias that cannot be used
    └── ConfigError                a setting that cannot be (also a ``ValueError``)
        └── AddressError           … because nothing can listen there (also an ``OSError``)
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

INVALID_REQUEST_PREFIX = "invalid_request: "
INTERNAL_PREFIX = "internal: "
ENGINE_LOST_PREFIX = "engine_lost: "
"""Begins the ``stop_reason`` that clients give to an output of their own making: the engine is gone."""

_NAME_OF_WORDS = re.compile(r"[a-z]+(?:_[a-z]+)+\b")


class EngineClientError(Exception):
    """Base of everything below."""


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """Why an engine is gone: a value, so that each waiter gets an exception of its own.

    Attributes:
        engine_index: global rank of the engine.
        cause: one sentence, e.g. ``"killed by signal 9 (SIGKILL)"``.
        exit_code: status of its process as ``subprocess`` gives it (negative: a signal), ``None`` if unknown.
        log_tail: the last lines it printed, newest last; empty for a remote engine.
    """

    engine_index: int
    cause: str
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()

    def exception(self) -> EngineDeadError:
        """Make a fresh exception: a shared one would collect every waiter's traceback."""
        return EngineDeadError(self)


def describe_exit(exit_code: int) -> str:
    """Put a process's exit status into words: ``"killed by signal 9 (SIGKILL)"``, ``"exited with status 1"``."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown signal"
    return f"killed by signal {-exit_code} ({name})"


def _with_log(text: str, log_tail: tuple[str, ...]) -> str:
    if not log_tail:
        return text
    return "\n  | ".join([f"{text}\n  Last lines of its log:", *log_tail])


class EngineDeadError(EngineClientError):
    """The engine is gone and this client cannot bring it back."""

    def __init__(self, death: EngineDeath) -> None:
        self.death = death
        super().__init__(_with_log(f"engine {death.engine_index} is dead: {death.cause}", death.log_tail))


class EngineUnavailableError(EngineClientError):
    """No engine, or not the one that was asked for, takes requests now; try again later.

    Attributes:
        death: of the engine that was lost; its return is awaited, or others go on.
    """

    def __init__(self, death: EngineDeath) -> None:
        self.death = death
        super().__init__(f"engine {death.engine_index} is not available: {death.cause}")


class EngineStartupError(EngineClientError):
    """An engine could not be started; everything the attempt made has been cleaned up.

    Attributes:
        stage: what was going on: ``"launch"``, ``"hello"``, ``"ready"``.
        engine_index: which engine, ``None`` when it concerns all of them.
        exit_code: status of its process if it ended, else ``None``.
        log_tail: the last lines it printed.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str,
        engine_index: int | None = None,
        exit_code: int | None = None,
        log_tail: tuple[str, ...] = (),
    ) -> None:
        self.stage = stage
        self.engine_index = engine_index
        self.exit_code = exit_code
        self.log_tail = log_tail
        super().__init__(_with_log(message, log_tail))


class EngineStartupTimeout(EngineStartupError, TimeoutError):
    """An engine was not ready in time."""


class ClientClosedError(EngineClientError):
    """The client was used after ``shutdown()``."""


class RequestError(EngineClientError):
    """One request was refused or failed; the engine and the other requests are fine."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        self.request_id = request_id
        super().__init__(message if request_id is None else f"request {request_id}: {message}")


class InvalidRequestError(RequestError, ValueError):
    """The request asks for something that cannot be done.

    Attributes:
        parameter: the offending parameter's name (``"temperature"``), ``None`` when it is not one of them.
    """

    def __init__(self, message: str, *, request_id: str | None = None, parameter: str | None = None) -> None:
        self.parameter = parameter
        super().__init__(message, request_id=request_id)


class DuplicateRequestIdError(RequestError, ValueError):
    """A request with this id is still running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            "this id is still in use; wait for it to finish, abort it, or choose another",
            request_id=request_id,
        )


class RequestLostError(RequestError):
    """The engine that ran the request died or was lost; sent again, it may run on another."""


class EngineGenerateError(RequestError):
    """The request failed for a reason that is not its own."""


def request_error_from_reason(request_id: str, reason: int | str | None) -> RequestError:
    """Turn the ``stop_reason`` of an ERROR output into the exception its caller gets.

    ``invalid_request: …`` is the caller's fault, ``internal: …`` and everything else is not; ``engine_lost: …`` comes
    from the client, of an engine that is gone. vLLM engines give no reason at all (``None``). A refusal that begins
    with a name of several words (``cache_salt is not supported``) is about that parameter; one word may be just a word.
    """
    if isinstance(reason, str) and reason.startswith(INVALID_REQUEST_PREFIX):
        text = reason.removeprefix(INVALID_REQUEST_PREFIX)
        name = _NAME_OF_WORDS.match(text)
        return InvalidRequestError(text, request_id=request_id, parameter=name and name[0])
    if isinstance(reason, str) and reason.startswith(ENGINE_LOST_PREFIX):
        return RequestLostError(reason.removeprefix(ENGINE_LOST_PREFIX), request_id=request_id)
    text = "the engine gave no reason; see its log" if reason is None else str(reason)
    return EngineGenerateError(text.removeprefix(INTERNAL_PREFIX), request_id=request_id)


class UtilityCallError(EngineClientError):
    """A utility call failed on the engine.

    Attributes:
        method: the utility's name.
        engine_index: the engine that failed it.
    """

    def __init__(self, message: str, *, method: str, engine_index: int = 0) -> None:
        self.method = method
        self.engine_index = engine_index
        super().__init__(message)


class UtilityTimeoutError(UtilityCallError, TimeoutError):
    """A utility call was not answered in time; a late answer will be dropped."""


class WireError(EngineClientError):
    """Bytes and messages do not fit together."""


class EncodeError(WireError):
    """A value cannot be put on the wire."""


class DecodeError(WireError):
    """Received bytes are not the message that was expected."""


class ModelError(EngineClientError):
    """A model file, folder or alias cannot be used."""


class ConfigError(EngineClientError, ValueError):
    """A setting has a value it cannot have."""


class AddressError(OSError, ConfigError):
    """An address cannot be bound: another process has it, or it is none of this host."""

    def __str__(self) -> str:
        return str(self.strerror)


class EngineStartupModelError(EngineStartupError, ModelError):
    """The engine process could not use the model."""


class EngineStartupConfigError(EngineStartupError, ConfigError):
    """The engine process could not use a setting."""


def startup_error(death: EngineDeath) -> EngineStartupError:
    """Make the error for an engine process that ended while starting.

    A refused model or setting is the same class of error as in the caller's own process: the cause begins with the
    class of what was raised there.
    """
    kinds = {"ModelError": EngineStartupModelError, "ConfigError": EngineStartupConfigError}
    return kinds.get(death.cause.partition(":")[0], EngineStartupError)(
        f"engine {death.engine_index} could not start: {death.cause}",
        stage="launch",
        engine_index=death.engine_index,
        exit_code=death.exit_code,
        log_tail=death.log_tail,
    )
