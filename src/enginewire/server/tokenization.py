"""``/tokenize`` and ``/detokenize``: the model's tokenizer over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from enginewire.errors import InvalidRequestError
from enginewire.server.body import decode_body
from enginewire.server.context import Context, Endpoint
from enginewire.server.conversation import render
from enginewire.server.http import Reply, Request, json_response
from enginewire.text.tokenizer import Tokenizer


class TokenizeRequest(Struct, kw_only=True):
    """Text to be made into tokens: a prompt, or a conversation.

    Attributes:
        add_special_tokens: what the model expects around a text; default: for prompts, not for conversations, whose
            template writes them.
        return_token_strs: the text of each token, too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeResponse(Struct, kw_only=True):
    """The tokens."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    """Tokens to be made into text."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(Struct):
    """The text, special tokens included."""

    prompt: str


async def tokenize(context: Context, request: Request) -> Reply:
    """Turn text into tokens."""
    wanted = decode_body(TokenizeRequest, request)
    context.check_model(wanted.model)
    tokenizer = context.llm.tokenizer
    tokens = await asyncio.to_thread(_tokens, tokenizer, wanted)
    return json_response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=context.llm.config.max_model_len,
            tokens=tokens,
            token_strs=list(map(tokenizer.token_text, tokens)) if wanted.return_token_strs else UNSET,
        )
    )


async def detokenize(context: Context, request: Request) -> Reply:
    """Turn tokens into text."""
    wanted = decode_body(DetokenizeRequest, request)
    context.check_model(wanted.model)
    tokenizer = context.llm.tokenizer
    for token_id in wanted.tokens:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} does not exist; ids are 0 to {tokenizer.vocab_size - 1}", parameter="tokens"
            )
    text = await asyncio.to_thread(tokenizer.decode, wanted.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))


def _tokens(tokenizer: Tokenizer, wanted: TokenizeRequest) -> list[int]:
    if (wanted.prompt is None) == (wanted.messages is None):
        raise InvalidRequestError("give either prompt or messages", parameter="prompt")
    if wanted.prompt is not None:
        return tokenizer.encode(wanted.prompt, wanted.add_special_tokens is not False)
    text = render(
        tokenizer,
        wanted.messages or [],
        add_generation_prompt=wanted.add_generation_prompt,
        tools=wanted.tools,
        template_kwargs=wanted.chat_template_kwargs,
    )
    return tokenizer.encode(text, bool(wanted.add_special_tokens))


ENDPOINTS = [
    Endpoint(
        "POST", "/tokenize", tokenize, "Turn text into tokens.", request=TokenizeRequest, response=TokenizeResponse
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        "Turn tokens into text.",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
    ),
]
