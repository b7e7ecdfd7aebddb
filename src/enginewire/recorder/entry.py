"""``Entry``: one message as it was on a socket, in the JSON form of the golden vectors.

A file is one array of objects with the keys ``name``, ``version``, ``direction``, ``frames`` (hex), ``payload_frame``,
``value``, and possibly ``t``, ``group``, ``note`` and ``error``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError
from enginewire.wire.codec import NOT_DECODABLE

_DIRECTION: Final = re.compile(r"(.+?)->(.+?)(?: \((.*)\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message.

    Attributes:
        direction: ``sender->receiver (socket)``, as in ``engine->frontend (output socket)``.
        frames: all of them, an identity and a type where the socket shows them.
        payload_frame: which of them is the payload; ``None``: none is msgpack.
        version: of the vLLM that made it; ``None``: not known yet.
        t: seconds since recording began.
        group: whose conversation it belongs to: ``engine0``, ``engine0.frontend1``; ``engine0-2`` once the engine has
            been restarted.
        note: a remark.
        error: why the frames are missing.
    """

    direction: str
    frames: Sequence[bytes]
    payload_frame: int | None = 0
    name: str = ""
    version: str | None = None
    t: float | None = None
    group: str = ""
    note: str = ""
    error: str = ""

    @property
    def parties(self) -> tuple[str, str, str]:
        """Sender, receiver and what stands behind them in parentheses; empty texts if it says something else."""
        found = _DIRECTION.fullmatch(self.direction)
        return (found[1], found[2], found[3] or "") if found else ("", "", "")


def to_json(entry: Entry, value: object) -> dict[str, Any]:
    """Put an entry and its payload, decoded without a schema, into the form of a file's objects."""
    found: dict[str, Any] = {"name": entry.name, "direction": entry.direction}
    optional = {"t": entry.t, "group": entry.group, "note": entry.note}
    found |= {key: it for key, it in optional.items() if it not in (None, "")}
    frames = [frame.hex() for frame in entry.frames]
    return found | {"frames": frames, "payload_frame": entry.payload_frame, "value": value}


def read_file(path: Path) -> tuple[list[Entry], str]:
    """Read a file's entries, and say what of it could not be read (empty: all could).

    A file whose recorder was killed in the middle of a line lacks that line only.

    Raises:
        DecodeError: this is no such file.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    problem = ""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as exc:
        found, damaged = _whole_lines(text)
        problem = f"{path} is damaged ({exc}); {damaged} lines are left out"
    if not isinstance(found, list) or not (found or not problem):
        raise DecodeError(f"{path} is no file of recorded messages: expected a JSON array of objects with frames")
    return [_entry(path, position, it) for position, it in enumerate(found)], problem


def _whole_lines(text: str) -> tuple[list[Any], int]:
    found, damaged = [], 0
    for line in text.splitlines():
        line = line.strip().removesuffix(",")
        if line in ("", "[", "]"):
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            damaged += 1
    return found, damaged


def _entry(path: Path, position: int, found: Any) -> Entry:
    try:
        return Entry(
            direction=found["direction"],
            frames=[bytes.fromhex(frame) for frame in found["frames"]],
            payload_frame=found.get("payload_frame"),
            **{
                key: found[key]
                for key in ("name", "version", "t", "group", "note", "error")
                if found.get(key) is not None
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise DecodeError(f"{path}: entry {position} is no recorded message: {exc!r}") from exc


def decode_schemaless(payload: bytes) -> Any:
    """Decode a payload without a schema; extensions stay :class:`Ext`. Raises :class:`DecodeError`."""
    try:
        return msgspec.msgpack.decode(payload, strict=True)
    except (*NOT_DECODABLE, ValueError, TypeError) as exc:  # a map's key may be unhashable
        raise DecodeError(f"not msgpack: {exc}") from exc


def as_json(value: Any) -> Any:
    """Put a decoded value into JSON: bytes, extensions and maps with other keys than texts have a form of their own."""
    match value:
        case bytes():
            return {"$bin": value.hex()}
        case Ext():
            return {"$ext": value.code, "hex": bytes(value.data).hex()}
        case list() | tuple():
            return [as_json(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: as_json(item) for key, item in value.items()}
        case dict():
            return {"$map": [[as_json(key), as_json(item)] for key, item in value.items()]}
    return value
