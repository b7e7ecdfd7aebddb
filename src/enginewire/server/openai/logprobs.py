"""Log probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from enginewire.frontend.logprobs import Logprob, TokenLogprobs
from enginewire.server.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from enginewire.text.tokenizer import Tokenizer

FLOOR: Final = -9999.0
"""What stands for minus infinity: JSON has no such number."""


def finite(logprob: float) -> float:
    """Return a number that JSON has; NaN compares false and becomes the floor too."""
    return logprob if FLOOR <= logprob < 1 else FLOOR


def completion_logprobs(
    rows: Sequence[TokenLogprobs | None], num_top: int, offset: int = 0, first_text: str = ""
) -> CompletionLogprobs:
    """Make the entry of a ``/v1/completions`` choice.

    Args:
        rows: one per token, the chosen token first; ``None`` for a prompt's first token.
        num_top: likeliest tokens besides the chosen one.
        offset: where the first token's text begins.
        first_text: the text of a prompt's first token.
    """
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for row in rows:
        made.text_offset.append(offset)
        if row is None:
            made.token_logprobs.append(None)
            made.tokens.append(first_text)
            made.top_logprobs.append(None)
            offset += len(first_text)
            continue
        chosen = next(iter(row.values()))
        text = _text(chosen)
        made.token_logprobs.append(finite(chosen.logprob))
        made.tokens.append(text)
        top: dict[str, float] = {}
        for candidate in islice(row.values(), num_top + 1):
            top.setdefault(_text(candidate), finite(candidate.logprob))
        made.top_logprobs.append(top)
        offset += len(text)
    return made


def chat_logprobs(rows: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """Make the entry of a ``/v1/chat/completions`` choice: one of ``rows`` per token, the chosen token first."""
    content: list[TokenLogprob] = []
    for row in rows:
        (token_id, chosen), *_ = row.items()
        # The chosen token is first, wherever it ranks; the likeliest are the rest, and it if it is one of them.
        ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
        top = [TopLogprob(_text(c), finite(c.logprob), list(tokenizer.token_bytes(i))) for i, c in ranked[:num_top]]
        content.append(TokenLogprob(_text(chosen), finite(chosen.logprob), list(tokenizer.token_bytes(token_id)), top))
    return ChatLogprobs(content)


def prompt_logprobs(rows: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """Make vLLM's ``prompt_logprobs``: by token id."""
    if rows is None:
        return None
    return [None if row is None else {token_id: _prompt_logprob(c) for token_id, c in row.items()} for row in rows]


def _prompt_logprob(candidate: Logprob) -> PromptLogprob:
    return PromptLogprob(finite(candidate.logprob), candidate.rank, candidate.decoded_token)


def _text(candidate: Logprob) -> str:
    return candidate.decoded_token or ""
