"""The start-up messages and what engines say about themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from enginewire.errors import DecodeError, InvalidRequestError
from enginewire.wire.capabilities import EVERYTHING, Capabilities, EngineInfo, check_sampling_params
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder
from enginewire.wire.handshake import (
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    HandshakeMessage,
)
from enginewire.wire.profile import V0_25
from enginewire.wire.sampling import SamplingParams

READY: dict[str, Any] = {
    "max_model_len": 1024, "num_gpu_blocks": 10, "block_size": 16, "dtype": "float32", "vllm_version": "0.25.1",
}  # fmt: skip


def decode(message_type: type, value: object) -> Any:
    return MsgpackDecoder(message_type).decode([msgspec.msgpack.encode(value)])


def test_hello_has_no_hash_and_ready_may_have_one() -> None:
    """Protocol B.1, B.5."""
    hello = HandshakeMessage(status="HELLO", local=True, headless=False)
    assert msgspec.to_builtins(hello) == {"status": "HELLO", "local": True, "headless": False}
    ready = HandshakeMessage(status="READY", local=True, headless=False, parallel_config_hash="ab")
    assert msgspec.to_builtins(ready)["parallel_config_hash"] == "ab"


@pytest.mark.parametrize(
    "value",
    [{}, {"status": "BYE", "local": True, "headless": True}, {"status": "HELLO", "local": 1, "headless": True},
     {"status": "HELLO", "local": True}, ["HELLO", True, True], b"HELLO"],
    ids=repr,
)  # fmt: skip
def test_what_is_no_greeting_is_refused(value: object) -> None:
    with pytest.raises(DecodeError, match="HandshakeMessage"):
        decode(HandshakeMessage, value)


def test_init_always_has_all_five_address_keys() -> None:
    """Protocol B.2."""
    init = EngineHandshakeMetadata(addresses=EngineZmqAddresses(inputs=["a"], outputs=["b"]), parallel_config={})
    assert msgspec.to_builtins(init) == {
        "addresses": {
            "inputs": ["a"], "outputs": ["b"], "coordinator_input": None, "coordinator_output": None,
            "frontend_stats_publish_address": None,
        },
        "parallel_config": {},
    }  # fmt: skip


def test_a_ready_response_may_lack_what_has_a_default_and_have_what_is_unknown() -> None:
    """Protocol B.4, M.2."""
    ready = decode(EngineCoreReadyResponse, READY | {"tensor_parallel_size": 1, "instance_id": "x"})
    assert (ready.world_size, ready.data_parallel_size, ready.dp_stats_address) == (1, 1, None)
    for name in READY:
        with pytest.raises(DecodeError, match=name):
            decode(EngineCoreReadyResponse, {key: READY[key] for key in READY if key != name})


def test_a_ready_response_of_ours_carries_capabilities_and_one_of_vllm_none() -> None:
    info = EngineInfo(version="1", executor="E", vocab_size=9, capabilities=Capabilities(min_p=True, tasks=("embed",)))
    ours = EngineCoreReadyResponse(**READY, enginewire=info)
    assert MsgpackDecoder(EngineCoreReadyResponse).decode(MsgpackEncoder().encode(ours)) == ours
    theirs = decode(EngineCoreReadyResponse, READY)
    assert theirs.enginewire is msgspec.UNSET
    assert "enginewire" not in msgspec.to_builtins(theirs)


def test_the_profile_names_the_layout_tables_of_one_version() -> None:
    assert V0_25.vllm_version == "0.25.1"
    assert issubclass(V0_25.received_outputs, V0_25.outputs)
    assert V0_25.ready is EngineCoreReadyResponse


USES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("logprobs", {"logprobs": 0}, {"max_logprobs": 0}),
    ("logprobs", {"logprobs": 5}, {"max_logprobs": 5}),
    ("logprobs", {"logprobs": -1}, {"max_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 0}, {"max_prompt_logprobs": 0}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}, {"structured_outputs": ("json", "regex")}),
    ("presence_penalty", {"presence_penalty": 0.5}, {"penalties": True}),
    ("frequency_penalty", {"frequency_penalty": -0.5}, {"penalties": True}),
    ("repetition_penalty", {"repetition_penalty": 1.1}, {"penalties": True}),
    ("min_p", {"min_p": 0.1}, {"min_p": True}),
    ("logit_bias", {"logit_bias": {1: 1.0}}, {"logit_bias": True}),
    ("allowed_token_ids", {"allowed_token_ids": [1]}, {"allowed_token_ids": True}),
    ("bad_words", {"bad_words": ["x"]}, {"bad_words": True}),
    ("bad_words", {"bad_words_token_ids": [[1]]}, {"bad_words": True}),
    ("logprob_token_ids", {"logprob_token_ids": [1]}, {"logprob_token_ids": True}),
]


@pytest.mark.parametrize(("parameter", "use", "capability"), USES, ids=repr)
def test_a_parameter_needs_its_capability(parameter: str, use: dict[str, Any], capability: dict[str, Any]) -> None:
    params = SamplingParams(**use)
    with pytest.raises(InvalidRequestError, match="this engine does not support") as caught:
        check_sampling_params(params, Capabilities())
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)
    check_sampling_params(params, Capabilities(**capability))
    check_sampling_params(params, EVERYTHING)


def test_what_every_engine_can_do_needs_no_capability() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.5, top_k=5, seed=1, stop="x", max_tokens=3, logit_bias={})
    check_sampling_params(params, Capabilities())


@pytest.mark.parametrize(
    ("asked", "limit", "text"),
    [(6, 5, "logprobs=6; it offers at most 5"), (-1, 5, "logprobs=-1; it offers at most 5"),
     (1, 0, "logprobs=1; it offers the sampled token's only"), (0, None, "does not support logprobs$")],
)  # fmt: skip
def test_too_many_logprobs_are_refused_with_the_bound(asked: int, limit: int | None, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        check_sampling_params(SamplingParams(logprobs=asked), Capabilities(max_logprobs=limit))


def test_a_refused_constraint_names_those_on_offer() -> None:
    params = SamplingParams(structured_outputs={"grammar": "root ::= x"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="structured_outputs of kind 'grammar'; it offers json, regex"):
        check_sampling_params(params, Capabilities(structured_outputs=("json", "regex")))
    with pytest.raises(InvalidRequestError, match="it offers none"):
        check_sampling_params(params, Capabilities())
