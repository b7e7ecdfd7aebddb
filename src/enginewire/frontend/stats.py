"""What happens to requests, in numbers: for metrics, status pages and logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from enginewire.wire.messages import EngineCoreEvent, FinishReason
from enginewire.wire.stats import EngineCoreEventType, SchedulerStats


class StatLogger(Protocol):
    """Is told about every message of the engine and every end of a request; see ``AsyncLLM.stat_logger``.

    It is called between the engine and everybody's tokens: it must be quick and must not raise.
    """

    def record(
        self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take a message's numbers. ``scheduler_stats`` has changes since the last one, so every one counts."""

    def record_unfinished(self, engine_index: int, reason: FinishReason) -> None:
        """Take note of a completion that ends early, by the user's wish (``ABORT``) or a failure (``ERROR``).

        One that no engine was given is not told.
        """


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """A completion that ran to its end. Times are seconds; those inside the engine are ``None`` if it did not say.

    Attributes:
        finish_reason: why it ended.
        num_prompt_tokens: tokens of the prompt.
        num_generation_tokens: tokens of the completion.
        max_tokens: how many it could have had at most.
        e2e_latency: from the request's arrival here to the end.
        queued_time: waiting in the engine for a place.
        prefill_time: from there to the first token.
        decode_time: from there to the last token.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    e2e_latency: float
    queued_time: float | None = None
    prefill_time: float | None = None
    decode_time: float = 0.0


@dataclass(slots=True)
class IterationStats:
    """What one message brought to the requests in it. Completions count one by one, as engines see them.

    Attributes:
        timestamp: when it came, seconds of our monotonic clock.
        engine_timestamp: when the engine sent it, seconds of the engine's monotonic clock.
        num_prompt_tokens: tokens of the prompts whose first token came.
        num_generation_tokens: new tokens.
        time_to_first_tokens: seconds from a request's arrival here to a completion's first token.
        inter_token_latencies: seconds since the same completion's previous token; the mean, if several came at once.
        finished_requests: completions that ended.
    """

    timestamp: float
    engine_timestamp: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)


def engine_times(events: Iterable[EngineCoreEvent], engine_ts: float) -> tuple[float | None, float | None]:
    """Return how long a request was queued in the engine, and how long its prompt took, seconds; ``None``: unknown.

    Measured by the engine's clock alone: on another machine it is not ours.

    Args:
        events: that came with the first token.
        engine_ts: when the engine sent them.
    """
    queued = scheduled = None
    for event in events:
        if event.type == EngineCoreEventType.QUEUED:
            queued = event.timestamp
        elif event.type == EngineCoreEventType.SCHEDULED and scheduled is None:  # a preempted one has more
            scheduled = event.timestamp
    if scheduled is None:
        return None, None
    return None if queued is None else max(0.0, scheduled - queued), max(0.0, engine_ts - scheduled)
