"""``EngineMonitor``: what the engine is up to. ``/health`` and ``/ready`` ask it, and so does who waits for a death."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from enginewire.errors import ClientClosedError, EngineDeadError, EngineDeath, UtilityCallError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.stats import IterationStats
from enginewire.server.admission import Admission
from enginewire.server.state import Health, ServerState
from enginewire.wire.messages import FinishReason
from enginewire.wire.stats import SchedulerStats

logger = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 0.5
"""How often the engine is asked whether it is paused; an idle server learns of a death, or a pause by others, so."""


class EngineMonitor:
    """The one owner of what is known about the engine's condition. A ``StatLogger`` in front of ``state``.

    Args:
        llm: the frontend; its ``stat_logger`` becomes this.
        state: is told.
        admission: knows what is in flight.
        stall_timeout_s: how long the engine may give no answer, or a busy one make no progress.

    Attributes:
        death: why the engine is gone for good.
    """

    def __init__(self, llm: AsyncLLM, state: ServerState, admission: Admission, stall_timeout_s: float) -> None:
        self._llm = llm
        self._state = state
        self._admission = admission
        self._stall_timeout_s = stall_timeout_s
        self._last_answer = self._last_message = time.monotonic()
        self._is_paused = False
        self._is_asleep = False
        self._is_draining = False
        self._died = asyncio.Event()
        self.death: EngineDeath | None = None
        llm.stat_logger = self

    # What others say.

    def record(
        self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take note of a message: the engine makes progress."""
        self._last_message = iteration_stats.timestamp
        self._state.record(engine_index, scheduler_stats, iteration_stats)

    def record_unfinished(self, reason: FinishReason, count: int) -> None:
        """Pass it on."""
        self._state.record_unfinished(reason, count)

    def engine_died(self, death: EngineDeath) -> None:
        """Take note of the engine's death; the first cause sticks."""
        if self.death is None:
            self.death = death
            self._state.engine_died(death)
            logger.error("engine=%d died cause=%r", death.engine_index, death.cause)
            self._died.set()

    def draining(self) -> None:
        """Take note that the server is about to leave."""
        self._is_draining = True
        self._publish()

    def sleeping(self, is_asleep: bool) -> None:
        """Take note that the engine was sent to sleep or woken."""
        self._is_asleep = is_asleep
        self._publish()

    # What the engine says.

    async def watch(self) -> None:
        """Ask the engine for its condition, until it is dead or closed."""
        while self.death is None:
            try:
                await self.refresh()
            except EngineDeadError as exc:
                self.engine_died(exc.death)
            except ClientClosedError:
                return
            except UtilityCallError as exc:
                logger.warning("the engine does not tell whether it is paused: %s", exc)
            await asyncio.sleep(PING_INTERVAL_S)

    async def refresh(self) -> None:
        """Ask the engine whether it is paused."""
        self._is_paused = await self._llm.is_paused()
        self._last_answer = time.monotonic()
        if not self._is_paused:
            self._is_asleep = False  # engines pause to sleep, and wake up before they go on
        self._publish()

    async def wait_died(self) -> EngineDeath:
        """Wait until the engine is dead; return why."""
        await self._died.wait()
        assert self.death is not None
        return self.death

    # What is to be told.

    @property
    def health(self) -> Health:
        """The engine's condition in a word."""
        if self.death is not None:
            return Health.DEAD
        if self._is_draining:
            return Health.DRAINING
        if self._is_asleep:
            return Health.ASLEEP
        return Health.PAUSED if self._is_paused else Health.READY

    def why_not_ready(self) -> str | None:
        """Return why new work should go elsewhere; ``None``: it is welcome."""
        if self.death is not None:
            return f"engine {self.death.engine_index} is dead: {self.death.cause}"
        if self.health is not Health.READY:
            return self.health.value
        now = time.monotonic()
        if (silence := now - self._last_answer) > self._stall_timeout_s:
            return f"the engine has not answered for {silence:.0f} s"
        busy_since = self._admission.busy_since
        if busy_since is not None and (idle := now - max(busy_since, self._last_message)) > self._stall_timeout_s:
            return f"the engine has work and has made no progress for {idle:.0f} s"
        return None

    def _publish(self) -> None:
        self._state.set_health(self.health)
