"""``EngineState``: what goes on in one engine, in numbers, as the server counts them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from enginewire.frontend.stats import FinishedRequestStats, IterationStats
from enginewire.server.meters import Histogram, Rate
from enginewire.wire.messages import FinishReason
from enginewire.wire.stats import SchedulerStats

# The buckets are those of vLLM, so that its dashboards fit, and finer ones below them for small models.
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Health(StrEnum):
    """What an engine can do, from best to worst."""

    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    DRAINING = "draining"
    LEAVING = "leaving"
    STALLED = "stalled"
    STARTING = "starting"
    LOST = "lost"
    DEAD = "dead"


SEVERITY: Final = {health: rank for rank, health in enumerate(Health)}


class EngineState(Struct, kw_only=True):
    """An engine as the server knows it. Counters count from the server's start.

    Attributes:
        health: what it can do; see :class:`~enginewire.server.health.EngineMonitor`.
        is_removed: it was taken out. What it counted stays, so that sums do not go back, and goes on if an engine of
            its rank is put in again.
        num_deaths: how often it died or was lost.
        death: why, the last time.
        num_restarts: how often it was started again.
        num_moved, num_lost: completions that went on elsewhere, and that failed, because it was gone.
        num_in_flight: completions that were sent to it and have not ended.
        block_size, num_gpu_blocks: of its KV cache; 0 until it has said.
        num_running, num_waiting, kv_cache_usage: its last report; zeros before the first, and while it is gone.
        reported_at: when it sent that, by its own clock; 0 before the first, and while it is gone. A report goes to one
            of several server processes, and they may be late by different times.
        finished: completions by why they ended.
    """

    index: int
    health: Health = Health.READY
    is_removed: bool = False
    num_deaths: int = 0
    death: str | None = None
    num_restarts: int = 0
    num_moved: int = 0
    num_lost: int = 0
    num_in_flight: int = 0
    block_size: int = 0
    num_gpu_blocks: int = 0

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    reported_at: float = 0.0

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: dict[FinishReason, int]
    prompt_rate: Rate
    generation_rate: Rate

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    prompt_len: Histogram
    generation_len: Histogram
    max_tokens: Histogram

    @classmethod
    def new(cls, index: int, max_model_len: int, now: float) -> EngineState:
        """Make the state of an engine that has done nothing yet."""
        tokens = _token_buckets(max_model_len)
        return cls(
            index=index,
            finished=dict.fromkeys(FinishReason, 0),
            prompt_rate=Rate(now),
            generation_rate=Rate(now),
            time_to_first_token=Histogram(FIRST_TOKEN_S),
            inter_token_latency=Histogram(BETWEEN_TOKENS_S),
            time_per_output_token=Histogram(BETWEEN_TOKENS_S),
            e2e_latency=Histogram(REQUEST_S),
            queue_time=Histogram(REQUEST_S),
            prefill_time=Histogram(REQUEST_S),
            decode_time=Histogram(REQUEST_S),
            prompt_len=Histogram(tokens),
            generation_len=Histogram(tokens),
            max_tokens=Histogram(tokens),
        )

    def record(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """Take in what a message brought."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
            self.reported_at = iteration.engine_timestamp
            self.prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration.num_generation_tokens:
            self.num_generation_tokens += iteration.num_generation_tokens
            self.generation_rate.count(iteration.num_generation_tokens, iteration.timestamp)
            self.inter_token_latency.observe_all(iteration.inter_token_latencies)
        if iteration.num_prompt_tokens:
            self.num_prompt_tokens += iteration.num_prompt_tokens
            self.prompt_rate.count(iteration.num_prompt_tokens, iteration.timestamp)
            self.time_to_first_token.observe_all(iteration.time_to_first_tokens)
        for finished in iteration.finished_requests:
            self._record_finished(finished)

    def is_gone(self) -> None:
        """Forget its last report: whatever it ran has ended, and the next one's clock may be another."""
        self.num_running = self.num_waiting = 0
        self.kv_cache_usage = self.reported_at = 0.0

    def remove(self) -> None:
        """Keep what it counted, and nothing of what it was."""
        self.is_gone()
        self.is_removed, self.health, self.num_in_flight, self.death = True, Health.READY, 0, None

    def add(self, other: EngineState) -> None:
        """Add what another server process knows of the same engine."""
        self.health = max(self.health, other.health, key=SEVERITY.__getitem__)
        self.is_removed &= other.is_removed
        if other.num_deaths > self.num_deaths:
            self.num_deaths, self.death = other.num_deaths, other.death
        self.num_restarts = max(self.num_restarts, other.num_restarts)
        if other.reported_at > self.reported_at:  # a report goes to one of them
            self.num_running, self.num_waiting = other.num_running, other.num_waiting
            self.kv_cache_usage, self.reported_at = other.kv_cache_usage, other.reported_at
        self.block_size = other.block_size or self.block_size
        self.num_gpu_blocks = other.num_gpu_blocks or self.num_gpu_blocks
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.finished.items():
            self.finished[reason] += count
        for name in ADDED:
            getattr(self, name).add(getattr(other, name))

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.finished[request.finish_reason] += 1
        if request.finish_reason is FinishReason.ABORT:  # by the engine, which was paused or sent to sleep
            return
        self.e2e_latency.observe(request.e2e_latency)
        self.decode_time.observe(request.decode_time)
        self.prompt_len.observe(request.num_prompt_tokens)
        self.generation_len.observe(request.num_generation_tokens)
        self.max_tokens.observe(request.max_tokens)
        if request.num_generation_tokens > 1:
            self.time_per_output_token.observe(request.decode_time / (request.num_generation_tokens - 1))
        if request.queued_time is not None:
            self.queue_time.observe(request.queued_time)
        if request.prefill_time is not None:
            self.prefill_time.observe(request.prefill_time)


SUMMED: Final = (
    "num_in_flight",
    "num_moved",
    "num_lost",
    "num_prompt_tokens",
    "num_generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
ADDED: Final = tuple(name for name, kind in EngineState.__annotations__.items() if kind in ("Rate", "Histogram"))


def _token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Make 1, 2, 5, 10, 20 … up to the longest there can be."""
    steps = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= max_model_len)
