"""Log probabilities as users read them: one map from token id to :class:`Logprob` per position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from enginewire.wire.arrays import LogprobsLists, LogprobsTensors

TokenText: TypeAlias = Callable[[int], str]


class Logprob(NamedTuple):
    """How likely a token was.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest token; ``None`` where the engine does not say.
        decoded_token: its text, ``None`` without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""The token of one position first, then the likeliest ones by rank."""


def sampled_logprobs(lists: LogprobsLists, token_text: TokenText | None, *, has_ranks: bool) -> list[TokenLogprobs]:
    """Convert what came with a step's tokens.

    Args:
        lists: of one request.
        token_text: decodes a token for display; ``None``: no texts.
        has_ranks: whether the columns behind the first are the likeliest tokens in order, not ones chosen by the user.
    """
    return _rows(
        lists.logprob_token_ids.tolist(),
        lists.logprobs.tolist(),
        lists.sampled_token_ranks.tolist(),
        token_text,
        has_ranks=has_ranks,
    )


def prompt_logprobs(tensors: LogprobsTensors, token_text: TokenText | None) -> list[TokenLogprobs | None]:
    """Convert a prompt's log probabilities; nothing precedes its first token, which has none."""
    rows = _rows(
        tensors.logprob_token_ids.numpy().tolist(),
        tensors.logprobs.numpy().tolist(),
        tensors.selected_token_ranks.numpy().tolist(),
        token_text,
        has_ranks=True,
    )
    return [None, *rows]


def _rows(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    ranks: Sequence[int],
    token_text: TokenText | None,
    *,
    has_ranks: bool,
) -> list[TokenLogprobs]:
    rows: list[TokenLogprobs] = []
    for row_ids, row_logprobs, first_rank in zip(ids, logprobs, ranks, strict=True):
        row: TokenLogprobs = {}
        for column, (token_id, logprob) in enumerate(zip(row_ids, row_logprobs, strict=True)):
            if token_id not in row:  # the sampled token shows up again among the likeliest
                rank = first_rank if column == 0 else column if has_ranks else None
                row[token_id] = Logprob(logprob, rank, None if token_text is None else token_text(token_id))
        rows.append(row)
    return rows
