"""Reads the golden vectors: recorded frames with the value that a decoder without a schema sees in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from enginewire.wire.frames import START_DP_WAVE, Buffer
from enginewire.wire.profile import PROFILES, WireProfile

VERSIONS = {profile.vllm_version: profile for profile in PROFILES}
OLD, NEW = VERSIONS

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Vector:
    """One entry of a file.

    Attributes:
        frames: payload first, then auxiliary frames; what stands before the payload on the socket is in ``head``.
        value: the payload without a schema, see :func:`schemaless`.
        error: the reference refused to encode this.
        group: which conversation it belongs to, e.g. ``engine rank 1``.
        time: seconds since the recording began.
    """

    file: str
    version: str
    name: str
    direction: str
    head: list[bytes]
    frames: list[bytes]
    value: Any
    error: str | None
    group: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        return f"{self.file}-{self.version}/{self.name}"

    @property
    def profile(self) -> WireProfile:
        """The layout of the version that made it."""
        return VERSIONS[self.version]


def load(*files: str, versions: Iterable[str] = VERSIONS) -> list[Vector]:
    """Read vector files by their names without version."""
    paths = [(name, DATA / f"{name}-{version}.json") for name in files for version in versions]
    return [_vector(name, entry) for name, path in paths for entry in json.loads(path.read_text())]


def by_name(file: str, version: str = OLD) -> dict[str, Vector]:
    """Read one file whose names are unique."""
    return {vector.name: vector for vector in load(file, versions=[version])}


def _vector(file: str, entry: dict[str, Any]) -> Vector:
    frames = [bytes.fromhex(frame) for frame in entry["frames"]]
    first = entry.get("payload_frame") or 0
    if frames[:1] == [START_DP_WAVE] and len(frames) == 2:
        first = 1  # frontend-dp2 says 0
    return Vector(
        file,
        entry["version"],
        entry["name"],
        entry["direction"],
        frames[:first],
        frames[first:],
        entry["value"],
        entry.get("error"),
        entry.get("group") or "",
        entry.get("t") or 0.0,
    )


def same_bytes(frames: Sequence[Buffer], vector: Vector) -> bool:
    """Whether frames are the vector's. 0.32 writes the keys of its maps in another order, which means nothing."""
    payload, *aux = map(bytes, frames)
    if vector.version == OLD or payload == vector.frames[0]:
        return [payload, *aux] == vector.frames
    text, expected = (json.dumps(schemaless(one), sort_keys=True) for one in (payload, vector.frames[0]))
    return text == expected and len(payload) == len(vector.frames[0]) and aux == vector.frames[1:]


def schemaless(payload: bytes) -> Any:
    """Decode a payload without a schema into the JSON form of the vectors."""
    return as_json(msgspec.msgpack.decode(payload, strict=True))


def as_json(value: Any) -> Any:
    """Put a decoded value into the JSON form of the vectors."""
    match value:
        case bytes():
            return {"$bin": value.hex()}
        case Ext():
            return {"$ext": value.code, "hex": bytes(value.data).hex()}
        case list():
            return [as_json(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: as_json(item) for key, item in value.items()}
        case dict():
            return {"$map": [[as_json(key), as_json(item)] for key, item in value.items()]}
    return value
