"""``Journal``: writes entries to a file that is a whole JSON array after every one of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, as_json, decode_schemaless, to_json
from enginewire.recorder.kinds import RAW_TYPES, SUBSCRIPTIONS, engine_of_group, payload_of

_OPEN: Final = b"[\n"
_CLOSE: Final = b"\n]\n"
_NEXT: Final = b",\n"

_VERSION_ROOM: Final = 32
"""Bytes kept for an engine's version, which is known only once it is ready; its HELLO and INIT come before."""


class Journal:
    """A file of recorded messages.

    The array is closed behind every entry and opened again for the next one by the same write, so a recorder that is
    killed loses at most the message it was writing.

    Raises:
        OSError: the file cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)  # prompts are private
        self._end = os.pwrite(self._file, _OPEN + _CLOSE, 0) - len(_CLOSE)
        self._is_empty = True
        self._without_version: dict[str, list[int]] = {}
        """Per engine, where its entries lack a version."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def write(self, entry: Entry, type_: str) -> None:
        """Append an entry; complete those of its engine that came before its version was known."""
        engine = engine_of_group(entry.group)
        found = to_json(entry, value_of(entry, type_))
        text = json.dumps(found, ensure_ascii=False, separators=(", ", ": ")).encode("utf-8", "replace")
        head = b'{"version": '
        line = head + _version_text(entry.version) + b", " + text.removeprefix(b"{")
        start = self._end + (0 if self._is_empty else len(_NEXT))
        os.pwrite(self._file, (b"" if self._is_empty else _NEXT) + line + _CLOSE, self._end)
        self._end = start + len(line)
        self._is_empty = False
        if entry.version is None:
            self._without_version.setdefault(engine, []).append(start + len(head))
        else:
            for position in self._without_version.pop(engine, ()):
                os.pwrite(self._file, _version_text(entry.version), position)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def value_of(entry: Entry, type_: str) -> object:
    """Return what the file says of a payload: decoded without a schema, or a raw frame's text or bytes.

    ``None`` if it is neither, which the frames tell as well.
    """
    payload = payload_of(entry)
    if not payload:
        return None
    if type_ in RAW_TYPES:
        return {"$bin": payload[0].hex()} if type_ in SUBSCRIPTIONS.values() else payload[0].decode()
    try:
        return as_json(decode_schemaless(payload[0]))
    except (DecodeError, RecursionError):  # not msgpack, or nested too deep for JSON
        return None


def _version_text(version: str | None) -> bytes:
    return json.dumps(version).encode()[:_VERSION_ROOM].ljust(_VERSION_ROOM)
