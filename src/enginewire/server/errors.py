"""From exceptions to HTTP: the one place that knows which is which status, and what an error's body looks like."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from enginewire.errors import (
    ClientClosedError,
    DuplicateRequestIdError,
    EncodeError,
    EngineClientError,
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelError,
    RequestLostError,
    UtilityCallError,
    UtilityTimeoutError,
)

RETRY_AFTER_S: Final = 1
"""What ``Retry-After`` says. A completion takes seconds, and so does another replica's health check."""

CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a client that left; nobody receives it, logs and metrics have it."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """What is wrong.

    Attributes:
        message: in words.
        type: its kind: whose fault it is.
        param: the request's parameter that it is about.
        code: for programs.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every response that is no success, and of the event that ends a stream early."""

    error: ErrorBody


class HTTPError(Exception):
    """An answer that is no success.

    Attributes:
        status: HTTP status.
        body: of the response.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = ErrorResponse(ErrorBody(message=message, type=_error_type(status), param=param, code=code))


class ClientGoneError(Exception):
    """The client closed the connection: nobody is left to be answered."""


class BodyTooLargeError(Exception):
    """A request's body is over the limit."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the body is larger than this server accepts ({max_bytes} bytes); --max-body-bytes raises it")


class OverloadedError(Exception):
    """The queue is full."""

    def __init__(self, num_in_flight: int) -> None:
        super().__init__(f"{num_in_flight} completions are running or waiting already; try again later")


class UnavailableError(Exception):
    """The server takes no work now.

    Attributes:
        code: why, for programs: ``starting``, ``draining``, ``engine_dead``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class NotReadyError(Exception):
    """New work should go elsewhere."""


class NotFoundError(Exception):
    """There is no such thing; ``param`` and ``code`` say of which kind."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class MethodNotAllowedError(Exception):
    """The path exists, for other methods."""

    def __init__(self, method: str, allowed: list[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"{method} is not allowed here; allowed: {self.allowed}")


class UnsupportedMediaTypeError(Exception):
    """The body is not said to be JSON."""

    def __init__(self, content_type: str) -> None:
        super().__init__(f"the body must be JSON, with Content-Type: application/json; got {content_type!r}")


class UnauthorizedError(Exception):
    """The API key is missing or wrong."""

    def __init__(self) -> None:
        super().__init__("this server wants an API key: send the header Authorization: Bearer KEY")


def http_error(exc: Exception) -> HTTPError:
    """Return what a client is told about an exception. What is nobody's fault but ours is told in general words."""
    match exc:
        case HTTPError():
            return exc
        case msgspec.ValidationError() | msgspec.DecodeError():
            return HTTPError(400, f"the body is not what was expected: {exc}", param=_parameter(str(exc)))
        case InvalidRequestError():
            return HTTPError(400, str(exc), param=exc.parameter)
        case DuplicateRequestIdError():
            return HTTPError(400, str(exc), param="request_id", code="duplicate_request_id")
        case ModelError():
            return HTTPError(400, str(exc), code="unsuitable_model")
        case EncodeError():  # what a request holds goes to the engine: a number of more than 64 bits, say
            return HTTPError(400, f"the engine cannot be told this: {exc}")
        case UnauthorizedError():
            return HTTPError(401, str(exc), code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        case NotFoundError():
            return HTTPError(404, str(exc), param=exc.param, code=exc.code)
        case MethodNotAllowedError():
            return HTTPError(405, str(exc), headers={"Allow": exc.allowed})
        case BodyTooLargeError():
            return HTTPError(413, str(exc), code="body_too_large", headers={"Connection": "close"})
        case UnsupportedMediaTypeError():
            return HTTPError(415, str(exc), code="unsupported_media_type")
        case OverloadedError():
            return _try_later(429, str(exc), "queue_full")
        case NotReadyError():
            return _try_later(503, str(exc), "not_ready")
        case UnavailableError():
            return _try_later(503, str(exc), exc.code)
        case _:
            return _engine_error(exc)


def _engine_error(exc: Exception) -> HTTPError:
    match exc:
        case EngineDeadError():
            # Not the tail of its log: that may hold anything.
            death = exc.death
            return _try_later(503, f"engine {death.engine_index} is dead: {death.cause}", "engine_dead")
        case ClientClosedError():
            return _try_later(503, "the server is shutting down", "shutting_down")
        case EngineUnavailableError():
            return _try_later(503, str(exc), "engine_unavailable")
        case RequestLostError():
            return _try_later(503, str(exc), "engine_lost")
        case EngineGenerateError():
            return HTTPError(500, str(exc), code="generation_failed")
        case UtilityTimeoutError():
            return HTTPError(504, str(exc), code="engine_timeout")
        case UtilityCallError():
            return HTTPError(500, str(exc), code="engine_call_failed")
        case EngineClientError():
            return HTTPError(500, str(exc), code="engine_error")
        case _:
            return HTTPError(500, "internal error; the server's log says more", code="internal_error")


def _try_later(status: int, message: str, code: str) -> HTTPError:
    return HTTPError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


_PATH: Final = re.compile(r"\$\.([A-Za-z_]\w*)")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def _parameter(message: str) -> str | None:
    """Find the parameter's name in msgspec's words: ``Expected `int`, got `str` - at `$.max_tokens` ``."""
    found = _PATH.search(message) or _MISSING.search(message)  # what is missing in an object has that object's path
    return None if found is None else found[1]
