"""``Reader``: from frames to a message with names. Pure: no socket, clock or file.

It remembers what one message has to be understood by: which version an engine speaks, and which method a call named.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, decode_schemaless
from enginewire.recorder.kinds import COORDINATOR_READY, SUBSCRIPTIONS, engine_of_group, payload_of, type_of
from enginewire.recorder.naming import Namer
from enginewire.wire.codec import (
    NOT_DECODABLE,
    MsgpackDecoder,
    OutputsDecoder,
    RequestDecoder,
    UtilityCallDecoder,
    array_length,
)
from enginewire.wire.frames import ENGINE_CORE_DEAD, engine_index_of
from enginewire.wire.handshake import EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import UtilityCall
from enginewire.wire.profile import PROFILES, V0_25, V0_32, WireProfile, decode_ready

MAX_OPEN_CALLS: Final = 10_000
"""Calls whose answers are awaited; older ones are forgotten, and their answers shown without the method's name."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message with names.

    Attributes:
        type: one of :data:`~enginewire.recorder.kinds.TYPES`.
        content: what it says: a map of its fields by name, where there is a layout for it.
        request_ids: the requests it is about.
        call: of a utility call or its answer: the method, if known.
        problem: why the other end refuses it or nothing can be made of it; empty: nothing is wrong with it.
    """

    entry: Entry
    type: str
    engine_index: int | None
    client_index: int | None
    content: Any
    request_ids: tuple[str, ...] = ()
    call: str = ""
    problem: str = ""


class Versions:
    """Which version each conversation is in, by what was seen of it."""

    def __init__(self) -> None:
        self._stated: dict[str, str] = {}

    def of(self, entry: Entry, type_: str) -> str | None:
        """Take note of a message of a group; return its version, ``None`` as long as that is not known."""
        engine, payload = engine_of_group(entry.group), payload_of(entry)
        if type_ == "READY_RESPONSE":
            self._stated.pop(engine, None)
            try:
                profile, response = decode_ready(payload)
            except DecodeError:
                return None
            is_of_profile = profile_of_version(response.vllm_version) is profile
            self._stated[engine] = response.vllm_version if is_of_profile else profile.vllm_version
        elif type_ == "ADD":  # an engine that can speak both follows the first request
            spoken = _profile_of_full_request(payload[0])
            if spoken is not None and spoken is not profile_of_version(self._stated.get(engine)):
                self._stated[engine] = spoken.vllm_version
        return self._stated.get(engine)


class Reader:
    """Makes readable messages of entries, in the order in which they were sent.

    Args:
        is_full: leave nothing out, such as fields that hold their default.
    """

    def __init__(self, *, is_full: bool = False) -> None:
        self._is_full = is_full
        self._versions = Versions()
        self._calls: OrderedDict[tuple[str, int], str] = OrderedDict()

    def read(self, entry: Entry) -> Message:
        """Read one entry. Never raises: what is wrong with it is in the message."""
        type_ = type_of(entry)
        seen = self._versions.of(entry, type_)
        profile = profile_of_version(entry.version or seen)
        payload = payload_of(entry)
        value, problem = _value(type_, payload) if entry.frames else (None, entry.error or "no frames")
        expected = _LAYOUTS.get(type_)
        content = Namer(payload, is_full=self._is_full).name(value, expected(profile) if expected else Any)
        return Message(
            entry,
            type_,
            engine_index=_engine_index(entry, value),
            client_index=_client_index(entry, type_, value),
            content=content,
            request_ids=tuple(_request_ids(type_, value)),
            call=self._call(entry, type_, value),
            problem=problem or _unknown_type(entry, type_, payload) or _refusal(type_, payload, profile),
        )

    def _call(self, entry: Entry, type_: str, value: Any) -> str:
        """Return the method that a utility message is about."""
        engine = engine_of_group(entry.group)
        match type_, value:
            case "UTILITY", [_, int(call_id), str(method), *_]:
                self._calls[engine, call_id] = method
                if len(self._calls) > MAX_OPEN_CALLS:
                    self._calls.popitem(last=False)
                return method
            case "UTILITY_OUTPUT", [_, _, _, _, [int(call_id), *_], *_]:
                return self._calls.pop((engine, call_id), "")
        return ""


def profile_of_version(version: str | None) -> WireProfile:
    """Return the layout of a version; 0.25's where none is known, as start-up is the same in both."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version or "")
    return V0_32 if numbers and (int(numbers[1]), int(numbers[2])) >= V0_32.release else V0_25


def _profile_of_full_request(payload: bytes) -> WireProfile | None:
    """Return the layout of a request that was written in full, as vLLM's frontends and ours do."""
    length = array_length(payload)
    return next((profile for profile in PROFILES if len(profile.request.__struct_fields__) == length), None)


def _unknown_type(entry: Entry, type_: str, payload: Sequence[bytes]) -> str:
    if type_ != "UNKNOWN" or len(entry.frames) <= len(payload):
        return ""
    type_frame = entry.frames[len(entry.frames) - len(payload) - 1]
    return f"request type {type_frame[:8].hex() or 'empty'} is not known; a sound engine ignores the message"


def _value(type_: str, payload: Sequence[bytes]) -> tuple[Any, str]:
    """Decode a payload without a schema; say what prevents it."""
    if not payload:
        return None, "the message ends before its payload"
    if type_ in ("ENGINE_CORE_DEAD", "COORDINATOR_READY"):
        return (ENGINE_CORE_DEAD if type_ == "ENGINE_CORE_DEAD" else COORDINATOR_READY).decode(), ""
    if type_ in SUBSCRIPTIONS.values():
        return payload[0], ""
    try:
        return decode_schemaless(payload[0]), ""
    except DecodeError as exc:
        return None, str(exc)


_LAYOUTS: Final[dict[str, Callable[[WireProfile], Any]]] = {
    "HELLO": lambda _: HandshakeMessage,
    "READY": lambda _: HandshakeMessage,
    "INIT": lambda _: EngineHandshakeMetadata,
    "READY_RESPONSE": lambda profile: profile.ready,
    "ADD": lambda profile: profile.request,
    "UTILITY": lambda _: UtilityCall,
    "OUTPUTS": lambda profile: profile.outputs,
    "UTILITY_OUTPUT": lambda profile: profile.outputs,
    "REPORT": lambda profile: profile.outputs,
}


@functools.cache
def _check_for(type_: str, profile: WireProfile) -> Callable[[Sequence[bytes]], object] | None:
    """Return what our own end decodes messages of a type with; ``None``: it has nothing for them."""
    match type_:
        case "READY_RESPONSE":
            return lambda payload: decode_ready(payload) if payload[0] else None
        case "ADD":
            return RequestDecoder(profile.request).decode
        case "ABORT":
            return MsgpackDecoder(list[str]).decode
        case "UTILITY":
            return UtilityCallDecoder().decode
        case "OUTPUTS" | "UTILITY_OUTPUT" | "REPORT":
            decoder = OutputsDecoder(profile.received_outputs)
            return lambda payload: decoder.decode_sound(payload[0])
        case "HELLO" | "READY" | "INIT":
            return MsgpackDecoder(_LAYOUTS[type_](profile)).decode
    return None


def _refusal(type_: str, payload: Sequence[bytes], profile: WireProfile) -> str:
    """Say why our own end would not take a message; empty: it would."""
    check = _check_for(type_, profile)
    if check is None or not payload:
        return ""
    try:
        check(payload)
    except (*NOT_DECODABLE, DecodeError) as exc:
        return str(exc)
    return ""


def _engine_index(entry: Entry, value: Any) -> int | None:
    """Return the engine that a message is from or for: by its identity, its group, or its own word."""
    sender, receiver, socket = entry.parties
    if "engine" not in (sender, receiver) and "engine" not in sender + receiver:
        return None
    if "socket" in socket or "handshake" in socket:
        head = entry.frames[: entry.payload_frame or 0]
        for frame in head[:1]:
            if (index := engine_index_of(frame)) is not None:
                return index
    if (found := re.match(r"engine(?: rank )?(\d+)", entry.group)) is not None:
        return int(found[1])
    match value:
        case [int(index), list(), *_] if sender == "engine":
            return index
    return None


def _client_index(entry: Entry, type_: str, value: Any) -> int | None:
    """Return the frontend that a message is from or for."""
    if (found := re.search(r"\.frontend(\d+)", entry.group)) is not None:
        return int(found[1])
    match type_, value:
        case "ADD", [*fields] if len(fields) > 11 and isinstance(fields[11], int):
            return fields[11]
        case "UTILITY", [int(index), *_]:
            return index
    return None


def _request_ids(type_: str, value: Any) -> list[str]:
    match type_, value:
        case "ADD", [str(request_id), *_]:
            return [request_id]
        case "ABORT", list() as ids:
            return [it for it in ids if isinstance(it, str)]
        case (("OUTPUTS" | "UTILITY_OUTPUT" | "REPORT"), [_, list() as outputs, *rest]):
            ids = [output[0] for output in outputs if isinstance(output, list) and output]
            finished = rest[3] if len(rest) > 3 and isinstance(rest[3], list) else []
            return list(dict.fromkeys(it for it in (*ids, *finished) if isinstance(it, str)))
    return []
