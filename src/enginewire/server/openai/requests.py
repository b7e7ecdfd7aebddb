"""Bodies of requests: OpenAI's fields, and those that vLLM adds. ``None`` is "not given", as some clients send null."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from enginewire.wire.sampling import RepetitionDetectionParams, StructuredOutputsParams


class StreamOptions(Struct, kw_only=True):
    """What a stream has besides text.

    Attributes:
        include_usage: a last event with the usage.
        continuous_usage_stats: the usage so far in every event.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """Any text."""


class JSONObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Some JSON object."""


class JSONSchema(Struct, kw_only=True):
    """A schema with a name. It is always followed strictly."""

    name: str = "schema"
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JSONSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JSONSchema


ResponseFormat: TypeAlias = TextFormat | JSONObjectFormat | JSONSchemaFormat


class SamplingFields(Struct, kw_only=True):
    """What both kinds of completions have in common. Ranges are ``SamplingParams``'s.

    Attributes:
        request_id: makes the response's id; default: the header X-Request-Id, or a random one.
        priority: lower runs earlier, where the engine's policy is by priority.
        cache_salt: prompts share cached prefixes only with those of the same salt.
        return_token_ids: the token ids of prompt and text, too.
        vllm_xargs: handed to the engine as ``extra_args``.
    """

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    vllm_xargs: dict[str, Any] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    return_token_ids: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of ``POST /v1/completions``.

    Attributes:
        prompt: text or token ids, or a list of those.
        echo: the text begins with the prompt; with ``max_tokens`` 0 it is nothing else.
        logprobs: logprobs of this many likeliest tokens besides the chosen one.
        add_special_tokens: what the model expects around a text, such as BOS.
        best_of: refused unless it is ``n``.
        suffix: refused unless empty.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, tag_field="type", tag="function"):
    """A tool; functions are the only kind."""

    function: FunctionDefinition


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body of ``POST /v1/chat/completions``.

    Attributes:
        messages: maps with ``role`` and ``content``: text, or a list of text parts.
        max_completion_tokens: newer name of ``max_tokens``; default: as many as the context holds.
        logprobs: whether the chosen tokens' logprobs are returned.
        top_logprobs: and those of this many likeliest tokens.
        tools: what the model may call, if its chat template knows tools.
        tool_choice: ``auto`` or ``none``; others are refused.
        add_generation_prompt: open the assistant's turn at the end.
        chat_template_kwargs: further variables for the chat template.
        functions: refused; use ``tools``.
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
