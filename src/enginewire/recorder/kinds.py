"""What kind of message it is: told from its direction and its frames, without decoding more than that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, decode_schemaless
from enginewire.wire.frames import REQUEST_TYPES, is_death_marker, may_hold_utility_output

TYPES: Final = (
    "HELLO", "INIT", "READY", "HANDSHAKE", "READY_RESPONSE", "ADD", "ABORT", "UTILITY", "OUTPUTS", "UTILITY_OUTPUT",
    "ENGINE_CORE_DEAD", "SUBSCRIBE", "UNSUBSCRIBE", "COORDINATOR_READY", "START_DP_WAVE", "REPORT", "STATS",
    "FIRST_REQ", "SCALE_ELASTIC_EP", "VALUE", "UNKNOWN",
)  # fmt: skip
"""Every kind of message. HANDSHAKE and UNKNOWN: nothing could be made of it."""

COORDINATOR_READY: Final = b"READY"
SUBSCRIPTIONS: Final = {b"\x00": "UNSUBSCRIBE", b"\x01": "SUBSCRIBE"}

RAW_TYPES: Final = frozenset({"ENGINE_CORE_DEAD", "COORDINATOR_READY", *SUBSCRIPTIONS.values()})
"""Their payload is not msgpack."""


def type_of(entry: Entry) -> str:
    """Find out which of :data:`TYPES` a message is, from its direction and its frames."""
    sender, receiver, socket = entry.parties
    payload = payload_of(entry)
    if not payload:
        return "UNKNOWN"
    if socket.endswith(" payload"):  # an encoder's, not from a socket
        return socket.removesuffix(" payload")
    if "handshake" in socket:
        return "INIT" if receiver == "engine" else _status(payload[0])
    if receiver == "engine":
        return _type_for_engine(entry, payload, is_coordinator=sender == "coordinator")
    if receiver == "coordinator":
        return _type_for_coordinator(payload, is_engine=sender == "engine")
    if sender == "coordinator":
        return "STATS"
    if sender == "engine":
        if is_death_marker(payload):
            return "ENGINE_CORE_DEAD"
        if "input" in socket:
            return "READY_RESPONSE"
        return "UTILITY_OUTPUT" if _is_utility_answer(payload[0]) else "OUTPUTS"
    return "VALUE" if not sender else "FIRST_REQ"  # inside a frontend, from its client to its link


def payload_of(entry: Entry) -> Sequence[bytes]:
    """Return the payload and the frames of arrays after it; empty if the message ends before."""
    first = entry.payload_frame or 0
    if entry.frames[first : first + 1] == [b"\x02"] and "coordinator->engine" in entry.direction:
        first += 1  # START_DP_WAVE's own type, where the payload is said to begin with it
    return entry.frames[first:]


def engine_of_group(group: str) -> str:
    """Return the part of a group that is the engine's, whichever frontend it talks to."""
    return group.partition(".frontend")[0]


def _status(payload: bytes) -> str:
    try:
        value = decode_schemaless(payload)
    except DecodeError:
        return "HANDSHAKE"
    status = value.get("status") if isinstance(value, dict) else None
    return status if status in ("HELLO", "READY") else "HANDSHAKE"


def _type_for_engine(entry: Entry, payload: Sequence[bytes], *, is_coordinator: bool) -> str:
    if is_coordinator:
        return "COORDINATOR_READY" if payload[0] == COORDINATOR_READY else "START_DP_WAVE"
    position = len(entry.frames) - len(payload) - 1
    return REQUEST_TYPES.get(entry.frames[position], "UNKNOWN") if position >= 0 else "UNKNOWN"


def _type_for_coordinator(payload: Sequence[bytes], *, is_engine: bool) -> str:
    if (subscription := SUBSCRIPTIONS.get(bytes(payload[0]))) is not None:
        return subscription
    if is_engine:
        return "REPORT"
    return "SCALE_ELASTIC_EP" if b"SCALE_ELASTIC_EP" in payload[0] else "FIRST_REQ"


def _is_utility_answer(payload: bytes) -> bool:
    if not may_hold_utility_output(payload):
        return False
    try:
        value = decode_schemaless(payload)
    except DecodeError:
        return False
    return isinstance(value, list) and len(value) > 4 and value[4] is not None
