"""``StateSnapshot``: the server's state at one moment, for people to look at. The body of ``GET /state``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewire._version import __version__
from enginewire.server.state import EngineState, Health, ServerState


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
        engines=[_engine_snapshot(engine, now) for engine in engines],
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
    )
