"""Conversations of real processes: every frame decodes by direction and type, and what is decoded survives encoding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from golden import DATA, OLD, Vector, load, schemaless

from enginewire.errors import DecodeError
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder, OutputsDecoder, RequestDecoder, UtilityCallDecoder
from enginewire.wire.frames import (
    ABORT,
    ADD,
    ALL_ENGINES_LISTEN,
    ENGINE_CORE_DEAD,
    REQUEST_TYPES,
    SUBSCRIBE_ALL,
    UTILITY,
    engine_index_of,
    is_death_marker,
    may_hold_utility_output,
)
from enginewire.wire.handshake import EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import EngineCoreOutputs, FinishReason, utility_result
from enginewire.wire.profile import PROFILES, decode_ready, profile_of_request

FILES = (
    "live", "frontend", "frontend-sync", "frontend-dp2", "death", "defects", "engine-dp2-moe", "coordinator",
)  # fmt: skip
OLD_FILES = ("coordinator-nowave", "external-lb")
"""Recorded with 0.25.1 only."""

CAPTURED = load(*FILES) + load(*OLD_FILES, versions=[OLD])

RAW = (SUBSCRIBE_ALL, ALL_ENGINES_LISTEN, ENGINE_CORE_DEAD)
"""Whole messages that are not msgpack."""

COORDINATORS: dict[str, Any] = {
    "coordinator->engine": tuple[int, int | bytes | None],
    "coordinator->frontend": tuple[list[list[int | float]] | None, int, bool],
    "frontend->coordinator": tuple[Any, int],  # a rank, as a number or as its identity; or SCALE_ELASTIC_EP
}
"""Messages of coordinators that have no struct, by direction (protocol J)."""

REFUSED = {
    "bad-temp.add": "temperature must be a finite number of at least 0 and at most 2, got 5.0",
    "abort-int": "Expected `array`, got `int`",
    "util-arity": "Expected `array` of at least length 4, got 3",
}
"""Messages that end or deafen the reference's engine (defects 1 and 3), and why they are refused here."""


def decoder_for(vector: Vector) -> Any:
    """Return what decodes a captured message, from its direction and request type."""
    if "handshake" in vector.direction:
        return MsgpackDecoder(EngineHandshakeMetadata if "frontend->engine" in vector.direction else HandshakeMessage)
    if (message_type := COORDINATORS.get(vector.direction.partition(" (")[0])) is not None:
        return MsgpackDecoder(message_type)
    if vector.direction == "engine->coordinator (PUSH)":
        return OutputsDecoder(vector.profile.received_outputs)
    if vector.direction == "engine->frontend (input socket)":
        return MsgpackDecoder(vector.profile.ready)
    if vector.direction == "engine->frontend (output socket)":
        return OutputsDecoder(vector.profile.received_outputs)
    return {
        ADD: RequestDecoder(vector.profile.request),
        ABORT: MsgpackDecoder(list[str]),
        UTILITY: UtilityCallDecoder(),
    }[vector.head[-1]]


def covers(encoded: Any, original: Any) -> bool:
    """Whether ``encoded`` says what ``original`` said; arrays and maps may be completed by defaults."""
    match original:
        case list():
            return len(encoded) >= len(original) and all(map(covers, encoded, original))
        case dict():
            return all(covers(encoded.get(key), item) for key, item in original.items())
    # An int that stands for a float (`temperature: 0`) is a float once decoded; bool, int and str stay what they are.
    return bool(encoded == original) and type(encoded) in (type(original), float)


def decode(vector: Vector, frames: Any) -> Any:
    """Decode frames as the vector's are, arrays included."""
    message = decoder_for(vector).decode(frames)
    if isinstance(message, EngineCoreOutputs):
        for output in message.outputs:
            for name in output.__struct_fields__:
                getattr(output, name)
    return message


def is_decodable(vector: Vector) -> bool:
    known = not vector.head or len(vector.head[-1]) == 2 or vector.head[-1] in REQUEST_TYPES
    return known and vector.name not in REFUSED and not is_raw(vector)


def is_raw(vector: Vector) -> bool:
    return len(vector.frames) == 1 and vector.frames[0] in RAW


@pytest.mark.parametrize("vector", [v for v in CAPTURED if is_decodable(v)], ids=str)
def test_a_captured_message_decodes_and_survives_encoding(vector: Vector) -> None:
    frames = MsgpackEncoder().encode(decode(vector, vector.frames))
    assert covers(schemaless(frames[0]), vector.value)
    assert list(map(bytes, frames[1:])) == vector.frames[1:]
    assert MsgpackEncoder().encode(decode(vector, frames)) == frames


@pytest.mark.parametrize("vector", [v for v in CAPTURED if v.name in REFUSED], ids=str)
def test_what_disables_the_reference_is_refused_with_a_reason(vector: Vector) -> None:
    """Defects 1, 3."""
    with pytest.raises(DecodeError) as caught:
        decoder_for(vector).decode(vector.frames)
    assert REFUSED[vector.name] in str(caught.value)


def test_every_refused_message_is_among_the_captured() -> None:
    assert set(REFUSED) <= {vector.name for vector in CAPTURED}


def test_the_sender_of_a_refused_request_is_known() -> None:
    """Defect 1."""
    refused = [v for v in CAPTURED if v.name == "bad-temp.add"]
    assert len(refused) == len(PROFILES)
    for vector in refused:
        assert RequestDecoder(vector.profile.request).sender(vector.frames) == ("bad-temp", 0)


def test_identities_are_ranks_and_types_are_known_except_the_one_that_deafens_the_reference() -> None:
    """Defect 2."""
    to_engine = [v for v in CAPTURED if v.direction.startswith("frontend->engine (input")]
    assert {v.head[-1] for v in to_engine} - set(REQUEST_TYPES) == {b"\x09"}
    identities = {frame for v in CAPTURED for frame in v.head if len(frame) == 2}
    assert {engine_index_of(identity) for identity in identities} == {0, 1}


@pytest.mark.parametrize("vector", [v for v in CAPTURED if "output socket" in v.direction], ids=str)
def test_a_glance_finds_every_utility_answer_and_spares_every_message_with_outputs(vector: Vector) -> None:
    if is_death_marker(vector.frames):
        assert not may_hold_utility_output(vector.frames[0])
        return
    assert may_hold_utility_output(vector.frames[0]) is (vector.value[1] == [])


def test_utility_results_arrive_as_recorded() -> None:
    answers = [v for v in CAPTURED if "output socket" in v.direction and isinstance(v.value, list) and v.value[4]]
    assert len(answers) > 20
    for vector in answers:
        output = OutputsDecoder(vector.profile.received_outputs).decode(vector.frames).utility_output
        assert output is not None
        call_id, failure, result = vector.value[4]
        assert (output.call_id, output.failure_message) == (call_id, failure)
        assert utility_result(output) == (None if result is None else result[1])


def test_the_recorded_values_are_what_a_schemaless_decoder_sees() -> None:
    for vector in CAPTURED:
        if not is_raw(vector):
            assert schemaless(vector.frames[0]) == vector.value, vector


@pytest.mark.parametrize("vector", [v for v in CAPTURED if is_raw(v)], ids=str)
def test_raw_messages_go_the_way_they_should(vector: Vector) -> None:
    """Protocol C.2, J.1."""
    ways = {
        SUBSCRIBE_ALL: "->coordinator (XSUB",
        ALL_ENGINES_LISTEN: "coordinator->engine (XPUB)",
        ENGINE_CORE_DEAD: "engine->frontend (output socket)",
    }
    assert ways[vector.frames[0]] in vector.direction
    assert is_death_marker(vector.frames) is (vector.frames[0] == ENGINE_CORE_DEAD)


def test_ranks_in_lock_step_report_waves_and_loads_as_ours_do() -> None:
    """Protocol J.2: of a report's parts one is set; coordinators order loads by wave and step."""
    reports = [v for v in CAPTURED if v.file == "engine-dp2-moe" and v.direction == "engine->coordinator (PUSH)"]
    assert len(reports) > 20
    for vector in reports:
        report = decoder_for(vector).decode(vector.frames)
        parts = (report.scheduler_stats, report.wave_complete, report.start_wave)
        assert [part is not None for part in parts].count(True) == 1
        assert not report.outputs
        assert report.engine_index == 0 or report.wave_complete is None


def test_ready_responses_of_vllm_carry_no_capabilities() -> None:
    for vector in CAPTURED:
        if vector.direction == "engine->frontend (input socket)":
            profile, ready = decode_ready(vector.frames)
            assert profile is vector.profile
            assert type(ready) is profile.ready
            assert ready.enginewire is msgspec.UNSET
            assert ready.vllm_version == vector.version


def test_the_first_request_of_a_frontend_tells_its_version() -> None:
    """Protocol M.1. Requests that the capturing script made are short: they are 0.25's by definition."""
    adds = [v for v in CAPTURED if v.head[-1:] == [ADD] and len(v.value) >= 20]
    assert len(adds) > 20
    assert {profile_of_request(v.frames[0]) for v in adds} == set(PROFILES)
    for vector in adds:
        assert profile_of_request(vector.frames[0]) is vector.profile


@pytest.mark.parametrize("vector", [v for v in CAPTURED if "output socket" in v.direction], ids=str)
def test_outputs_read_with_the_wrong_table_are_told_apart_or_mean_the_same(vector: Vector) -> None:
    if is_death_marker(vector.frames):
        return
    (other,) = set(PROFILES) - {vector.profile}
    message = OutputsDecoder(other.received_outputs).decode(vector.frames)
    right = OutputsDecoder(vector.profile.received_outputs).decode(vector.frames)
    assert [output.request_id for output in message.outputs] == [output.request_id for output in right.outputs]
    for output in message.outputs:
        assert output.finish_reason is FinishReason.ERROR
        assert "an engine of another version of vLLM" in str(output.stop_reason)
    assert message.engine_index == right.engine_index
    assert message.utility_output == right.utility_output
    assert message.finished_requests == right.finished_requests
    if not message.outputs and message.scheduler_stats is not None:
        assert right.scheduler_stats is not None
        assert message.scheduler_stats.num_running_reqs == right.scheduler_stats.num_running_reqs


def test_no_file_is_forgotten() -> None:
    """Every entry of every file is a test: here, or in test_generated_vectors.py."""
    generated = {"requests", "outputs", "utility", "handshake", "arrays"}
    recorded = {path.stem.rpartition("-")[0] for path in DATA.glob("*.json")}
    assert recorded == {*FILES, *OLD_FILES} | generated
    for vector in CAPTURED:
        assert is_decodable(vector) or is_raw(vector) or vector.name in REFUSED or vector.head[-1:] == [b"\x09"], vector
