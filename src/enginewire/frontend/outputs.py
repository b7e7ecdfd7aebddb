"""What a user gets back: ``RequestOutput`` with a ``CompletionOutput`` for each completion of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from enginewire.errors import EngineClientError
from enginewire.frontend.logprobs import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the ``n`` completions.
        text: the text, without the stop string or stop token unless asked for; empty with ``detokenize=False``.
        token_ids: the tokens, with the one that ended the completion. If a stop string did, they end with the token
            that completed it.
        cumulative_logprob: sum over all tokens so far, ``None`` unless ``logprobs`` were asked for.
        logprobs: one map per token of ``token_ids``, ``None`` unless asked for.
        finish_reason: ``stop``, ``length``, ``abort``, ``error``, ``repetition``; ``None`` while it runs.
        stop_reason: the stop string or the stop token's id; ``None`` for EOS and for other reasons.
        engine_index: which of several engines made it; ``None``: none has it yet.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    engine_index: int | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


class RequestMetrics(NamedTuple):
    """When things happened, as this process saw it. ``…_ts`` are ``time.monotonic()`` seconds.

    Attributes:
        arrival_time: wall-clock seconds at which the request came.
        arrival_ts: the same moment.
        first_token_ts: the first token's arrival, ``None`` before it.
        last_token_ts: the latest token's arrival.
        num_generation_tokens: tokens so far, of all completions.
    """

    arrival_time: float
    arrival_ts: float
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_ts

    @property
    def tokens_per_second(self) -> float | None:
        """Rate behind the first token; ``None`` before the second."""
        if self.first_token_ts is None or self.last_token_ts is None or self.last_token_ts <= self.first_token_ts:
            return None
        return (self.num_generation_tokens - 1) / (self.last_token_ts - self.first_token_ts)


@dataclass(slots=True)
class RequestOutput:
    """What there is of a request: all of it so far, or what is new, as its ``output_kind`` says.

    Attributes:
        request_id: the user's id.
        prompt: the prompt's text, ``None`` if it was given as tokens.
        prompt_token_ids: its tokens.
        outputs: the completions by index; with DELTA only those with something new.
        finished: whether this is the last output of the request.
        prompt_logprobs: one map per prompt token (``None`` for the first), ``None`` unless asked for. With DELTA they
            come once.
        num_cached_tokens: prompt tokens that the engine did not have to compute; ``None`` before the first token.
        metrics: timings.
        kv_transfer_params: what the engine says about transferred KV blocks.
        error: why the request failed; only in lists of ``LLM.generate(…, on_error="return")``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None  # as the engine's connector makes it
    error: EngineClientError | None = None
