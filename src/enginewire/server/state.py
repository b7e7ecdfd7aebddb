"""``ServerState``: what goes on in the server and its engines, in numbers.

The one source of ``GET /state``, of the page at ``/``, and of ``GET /metrics``. Nothing here waits, locks or knows
HTTP; everything is called on the server's event loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from enginewire._version import __version__
from enginewire.config import EngineConfig
from enginewire.errors import EngineDeath
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
    """What an engine can do."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    DRAINING = "draining"
    DEAD = "dead"


class EngineState:
    """An engine as the server knows it. Counters count from the server's start.

    Attributes:
        health: set by whoever changes it.
        death: why it died last.
        scheduler: its last report; zeros before the first, and once it is dead.
        finished: completions by why they ended.
    """

    def __init__(self, index: int, max_model_len: int, now: float) -> None:
        self.index = index
        self.health = Health.READY
        self.num_deaths = 0
        self.death: EngineDeath | None = None
        self.scheduler = SchedulerStats()

        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.prompt_rate = Rate(now)
        self.generation_rate = Rate(now)
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.finished = dict.fromkeys(FinishReason, 0)

        tokens = _token_buckets(max_model_len)
        self.time_to_first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token_latency = Histogram(BETWEEN_TOKENS_S)
        self.time_per_output_token = Histogram(BETWEEN_TOKENS_S)
        self.e2e_latency = Histogram(REQUEST_S)
        self.queue_time = Histogram(REQUEST_S)
        self.prefill_time = Histogram(REQUEST_S)
        self.decode_time = Histogram(REQUEST_S)
        self.prompt_len = Histogram(tokens)
        self.generation_len = Histogram(tokens)
        self.max_tokens = Histogram(tokens)

    def record(self, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        """Take in what a message brought."""
        if scheduler_stats is not None:
            self.scheduler = scheduler_stats
            self.prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration.num_generation_tokens:
            self.num_generation_tokens += iteration.num_generation_tokens
            self.generation_rate.add(iteration.num_generation_tokens, iteration.timestamp)
            self.inter_token_latency.observe_all(iteration.inter_token_latencies)
        if iteration.num_prompt_tokens:
            self.num_prompt_tokens += iteration.num_prompt_tokens
            self.prompt_rate.add(iteration.num_prompt_tokens, iteration.timestamp)
            self.time_to_first_token.observe_all(iteration.time_to_first_tokens)
        for finished in iteration.finished_requests:
            self._record_finished(finished)

    def died(self, death: EngineDeath) -> None:
        """Take note of its death."""
        self.health, self.death = Health.DEAD, death
        self.num_deaths += 1
        self.scheduler = SchedulerStats()

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


class ServerState:
    """Everything that is counted. A ``StatLogger``: set it as ``AsyncLLM.stat_logger``.

    Args:
        config: the engine's, with what it reported.
        model_name: under which it is served.
        num_in_flight: tells how many completions the server is busy with, wherever they are.
        now: gives monotonic seconds.

    Attributes:
        responses: HTTP responses by (endpoint, method, status).
        disconnects: requests whose client went away, by endpoint.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        *,
        num_in_flight: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.num_in_flight = num_in_flight
        self._now = now
        self._start = now()
        self._engines: dict[int, EngineState] = {}
        for index in _engine_indices(config):
            self.engine(index)
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.disconnects: Counter[str] = Counter()

    # What the frontend says.

    def record(
        self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take in what a message of an engine brought."""
        self.engine(engine_index).record(scheduler_stats, iteration_stats)

    def record_unfinished(self, reason: FinishReason, count: int) -> None:
        """Take note of completions that were aborted or failed. Nobody knows where they ran: the first counts them."""
        self.engines[0].finished[reason] += count

    # What the server says.

    def response_sent(self, endpoint: str, method: str, status: int) -> None:
        """Count a response.

        Args:
            endpoint: the route's pattern, not the path: a path is the client's choice and would make endless labels.
        """
        self.responses[endpoint, method, status] += 1

    def client_disconnected(self, endpoint: str) -> None:
        """Count a request that was aborted because its client went away."""
        self.disconnects[endpoint] += 1

    def engine_died(self, death: EngineDeath) -> None:
        """Take note of a death."""
        self.engine(death.engine_index).died(death)

    def set_health(self, health: Health) -> None:
        """Say what all engines can do; the dead stay dead."""
        for engine in self.engines:
            if engine.health is not Health.DEAD:
                engine.health = health

    # What everybody asks.

    @property
    def engines(self) -> list[EngineState]:
        """The engines by index."""
        return [self._engines[index] for index in sorted(self._engines)]

    def engine(self, index: int) -> EngineState:
        """Return an engine's state; one that nobody has heard of begins to exist."""
        if index not in self._engines:
            self._engines[index] = EngineState(index, self.config.max_model_len or 1, self._now())
        return self._engines[index]

    @property
    def uptime_s(self) -> float:
        """Seconds since the server's start."""
        return self._now() - self._start

    def snapshot(self) -> StateSnapshot:
        """Return the state at this moment, for people to look at."""
        now = self._now()
        return StateSnapshot(
            model=self.model_name,
            version=__version__,
            max_model_len=self.config.max_model_len,
            uptime_s=now - self._start,
            num_requests_served=sum(sum(engine.finished.values()) for engine in self.engines),
            num_in_flight=self.num_in_flight(),
            num_disconnects=self.disconnects.total(),
            engines=[_engine_snapshot(engine, now) for engine in self.engines],
        )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment.

    Attributes:
        health: see :class:`Health`.
        num_running: requests in the executor.
        num_waiting: requests in its admission queue.
        kv_cache_usage: share of the KV blocks in use, 0 … 1.
        prefix_cache_hit_rate: share of prompt tokens that were cached, since the start; ``None`` before the first.
        prompt_tokens_per_s: over the last five seconds.
        generation_tokens_per_s: over the last five seconds.
        generation_history: generated tokens in each of the last 60 seconds, oldest first.
        num_deaths: how often it died.
        death: why it died last.
    """

    index: int
    health: Health
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    generation_history: list[int] = field(repr=False)
    num_deaths: int = 0
    death: str | None = None


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The server at one moment: the body of ``GET /state``.

    Attributes:
        model: the name it is served under.
        version: of enginewire.
        max_model_len: most tokens of prompt and output together.
        uptime_s: seconds since the server's start.
        num_requests_served: completions that ended, however they did.
        num_in_flight: completions that the server is busy with, wherever they are.
        num_disconnects: requests whose client went away.
        engines: by index.
    """

    model: str
    version: str
    max_model_len: int | None
    uptime_s: float
    num_requests_served: int
    num_in_flight: int
    num_disconnects: int
    engines: Sequence[EngineSnapshot]


def _engine_snapshot(engine: EngineState, now: float) -> EngineSnapshot:
    queries = engine.prefix_cache_queries
    return EngineSnapshot(
        index=engine.index,
        health=engine.health,
        num_running=engine.scheduler.num_running_reqs,
        num_waiting=engine.scheduler.num_waiting_reqs,
        kv_cache_usage=round(engine.scheduler.kv_cache_usage, 4),
        prefix_cache_hit_rate=round(engine.prefix_cache_hits / queries, 4) if queries else None,
        prompt_tokens_per_s=round(engine.prompt_rate.per_second(now), 1),
        generation_tokens_per_s=round(engine.generation_rate.per_second(now), 1),
        generation_history=engine.generation_rate.history(now),
        num_deaths=engine.num_deaths,
        death=None if engine.death is None else engine.death.cause,
    )


def _engine_indices(config: EngineConfig) -> Sequence[int]:
    """Return which engines this server has."""
    if config.data_parallel_external_lb or config.data_parallel_size == 1:
        return [config.data_parallel_rank]
    return range(config.data_parallel_size)


def _token_buckets(max_model_len: int) -> list[float]:
    """Make 1, 2, 5, 10, 20 … up to the longest there can be."""
    steps = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return [float(step) for step in steps if step <= max_model_len]
