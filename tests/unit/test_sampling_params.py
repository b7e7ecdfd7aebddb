"""Sampling parameters: what is refused, under which name, and what is normalised."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from enginewire.errors import DecodeError, InvalidRequestError
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder
from enginewire.wire.sampling import (
    MAX_LOGPROB_TOKEN_IDS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

NAN, INFINITY = math.nan, math.inf

REFUSED: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1)],
    *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, INFINITY, -INFINITY)],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, NAN, INFINITY)],
    *[("repetition_penalty", value) for value in (0, 0.0, -1.0, NAN, INFINITY)],
    *[("temperature", value) for value in (-0.01, 2.01, 5.0, NAN, INFINITY)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.01, NAN, INFINITY)],
    *[("top_k", value) for value in (-2, -100, 2**63)],
    *[("min_p", value) for value in (-0.01, 1.01, NAN, INFINITY)],
    *[("seed", value) for value in (2**63, -(2**63) - 1)],
    *[("max_tokens", value) for value in (0, -1, 2**63)],
    *[("min_tokens", value) for value in (-1, 17)],
    *[("logprobs", value) for value in (-2, -10)],
    *[("prompt_logprobs", value) for value in (-2, -10)],
    *[("thinking_token_budget", value) for value in (-2, -10)],
    *[("logprob_token_ids", value) for value in ([-1], list(range(MAX_LOGPROB_TOKEN_IDS + 1)))],
    *[("stop_token_ids", value) for value in ([-1], [3, -7])],
    *[("allowed_token_ids", value) for value in ([], [-1])],
    *[("stop", value) for value in ("", ["a", ""])],
    *[("logit_bias", value) for value in ({-1: 1.0}, {1: NAN}, {1: INFINITY}, {1: -INFINITY})],
    *[("structured_outputs", value) for value in ({}, {"json": "{}", "regex": "a"})],
    *[
        ("repetition_detection", value)
        for value in (
            {"max_pattern_size": 3, "min_count": 1},
            {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
            {"min_pattern_size": -1},
        )
    ],
]
"""Values of the right type that are out of range: refused on construction and on decoding."""

WRONG_TYPE: list[tuple[str, Any]] = [
    *[("n", value) for value in (True, 1.0, "1")],
    *[("temperature", value) for value in (True, "0.5", None)],
    *[("top_p", value) for value in (True, "1", None)],
    *[("top_k", value) for value in (True, 8.0, None)],
    *[("seed", value) for value in (True, 1.0, "1")],
    *[("max_tokens", value) for value in (True, 8.0, "8")],
    *[("min_tokens", value) for value in (True, 1.0)],
    *[("logprobs", value) for value in (True, 1.0)],
    *[("prompt_logprobs", value) for value in (True, 1.0)],
    *[("thinking_token_budget", value) for value in (True, 1.0)],
    *[("stop", value) for value in (5, [5], {"a": 1}, [b"a"])],
    *[("bad_words", value) for value in ("a", [5])],
    *[("stop_token_ids", value) for value in (2, [2.0], [True], "2")],
    *[("allowed_token_ids", value) for value in (2, ["2"])],
    *[("logprob_token_ids", value) for value in (2, [None])],
    *[("logit_bias", value) for value in ([1], {"1": 1.0}, {True: 1.0}, {1: "x"}, {1: True})],
    *[("structured_outputs", value) for value in ("json", {"json": 5}, {"jsn": "{}"}, [])],
    *[("repetition_detection", value) for value in (5, {"min_count": "2"})],
]
"""What a type checker would have found; the interpreter finds it too."""


def identify(value: object) -> str:
    return repr(value)[:40]


@pytest.mark.parametrize(("name", "value"), REFUSED + WRONG_TYPE, ids=identify)
def test_a_bad_value_is_refused_by_the_name_of_its_parameter(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [it for it in REFUSED if it[1] != -(2**63) - 1], ids=identify)
def test_a_value_out_of_range_is_refused_on_decoding_with_the_same_text(name: str, value: object) -> None:
    """Protocol D.2: the checks run again in the engine."""
    payload = msgspec.msgpack.encode({name: value})
    with pytest.raises(DecodeError) as decoding:
        MsgpackDecoder(SamplingParams).decode([payload])
    with pytest.raises(InvalidRequestError) as construction:
        SamplingParams(**{name: value})
    assert name in str(decoding.value)
    if not isinstance(value, (int, dict)):  # an int has become a float, nested parameters state their path
        assert str(decoding.value) == str(construction.value)


def test_errors_say_what_came_and_what_was_expected() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^temperature must be a finite number of at least 0 and at most 2, got 5\.0$"
    ):
        SamplingParams(temperature=5.0)
    with pytest.raises(InvalidRequestError, match=r"^top_p must be a finite number above 0 and at most 1, got 0$"):
        SamplingParams(top_p=0)
    with pytest.raises(
        InvalidRequestError, match=r"^min_tokens must be an integer of at least 0 and at most 4, got 5$"
    ):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(InvalidRequestError, match=r"^repetition_penalty must be a finite number above 0, got -1$"):
        SamplingParams(repetition_penalty=-1)
    with pytest.raises(InvalidRequestError, match=r"^logit_bias must be a finite number, got nan$"):
        SamplingParams(logit_bias={1: NAN})


def test_the_text_of_an_error_is_short_however_long_the_value() -> None:
    for value in (["x" * 10_000] * 10_000 + [5], {"a": "x" * 100_000}):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(stop=value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 100},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-9},
        {"temperature": 2, "top_p": 1, "min_p": 1},
        {"top_k": 50_000},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"logit_bias": {0: -100, 5: 1e300}},
        {"logit_bias": {}},
        {"allowed_token_ids": [0]},
        {"logprob_token_ids": list(range(MAX_LOGPROB_TOKEN_IDS))},
        {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 2}},
    ],
    ids=identify,
)
def test_the_bounds_themselves_are_accepted_and_survive_the_wire(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params)) == params


def test_defaults_are_those_of_the_wire() -> None:
    """Protocol D.2: an empty map means: sample, 16 tokens, no EOS known."""
    params = MsgpackDecoder(SamplingParams).decode([msgspec.msgpack.encode({})])
    assert params == SamplingParams()
    assert (params.temperature, params.max_tokens, params.eos_token_id) == (1.0, 16, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False}),
        ({"stop": "END"}, {"stop": ["END"], "output_text_buffer_length": 2}),
        ({"stop": ["a", "four"]}, {"output_text_buffer_length": 3}),
        ({"stop": ["four"], "include_stop_str_in_output": True}, {"output_text_buffer_length": 0}),
        ({"stop": ["four"], "output_text_buffer_length": 9}, {"output_text_buffer_length": 9}),
        ({"seed": -1}, {"seed": None}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
        ({"temperature": 0.005}, {"temperature": 0.01, "is_greedy": False}),
        ({"temperature": 1e-9}, {"temperature": 0.01}),
        ({"temperature": 0.01}, {"temperature": 0.01}),
        (
            {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
            {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "is_greedy": True},
        ),
        ({"temperature": 0.0}, {"top_p": 1.0, "is_greedy": True}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
        ({"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}),
        ({"prompt_logprobs": 2, "skip_reading_prefix_cache": False}, {"skip_reading_prefix_cache": False}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": StructuredOutputsParams(regex="a+")}),
        ({"repetition_detection": {}}, {"repetition_detection": RepetitionDetectionParams()}),
    ],
    ids=identify,
)
def test_equivalent_spellings_become_one(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Protocol D.2, on construction and on decoding alike."""
    decoded = MsgpackDecoder(SamplingParams).decode([msgspec.msgpack.encode(given)])
    for params in (SamplingParams(**given), decoded):
        assert {name: getattr(params, name) for name in expected} == expected


def test_normalising_twice_changes_nothing() -> None:
    params = SamplingParams(stop="END", temperature=0.001, seed=-1, top_k=-1)
    assert MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params)) == params


def test_what_holds_its_default_is_not_written() -> None:
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams()))
    assert written == {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False}


def test_private_names_of_the_wire() -> None:
    written = msgspec.msgpack.decode(
        msgspec.msgpack.encode(
            SamplingParams(
                eos_token_id=2,
                all_stop_token_ids={2},
                bad_words_token_ids=[[3]],
                structured_outputs=StructuredOutputsParams(regex="a", backend="xgrammar", backend_was_auto=True),
            )
        )
    )
    assert written["_eos_token_id"] == 2
    assert written["_all_stop_token_ids"] == [2]
    assert written["_bad_words_token_ids"] == [[3]]
    assert written["structured_outputs"]["_backend"] == "xgrammar"
    assert written["structured_outputs"]["_backend_was_auto"] is True


def test_default_collections_are_not_shared() -> None:
    first, second = SamplingParams(), SamplingParams()
    first.all_stop_token_ids.add(1)
    assert second.all_stop_token_ids == set()


@pytest.mark.parametrize("kind", StructuredOutputsParams.KINDS)
def test_each_constraint_alone_is_accepted_and_named(kind: str) -> None:
    value: object = {"json_object": True, "choice": ["a", "b"]}.get(kind, "{}")
    assert StructuredOutputsParams(**{kind: value}).kinds() == [kind]


def test_two_constraints_or_none_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"exactly one of json, .*; got none"):
        StructuredOutputsParams()
    with pytest.raises(InvalidRequestError, match="got json, regex"):
        StructuredOutputsParams(json="{}", regex="a")
