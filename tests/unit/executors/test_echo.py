"""The echo executor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError, InvalidRequestError
from enginewire.executors import EchoExecutor
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest
from enginewire.wire.sampling import SamplingParams


def echo(configured_len: int | None = None, **options: Any) -> EchoExecutor:
    return EchoExecutor(EngineConfig.create("echo", executor_options=options, max_model_len=configured_len))


def request(prompt: list[int], request_id: str = "a", **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, sampling_params=SamplingParams(**params))


def tokens(executor: EchoExecutor, steps: int, request_id: str = "a") -> list[int]:
    outputs = [output for _ in range(steps) for output in executor.step()]
    return [token_id for output in outputs if output.request_id == request_id for token_id in output.new_token_ids]


def first_output(executor: EchoExecutor, core_request: EngineCoreRequest) -> EngineCoreOutput:
    executor.add_request(core_request)
    (output,) = executor.step()
    return output


def test_it_repeats_the_prompt_one_token_per_step_and_never_stops_by_itself() -> None:
    executor = echo()
    executor.add_request(request([4, 5, 6], eos_token_id=5, max_tokens=2))
    assert tokens(executor, 7) == [4, 5, 6, 4, 5, 6, 4]
    assert executor.has_unfinished_requests()


def test_what_is_aborted_is_forgotten() -> None:
    executor = echo()
    executor.add_request(request([4, 5]))
    executor.abort_requests(["a", "unknown"])
    assert executor.step() == []
    assert not executor.has_unfinished_requests()


@pytest.mark.parametrize("delivered", range(8))
def test_a_resumed_request_continues_the_cycle(delivered: int) -> None:
    """Section 11: extra_args["resume_output_len"] trailing tokens are output already."""
    prompt, whole = [4, 5, 6], [4, 5, 6] * 4
    executor = echo()
    executor.add_request(request(prompt + whole[:delivered], extra_args={"resume_output_len": delivered}))
    assert tokens(executor, 4) == whole[delivered : delivered + 4]


@pytest.mark.parametrize("value", [-1, 3, 4, 1.0, True, "1", None])
def test_a_resume_length_that_leaves_no_prompt_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="resume_output_len must be"):
        echo().add_request(request([1, 2, 3], extra_args={"resume_output_len": value}))


def test_logprobs_hold_the_token_itself_and_the_likeliest() -> None:
    output = first_output(echo(), request([8, 9], logprobs=2))
    assert output.new_logprobs is not None
    ids, values, ranks, _ = output.new_logprobs
    assert (ids.dtype.str, values.dtype.str) == ("<i4", "<f4")
    assert ids.tolist() == [[8, 8, 9]]
    assert values.tolist() == [pytest.approx([math.log(0.5), math.log(0.5), math.log(0.25)])]
    assert ranks.tolist() == [1]


def test_logprobs_of_zero_candidates_are_the_tokens_own() -> None:
    output = first_output(echo(), request([8, 9], logprobs=0))
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[8]]
    assert first_output(echo(), request([8])).new_logprobs is None


def test_candidates_are_distinct_and_within_a_vocabulary() -> None:
    output = first_output(echo(vocab_size=256), request([255], logprobs=20))
    assert output.new_logprobs is not None
    candidates = output.new_logprobs.logprob_token_ids[0, 1:].tolist()
    assert len(set(candidates)) == 20
    assert all(0 <= token_id < 256 for token_id in candidates)


def test_prompt_logprobs_come_with_the_first_token() -> None:
    """Protocol D.8: from the prompt's second token on."""
    executor = echo()
    output = first_output(executor, request([8, 9, 10], prompt_logprobs=1))
    assert output.new_prompt_logprobs_tensors is not None
    ids, values, ranks, _ = (part.numpy() if part is not None else None for part in output.new_prompt_logprobs_tensors)
    assert ids is not None
    assert values is not None
    assert ranks is not None
    assert ids.tolist() == [[9, 9], [10, 10]]
    assert values.shape == (2, 2)
    assert ranks.tolist() == [1, 1]
    assert executor.step()[0].new_prompt_logprobs_tensors is None


def test_how_many_logprobs_it_offers_is_an_option() -> None:
    assert echo(logprobs=3).capabilities.max_logprobs == 3
    assert echo(logprobs=None).capabilities.max_logprobs is None


def test_it_says_what_it_honours() -> None:
    can = echo().capabilities
    assert (can.deterministic, can.resume, can.stochastic, can.penalties) == (True, True, False, True)
    assert (can.logit_bias, can.allowed_token_ids, can.bad_words, can.structured_outputs) == (False, False, False, ())


def test_its_cache_fills_by_blocks() -> None:
    executor = echo(num_gpu_blocks=10, block_size=4)
    executor.add_request(request([1, 2, 3]))
    executor.step()
    assert executor.stats().kv_cache_usage == pytest.approx(0.1)  # 4 tokens
    executor.step()
    assert executor.stats().kv_cache_usage == pytest.approx(0.2)
    executor.abort_requests(["a"])
    assert executor.stats().kv_cache_usage == 0


def test_requests_that_do_not_fit_wait_and_the_first_one_always_goes_on() -> None:
    executor = echo(num_gpu_blocks=3, block_size=2)
    executor.add_request(request([1, 2, 3], "a"))
    executor.add_request(request([7, 8], "b"))
    assert [output.request_id for output in executor.step()] == ["a"]
    assert executor.stats().num_preempted_reqs == 1
    executor.abort_requests(["a"])
    assert [output.new_token_ids for output in executor.step()] == [[7]]
    assert executor.stats().num_preempted_reqs == 0


def test_its_context_is_what_options_configuration_and_cache_allow() -> None:
    assert echo().capacity.max_model_len >= 131_072
    assert echo(max_model_len=64).capacity.max_model_len == 64
    assert echo(50, max_model_len=64).capacity.max_model_len == 50
    assert echo(num_gpu_blocks=2, block_size=8).capacity.max_model_len == 16


def test_it_fails_at_the_step_it_was_told() -> None:
    executor = echo(fail_at_step=2)
    executor.add_request(request([1]))
    executor.step()
    with pytest.raises(RuntimeError, match="failing at step 2"):
        executor.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speed": 1}, "has no option speed; it has load_time_s"),
        ({"step_time_s": "fast"}, "Expected `float`"),
        ({"step_time_s": -1}, "step_time_s must be"),
        ({"load_time_s": math.inf}, "load_time_s must be"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks must be at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        echo(**options)


def test_methods_to_call_by_name() -> None:
    executor = echo()
    assert executor.collective_rpc("echo", args=[1, "x"], kwargs={"k": 2}) == [{"args": [1, "x"], "kwargs": {"k": 2}}]
    assert executor.collective_rpc("sleep_for", args=[0]) == [0]
    with pytest.raises(RuntimeError, match="boom"):
        executor.collective_rpc("raise_error", args=["boom"])
    with pytest.raises(ValueError, match="no method 'shutdown' to call; it has echo"):
        executor.collective_rpc("shutdown")
