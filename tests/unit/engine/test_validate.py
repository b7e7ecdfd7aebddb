"""Whether a request can be run."""

from __future__ import annotations

from typing import Any

import pytest

from enginewire.engine.validate import check_request
from enginewire.errors import InvalidRequestError
from enginewire.wire.arrays import Tensor
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import (
    EngineCoreRequest,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PoolingParams,
)
from enginewire.wire.sampling import SamplingParams, StructuredOutputsParams

NOTHING_SPECIAL = Capabilities()


def check(capabilities: Capabilities = NOTHING_SPECIAL, **fields: Any) -> None:
    prompt = fields.pop("prompt_token_ids", [1, 2, 3])
    if "pooling_params" not in fields:
        fields.setdefault("sampling_params", SamplingParams())
    request = EngineCoreRequest("a", prompt, **fields)
    check_request(request, max_model_len=10, vocab_size=100, capabilities=capabilities)


@pytest.mark.parametrize(
    ("fields", "text", "parameter"),
    [
        ({"sampling_params": None}, "neither sampling_params nor pooling_params", None),
        ({"pooling_params": PoolingParams(), "sampling_params": SamplingParams()}, "both", None),
        ({"pooling_params": PoolingParams(task="embed")}, "'embed' is not supported", None),
        ({"prompt_token_ids": []}, "the prompt is empty", "prompt"),
        ({"prompt_token_ids": None}, "the prompt is empty", "prompt"),
        ({"prompt_token_ids": [1] * 10}, "has 10 tokens; at most 9", "prompt"),
        ({"prompt_token_ids": [1, -1]}, "token id -1", "prompt"),
        ({"prompt_token_ids": [1, 100]}, "token id 100 .* at most 99", "prompt"),
        ({"sampling_params": SamplingParams(n=2)}, "n must be 1", "n"),
        ({"sampling_params": SamplingParams(max_tokens=None)}, "max_tokens must be set", "max_tokens"),
        ({"sampling_params": SamplingParams(logprobs=1)}, "does not support logprobs", "logprobs"),
        (
            {"sampling_params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))},
            "of kind 'regex'",
            "structured_outputs",
        ),
        ({"resumable": True}, "resumable", None),
        ({"lora_request": LoRARequest("name", 1, "/path")}, "LoRA", "lora_request"),
        ({"prompt_embeds": Tensor("float32", (1,), bytes(4))}, "embeddings", "prompt_embeds"),
        (
            {
                "mm_features": [
                    MultiModalFeatureSpec(
                        data=None,
                        modality="image",
                        identifier="x",
                        mm_position=PlaceholderRange(offset=0, length=1),
                    )
                ]
            },
            "multimodal",
            None,
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    fields: dict[str, Any], text: str, parameter: str | None
) -> None:
    """Defect 8: all of this killed the reference's engine, or was not checked at all."""
    with pytest.raises(InvalidRequestError, match=text) as caught:
        check(**fields)
    assert caught.value.parameter == parameter


def test_what_an_engine_is_capable_of_passes() -> None:
    check()
    check(prompt_token_ids=[0, 99] * 4 + [5])
    check(Capabilities(lora=True), lora_request=LoRARequest("name", 1, "/path"))
    check(Capabilities(tasks=("embed",)), pooling_params=PoolingParams(task="embed"))
    check(Capabilities(max_logprobs=5), sampling_params=SamplingParams(logprobs=5))


def test_an_engine_that_only_pools_refuses_to_generate() -> None:
    with pytest.raises(InvalidRequestError, match="serves embed"):
        check(Capabilities(tasks=("embed",)))


def test_without_a_vocabulary_only_negative_ids_are_refused() -> None:
    request = EngineCoreRequest("a", [10**9], sampling_params=SamplingParams())
    check_request(request, max_model_len=10, vocab_size=None, capabilities=Capabilities())
    request.prompt_token_ids = [-5]
    with pytest.raises(InvalidRequestError, match="token id -5"):
        check_request(request, max_model_len=10, vocab_size=None, capabilities=Capabilities())
