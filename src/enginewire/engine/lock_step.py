"""``LockStepLoop``: the busy loop of an engine whose ranks step together (mixture-of-experts models).

Whether it has to step is not only its own business: :class:`~enginewire.engine.waves.Waves` decides, from requests, the
coordinator's word, and what all ranks agree on over a :class:`~enginewire.engine.ranks.RankGroup`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from enginewire.engine.admission import Request
from enginewire.engine.busy_loop import BusyLoop, Phase
from enginewire.engine.core import EngineCore
from enginewire.engine.events import Events, Output
from enginewire.engine.frontends import COORDINATOR
from enginewire.engine.ranks import NotAgreed, RankGroup, RankLost
from enginewire.engine.spec import describe
from enginewire.engine.step import StepInput, StepOutput
from enginewire.engine.waves import Waves
from enginewire.wire.messages import EngineCoreOutputs, SchedulerStats, UtilityCall

if TYPE_CHECKING:
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 1.0
"""Ranks that are told to stop end one after the other: so long one that finds another gone waits to be told, too."""


class LockStepLoop(BusyLoop):
    """Steps when any rank has work.

    Args:
        core, events, output, child, reports_load: as of :class:`BusyLoop`.
        group: the ranks.
        has_coordinator: rank 0 tells it when waves end. Without one (offline) each rank tells its own client.
    """

    def __init__(
        self,
        core: EngineCore,
        events: Events,
        output: Output,
        child: ExecutorProcess | None = None,
        *,
        reports_load: bool = False,
        group: RankGroup,
        has_coordinator: bool,
    ) -> None:
        super().__init__(core, events, output, child, reports_load=reports_load)
        self._group = group
        self._has_coordinator = has_coordinator
        self._waves = Waves(group.rank)
        self._is_stepping = False
        """Whether what the executor was told last is a step, and not only to forget requests."""
        core.pauses.need_agreement = True
        core.scheduler.num_steps = 1  # after each, the ranks may have to agree on whether there is another

    # Steps.

    def _has_work(self) -> bool:
        return self._waves.is_running or super()._has_work()

    def _advance(self) -> None:
        try:
            super()._advance()
        except Exception as exc:  # noqa: BLE001 - raised again unless this is the end anyway
            self._leave(exc)

    def _have_no_step(self) -> None:
        if self._waves.is_running:
            self._core.executor.execute_dummy_batch()
            self._count_step()

    def _carry_out(self, step_input: StepInput) -> None:
        self._is_stepping = step_input.num_steps > 0
        super()._carry_out(step_input)

    def _finish_step(self, result: StepOutput) -> None:
        super()._finish_step(result)
        if self._is_stepping:
            self._count_step()

    def _count_step(self) -> None:
        if not self._waves.stepped():
            return
        core = self._core
        agreement = self._group.agree(
            # A rank that is to pause goes on until all are: the others must not rest without it.
            has_work=core.scheduler.has_steps() or core.pauses.is_pending,
            pauses=core.pauses.is_pending and core.pauses.is_ready,
            give_up=self._is_stopped,
        )
        complete = self._waves.agreed(any_has_work=agreement.any_has_work, all_pause=agreement.all_pause)
        if complete is not None:
            self._wave_completed(complete)
        if agreement.all_pause:
            core.pauses.complete()
            core.pauses.need_agreement = False

    def _wave_completed(self, wave: int) -> None:
        logger.debug("wave %d is complete", wave)
        if not self._has_coordinator:
            self._send(0, EngineCoreOutputs(wave_complete=wave))
        elif self._group.rank == 0:
            self._send(COORDINATOR, EngineCoreOutputs(wave_complete=wave))

    def _tell_start(self, wave: int | None) -> None:
        if wave is not None and self._has_coordinator:
            self._send(COORDINATOR, EngineCoreOutputs(start_wave=wave))

    def _complete_load(self, stats: SchedulerStats) -> None:
        stats.step_counter, stats.current_wave = self._waves.step_counter, self._waves.current_wave

    # Events.

    def _on_add(self, request: Request) -> None:
        super()._on_add(request)
        if self._core.scheduler.find(request.request_id) is request:
            self._tell_start(self._waves.request_added(request.core_request.current_wave))

    def _on_start_wave(self, told: tuple[int, int | None]) -> None:
        if self.phase is Phase.RUNNING:
            self._tell_start(self._waves.told_to_start(*told))

    def _on_utility(self, call: UtilityCall) -> None:
        super()._on_utility(call)
        core, waves = self._core, self._waves
        if core.pauses.is_pending and not waves.is_paused:
            self._tell_start(waves.pause_pending())
        elif waves.is_paused and (core.pauses.is_pending or not core.is_scheduler_paused()):
            core.pauses.need_agreement = True
            self._tell_start(waves.resume())

    # The end.

    def _look_whether_drained(self) -> None:
        steps_along = self._waves.is_running and not self._core.scheduler.has_requests()
        if not steps_along or self._is_stopped():
            super()._look_whether_drained()

    def _is_stopped(self) -> bool:
        """Whether this rank is to end without regard to the others."""
        at_once = self._core.config.shutdown_timeout_s == 0
        return self.num_stops > (0 if at_once else 1) or self._seconds_to_drain() == 0

    def _on_step_done(self, result: StepOutput) -> None:
        try:
            super()._on_step_done(result)
        except Exception as exc:  # noqa: BLE001 - raised again unless this is the end anyway
            self._leave(exc)

    def _on_failed(self, exc: BaseException) -> None:
        self._leave(exc)

    def _leave(self, exc: BaseException) -> None:
        """Step no more, as this rank was told to stop and another was faster.

        Raises:
            BaseException: ``exc``, if it was not: ranks in lock-step live and die together.
        """
        deadline = time.monotonic() + (STOP_GRACE_S if isinstance(exc, RankLost) else 0.0)
        while not self.num_stops:
            if time.monotonic() > deadline:
                raise exc
            time.sleep(0.02)
        if not isinstance(exc, (RankLost, NotAgreed)):
            logger.warning("while ending: %s", describe(exc))
        self._waves.is_running = self.is_step_in_flight = False
        self._abort_all("ranks in lock-step end together")
