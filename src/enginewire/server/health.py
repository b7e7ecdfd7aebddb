"""``EngineMonitor``: what the engines are up to. ``/health`` and ``/ready`` ask it, and so does who awaits a death."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from enginewire.client.status import EngineStatus
from enginewire.errors import ClientClosedError, EngineClientError, EngineDeath, UtilityCallError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.stats import IterationStats
from enginewire.server.engine_state import Health
from enginewire.server.state import ServerState
from enginewire.wire.messages import FinishReason
from enginewire.wire.stats import SchedulerStats

logger = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 0.5
"""How often engines are looked at and asked whether they are paused; an idle server learns of a death, or a pause by
others, so."""

REPORT_INTERVAL_S: Final = 10.0
"""How often an engine that does something has a line in the log."""

GONE: Final = (Health.STARTING, Health.LOST, Health.DEAD)

REMOVED: Final = "removed"
"""The state of an engine in the last that the client says of it."""


@dataclass(slots=True)
class _Engine:
    """What is known about one engine. ``last_…`` are monotonic seconds.

    Attributes:
        status: what the client says.
        is_leaving: it was being taken out when it was last seen alive.
        last_answer: when it last answered a question.
        last_progress: when its last message came, or when it was last seen with nothing to do.
        ping: the question that it has not answered yet.
        num_reported: tokens that the log's last line about it told of.
    """

    status: EngineStatus
    last_answer: float
    last_progress: float
    is_leaving: bool = False
    is_paused: bool = False
    is_asleep: bool = False
    ping: asyncio.Task[None] | None = None
    num_reported: int = 0
    has_complained: bool = False


class EngineMonitor:
    """The one owner of what is known about the engines' condition. A ``StatLogger`` in front of ``state``.

    Args:
        llm: the frontend; its ``stat_logger`` becomes this.
        state: is told.
        stall_timeout_s: how long an engine may give no answer, or a busy one make no progress.
    """

    def __init__(self, llm: AsyncLLM, state: ServerState, stall_timeout_s: float) -> None:
        self._llm = llm
        self._state = state
        self._stall_timeout_s = stall_timeout_s
        self._engines: dict[int, _Engine] = {}
        self._is_draining = False
        self._has_engine = True
        self._fatal_death: EngineDeath | None = None
        self._died = asyncio.Event()
        self.look()
        llm.stat_logger = self
        llm.on_engine_change = self._take_removal

    # What others say.

    def record(
        self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take note of a message: the engine makes progress."""
        if (engine := self._engines.get(engine_index)) is not None:
            engine.last_progress = iteration_stats.timestamp
        self._state.record(engine_index, scheduler_stats, iteration_stats)

    def record_unfinished(self, engine_index: int, reason: FinishReason) -> None:
        """Pass it on."""
        self._state.record_unfinished(engine_index, reason)

    def draining(self) -> None:
        """Take note that the server is about to leave."""
        self._is_draining = True
        self.look()

    def sleeping(self, is_asleep: bool) -> None:
        """Take note that the engines were sent to sleep or woken."""
        for engine in self._engines.values():
            engine.is_asleep = is_asleep
        self.look()

    # What the engines say.

    async def watch(self) -> None:
        """Look at the engines and ask each for its condition, until the client is closed."""
        next_report = time.monotonic() + REPORT_INTERVAL_S
        try:
            while True:
                self.look()
                for index, engine in self._answering():
                    if engine.ping is None or engine.ping.done():
                        engine.ping = asyncio.create_task(self._ping(index, engine), name=f"enginewire-ping-{index}")
                if time.monotonic() > next_report:
                    next_report += REPORT_INTERVAL_S
                    self._report()
                await asyncio.sleep(PING_INTERVAL_S)
        finally:
            for engine in self._engines.values():
                if engine.ping is not None:
                    engine.ping.cancel()

    async def refresh(self) -> None:
        """Ask the engines whether they are paused, and wait for their answers."""
        self.look()
        await asyncio.gather(*(self._ping(index, engine) for index, engine in self._answering()))
        self.look()

    def look(self) -> None:
        """Take in what the client knows of its engines now."""
        now = time.monotonic()
        for status in self._llm.engine_statuses():
            self._take(status, now)
        self._state.is_scaling = self._llm.is_scaling
        if self._fatal_death is None and (death := self.first_death()) is not None:
            self._fatal_death = death
            self._died.set()
        had_engine, self._has_engine = self._has_engine, not self.are_all_dead()
        if had_engine and not self._has_engine:  # of every other loss the client has told the log
            causes = (self._describe(index, Health.DEAD, now) for index in self._engines)
            logger.error("no engine is left: %s", "; ".join(causes))

    def _take(self, status: EngineStatus, now: float) -> None:
        """Take in what the client says of an engine."""
        engine = self._engines.get(status.index)
        if engine is None:
            self._state.engine(status.index).is_removed = False
            engine = self._engines[status.index] = _Engine(EngineStatus(status.index, Health.STARTING), now, now)
        elif engine.status.state != status.state or engine.status.num_deaths != status.num_deaths:
            self._changed(engine, now)
        before, engine.status = engine.status, status
        if status.state != Health.DEAD:
            engine.is_leaving = status.state == Health.LEAVING
        if not status.num_in_flight:
            engine.last_progress = now
        self._count(before, status)
        self._publish(engine, now)

    def _take_removal(self, status: EngineStatus) -> None:
        """Take in the last that the client says of an engine that was taken out: by a coroutine, thus on the loop."""
        if status.state == REMOVED and (engine := self._engines.pop(status.index, None)) is not None:
            if engine.ping is not None:
                engine.ping.cancel()
            self._count(engine.status, status)
            self._state.engine(status.index).remove()

    def _count(self, before: EngineStatus, status: EngineStatus) -> None:
        """Add to the server's counts what was added to the client's, which begin at 0 with every engine put in."""
        state = self._state.engine(status.index)
        state.num_deaths += status.num_deaths - before.num_deaths
        state.num_restarts += status.num_restarts - before.num_restarts
        state.num_moved += status.num_moved - before.num_moved
        state.num_lost += status.num_lost - before.num_lost

    def _changed(self, engine: _Engine, now: float) -> None:
        """Begin anew with an engine that is another one now, or is gone. The client has told the log."""
        engine.is_paused = engine.is_asleep = engine.has_complained = False
        engine.last_answer = engine.last_progress = now

    def _answering(self) -> list[tuple[int, _Engine]]:
        """Return the engines that can be asked something."""
        return [(index, engine) for index, engine in self._engines.items() if engine.status.state == Health.READY]

    async def _ping(self, index: int, engine: _Engine) -> None:
        try:
            engine.is_paused = await self._llm.is_engine_paused(index)
        except ClientClosedError:
            return
        except UtilityCallError as exc:
            if not engine.has_complained:
                engine.has_complained = True
                logger.warning("engine=%d does not tell whether it is paused: %s", index, exc)
        except EngineClientError:
            return  # it is gone, which the client knows
        engine.last_answer = time.monotonic()
        if not engine.is_paused:
            engine.is_asleep = False  # engines pause to sleep, and wake up before they go on

    async def wait_died(self) -> EngineDeath:
        """Wait until an engine is dead for good; return why."""
        await self._died.wait()
        assert self._fatal_death is not None
        return self._fatal_death

    # What is to be told.

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that will not come back; ``None`` if there is none.

        One that is being put in or taken out is no loss: whoever changes the number of engines hears of it.
        """
        is_scaling = self._llm.is_scaling
        for engine in self._engines.values():
            status = engine.status
            is_passing = is_scaling and (status.ready is None or engine.is_leaving)
            if status.state == Health.DEAD and not status.is_awaited and not is_passing:
                return status.death or EngineDeath(status.index, "for an unknown reason")
        return None

    def are_all_dead(self) -> bool:
        """Whether no engine is left."""
        return all(engine.status.state == Health.DEAD for engine in self._engines.values())

    def why_not_ready(self) -> str | None:
        """Return why new work should go elsewhere; ``None``: it is welcome.

        One engine that can take it is enough, unless another one is paused: what would be sent there waits.
        """
        self.look()
        if self._is_draining:
            return Health.DRAINING
        now = time.monotonic()
        conditions = {index: self._health(engine, now) for index, engine in self._engines.items()}
        stopped = [index for index, health in conditions.items() if health in (Health.PAUSED, Health.ASLEEP)]
        if not stopped and Health.READY in conditions.values():
            return None
        wanted = stopped or conditions
        return "; ".join(self._describe(index, conditions[index], now) for index in wanted)

    def _health(self, engine: _Engine, now: float) -> Health:
        """Put an engine's condition into a word."""
        if engine.status.state in GONE:
            return Health(engine.status.state)
        if self._is_draining:
            return Health.DRAINING
        if engine.status.state == Health.LEAVING:
            return Health.LEAVING
        if engine.is_asleep:
            return Health.ASLEEP
        if engine.is_paused:
            return Health.PAUSED
        return Health.READY if self._why_stalled(engine, now) is None else Health.STALLED

    def _why_stalled(self, engine: _Engine, now: float) -> str | None:
        if (silence := now - engine.last_answer) > self._stall_timeout_s:
            return f"has not answered for {silence:.0f} s"
        if (idle := now - engine.last_progress) > self._stall_timeout_s:
            return f"has work and has made no progress for {idle:.0f} s"
        return None

    def _describe(self, index: int, health: Health, now: float) -> str:
        engine = self._engines[index]
        if health is Health.STALLED:
            return f"engine {index} {self._why_stalled(engine, now)}"
        death = engine.status.death
        if health in GONE and death is not None:
            return f"engine {index} is {health}: {death.cause}"
        return f"engine {index} is {health}"

    def _publish(self, engine: _Engine, now: float) -> None:
        status = engine.status
        state = self._state.engine(status.index)
        health = self._health(engine, now)
        if health in GONE and state.health not in GONE:
            state.is_gone()
        state.health = health
        state.num_in_flight = status.num_in_flight
        state.death = None if status.death is None else status.death.cause
        if status.ready is not None:
            state.block_size, state.num_gpu_blocks = status.ready.block_size, status.ready.num_gpu_blocks

    def _report(self) -> None:
        """Have a line in the log for every engine that did something since the last."""
        now = time.monotonic()
        for index, engine in self._engines.items():
            state = self._state.engine(index)
            num_tokens = state.num_prompt_tokens + state.num_generation_tokens
            if num_tokens == engine.num_reported and not state.num_running:
                continue
            engine.num_reported = num_tokens
            logger.info(
                "engine=%d running=%d waiting=%d kv_cache_usage=%.3f prompt_tokens_per_s=%.1f "
                "generation_tokens_per_s=%.1f",
                index,
                state.num_running,
                state.num_waiting,
                state.kv_cache_usage,
                state.prompt_rate.per_second(now),
                state.generation_rate.per_second(now),
            )
