"""The real model behind the server: the same texts as without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from serving import Served, serve, wait_until
from test_many_engines import burst, check_counters, complete, per_engine, send_mixed

from enginewire import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Ein schöner Tag 🌞"]
CONVERSATION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def expected() -> dict[str, RequestOutput]:
    """What ``LLM`` makes of the prompts, one at a time."""
    with LLM("smollm2-135m") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24)
        made = {prompt: llm.generate(prompt, greedy)[0] for prompt in PROMPTS}
        made["chat"] = llm.chat(CONVERSATION, greedy)[0]
        made["seeded"] = llm.generate(PROMPTS[0], SamplingParams(seed=7, max_tokens=24))[0]
    return made


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("smollm2-135m") as served:
        yield served


@pytest.fixture
def sdk(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_are_those_of_llm(sdk: openai.OpenAI, expected: dict[str, RequestOutput], prompt: str) -> None:
    arguments = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    plain = sdk.completions.create(**arguments)
    assert plain.choices[0].text == expected[prompt].outputs[0].text
    assert plain.choices[0].finish_reason == expected[prompt].outputs[0].finish_reason
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == len(expected[prompt].prompt_token_ids)
    assert plain.usage.completion_tokens == len(expected[prompt].outputs[0].token_ids)
    streamed = sdk.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[prompt].outputs[0].text


def test_chat_is_that_of_llm(sdk: openai.OpenAI, expected: dict[str, RequestOutput]) -> None:
    arguments = {"model": "smollm2-135m", "messages": CONVERSATION, "temperature": 0, "max_tokens": 24}
    answer = sdk.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == expected["chat"].outputs[0].text
    streamed = sdk.chat.completions.create(**arguments, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == expected["chat"].outputs[0].text


def test_seed_gives_the_text_of_llm(sdk: openai.OpenAI, expected: dict[str, RequestOutput]) -> None:
    made = sdk.completions.create(model="smollm2-135m", prompt=PROMPTS[0], seed=7, max_tokens=24)
    assert made.choices[0].text == expected["seeded"].outputs[0].text


def test_sampled_completions_differ_and_stop_strings_end_them(sdk: openai.OpenAI) -> None:
    made = sdk.completions.create(
        model="smollm2-135m", prompt="My favourite", n=3, max_tokens=40, temperature=1.0, seed=3, stop=["."]
    )
    texts = [choice.text for choice in made.choices]
    assert len(set(texts)) == 3
    assert not any("." in text for text in texts)


def test_json_schema_is_followed(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    answer = sdk.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value.keys() == {"city", "large"}
    assert isinstance(value["large"], bool)


def test_logprobs_of_the_chosen_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="smollm2-135m", messages=CONVERSATION, temperature=0, max_tokens=8, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    assert all(token.logprob <= 0 for token in logprobs.content)
    assert (
        b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == answer.choices[0].message.content
    )


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a b", "echo": True, "logprobs": 0}, "echo"),
        ("/v1/chat/completions", {"messages": CONVERSATION, "logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        # These only the engine itself can tell.
        ("/v1/completions", {"prompt": "a", "cache_salt": "mine"}, "cache_salt"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "["}}, "structured_outputs"),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
            "response_format",
        ),
    ],
)
def test_what_this_engine_lacks_is_a_400_that_names_the_parameter(
    served: Served, path: str, change: dict[str, object], param: str
) -> None:
    refused = httpx.post(served.url + path, json=change)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_client_that_leaves_in_the_prefill_frees_the_engine(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "word " * 3000, "max_tokens": 500}, timeout=0.3)
    wait_until(lambda: served.num_live() == 0, "it is gone", timeout_s=30)


def test_another_models_tokenizer_can_be_used() -> None:
    with serve("echo", "--tokenizer", "smollm2-135m", "--served-model-name", "mixed") as served:
        body = {"prompt": "The capital of France", "max_tokens": 4, "return_token_ids": True}
        made = httpx.post(f"{served.url}/v1/completions", json=body).json()
    assert made["choices"][0]["text"] == "The capital of France"
    assert len(made["choices"][0]["prompt_token_ids"]) == 4


@pytest.mark.slow  # the same with echo is not, in test_many_engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_engines", "num_mixed"), [(2, 1000), (4, 300)])
def test_a_burst_splits_evenly_over_several_engines_and_all_of_a_mixture_completes(
    num_engines: int, num_mixed: int
) -> None:
    """Issue 5: the same text from whichever engine; their counts agree with what was sent."""
    with serve("smollm2-135m", "--data-parallel-size", str(num_engines)) as served:
        answers = asyncio.run(burst(served, 20, prompt=PROMPTS[0], max_tokens=8, ignore_eos=True))
        assert [answer.status_code for answer in answers] == [200] * 20
        counts = per_engine(served, "vllm:request_success_total", finished_reason="length")
        assert (len(counts), sum(counts)) == (num_engines, 20)
        assert max(counts) - min(counts) <= 1, counts
        alone = [
            complete(served, rank=rank, prompt=PROMPTS[0], max_tokens=8, temperature=0).json()["choices"][0]["text"]
            for rank in range(num_engines)
        ]
        assert len(set(alone)) == 1
    with serve("smollm2-135m", "--data-parallel-size", str(num_engines)) as served:
        sent = asyncio.run(send_mixed(served, num_mixed, at_once=64, max_tokens=12))
        assert sent.reasons.total() == num_mixed * 6 // 5
        check_counters(served, sent, num_engines)
