"""Giving names to what is in a payload: positions of arrays become fields, numbers of an enumeration its words.

What is shown is what came, before anything is converted or refused: a payload is decoded without a schema, and the
layout table of its version (:mod:`enginewire.wire.profile`) says only what its parts are called.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError
from enginewire.wire import v0_32
from enginewire.wire.arrays import (
    TENSOR_ITEM_SIZES,
    LogprobsLists,
    SamplingMaskLists,
    ndarray_from_wire,
    tensor_from_wire,
)
from enginewire.wire.extensions import RAW_VIEW

MAX_DEPTH: Final = 40
"""How deep what is shown may nest; a peer chooses how deep it nests, and no sound message comes near."""

_NUMPY_NAME: Final = re.compile(r"[<>|=]?[biufcSUO]\d+")

NAMED_TUPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "new_logprobs": LogprobsLists._fields,
    "new_prompt_logprobs_tensors": v0_32.LogprobsTensors._fields,  # 0.25's are its first four
    "new_sampling_mask": SamplingMaskLists._fields,
}
"""Fields whose arrays the layout tables leave as they come, and what their elements are called."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array on the wire, ``[dtype, shape, data]``.

    Attributes:
        frame: number of the frame that holds its bytes; ``None``: they are in the payload.
        data: the bytes; ``None`` if there are none: ``problem`` says why.
    """

    dtype: str
    shape: tuple[int, ...]
    frame: int | None
    data: bytes | None
    problem: str = ""

    def __str__(self) -> str:
        where = "" if self.frame is None else f" in frame {self.frame}"
        size = "" if self.data is None else f" {len(self.data)} B"
        return f"{self.dtype}{list(self.shape)}{size}{where}{f' ({self.problem})' if self.problem else ''}"

    def values(self) -> object:
        """Return its numbers as nested lists, or what is wrong with it as a text."""
        triple = [self.dtype, list(self.shape), Ext(RAW_VIEW, self.data or b"")]
        try:
            if self.dtype in TENSOR_ITEM_SIZES:
                return tensor_from_wire(triple).numpy().tolist()
            return ndarray_from_wire(triple).tolist()
        except (DecodeError, TypeError, ValueError) as exc:
            return str(exc)


class Namer:
    """Names the parts of one message.

    Args:
        frames: the payload and what follows it, for arrays that have a frame of their own.
        is_full: keep fields that hold their default.
    """

    def __init__(self, frames: Sequence[bytes], *, is_full: bool) -> None:
        self._frames = frames
        self._is_full = is_full

    def name(self, value: Any, expected: Any = Any, depth: int = 0) -> Any:
        """Return ``value`` with names as far as it is what a type says; the rest of it stays what it is."""
        if not isinstance(value, (list, dict, int)):
            return value
        if (array := self._array(value)) is not None:
            return array
        if depth > MAX_DEPTH and isinstance(value, (list, dict)):
            return f"… {type(value).__name__} of {len(value)}"
        depth += 1
        for candidate in _alternatives(expected):
            match value:
                case list() if _is_struct(candidate) and candidate.__struct_config__.array_like:
                    return self._fields(
                        candidate, dict(zip(_positions(candidate, len(value)), value, strict=True)), depth
                    )
                case dict() if _is_struct(candidate) and not candidate.__struct_config__.array_like:
                    return self._fields(candidate, value, depth)
                case list() if typing.get_origin(candidate) is list:
                    (element,) = typing.get_args(candidate)
                    return [self.name(item, element, depth) for item in value]
                case int() if isinstance(candidate, type) and issubclass(candidate, Enum) and type(value) is int:
                    return next((member.name for member in candidate if member.value == value), value)
        match value:
            case list():
                return [self.name(item, Any, depth) for item in value]
            case dict():
                return {key: self.name(item, Any, depth) for key, item in value.items()}
        return value

    def _fields(self, struct: type[msgspec.Struct], values: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        known = _field_infos(struct)
        found = {}
        for key, value in values.items():
            if value is None and not self._is_full:
                continue
            info = known.get(key)
            if key in NAMED_TUPLES and isinstance(value, list):
                named = {
                    name: self.name(item, Any, depth) for name, item in zip(NAMED_TUPLES[key], value, strict=False)
                }
            else:
                named = self.name(value, Any if info is None else info.type, depth)
            if self._is_full or not _is_default(info, value, named):
                found[key] = named
        return found

    def _array(self, value: Any) -> Array | None:
        match value:
            case [str(dtype), [*shape], Ext(code=code) as ext] if code == RAW_VIEW and _is_dtype(dtype):
                return Array(dtype, tuple(shape), None, bytes(ext.data))
            case [str(dtype), [*shape], int(frame)] if _is_dtype(dtype) and type(frame) is int:
                is_there = 0 < frame < len(self._frames)
                data = self._frames[frame] if is_there else None
                return Array(dtype, tuple(shape), frame, data, "" if is_there else "which is missing")
            case [str(dtype), [*shape], {"tensor_id": _} as handle] if _is_dtype(dtype):
                return Array(dtype, tuple(shape), None, None, f"out of band: {handle}")
        return None


def _is_dtype(name: str) -> bool:
    return name in TENSOR_ITEM_SIZES or _NUMPY_NAME.fullmatch(name) is not None


def _is_struct(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, msgspec.Struct)


def _is_default(info: msgspec.structs.FieldInfo | None, value: Any, named: Any) -> bool:
    """Whether a field need not be shown: it holds its default, which is not nil."""
    if info is None:
        return False
    if info.default is not msgspec.NODEFAULT:
        is_same = bool(value == info.default) and isinstance(value, bool) is isinstance(info.default, bool)
        return is_same and not (isinstance(value, float) and math.isnan(value))
    if info.default_factory is dict and isinstance(value, dict):
        return not any(value.values())  # counters that are zero
    return (info.default_factory in (list, set) and not value) or (value != {} and named == {})


@functools.cache
def _alternatives(expected: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(expected) in (typing.Union, types.UnionType)
    return typing.get_args(expected) if is_union else (expected,)


@functools.cache
def _field_infos(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    is_map = not struct.__struct_config__.array_like
    return {info.encode_name if is_map else info.name: info for info in msgspec.structs.fields(struct)}


@functools.cache
def _positions(struct: type[msgspec.Struct], length: int) -> tuple[str, ...]:
    """Return what the elements of an array of ``length`` are called; those past the known ones by their number."""
    names = struct.__struct_fields__[:length]
    return (*names, *(f"#{position}" for position in range(len(names), length)))
