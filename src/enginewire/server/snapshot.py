"""``StateSnapshot``: the server's state at one moment, for people to look at. The body of ``GET /state``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewire._version import __version__
from enginewire.server.engine_state import EngineState, Health
from enginewire.server.state import ServerState


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment.

    Attributes:
        health: see :class:`Health`.
        num_in_flight: completions that were sent to it and have not ended.
        num_running: requests in the executor.
        num_waiting: requests in its admission queue.
        kv_cache_usage: share of the KV blocks in use, 0 … 1.
        prefix_cache_hit_rate: share of prompt tokens that were cached, since the start; ``None`` before the first.
        prompt_tokens_per_s: over the last five seconds.
        generation_tokens_per_s: over the last five seconds.
        generation_history: generated tokens in each of the last 60 seconds, oldest first.
        num_deaths: how often it died or was lost.
        death: why, the last time.
        num_restarts: how often it was started again.
        num_moved: completions that went on at another engine because it was gone.
        num_lost: completions that failed because it was gone.
    """

    index: int
    health: Health
    num_in_flight: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    generation_history: list[int] = field(repr=False)
    num_deaths: int = 0
    death: str | None = None
    num_restarts: int = 0
    num_moved: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The server at one moment.

    Attributes:
        model: the name it is served under.
        version: of enginewire.
        max_model_len: most tokens of prompt and output together.
        uptime_s: seconds since the server's start.
        num_requests_served: completions that ended, however they did.
        num_in_flight: completions that the server is busy with, wherever they are.
        num_disconnects: requests whose client went away.
        engines: those that there are now, by index.
        is_scaling: the number of engines is being changed.
        generation_tokens_per_s, generation_history: of all engines; what those did that were taken out counts, too.
        num_generation_tokens, num_deaths, num_restarts, num_moved, num_lost: the same, since the start.
    """

    model: str
    version: str
    max_model_len: int | None
    uptime_s: float
    num_requests_served: int
    num_in_flight: int
    num_disconnects: int
    engines: Sequence[EngineSnapshot]
    is_scaling: bool = False
    generation_tokens_per_s: float = 0.0
    generation_history: list[int] = field(default_factory=list, repr=False)
    num_generation_tokens: int = 0
    num_deaths: int = 0
    num_restarts: int = 0
    num_moved: int = 0
    num_lost: int = 0


def snapshot(state: ServerState, now: float) -> StateSnapshot:
    """Return the state at ``now``, monotonic seconds."""
    engines = state.engines.values()
    return StateSnapshot(
        model=state.model_name,
        version=__version__,
        max_model_len=state.max_model_len,
        uptime_s=now - state.started,
        num_requests_served=sum(sum(engine.finished.values()) for engine in engines),
        num_in_flight=state.num_in_flight,
        num_disconnects=sum(state.disconnects.values()),
        engines=[_engine_snapshot(engine, now) for engine in state.present],
        is_scaling=state.is_scaling,
        generation_tokens_per_s=round(sum(engine.generation_rate.per_second(now) for engine in engines), 1),
        generation_history=[
            sum(counts) for counts in zip(*(engine.generation_rate.history(now) for engine in engines), strict=True)
        ],
        num_generation_tokens=sum(engine.num_generation_tokens for engine in engines),
        num_deaths=sum(engine.num_deaths for engine in engines),
        num_restarts=sum(engine.num_restarts for engine in engines),
        num_moved=sum(engine.num_moved for engine in engines),
        num_lost=sum(engine.num_lost for engine in engines),
    )


def _engine_snapshot(engine: EngineState, now: float) -> EngineSnapshot:
    queries = engine.prefix_cache_queries
    return EngineSnapshot(
        index=engine.index,
        health=engine.health,
        num_in_flight=engine.num_in_flight,
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        kv_cache_usage=round(engine.kv_cache_usage, 4),
        prefix_cache_hit_rate=round(engine.prefix_cache_hits / queries, 4) if queries else None,
        prompt_tokens_per_s=round(engine.prompt_rate.per_second(now), 1),
        generation_tokens_per_s=round(engine.generation_rate.per_second(now), 1),
        generation_history=engine.generation_rate.history(now),
        num_deaths=engine.num_deaths,
        death=engine.death,
        num_restarts=engine.num_restarts,
        num_moved=engine.num_moved,
        num_lost=engine.num_lost,
    )
