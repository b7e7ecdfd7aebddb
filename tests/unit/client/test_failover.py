"""``why_not_resumed`` and ``next_attempt``: which requests go on elsewhere, and as what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from enginewire import EngineCoreRequest, SamplingParams
from enginewire.client.failover import next_attempt, why_not_resumed
from enginewire.wire.arrays import Tensor
from enginewire.wire.capabilities import EVERYTHING, Capabilities
from enginewire.wire.messages import MultiModalFeatureSpec, PlaceholderRange, PoolingParams

PLAIN = Capabilities()
RESUMES = Capabilities(resume=True)
EXACT = Capabilities(deterministic=True, resume=True)


def request(**params: Any) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1, 2, 3], sampling_params=SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "seed": 7},
        {"temperature": 1.3, "top_p": 0.5, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6], "stop_token_ids": [6], "min_tokens": 3},
        {"stop": ["."], "logprobs": 5, "prompt_logprobs": 2, "max_tokens": None},
        {"extra_args": {"resume_output_len": 1}},
    ],
)
def test_what_stays_a_valid_sample_is_resumed(params: dict[str, Any]) -> None:
    """Resuming: greedy and unseeded sampling, on any engine."""
    for can in (PLAIN, EVERYTHING):
        assert why_not_resumed(request(**params), 5, "resume", can) is None


UNKNOWN = [
    ("seed", {"seed": 7}),
    ("structured_outputs", {"temperature": 0, "structured_outputs": {"json_object": True}}),
    ("bad_words", {"bad_words": ["no"]}),
    ("thinking_token_budget", {"thinking_token_budget": 10}),
    ("repetition_detection", {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}),
    ("extra_args", {"extra_args": {"kv_transfer_params": {}}}),
]


@pytest.mark.parametrize(("parameter", "params"), UNKNOWN, ids=[name for name, _ in UNKNOWN])
def test_what_depends_on_more_than_the_tokens_is_not_resumed_but_may_begin_anew(
    parameter: str, params: dict[str, Any]
) -> None:
    """Resuming: anything may restart if nothing was delivered yet."""
    for mode in ("resume", "exact"):
        reason = why_not_resumed(request(**params), 1, mode, EXACT)  # type: ignore[arg-type]
        assert reason is not None
        assert reason.startswith(f"{parameter}: ")
        assert why_not_resumed(request(**params), 0, mode, PLAIN) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_on_output_need_an_engine_that_can_be_told_what_is_output(penalty: str) -> None:
    one = request(**{penalty: 0.5}, temperature=0)
    assert why_not_resumed(one, 1, "resume", RESUMES) is None
    assert "cannot be told which tokens are output" in (why_not_resumed(one, 1, "resume", EVERYTHING) or "")
    assert why_not_resumed(one, 1, "exact", EXACT) is not None


def test_exact_is_for_greedy_requests_on_deterministic_engines() -> None:
    assert why_not_resumed(request(temperature=0, repetition_penalty=1.2), 5, "exact", EXACT) is None
    assert why_not_resumed(request(temperature=1), 5, "exact", EXACT) is not None
    assert why_not_resumed(request(temperature=0), 5, "exact", RESUMES) is not None
    assert why_not_resumed(request(temperature=0), 5, "exact", EVERYTHING) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None, "prompt_embeds": Tensor("float32", (1, 2), bytes(8))},
        {"prompt_is_token_ids": [True, True, False]},
        {
            "mm_features": [
                MultiModalFeatureSpec(
                    data={}, modality="image", identifier="i", mm_position=PlaceholderRange(offset=0, length=1)
                )
            ]
        },
        {"sampling_params": None, "pooling_params": PoolingParams()},
    ],
)
def test_prompts_that_are_more_than_tokens_only_begin_anew(changes: dict[str, Any]) -> None:
    one = msgspec.structs.replace(request(temperature=0), **changes)
    assert why_not_resumed(one, 1, "resume", EXACT) == "its prompt is not made of tokens alone"
    assert why_not_resumed(one, 0, "exact", PLAIN) is None


def test_a_prompt_that_was_to_be_continued_is_not_even_begun_anew() -> None:
    one = msgspec.structs.replace(request(temperature=0), resumable=True)
    assert why_not_resumed(one, 0, "resume", EXACT) == "more of its prompt was to follow"


def test_an_attempt_is_prompt_and_output_and_what_is_left_of_the_limits() -> None:
    """Failover: max_tokens as if undisturbed; what came with the prompt does not come twice."""
    first = request(max_tokens=10, min_tokens=4, logprobs=2, prompt_logprobs=3, stop=["."], seed=None)
    first.data_parallel_rank = 3
    first.external_req_id = "user's"
    attempt = next_attempt(first, "r~2", [7, 8], PLAIN)
    params, before = attempt.sampling_params, first.sampling_params
    assert params is not None
    assert before is not None
    assert (attempt.request_id, attempt.prompt_token_ids) == ("r~2", [1, 2, 3, 7, 8])
    assert (attempt.data_parallel_rank, attempt.external_req_id) == (None, "user's")
    assert attempt.arrival_time == first.arrival_time
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (8, 2, 2, None)
    assert (params.stop, params.extra_args) == (["."], None)
    assert (first.request_id, first.prompt_token_ids, before.max_tokens) == ("r", [1, 2, 3], 10), "it is as it was"
    assert next_attempt(first, "r~3", [7, 8, 9, 7, 8], PLAIN).sampling_params.min_tokens == 0  # type: ignore[union-attr]


def test_an_engine_that_can_be_told_is_told_how_many_tokens_are_output() -> None:
    one = request(extra_args={"resume_output_len": 1}, max_tokens=None)
    params = next_attempt(one, "r~2", [7, 8], RESUMES).sampling_params
    assert params is not None
    assert (params.extra_args, params.max_tokens) == ({"resume_output_len": 3}, None)


def test_a_request_of_which_nothing_was_delivered_begins_anew() -> None:
    one = request(seed=3, prompt_logprobs=1, min_tokens=2)
    attempt = next_attempt(one, "r~2", [], EXACT)
    assert attempt.prompt_token_ids == [1, 2, 3]
    assert attempt.sampling_params == one.sampling_params
