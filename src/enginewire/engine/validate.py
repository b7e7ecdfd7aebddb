"""Whether a request can be run: checked on receipt, before it reaches the queue or the model. Pure.

Frontends use the same check, to refuse a request before it is sent.
"""

from __future__ import annotations

from enginewire.errors import InvalidRequestError
from enginewire.wire.capabilities import Capabilities, check_sampling_params
from enginewire.wire.messages import EngineCoreRequest, PoolingParams
from enginewire.wire.sampling import SamplingParams


def check_request(
    request: EngineCoreRequest, *, max_model_len: int, vocab_size: int | None, capabilities: Capabilities
) -> None:
    """Refuse what this engine cannot run.

    Args:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are ``0 … vocab_size - 1``; ``None``: only negative ones are refused.

    Raises:
        InvalidRequestError: says what is wrong and what would be right.
    """
    match request.sampling_params, request.pooling_params:
        case (SamplingParams() as params, None):
            _check_generation(params, capabilities)
        case (None, PoolingParams() as pooling):
            _check_pooling(pooling, capabilities)
        case (None, None):
            raise InvalidRequestError("it has neither sampling_params nor pooling_params")
        case _:
            raise InvalidRequestError("it has both sampling_params and pooling_params; exactly one must be set")
    if request.resumable:
        raise InvalidRequestError("streaming input (resumable) is not supported by this engine")
    if request.mm_features:
        raise InvalidRequestError("multimodal input is not supported by this engine")
    if request.prompt_embeds is not None:
        raise InvalidRequestError("prompt embeddings are not supported by this engine", parameter="prompt_embeds")
    _check_newer(request)
    if request.lora_request is not None and not capabilities.lora:
        raise InvalidRequestError("LoRA adapters are not supported by this engine", parameter="lora_request")
    check_prompt(request.prompt_token_ids, max_model_len=max_model_len, vocab_size=vocab_size)


def _check_newer(request: EngineCoreRequest) -> None:
    """Refuse what only vLLM 0.32's requests can ask for. What only advises (``session_id``) or is only about how often
    something is sent (``stream_interval``) is no reason to refuse; nor are values that ask for nothing.
    """
    params = request.sampling_params
    for name, value in (
        ("watermarking", getattr(params, "watermarking", None)),
        ("prompt_logprob_token_ids", getattr(params, "prompt_logprob_token_ids", None)),
        ("prompt_logprob_start", getattr(params, "prompt_logprob_start", None)),
        ("trace_decode_token_ids", getattr(params, "trace_decode_token_ids", None)),
        ("kv_hints", getattr(request, "kv_hints", None)),
    ):
        if isinstance(value, list) or value:  # an array is a list as it came
            raise InvalidRequestError(f"{name} is not supported by this engine", parameter=name)


def check_prompt(token_ids: list[int] | None, *, max_model_len: int, vocab_size: int | None) -> None:
    """Refuse a prompt that is empty, leaves no room for a token, or holds what is no token. Raises as above."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; it must have at least one token", parameter="prompt")
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; at most {max_model_len - 1} leave room for an answer "
            f"(max_model_len {max_model_len})",
            parameter="prompt",
        )
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        top = "" if vocab_size is None else f" and at most {vocab_size - 1}"
        raise InvalidRequestError(
            f"token id {wrong} is not in the vocabulary; ids are at least 0{top}", parameter="prompt"
        )


def _check_generation(params: SamplingParams, capabilities: Capabilities) -> None:
    if "generate" not in capabilities.tasks:
        raise InvalidRequestError(f"this engine does not generate text; it serves {', '.join(capabilities.tasks)}")
    if params.n != 1:
        raise InvalidRequestError(f"n must be 1 in a request to an engine, got {params.n}", parameter="n")
    if params.max_tokens is None:
        raise InvalidRequestError("max_tokens must be set in a request to an engine", parameter="max_tokens")
    check_sampling_params(params, capabilities)


def _check_pooling(params: PoolingParams, capabilities: Capabilities) -> None:
    if params.task is None or params.task not in capabilities.tasks:
        raise InvalidRequestError(
            f"pooling task {params.task!r} is not supported; this engine serves {', '.join(capabilities.tasks)}"
        )
