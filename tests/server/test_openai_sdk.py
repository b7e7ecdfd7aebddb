"""The official client, as it comes."""

from __future__ import annotations

import json

import openai
import pytest

PROMPT = "abc"


def test_completion(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="echo", prompt=PROMPT, max_tokens=7)
    assert completion.object == "text_completion"
    assert completion.choices[0].text == "abcabca"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        3,
        7,
        10,
    )


def test_completion_stops_at_a_string_and_says_which(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="echo", prompt=PROMPT, max_tokens=50, stop=["ca"])
    assert completion.choices[0].text == "ab"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].stop_reason == "ca"  # type: ignore[attr-defined]


def test_default_of_completions_is_sixteen_tokens(sdk: openai.OpenAI) -> None:
    assert sdk.completions.create(model="echo", prompt="x").choices[0].text == "x" * 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "xyz"], ["abab", "xyzx"]),
        ([97, 98], ["abab"]),
        ([[97, 98], [120]], ["abab", "xxxx"]),
    ],
)
def test_every_form_of_prompt(sdk: openai.OpenAI, prompt: list[int], texts: list[str]) -> None:
    completion = sdk.completions.create(model="echo", prompt=prompt, max_tokens=4)
    assert [choice.text for choice in completion.choices] == texts
    assert [choice.index for choice in completion.choices] == list(range(len(texts)))
    streamed = [""] * len(texts)
    for chunk in sdk.completions.create(model="echo", prompt=prompt, max_tokens=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_n_completions_of_each_of_several_prompts_are_numbered_through(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="echo", prompt=["ab", "x"], max_tokens=2, n=2, extra_body={"best_of": 2})
    assert [(choice.index, choice.text) for choice in completion.choices] == [
        (0, "ab"),
        (1, "ab"),
        (2, "xx"),
        (3, "xx"),
    ]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3
    assert completion.usage.completion_tokens == 8


def test_stream_of_completions_ends_with_usage_when_asked(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.completions.create(
            model="echo", prompt=PROMPT, max_tokens=7, stream=True, stream_options={"include_usage": True}
        )
    )
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == "abcabca"
    assert [chunk.choices[0].finish_reason for chunk in texts][-1] == "length"
    assert all(chunk.usage is None for chunk in texts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_of_completions(sdk: openai.OpenAI) -> None:
    logprobs = sdk.completions.create(model="echo", prompt=PROMPT, max_tokens=3, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == pytest.approx([-0.6931] * 3, abs=1e-3)
    assert logprobs.top_logprobs is not None
    assert list(logprobs.top_logprobs[0]) == ["a", "`"]


def test_streamed_logprobs_are_those_of_a_plain_response(sdk: openai.OpenAI) -> None:
    arguments = {"model": "echo", "prompt": "añb", "max_tokens": 9, "logprobs": 1, "echo": True}
    plain = sdk.completions.create(**arguments).choices[0]
    text, tokens, offsets, values = "", [], [], []
    for chunk in sdk.completions.create(**arguments, stream=True):
        choice = chunk.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
            values += choice.logprobs.token_logprobs
    assert plain.logprobs is not None
    assert (text, tokens, offsets, values) == (
        plain.text,
        plain.logprobs.tokens,
        plain.logprobs.text_offset,
        plain.logprobs.token_logprobs,
    )
    assert values[0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(sdk: openai.OpenAI, stream: bool) -> None:
    made = sdk.completions.create(model="echo", prompt=[97, 98], max_tokens=3, echo=True, n=2, stream=stream)
    texts = ["", ""]
    for chunk in made if stream else [made]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["ababa"] * 2


def test_echo_without_tokens_scores_the_prompt(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="echo", prompt="abcd", max_tokens=0, echo=True, logprobs=1)
    choice = completion.choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0


def chat(sdk: openai.OpenAI, text: str = "Hi", **arguments: object) -> openai.types.chat.ChatCompletion:
    return sdk.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}], **arguments)  # type: ignore[call-overload, no-any-return]


ANSWER = "user\nHi"
"""The echo of the conversation, up to its end-of-turn token."""


def test_chat(sdk: openai.OpenAI) -> None:
    completion = chat(sdk)
    message = completion.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", ANSWER, None)
    assert completion.choices[0].finish_reason == "stop"
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")


def test_chat_accepts_both_names_of_max_tokens(sdk: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        choice = chat(sdk, **{name: 3}).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("us", "length")  # the first token is special


def test_chat_accepts_content_in_parts_and_nulls(sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        temperature=None,
        stop=None,
        n=None,
        extra_body={"logit_bias": {}, "user": "someone"},
    )
    assert completion.choices[0].message.content == ANSWER


def test_chat_stream_says_role_then_text_then_end_then_usage(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chunks = list(
        sdk.chat.completions.create(
            model="echo",
            messages=messages,  # type: ignore[arg-type]
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *body, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    for index in range(2):
        choices = [choice for chunk in body for choice in chunk.choices if choice.index == index]
        first, *middle, end = choices
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in middle) == ANSWER
        assert all(choice.finish_reason is None for choice in [first, *middle])
        assert (end.delta.content, end.finish_reason) == (None, "stop")


def test_chat_logprobs_have_exact_bytes(sdk: openai.OpenAI) -> None:
    completion = chat(sdk, "ñ", logprobs=True, top_logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert b"user\n\xc3\xb1" in data
    assert {len(token.top_logprobs) for token in logprobs.content} == {2}
    first = logprobs.content[0]
    assert first.top_logprobs[0].token == first.token


def test_chat_logprobs_without_top_have_the_chosen_tokens_only(sdk: openai.OpenAI) -> None:
    logprobs = chat(sdk, logprobs=True, max_tokens=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.top_logprobs for token in logprobs.content] == [[], []]


def test_token_ids_come_with_the_text_when_asked(sdk: openai.OpenAI) -> None:
    body = {"return_token_ids": True}
    plain = sdk.completions.create(model="echo", prompt="ab", max_tokens=3, extra_body=body).choices[0]
    assert plain.prompt_token_ids == [97, 98]  # type: ignore[attr-defined]
    assert plain.token_ids == [97, 98, 97]  # type: ignore[attr-defined]
    ids: list[int] = []
    for chunk in sdk.completions.create(model="echo", prompt="ab", max_tokens=3, stream=True, extra_body=body):
        ids += chunk.choices[0].token_ids  # type: ignore[attr-defined]
    assert ids == [97, 98, 97]
    answer = chat(sdk, max_tokens=2, extra_body=body)
    assert len(answer.choices[0].token_ids) == 2  # type: ignore[attr-defined]
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens  # type: ignore[attr-defined, union-attr]


def test_sampling_extensions_are_honoured(sdk: openai.OpenAI) -> None:
    def text(**body: object) -> str:
        return sdk.completions.create(model="echo", prompt="abc", max_tokens=6, extra_body=body).choices[0].text

    assert text(stop_token_ids=[99]) == "ab"
    assert text(stop="c", include_stop_str_in_output=True) == "abc"
    assert text(stop_token_ids=[99], min_tokens=4) == "abcab"
    assert text(top_k=5, min_p=0.1, repetition_penalty=1.1, ignore_eos=True, priority=3) == "abcabc"
    assert sdk.completions.create(model="echo", prompt=[97, 258], max_tokens=2).choices[0].text == "a"
    shown = sdk.completions.create(
        model="echo", prompt=[97, 258], max_tokens=2, extra_body={"skip_special_tokens": False}
    )
    assert shown.choices[0].text == "a<|im_start|>"


def test_prompt_logprobs_are_by_token_id(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="echo", prompt="ab", max_tokens=1, extra_body={"prompt_logprobs": 0})
    first, second = completion.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    assert second["98"]["decoded_token"] == "b"
    assert second["98"]["rank"] == 1


def test_request_ids_come_back(sdk: openai.OpenAI) -> None:
    raw = sdk.completions.with_raw_response.create(
        model="echo", prompt="a", extra_headers={"X-Request-Id": "mine-1"}, extra_body={"request_id": "other"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "cmpl-other"
    assert (
        sdk.completions.create(model="echo", prompt="a", extra_headers={"X-Request-Id": "mine-2"}).id == "cmpl-mine-2"
    )


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["echo"]
    assert sdk.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("some/other")


def test_errors_are_of_the_clients_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="gpt-none", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(sdk, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as stream:
        next(iter(chat(sdk, temperature=9, stream=True)))
    assert stream.value.param == "temperature"


def test_streams_and_plain_responses_say_the_same_to_several_prompts(sdk: openai.OpenAI) -> None:
    prompts = [chr(97 + i) * (i + 1) for i in range(20)]
    plain = sdk.completions.create(model="echo", prompt=prompts, max_tokens=30, n=2)
    texts = [""] * 40
    reasons: dict[int, str] = {}
    for chunk in sdk.completions.create(model="echo", prompt=prompts, max_tokens=30, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in plain.choices]
    assert reasons == dict.fromkeys(range(40), "length")


def test_what_is_streamed_is_strict_json(sdk: openai.OpenAI) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    raw = sdk.completions.with_raw_response.create(model="echo", prompt="ab", max_tokens=4, logprobs=1, stream=True)
    for line in raw.http_response.iter_lines():
        if line.startswith("data: {"):
            json.loads(line.removeprefix("data: "), parse_constant=refuse)
