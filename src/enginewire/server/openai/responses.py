"""Bodies of responses and events. A field that is ``UNSET`` is absent; ``None`` is null."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "repetition", "error"]


class PromptTokensDetails(Struct):
    """How many of the prompt's tokens came from a cache."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of all prompts and completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(Struct):
    """How likely a token of the prompt was."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(Struct, kw_only=True):
    """Logprobs of a text, one entry per token.

    Attributes:
        text_offset: where the token's text begins in the choice's text.
        top_logprobs: by the token's text; tokens of the same text share the likelier one's entry.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """A completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The response of ``POST /v1/completions``, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token that could have been chosen. Its bytes are exact where its text cannot be."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The token that was chosen, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Logprobs of an answer, one entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    """Which function, with which arguments: JSON as text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call that the model wants made. ``index`` is there in streams."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(Struct, kw_only=True):
    """The response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class ChatDelta(Struct, kw_only=True):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """What is new of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "enginewire"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(Struct, kw_only=True):
    """The models that are served: one, under all its names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
