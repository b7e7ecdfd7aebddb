"""Frames become readable messages: golden vectors of both versions, and whatever else may come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire.recorder.entry import Entry, read_file
from enginewire.recorder.journal import value_of
from enginewire.recorder.kinds import TYPES, type_of
from enginewire.recorder.printing import Printer
from enginewire.recorder.reading import Message, Reader
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from enginewire.wire.profile import V0_25, V0_32, WireProfile
from enginewire.wire.sampling import SamplingParams

DATA = Path(__file__).parents[1] / "vectors" / "data"

FILES = sorted(DATA.glob("*.json"))

TO_ENGINE = "frontend->engine (input socket)"
FROM_ENGINE = "engine->frontend (output socket)"
DIRECTIONS = (
    TO_ENGINE,
    FROM_ENGINE,
    "engine->frontend (input socket)",
    "engine->frontend (handshake)",
    "frontend->engine (handshake)",
    "engine->coordinator (PUSH)",
    "engine->coordinator (XSUB)",
    "coordinator->engine (XPUB)",
    "coordinator->frontend (XPUB)",
    "frontend->coordinator (XSUB)",
    "nobody knows",
)


def to_engine(type_: bytes, message: object, **fields: Any) -> Entry:
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
    return Entry(direction=TO_ENGINE, frames=[b"\1\0", type_, *frames], payload_frame=2, **fields)


def from_engine(message: object, **fields: Any) -> Entry:
    return Entry(direction=FROM_ENGINE, frames=[bytes(it) for it in MsgpackEncoder().encode(message)], **fields)


def read(*entries: Entry, is_full: bool = False) -> Message:
    """Read entries with one reader; return the last message."""
    reader = Reader(is_full=is_full)
    return [reader.read(entry) for entry in entries][-1]


def text(*entries: Entry, is_full: bool = False) -> str:
    return Printer(is_full=is_full).text(read(*entries, is_full=is_full))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_golden_vector_is_shown(path: Path, is_full: bool) -> None:
    reader, printer = Reader(is_full=is_full), Printer(is_full=is_full)
    entries, problem = read_file(path)
    assert entries
    assert not problem
    for entry in entries:
        message = reader.read(entry)
        assert message.type in TYPES
        assert "None" not in printer.text(message)
        assert json.loads(printer.json(message))["name"] == entry.name
        if entry.frames and message.problem:
            assert any(word in entry.name for word in ("bad-temp", "abort-int", "util-arity", "unknown_type")), entry


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_file_would_say_of_a_golden_vector_is_what_it_says(path: Path) -> None:
    recorded = {position: it["value"] for position, it in enumerate(json.loads(path.read_text()))}
    entries, _ = read_file(path)
    for position, entry in enumerate(entries):
        if entry.payload_frame is not None and entry.frames:
            said = recorded[position]
            said = "READY" if said == "b'READY'" else said  # as one capture has it
            assert value_of(entry, type_of(entry)) == said, entry.name


@pytest.mark.parametrize("profile", [V0_25, V0_32], ids=str)
def test_fields_have_the_names_of_the_engines_version(profile: WireProfile) -> None:
    output = EngineCoreOutput("r1", [5], trace_headers={"a": "b"}, finish_reason=FinishReason.LENGTH)
    message = profile.outputs_of(EngineCoreOutputs(outputs=[output], timestamp=1.0))
    (shown,) = read(from_engine(message, version=profile.vllm_version)).content["outputs"]
    expected = {"request_id": "r1", "new_token_ids": [5], "finish_reason": "LENGTH", "trace_headers": {"a": "b"}}
    assert shown == expected


def test_the_version_is_that_of_the_engines_ready_response() -> None:
    ready = next(entry for entry in read_file(DATA / "live-0.32.0.json")[0] if type_of(entry) == "READY_RESPONSE")
    unknown = Entry(
        direction=ready.direction, frames=ready.frames, payload_frame=ready.payload_frame, group="engine0.frontend0"
    )
    output = EngineCoreOutput("r1", [5], trace_headers={"a": "b"})
    outputs = from_engine(V0_32.outputs_of(EngineCoreOutputs(outputs=[output])), group="engine0.frontend0")
    assert read(unknown, outputs).content["outputs"][0]["trace_headers"] == {"a": "b"}
    assert not read(unknown, outputs).problem
    assert read(outputs).problem, "0.25's layout, if nothing was seen before"


def test_a_full_request_tells_the_version_of_an_engine_that_speaks_both() -> None:
    request = EngineCoreRequest("r1", [1], sampling_params=SamplingParams(max_tokens=1))
    output = V0_32.outputs_of(EngineCoreOutputs(outputs=[EngineCoreOutput("r1", [5])]))
    entries = to_engine(b"\0", V0_32.request_of(request), group="engine0"), from_engine(output, group="engine0")
    assert not read(*entries).problem
    assert read(*entries[1:]).problem


def test_an_answer_is_shown_with_the_method_that_was_called() -> None:
    call = to_engine(b"\3", [0, 77, "is_sleeping", []], group="engine1.frontend0")
    answer = from_engine([1, [], None, 1.0, [77, None, [None, True]]], group="engine1.frontend0")
    assert "frontend 0 → engine 1" in text(call)
    assert "UTILITY is_sleeping() call=77" in text(call)
    assert "UTILITY_OUTPUT is_sleeping = true call=77" in text(call, answer)
    assert "(call not seen) = true" in text(answer)
    failure = from_engine([1, [], None, 1.0, [77, "no", None]], group="engine1.frontend0")
    assert "is_sleeping failed: no" in text(call, failure)


def test_long_lists_are_shortened_and_shown_in_full_when_asked_for() -> None:
    request = to_engine(b"\0", EngineCoreRequest("r1", list(range(1000)), sampling_params=SamplingParams(max_tokens=1)))
    assert "prompt_token_ids: [0, 1, 2, 3, 4, 5, 6, 7, … 992 more]" in text(request)
    assert "998, 999]" in text(request, is_full=True)
    assert "resumable" not in text(request)
    assert "resumable: false" in text(request, is_full=True)


def test_arrays_are_shown_by_type_and_shape_and_with_their_values_when_asked_for() -> None:
    (entry,) = [it for it in read_file(DATA / "outputs-0.25.1.json")[0] if it.name == "logprobs_aux"]
    assert "logprobs: <f4[3, 40] 480 B in frame 2" in text(entry)
    assert "sampled_token_ranks: <i4[3] 12 B = [" in text(entry, is_full=True)
    cut = Entry(direction=entry.direction, frames=entry.frames[:2], version=entry.version)
    assert "<f4[3, 40] in frame 2 (which is missing)" in text(cut)


def test_what_the_other_end_would_refuse_is_shown_with_the_reason() -> None:
    request = to_engine(b"\0", ["r1", [1], None, {"temperature": 5.0, "max_tokens": 1}, None, 1.0, None, None, None])
    assert "sampling_params: {temperature: 5.0, max_tokens: 1}" in text(request)
    assert "! temperature must be a finite number" in text(request)
    assert read(request).request_ids == ("r1",)


def test_what_is_not_msgpack_is_shown_as_hex_with_the_reason() -> None:
    broken = Entry(direction=FROM_ENGINE, frames=[b"\xc1\xff" + bytes(100)])
    shown = text(broken)
    assert "! not msgpack" in shown
    assert "frame 0: c1ff" in shown
    assert "70 more bytes" in shown
    assert "more bytes" not in text(broken, is_full=True)


def test_an_unknown_request_type_is_named() -> None:
    assert "request type 09 is not known" in text(to_engine(b"\x09", []))


def test_a_message_that_ends_before_its_payload_is_shown() -> None:
    assert "the message ends before its payload" in text(Entry(direction=TO_ENGINE, frames=[b"\0\0"], payload_frame=2))


def test_the_death_marker_has_a_type_of_its_own() -> None:
    assert "ENGINE_CORE_DEAD  16 B" in text(Entry(direction=FROM_ENGINE, frames=[b"ENGINE_CORE_DEAD"]))


def test_a_coordinators_messages_say_which_engine_they_mean() -> None:
    frames = [b"\2", msgspec.msgpack.encode([3, b"\1\0"])]
    shown = text(Entry(direction="coordinator->engine (XPUB)", frames=frames, payload_frame=1, group="engine0"))
    assert "coordinator → engine 0" in shown
    assert "START_DP_WAVE wave=3 except=1 (as identity)" in shown
    stats = Entry(direction="coordinator->frontend (XPUB)", frames=[msgspec.msgpack.encode([[[1, 2]], 4, True])])
    assert "STATS counts=[[1, 2]] wave=4 running=true" in text(stats)


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=5),
    max_leaves=40,
)
payloads = st.binary(max_size=60) | msgpack_values.map(msgspec.msgpack.encode)


@given(
    st.sampled_from(DIRECTIONS),
    st.lists(payloads, max_size=4),
    st.sampled_from([None, 0, 1, 2]),
    st.sampled_from(["", "engine0.frontend1", "engine rank 1"]),
    st.sampled_from([None, "0.25.1", "0.32.0", "nonsense"]),
    st.booleans(),
)
def test_nothing_that_comes_ends_the_reader(
    direction: str, frames: list[bytes], payload_frame: int | None, group: str, version: str | None, is_full: bool
) -> None:
    entry = Entry(direction=direction, frames=frames, payload_frame=payload_frame, group=group, version=version)
    message = Reader(is_full=is_full).read(entry)
    printer = Printer(is_full=is_full)
    assert printer.text(message)
    json.loads(printer.json(message))
    value_of(entry, message.type)


def test_deep_nesting_ends_nobody() -> None:
    for depth in (100, 500, 5000):
        entry = Entry(direction=FROM_ENGINE, frames=[b"\x91" * depth + b"\x90"])
        message = Reader().read(entry)
        assert Printer().text(message)
        assert Printer().json(message)
        value_of(entry, message.type)
