"""Multipart layouts: identities, the request-type byte, the death marker, and what can be told from a glance.

Source: protocol sections A.2, C.1 and C.2.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Final

Buffer = bytes | bytearray | memoryview
"""One frame, without a copy."""

ADD: Final = b"\x00"
ABORT: Final = b"\x01"
START_DP_WAVE: Final = b"\x02"
UTILITY: Final = b"\x03"

REQUEST_TYPES: Final = {ADD: "ADD", ABORT: "ABORT", START_DP_WAVE: "START_DP_WAVE", UTILITY: "UTILITY"}
"""What a peer may send. 04 and 05 exist inside the reference only and are refused on a socket."""

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"

SUBSCRIBE_ALL: Final = b"\x01"
"""Asks a coordinator for everything it publishes."""

ALL_ENGINES_LISTEN: Final = b"READY"
"""A coordinator's word to engines that every one of them has subscribed; one raw frame."""


def engine_identity(engine_index: int) -> bytes:
    """Return the ZeroMQ identity of an engine: its rank as two bytes, little endian."""
    return engine_index.to_bytes(2, "little")


def engine_index_of(identity: bytes) -> int | None:
    """Return the rank that an identity stands for, ``None`` if it is not an engine's."""
    return int.from_bytes(identity, "little") if len(identity) == 2 else None


def describe_identity(identity: bytes) -> str:
    """Return the rank that an identity stands for in words, or the identity if it is not an engine's."""
    index = engine_index_of(identity)
    return f"identity {reprlib.repr(identity)}" if index is None else f"rank {index}"


def is_death_marker(frames: Sequence[Buffer]) -> bool:
    """Whether a message is an engine's last word: exactly one frame of exactly these 16 bytes."""
    return len(frames) == 1 and len(frames[0]) == len(ENGINE_CORE_DEAD) and bytes(frames[0]) == ENGINE_CORE_DEAD


_INT_WIDTHS: Final = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Bytes that a msgpack integer takes, by its first; one if it is not among these."""


def may_hold_utility_output(payload: Buffer) -> bool:
    """Whether an EngineCoreOutputs payload has an empty ``outputs`` list, as every utility answer has.

    A receiver decodes such a message at once and may leave the others to the consumer, so that no caller of a
    utility waits for a slow reader of outputs. Looks only at the array header, ``engine_index``, which takes one
    byte or more, and the byte after it: ``90`` is the empty list.
    """
    size = len(payload)
    if size < 3:
        return False
    if payload[0] & 0xF0 == 0x90 and payload[1] < 0x80:  # nearly always
        return payload[2] == 0x90
    position = {0xDC: 3, 0xDD: 5}.get(payload[0], 1)
    if position < size:
        position += _INT_WIDTHS.get(payload[position], 1)
    return position < size and payload[position] == 0x90


def heads_of_outputs(engine_index: int) -> frozenset[bytes]:
    """Return how nearly all messages of an engine begin that have outputs: their first three bytes.

    Those are the header of an array of 8 or 9, ``engine_index`` as one byte, and the header of a list that is not
    empty. What begins so is no utility answer and no death marker; what does not may still have outputs.
    """
    return _heads(engine_index, (*range(0x91, 0xA0), 0xDC, 0xDD))


def heads_of_answers(engine_index: int) -> frozenset[bytes]:
    """Return how nearly all utility answers of an engine begin: like outputs, but with the header of an empty list."""
    return _heads(engine_index, (0x90,))


def _heads(engine_index: int, list_headers: Sequence[int]) -> frozenset[bytes]:
    if engine_index > 0x7F:  # that takes more than a byte
        return frozenset()
    return frozenset(bytes((array, engine_index, first)) for array in (0x98, 0x99) for first in list_headers)


def sender_of(payload: Buffer) -> int | None:
    """Return the ``engine_index`` of an EngineCoreOutputs payload without decoding it; ``None`` if it is none.

    Engines that share a socket may speak different layouts, and this comes before either.
    """
    position = {0xDC: 3, 0xDD: 5}.get(payload[0], 1) if len(payload) else 1
    if position >= len(payload):
        return None
    first = payload[position]
    width = _INT_WIDTHS.get(first, 1) - 1
    if first in range(0xD0, 0xD4) or (width == 0 and first > 0x7F):
        return None  # negative, or no integer at all
    digits = payload[position + 1 : position + 1 + width]
    return int.from_bytes(digits, "big") if width else first
