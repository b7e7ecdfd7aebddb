"""SamplingParams to GenerationConfig, without the library."""

from __future__ import annotations

from typing import Any

import pytest

from enginewire.executors.openvino_sampling import generation_settings, has_plain_choice
from enginewire.wire.sampling import SamplingParams, StructuredOutputsParams

SAMPLING = {"do_sample", "temperature", "top_p", "top_k", "min_p", "rng_seed"}


def settings(params: SamplingParams, *, num_delivered: int = 0, max_new_tokens: int = 100) -> dict[str, Any]:
    return generation_settings(
        params,
        num_delivered=num_delivered,
        max_new_tokens=max_new_tokens,
        random_seed=77,
        model_eos=2,
        vocab_size=1000,
    )


def test_temperature_zero_is_greedy_and_sets_nothing_about_sampling() -> None:
    """OpenVINO raises on temperature 0 with sampling on."""
    assert not SAMPLING & settings(SamplingParams(temperature=0)).keys()


@pytest.mark.parametrize("min_p", [1.0, 0.99999999])
def test_a_min_p_that_is_one_in_float32_is_greedy(min_p: float) -> None:
    """OpenVINO raises on min_p 1."""
    assert not SAMPLING & settings(SamplingParams(min_p=min_p)).keys()


def test_sampling_parameters_are_handed_over() -> None:
    got = settings(SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=5))
    assert {name: got[name] for name in SAMPLING} == {
        "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "rng_seed": 5,
    }  # fmt: skip


@pytest.mark.parametrize("top_k", [0, -1, 1000, 2**40])
def test_top_k_that_keeps_everything_is_left_out(top_k: int) -> None:
    """OpenVINO raises on top_k -1."""
    assert "top_k" not in settings(SamplingParams(top_k=top_k))


@pytest.mark.parametrize(("seed", "expected"), [(None, 77), (0, 0), (-5, 2**32 - 5), (2**63 - 1, 2**32 - 1)])
def test_a_seed_counts_modulo_2_to_32_and_without_one_the_drawn_seed_is_used(seed: int | None, expected: int) -> None:
    assert settings(SamplingParams(seed=seed))["rng_seed"] == expected


@pytest.mark.parametrize(
    ("params", "low", "high"),
    [(SamplingParams(top_p=1e-60), 1e-38, 1e-6), (SamplingParams(top_p=1.0), 1.0, 1.0)],
)
def test_top_p_stays_above_zero_in_float32(params: SamplingParams, low: float, high: float) -> None:
    assert low <= settings(params)["top_p"] <= high


@pytest.mark.parametrize("penalty", [1e-60, 1e60])
def test_repetition_penalty_stays_finite_and_above_zero_in_float32(penalty: float) -> None:
    assert 1e-38 < settings(SamplingParams(repetition_penalty=penalty))["repetition_penalty"] < 1e38


def test_eos_and_stop_tokens_are_all_listed_as_stop_tokens() -> None:
    got = settings(SamplingParams(eos_token_id=2, stop_token_ids=[10, 11]))
    assert (got["eos_token_id"], got["stop_token_ids"]) == (2, {2, 10, 11})
    assert "ignore_eos" not in got


def test_with_eos_ignored_stop_tokens_still_stop() -> None:
    """OpenVINO's ignore_eos also switches stop tokens off, and an unset EOS is filled in from the model."""
    got = settings(SamplingParams(ignore_eos=True, stop_token_ids=[11, 10]))
    assert (got["eos_token_id"], got["stop_token_ids"]) == (10, {10, 11})
    assert "ignore_eos" not in got


def test_a_request_that_no_token_ends_ignores_eos() -> None:
    got = settings(SamplingParams(ignore_eos=True, min_tokens=3))
    assert got["ignore_eos"] is True
    assert not {"eos_token_id", "stop_token_ids", "min_new_tokens"} & got.keys()


def test_stop_tokens_outside_the_vocabulary_are_left_out() -> None:
    """With min_tokens OpenVINO would write to their place in the logits."""
    assert settings(SamplingParams(stop_token_ids=[5, 1000, 10**9]))["stop_token_ids"] == {5}
    assert settings(SamplingParams(stop_token_ids=[10**9]))["ignore_eos"] is True


def test_min_tokens_count_what_was_delivered_before_an_interruption() -> None:
    params = SamplingParams(eos_token_id=2, min_tokens=10)
    assert settings(params)["min_new_tokens"] == 10
    assert settings(params, num_delivered=4)["min_new_tokens"] == 6
    assert "min_new_tokens" not in settings(params, num_delivered=10)


def test_min_tokens_never_exceed_the_tokens_still_to_come() -> None:
    """OpenVINO raises if they do."""
    assert settings(SamplingParams(eos_token_id=2, min_tokens=16), max_new_tokens=3)["min_new_tokens"] == 3


def test_the_end_of_a_grammar_is_not_masked_by_min_tokens() -> None:
    """With every token masked, OpenVINO samples garbage."""
    params = SamplingParams(eos_token_id=2, min_tokens=9, structured_outputs=StructuredOutputsParams(regex="a"))
    assert "min_new_tokens" not in settings(params)


def test_a_grammar_ends_with_the_models_own_eos_when_the_request_has_none() -> None:
    got = settings(SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a")))
    assert (got["eos_token_id"], got["stop_token_ids"]) == (2, {2})


@pytest.mark.parametrize(("logprobs", "expected"), [(None, None), (0, 1)])
def test_logprobs_are_computed_only_when_asked_for(logprobs: int | None, expected: int | None) -> None:
    assert settings(SamplingParams(logprobs=logprobs)).get("logprobs") == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=1), False),
        (SamplingParams(temperature=0, repetition_penalty=1.1), False),
        (SamplingParams(temperature=0, presence_penalty=0.1), False),
        (SamplingParams(temperature=0, frequency_penalty=0.1), False),
        (SamplingParams(temperature=0, min_tokens=1), False),
        (SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a")), False),
    ],
)
def test_the_sampled_token_is_known_to_be_the_likeliest_only_if_nothing_adjusts_the_choice(
    params: SamplingParams, expected: bool
) -> None:
    assert has_plain_choice(params) is expected
