"""From prompts to requests: what is refused, and what is filled in."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from enginewire.config import EngineConfig
from enginewire.errors import InvalidRequestError, ModelError
from enginewire.frontend.inputs import MAX_COMPLETIONS, InputProcessor, PreparedRequest, is_single_prompt
from enginewire.text.tokenizer import ByteTokenizer
from enginewire.wire.capabilities import EVERYTHING, Capabilities
from enginewire.wire.messages import LoRARequest
from enginewire.wire.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

EOS, IM_END = 257, 259
MESSAGES = [{"role": "user", "content": "hi"}]


def make_inputs(**settings: Any) -> InputProcessor:
    return InputProcessor(EngineConfig.create("echo", **({"max_model_len": 100, "vocab_size": 260} | settings)))


def prepare(prompt: Any, params: SamplingParams | None = None, **settings: Any) -> PreparedRequest:
    return make_inputs(**settings).prepare(prompt, params, request_id="mine")


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ("x" * 100, "the prompt has 100 tokens; at most 99"),
        ([1] * 101, "the prompt has 101 tokens; at most 99"),
        ([5, 260], "token id 260 is not in the vocabulary; ids are at least 0 and at most 259"),
        ([5, -1], "token id -1 is not in the vocabulary"),
        ([10**30], "is not in the vocabulary"),
        ([1, True], "list of integers"),
        ([1, 2.0], "got one of float, int"),
        ([1, "a"], "list of integers"),
        (b"bytes", "got bytes"),
        (7, "must be text, a list of token ids, .* got int"),
        (None, "got NoneType"),
        ({}, "needs one of 'prompt' and 'prompt_token_ids'"),
        ({"text": "x"}, "unknown key text; known: cache_salt, prompt, prompt_token_ids"),
        ({"prompt": 3}, "must have a string as 'prompt', got int"),
        ({"prompt": "x", "cache_salt": ""}, "non-empty string as 'cache_salt'"),
        ([{"role": "user", "content": 3}], "messages\\[0\\].content must be text"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(prompt: Any, text: str) -> None:
    """Errors that users will meet: empty prompt, prompt too long, token id out of range."""
    with pytest.raises(InvalidRequestError, match=text):
        prepare(prompt)


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"temperature": 5.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": MAX_COMPLETIONS + 1}, "n"),
        ({"stop": ["a"], "detokenize": False}, "stop"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, 260]}, "allowed_token_ids"),
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"output_kind": 3}, "output_kind"),
        ({"min_tokens": 200, "max_tokens": None}, "min_tokens"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_even_if_it_was_set_later(changes: dict[str, Any], parameter: str) -> None:
    """Errors that users will meet: temperature 5 or NaN, max_tokens 0."""
    params = SamplingParams()
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        prepare("x", params)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        (SamplingParams(logprobs=3), "logprobs"),
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
        (SamplingParams(presence_penalty=1.0), "presence_penalty"),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "structured_outputs"),
        (SamplingParams(bad_words=["a"]), "bad_words"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_it_is_sent(params: SamplingParams, parameter: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not support") as caught:
        prepare("x", params, capabilities=Capabilities())
    assert caught.value.parameter == parameter
    assert prepare("x", params, capabilities=EVERYTHING)


def test_an_adapter_is_refused_by_an_engine_without_adapters() -> None:
    lora = LoRARequest("a", 1, "/a")
    with pytest.raises(InvalidRequestError, match="lora_request"):
        make_inputs(capabilities=Capabilities()).prepare("x", None, request_id="1", lora_request=lora)
    assert make_inputs().prepare("x", None, request_id="1", lora_request=lora).requests[0].lora_request == lora


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        make_inputs().prepare("x", {"temperature": 0}, request_id="1")  # type: ignore[arg-type]


# Kinds of prompts.


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("hü", "hü", [104, 195, 188]),
        ([1, 2], None, [1, 2]),
        ((1, 2), None, [1, 2]),
        (np.array([1, 2], dtype=np.int32), None, [1, 2]),
        ([np.int64(3)], None, [3]),
        ({"prompt": "a"}, "a", [97]),
        ({"prompt_token_ids": [5]}, None, [5]),
        ({"prompt_token_ids": [5], "prompt": "five"}, "five", [5]),
    ],
)
def test_prompts_come_as_text_tokens_or_maps(prompt: Any, text: str | None, token_ids: list[int]) -> None:
    prepared = prepare(prompt)
    assert (prepared.prompt, prepared.prompt_token_ids) == (text, token_ids)
    assert [type(token_id) for token_id in prepared.prompt_token_ids] == [int] * len(token_ids)
    assert prepared.requests[0].prompt_token_ids == token_ids


def test_chat_messages_are_rendered_with_the_models_template() -> None:
    prepared = prepare(MESSAGES)
    assert prepared.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.prompt_token_ids == ByteTokenizer().encode(prepared.prompt)


def test_a_prompt_map_may_carry_a_cache_salt() -> None:
    assert prepare({"prompt": "a", "cache_salt": "s"}).requests[0].cache_salt == "s"


@pytest.mark.parametrize(
    ("prompts", "is_single"),
    [
        ("a", True),
        ([1, 2], True),
        ({"prompt": "a"}, True),
        (MESSAGES, True),
        (["a"], False),
        ([[1, 2]], False),
        ([{"prompt": "a"}], False),
        ([MESSAGES, MESSAGES], False),
        ([], False),
        (("a", [1]), False),
        (np.array([1, 2]), True),
        ([np.array([1, 2]), [3]], False),
        (np.array([[1, 2], [3, 4]]), False),
        (None, True),
        (5, True),
        (iter(["a"]), True),
    ],
)
def test_one_prompt_is_told_from_a_list_of_prompts(prompts: Any, is_single: bool) -> None:
    assert is_single_prompt(prompts) is is_single


# What is filled in.


def test_every_request_gets_an_id_of_its_own_and_keeps_the_users() -> None:
    """client-layer, section 11: Duplicate ids; protocol D.1 #16."""
    inputs = make_inputs()
    requests = [inputs.prepare("x", None, request_id="mine").requests[0] for _ in range(2)]
    assert requests[0].request_id != requests[1].request_id
    for request in requests:
        prefix, _, suffix = request.request_id.rpartition("-")
        assert prefix == "mine"
        assert len(bytes.fromhex(suffix)) == 4
        assert request.external_req_id == "mine"


def test_several_completions_are_requests_with_seeds_in_a_row() -> None:
    prepared = prepare("x", SamplingParams(n=3, seed=2**63 - 2))
    ids = [request.request_id.split("_") for request in prepared.requests]
    assert [number for number, _ in ids] == ["0", "1", "2"]
    assert len({name for _, name in ids}) == 1
    assert [request.sampling_params.seed for request in prepared.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [request.sampling_params.n for request in prepared.requests] == [1, 1, 1]
    assert prepared.params.n == 3


def test_missing_max_tokens_become_what_the_context_holds() -> None:
    prepared = prepare("x" * 30, SamplingParams(max_tokens=None))
    assert prepared.params.max_tokens == prepared.max_output_len == 70


def test_more_tokens_than_the_context_holds_are_left_to_the_engine_to_cap() -> None:
    prepared = prepare("x" * 30, SamplingParams(max_tokens=1000))
    assert (prepared.params.max_tokens, prepared.max_output_len) == (1000, 70)


def test_without_a_reported_context_max_tokens_must_be_given() -> None:
    with pytest.raises(InvalidRequestError, match="did not report its max_model_len"):
        prepare("x", SamplingParams(max_tokens=None), max_model_len=None)
    assert prepare("x", SamplingParams(max_tokens=9), max_model_len=None).max_output_len == 9


def test_end_tokens_are_filled_in() -> None:
    params = prepare("x", SamplingParams(stop_token_ids=[7])).params
    assert (params.eos_token_id, params.stop_token_ids) == (EOS, [7, IM_END])
    assert params.all_stop_token_ids == {7, EOS, IM_END}


def test_ignored_end_tokens_are_not_filled_in() -> None:
    params = prepare("x", SamplingParams(ignore_eos=True, stop_token_ids=[7])).params
    assert (params.eos_token_id, params.stop_token_ids, params.all_stop_token_ids) == (None, [7], {7})


def test_bad_words_are_spelled_at_the_start_and_behind_a_space() -> None:
    params = prepare("x", SamplingParams(bad_words=["no"])).params
    assert params.bad_words_token_ids == [[110, 111], [32, 110, 111]]


def test_a_kind_of_output_may_be_a_bare_number() -> None:
    assert prepare("x", SamplingParams(output_kind=1)).params.output_kind is RequestOutputKind.DELTA  # type: ignore[arg-type]


def test_the_users_parameters_stay_as_they_are() -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=None, stop_token_ids=[7])
    before = msgspec.json.encode(params)
    prepare("x", params)
    assert msgspec.json.encode(params) == before


# The tokenizer.


def without_tokenizer() -> InputProcessor:
    return InputProcessor(EngineConfig.create("no-such-model", max_model_len=100))


def test_token_ids_in_and_out_need_no_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    inputs = without_tokenizer()
    silent = SamplingParams(detokenize=False, ignore_eos=True)
    assert not inputs.is_slow([1], silent)
    assert inputs.prepare([1], silent, request_id="1").tokenizer is None
    assert not caplog.records


def test_without_a_tokenizer_requests_run_without_eos_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs = without_tokenizer()
    for _ in range(2):
        prepared = inputs.prepare([1], SamplingParams(detokenize=False), request_id="1")
        assert prepared.params.eos_token_id is None
    assert ["do not stop at EOS" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("prompt", ["text", [1]])
def test_text_without_a_tokenizer_is_an_error_that_names_the_model(prompt: Any) -> None:
    with pytest.raises(ModelError, match="unknown model 'no-such-model'"):
        without_tokenizer().prepare(prompt, None, request_id="1")


def test_a_tokenizer_may_be_given() -> None:
    config = EngineConfig.create("no-such-model", max_model_len=100)
    for tokenizer in (ByteTokenizer(), "echo"):
        assert InputProcessor(config, tokenizer).prepare("a", None, request_id="1").prompt_token_ids == [97]


def test_only_what_takes_long_is_called_slow() -> None:
    inputs = make_inputs()
    assert inputs.is_slow("x", None)  # has to load the tokenizer
    assert inputs.tokenizer
    assert not inputs.is_slow("x", None)
    assert not inputs.is_slow([1], None)
    assert inputs.is_slow("x" * 10_000, None)
    assert inputs.is_slow({"prompt": "x" * 10_000}, None)
    assert inputs.is_slow(MESSAGES, None)
