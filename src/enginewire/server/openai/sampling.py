"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from enginewire.errors import InvalidRequestError
from enginewire.server.openai.requests import (
    JSONObjectFormat,
    JSONSchemaFormat,
    SamplingFields,
)
from enginewire.wire.sampling import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

SAME_NAME: Final = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "thinking_token_budget", "repetition_detection",
)  # fmt: skip
"""Fields that mean the same in both."""

MAX_BIAS: Final = 100.0
"""OpenAI's bound of ``logit_bias``: such a token is taken always, or never."""

MAX_PATTERN_SIZE: Final = 1024
"""Bound of ``repetition_detection``: every token costs the engine a comparison per size, about 0.1 ms for so many, and
all requests of a step wait for that."""

MAX_STOP_STRINGS: Final = 128
"""Every token's text is searched for each of them, on the event loop."""


MAX_STOP_TOKENS: Final = 1024
"""They are checked, copied and sent to the engine, all on the event loop."""


def sampling_params(
    fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Make the sampling parameters.

    Args:
        fields: the request.
        max_tokens: ``None``: as many as the context holds.
        logprobs: besides the chosen token's.
        prompt_logprobs: the same for the prompt.

    Raises:
        InvalidRequestError: a value is out of range, or two contradict each other.
    """
    _check_costs(fields)
    given: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.logit_bias:
        given["logit_bias"] = {
            token_id: min(MAX_BIAS, max(-MAX_BIAS, bias)) for token_id, bias in fields.logit_bias.items()
        }
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=_constraint(fields),
        extra_args=fields.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY,
        **given,
    )


def check_stream_options(fields: SamplingFields) -> None:
    """Refuse what contradicts ``stream``.

    Raises:
        InvalidRequestError: it does.
    """
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream=true", parameter="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs is not available with stream=true", parameter="prompt_logprobs")


def _check_costs(fields: SamplingFields) -> None:
    """Refuse what would cost everybody else too much: one client must not stop the server."""
    if isinstance(fields.stop, list) and len(fields.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(fields.stop)} strings; at most {MAX_STOP_STRINGS} are searched for", parameter="stop"
        )
    if fields.stop_token_ids is not None and len(fields.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(fields.stop_token_ids)} ids; at most {MAX_STOP_TOKENS} are watched for",
            parameter="stop_token_ids",
        )
    detection = fields.repetition_detection
    if detection is not None and detection.max_pattern_size > MAX_PATTERN_SIZE:
        raise InvalidRequestError(
            f"repetition_detection.max_pattern_size must be at most {MAX_PATTERN_SIZE}, "
            f"got {detection.max_pattern_size}",
            parameter="repetition_detection",
        )


def _constraint(fields: SamplingFields) -> StructuredOutputsParams | None:
    constraint: StructuredOutputsParams | None = None
    match fields.response_format:
        case JSONObjectFormat():
            constraint = StructuredOutputsParams(json_object=True)
        case JSONSchemaFormat(json_schema):
            constraint = StructuredOutputsParams(json=json_schema.schema)
        case _:
            return fields.structured_outputs
    if fields.structured_outputs is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs are two constraints; give one", parameter="response_format"
        )
    return constraint


@contextlib.contextmanager
def errors_name(names: Mapping[str, str]) -> Iterator[None]:
    """Have refusals of a sampling parameter name what the client gave instead of it."""
    try:
        yield
    except InvalidRequestError as exc:
        name = names.get(exc.parameter or "")
        if name is None:
            raise
        raise InvalidRequestError(f"{name}: {exc}", parameter=name) from exc


def names_of_format(fields: SamplingFields) -> dict[str, str]:
    """Return the entry of ``response_format``, if that was given, for :func:`errors_name`."""
    is_constraint = isinstance(fields.response_format, (JSONObjectFormat, JSONSchemaFormat))
    return {"structured_outputs": "response_format"} if is_constraint else {}
