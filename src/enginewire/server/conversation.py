"""From a conversation to a prompt, with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from enginewire.errors import InvalidRequestError, ModelError
from enginewire.text.tokenizer import Tokenizer

RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "template", "self"}
)
"""Template variables that are not the client's."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt's text, special tokens included. Takes milliseconds for a long conversation.

    Raises:
        InvalidRequestError: the template refuses the messages, or does not know tools.
        ModelError: the model has no chat template.
    """
    kwargs = dict(template_kwargs or {})
    if clashes := sorted(RESERVED & set(kwargs)):
        raise InvalidRequestError(
            f"chat_template_kwargs must not have {', '.join(clashes)}", parameter="chat_template_kwargs"
        )
    if tokenizer.chat_template is None:
        raise ModelError("this model has no chat template: use /v1/completions, or an instruction-tuned model")
    if tools and not knows_tools(tokenizer):
        raise InvalidRequestError(
            "the chat template of this model does not know tools; leave tools out, or use a model made for them",
            parameter="tools",
        )
    return tokenizer.apply_chat_template(
        [_with_parsed_arguments(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=tools or None,
        **kwargs,
    )


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's template does anything with tools."""
    return "tools" in (tokenizer.chat_template or "")


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give templates the arguments of earlier tool calls as maps: OpenAI has them as text, templates write JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in cast("list[object]", calls)]}


def _parsed_call(call: object) -> object:
    match call:
        case {"function": {"arguments": str(text), **function}, **rest}:
            try:
                return {**rest, "function": {**function, "arguments": json.loads(text)}}
            except (ValueError, RecursionError):
                raise InvalidRequestError(
                    "the arguments of an assistant's tool call must be JSON", parameter="messages"
                ) from None
        case _:
            return call
