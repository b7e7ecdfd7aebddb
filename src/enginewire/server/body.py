"""Reading JSON bodies."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import msgspec

from enginewire.errors import InvalidRequestError
from enginewire.server.http import Request

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

IGNORED = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "verbosity", "prediction", "prompt_cache_retention",
    }
)  # fmt: skip
"""OpenAI's fields that change nothing about the text. Everything else unknown is worth a warning."""

MAX_REPORTED = 1000
"""After so many different unknown fields no more are reported: their names are the clients' choice."""

_reported: set[tuple[str, str]] = set()


def decode_body(kind: type[T], request: Request) -> T:
    """Decode a request's body, strictly typed. Unknown fields are ignored, as OpenAI-compatible servers do, and logged.

    Raises:
        msgspec.ValidationError: a value is not of its type; the message names the field.
        msgspec.DecodeError: the body is no JSON.
        InvalidRequestError: it is nested too deeply.
    """
    try:
        with _no_collections():
            value: T = _decoder(kind).decode(request.body)
            given = _keys_decoder.decode(request.body)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    names = _field_names(kind)
    for name in given:
        if name not in names and (kind.__name__, name) not in _reported and len(_reported) < MAX_REPORTED:
            _reported.add((kind.__name__, name))
            logger.warning("ignoring the unknown field %r of a %s, now and later", name, kind.__name__)
    return value


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector out. Decoding makes no garbage, and every collection walks all that it has made.

    A body of eight million lists takes 0.8 s so, 5.5 s otherwise, and everybody else waits for that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_keys_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


@cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return IGNORED | {field.encode_name for field in msgspec.structs.fields(kind)}
