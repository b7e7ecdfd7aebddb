"""OpenVINOExecutor with ``deterministic=True``: what must be equal is equal, through recovery and sleep too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError
from enginewire.executors import OpenVINOExecutor
from enginewire.models import resolve_model
from enginewire.text.tokenizer import load_tokenizer
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from enginewire.wire.sampling import SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

NUM_BLOCKS = 64
LENGTH = 24


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[OpenVINOExecutor]:
    options = {"num_kv_blocks": NUM_BLOCKS, "deterministic": True}
    executor = OpenVINOExecutor(EngineConfig.create(str(model), executor_options=options))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def prompts(model: Path) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(model)
    words = ["cats", "dogs", "rain", "snow", "sun", "moon", "tea", "milk"]
    words += ["cars", "trains", "ships", "roads", "books", "songs", "games", "art"]
    return {word: list(tokenizer.encode(f"Once upon a time there was a story about {word}, and")) for word in words}


def greedy(name: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    params = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True} | params
    return EngineCoreRequest(name, prompt, sampling_params=SamplingParams(**params))


def drain(executor: OpenVINOExecutor) -> list[EngineCoreOutput]:
    outputs = []
    while executor.has_unfinished_requests():
        outputs += executor.step()
    return outputs


def texts(outputs: list[EngineCoreOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


@pytest.fixture(scope="module")
def alone(executor: OpenVINOExecutor, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """What each prompt gives when it runs alone."""
    found = {}
    for name, prompt in prompts.items():
        executor.add_request(greedy(name, prompt))
        found |= texts(drain(executor))
    return found


def test_kv_blocks_have_the_computed_size(executor: OpenVINOExecutor, alone: dict[str, list[int]]) -> None:
    pipeline = executor._pipeline
    assert pipeline is not None
    assert pipeline.kv_cache_bytes == NUM_BLOCKS * 1_474_560
    assert executor.capacity.dtype == "float32"
    assert executor.capabilities.deterministic


def test_a_batch_of_16_equals_each_request_alone(
    executor: OpenVINOExecutor, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    for name, prompt in prompts.items():
        executor.add_request(greedy(name, prompt))
    assert texts(drain(executor)) == alone


def test_text_goes_on_as_it_would_have_after_a_prefix_of_it_was_prompted(
    executor: OpenVINOExecutor, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    for i, (name, prompt) in enumerate(prompts.items(), start=1):
        executor.add_request(greedy(name, prompt + alone[name][:i], max_tokens=LENGTH - i))
    assert texts(drain(executor)) == {name: alone[name][i:] for i, name in enumerate(prompts, start=1)}


@pytest.mark.parametrize(
    "constraint", [{"json": {"type": "nonsense"}}, {"regex": "(un["}, {"grammar": "root ::= nowhere"}], ids=str
)
def test_an_invalid_constraint_that_slips_through_is_answered_and_the_others_texts_are_undisturbed(
    executor: OpenVINOExecutor,
    prompts: dict[str, list[int]],
    alone: dict[str, list[int]],
    constraint: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the check up front, OpenVINO raises inside the step, and again in every step after."""
    monkeypatch.setattr(executor, "_grammar_probe", lambda: None)
    names = list(prompts)[:5]
    for name in names[:4]:
        executor.add_request(greedy(name, prompts[name]))
    outputs = [output for _ in range(5) for output in executor.step()]
    pipeline = executor._pipeline
    executor.add_request(greedy("bad", prompts["art"], structured_outputs=StructuredOutputsParams(**constraint)))
    executor.add_request(greedy(names[4], prompts[names[4]]))
    outputs += drain(executor)
    (answer,) = [output for output in outputs if output.request_id == "bad"]
    assert answer.finish_reason is FinishReason.ERROR
    assert str(answer.stop_reason).startswith("invalid_request: OpenVINO: ")
    assert {name: tokens for name, tokens in texts(outputs).items() if name != "bad"} == {n: alone[n] for n in names}
    assert executor._pipeline is pipeline, "repaired, not rebuilt"


def test_a_request_too_large_for_the_cache_is_answered_and_the_others_texts_are_undisturbed(
    executor: OpenVINOExecutor, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    """Refused on receipt; if one came through, OpenVINO would drop every request."""
    names = list(prompts)[:3]
    for name in names:
        executor.add_request(greedy(name, prompts[name]))
    outputs = [output for _ in range(3) for output in executor.step()]
    assert executor._pipeline is not None
    executor.add_request(greedy("large", [5]))
    large = executor._running["large"]
    assert large.handle is not None
    large.handle.cancel()
    large.handle = executor._pipeline.add([5] * (NUM_BLOCKS * 32 + 40), {"max_new_tokens": 1}, None)
    large.request.prompt_token_ids = [5] * (NUM_BLOCKS * 32 + 40)
    outputs += drain(executor)
    results = texts(outputs)
    assert results.pop("large") == []
    assert results == {name: alone[name] for name in names}


def test_running_requests_sleep_through_a_reload(
    executor: OpenVINOExecutor, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    names = list(prompts)[:4]
    for name in names:
        executor.add_request(greedy(name, prompts[name]))
    outputs = [output for _ in range(9) for output in executor.step()]
    executor.sleep(1)
    executor.wake_up()
    assert texts(outputs + drain(executor)) == {name: alone[name] for name in names}


def test_logprobs_are_those_of_the_unscaled_distribution(
    executor: OpenVINOExecutor, prompts: dict[str, list[int]]
) -> None:
    def first(**params: Any) -> tuple[int, float]:
        sampling = SamplingParams(max_tokens=1, logprobs=0, **params)
        executor.add_request(EngineCoreRequest("r", prompts["sun"], sampling_params=sampling))
        (output,) = drain(executor)
        assert output.new_logprobs is not None
        ids, values = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
        assert (ids.shape, values.shape) == ((1, 1), (1, 1))
        assert ids[0, 0] == output.new_token_ids[0]
        return output.new_token_ids[0], float(values[0, 0])

    likeliest, logprob = first(temperature=0)
    assert -4 < logprob < 0
    hot = [first(temperature=2, top_k=3, seed=seed) for seed in range(12)]
    assert len({token for token, _ in hot}) > 1
    assert all(value <= logprob + 0.01 for _, value in hot), "no other token is likelier"
    assert dict(hot).get(likeliest, logprob) == pytest.approx(logprob, abs=0.01)


def test_properties_that_contradict_determinism_are_refused(model: Path) -> None:
    options = {"deterministic": True, "properties": {"KV_CACHE_PRECISION": "u8"}}
    with pytest.raises(ConfigError, match="KV_CACHE_PRECISION"):
        OpenVINOExecutor(EngineConfig.create(str(model), executor_options=options))
