"""Conversations of real processes: every frame decodes by direction and type, and what is decoded survives encoding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from golden import Vector, load, schemaless

from enginewire.errors import DecodeError
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder, OutputsDecoder, RequestDecoder, UtilityCallDecoder
from enginewire.wire.frames import (
    ABORT,
    ADD,
    REQUEST_TYPES,
    UTILITY,
    engine_index_of,
    is_death_marker,
    may_hold_utility_output,
)
from enginewire.wire.handshake import EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import EngineCoreOutputs, FinishReason, utility_result
from enginewire.wire.profile import PROFILES, decode_ready, profile_of_request

CAPTURED = load("live", "frontend", "frontend-sync", "death", "defects")

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
    return known and vector.name not in REFUSED and not is_death_marker(vector.frames)


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
    assert {engine_index_of(identity) for identity in identities} == {0}


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
        if not is_death_marker(vector.frames):
            assert schemaless(vector.frames[0]) == vector.value, vector


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
