"""Log lines in logfmt, each with the id of the request it is about."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

from enginewire.server.http import Request

access_logger = logging.getLogger("enginewire.access")

current_request_id: Final[ContextVar[str | None]] = ContextVar("enginewire_request_id", default=None)
"""Set while a request is served, so that whatever is logged then, also by the frontend, carries it."""

_BARE: Final = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def set_up_logging(level: int | str, fields: Mapping[str, object] | None = None) -> None:
    """Have everything logged in logfmt on stderr, with these fields in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # we say ourselves when we start and stop


def log_access(request: Request, status: int | None, seconds: float, *, is_quiet: bool) -> None:
    """Write a request's line. ``status`` is ``None`` if the connection was lost before there was one."""
    level = logging.DEBUG if is_quiet else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields = {
        "client": request.client,
        "method": request.method,
        "path": request.path,
        "status": "-" if status is None else status,
        "duration_s": f"{seconds:.4f}",
        **request.notes,
    }
    access_logger.log(level, "%s", " ".join(f"{name}={quoted(value)}" for name, value in fields.items()))


def quoted(value: object) -> str:
    """Write a value so that it is one logfmt field, whatever a client has put into it."""
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


class LogfmtFormatter(logging.Formatter):
    """``ts=… level=… logger=… request_id=…`` and the message: in quotes, or as it is when it is fields already.

    Args:
        fields: further ones that every line has.
    """

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fields = fields or {}

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._fields,
        }
        if (request_id := current_request_id.get()) is not None:
            fields["request_id"] = request_id
        line = " ".join(f"{name}={quoted(value)}" for name, value in fields.items())
        message = record.getMessage()
        line += f" {message}" if record.name == access_logger.name else f" msg={json.dumps(message)}"
        if record.exc_info:
            line += f" exception={json.dumps(self.formatException(record.exc_info))}"
        return line
