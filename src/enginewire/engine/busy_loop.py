"""``BusyLoop``: what an engine process does in its main thread: handle events, do or start a step, and again.

A step runs in this thread, or, for an executor that holds the interpreter lock, in a child process, and then its result
is an event like any other: the loop never waits for it, and the child does not wait for the loop (decision 4).
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from enginewire.engine.admission import Request
from enginewire.engine.core import EngineCore
from enginewire.engine.events import Event, EventKind, Events, Output
from enginewire.engine.frontends import COORDINATOR
from enginewire.engine.step import StepInput, StepOutput, error_outputs, run_step, synthetic_outputs
from enginewire.engine.utilities import SHUTTING_DOWN, Utilities
from enginewire.errors import DuplicateRequestIdError, InvalidRequestError
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats, UtilityCall

if TYPE_CHECKING:
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)

DELIVERY_INTERVAL_S: Final = 0.2
"""How often tokens are sent whose readers wait for the last one (decision 4)."""

STEPS_PER_INPUT: Final = 2
"""Steps that a child is told to make at once. While it makes the second it is told of the next two, and never waits."""


class Phase(Enum):
    """Where an engine is in its life, as far as its loop knows."""

    RUNNING = auto()
    DRAINING = auto()
    """Told to stop: what is here may finish, nothing new is taken."""
    STOPPING = auto()
    """Nothing runs any more; the loop ends."""


class BusyLoop:
    """Drives an engine core until it is told to stop.

    Args:
        core: the engine.
        events: filled by other threads and signal handlers.
        output: takes what there is to tell.
        child: the core's executor, if it runs in a process of its own.
        reports_load: tell the coordinator whenever there is more or less to do.
    """

    def __init__(
        self,
        core: EngineCore,
        events: Events,
        output: Output,
        child: ExecutorProcess | None = None,
        *,
        reports_load: bool = False,
    ) -> None:
        self.phase = Phase.RUNNING
        self.num_stops = 0
        """How often it was told to stop, handled or not."""
        self.is_step_in_flight = False
        """In the child."""
        self._core = core
        self._events = events
        self._output = output
        self._send = output.put
        self._utilities = Utilities(core, output)
        self._child = child
        self._reports_load = reports_load
        self._backlog: deque[Event] = deque()
        """Events that wait for the end of the step during which they came, in order."""
        self._drain_deadline: float | None = None
        core.scheduler.delivery_interval_s = DELIVERY_INTERVAL_S
        if child is not None:
            core.scheduler.num_steps = STEPS_PER_INPUT
        self._handlers: Final[dict[EventKind, Callable[[Any], None]]] = {
            EventKind.ADD: self._on_add,
            EventKind.ABORT: self._on_abort,
            EventKind.FRONTEND_LOST: self._on_frontend_lost,
            EventKind.START_WAVE: self._on_start_wave,
            EventKind.UTILITY: self._on_utility,
            EventKind.STEP_DONE: self._on_step_done,
            EventKind.STOP: self._on_stop,
            EventKind.FAILED: self._on_failed,
        }

    def run(self) -> None:
        """Go on until told to stop and everything running has ended. Raises whatever the executor's step raises."""
        while self._goes_on():
            self._handle_events()
            if self._goes_on():
                self._advance()
        self._flush_synthetic()

    def stop(self) -> None:
        """Tell it to stop: to drain or abort as configured, and the second time to abort. Safe in a signal handler."""
        self.num_stops += 1
        self._events.put((EventKind.STOP, None))

    def refuse_the_rest(self) -> None:
        """Answer what is still queued after :meth:`run` and once nobody can queue any more."""
        in_flight, self.is_step_in_flight = self.is_step_in_flight, False  # nothing waits for it any more
        self._handle_backlog()
        while not self._events.empty():
            kind, argument = self._events.get_nowait()
            if kind is EventKind.STEP_DONE:
                in_flight = False
            elif kind is not EventKind.FAILED:
                self._handlers[kind](argument)
        self.is_step_in_flight = in_flight

    # Events and steps.

    def _handle_events(self) -> None:
        """Handle what has happened; wait for something to happen if there is nothing to do meanwhile."""
        if not self.is_step_in_flight:
            self._handle_backlog()
        if self.is_step_in_flight or not self._has_work():
            self._flush_synthetic()
            try:
                kind, argument = self._events.get(timeout=self._seconds_to_drain())
            except queue.Empty:
                self._abort_all("the time for running requests to finish is over")
                return
            self._handlers[kind](argument)
        while not self._events.empty():
            kind, argument = self._events.get_nowait()
            self._handlers[kind](argument)

    def _handle_backlog(self) -> None:
        while self._backlog:
            kind, argument = self._backlog.popleft()
            self._handlers[kind](argument)

    def _has_work(self) -> bool:
        return self._core.scheduler.has_work()

    def _advance(self) -> None:
        """Do a step, or start one, if there is one to do."""
        self._flush_synthetic()
        if self._reports_load:
            self._report_load()
        self._output.catch_up()
        if self.is_step_in_flight:
            self._tell_more()
            return
        step_input = self._core.schedule()
        if step_input is None:
            self._have_no_step()
        else:
            self._carry_out(step_input)

    def _tell_more(self) -> None:
        """Tell the child while it steps what is to follow, or that something waits for the end of this step."""
        scheduler = self._core.scheduler
        if self._child is not None and scheduler.num_steps > 1:
            step_input = scheduler.halt() if self._backlog else scheduler.schedule()
            if step_input is not None:
                self._child.start_step(step_input)

    def _have_no_step(self) -> None:
        """Do nothing: there is nothing to do until something arrives."""

    def _carry_out(self, step_input: StepInput) -> None:
        if self._child is not None:
            self.is_step_in_flight = True
            self._child.start_step(step_input)
        else:
            result = run_step(self._core.executor, step_input)
            self._notice_aborts()
            self._finish_step(result)

    def _notice_aborts(self) -> None:
        """Apply the aborts that came during the step, so that its tokens for them are dropped.

        They stay in the backlog too, in their place among the ADDs: this one only ends what was running before.
        """
        while not self._events.empty():
            event = self._events.get_nowait()
            self._backlog.append(event)
            if event[0] is EventKind.ABORT:
                self._core.abort_requests(event[1])
            elif event[0] is EventKind.FRONTEND_LOST:
                self._core.abort_client(event[1])

    def _finish_step(self, result: StepOutput) -> None:
        for client_index, message in self._core.update(result).items():
            self._send(client_index, message)
        self.is_step_in_flight = self._core.scheduler.is_stepping
        if self._reports_load:
            self._report_load()
        if not self.is_step_in_flight:
            self._core.post_step()

    def _report_load(self) -> None:
        """Tell the coordinator what there is to do if that has changed (defect 15)."""
        if (stats := self._core.scheduler.load_change()) is not None:
            self._complete_load(stats)
            self._send(COORDINATOR, EngineCoreOutputs(scheduler_stats=stats))

    def _complete_load(self, stats: SchedulerStats) -> None:
        """Add what a coordinator orders reports by: nothing, as engines that do not step together have no order."""

    def _flush_synthetic(self) -> None:
        for client_index, message in self._core.scheduler.take_synthetic().items():
            self._send(client_index, message)

    # Events, one by one.

    def _on_step_done(self, result: StepOutput) -> None:
        self._finish_step(result)
        if not self.is_step_in_flight:
            self._handle_backlog()  # before the events that came after those in it

    def _on_add(self, request: Request) -> None:
        if self.is_step_in_flight and self._backlog:  # must not overtake a utility call that waits for the step
            self._backlog.append((EventKind.ADD, request))
        elif self.is_ending:
            aborted = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self._send(request.client_index, synthetic_outputs([aborted]))
        else:
            try:
                self._core.add_request(request)
            except DuplicateRequestIdError as exc:
                self._refuse_duplicate(request, exc)

    def _refuse_duplicate(self, newcomer: Request, exc: DuplicateRequestIdError) -> None:
        first = self._core.scheduler.find(newcomer.request_id)
        logger.warning("%s; the newcomer is dropped, client_index=%d", exc, newcomer.client_index)
        # To the same client an ERROR would end the first one's stream, as both have one id.
        if first is not None and first.client_index != newcomer.client_index:
            self._send(newcomer.client_index, error_outputs(newcomer.request_id, InvalidRequestError(str(exc))))

    def _on_abort(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)
        if self.is_step_in_flight and self._backlog:  # it may concern an ADD that waits there
            self._backlog.append((EventKind.ABORT, request_ids))

    def _on_frontend_lost(self, client_index: int) -> None:
        self._core.abort_client(client_index)
        if self.is_step_in_flight and self._backlog:  # its ADDs may wait there
            self._backlog.append((EventKind.FRONTEND_LOST, client_index))

    def _on_utility(self, call: UtilityCall) -> None:
        if self.is_step_in_flight:
            self._backlog.append((EventKind.UTILITY, call))
        elif self.is_ending:
            self._utilities.refuse(call, SHUTTING_DOWN)
        else:
            answer = self._utilities.invoke(call)
            self._flush_synthetic()  # the ABORT outputs of a pause come before its answer
            answer()

    def _on_stop(self, _: None) -> None:
        if self.phase is Phase.DRAINING:
            self._abort_all("told to stop again")
        elif self.phase is Phase.RUNNING:
            timeout_s = self._core.config.shutdown_timeout_s
            logger.info("told to stop, shutdown_timeout_s=%g", timeout_s)
            self._core.pauses.fail(SHUTTING_DOWN)
            if timeout_s > 0:
                self.phase = Phase.DRAINING
                self._drain_deadline = time.monotonic() + timeout_s
            else:
                self._abort_all("told to stop")

    def _on_start_wave(self, told: tuple[int, int | None]) -> None:
        """Do nothing: this engine steps when it has something to do."""

    def _on_failed(self, exc: BaseException) -> None:
        raise exc

    # The orderly end.

    @property
    def is_ending(self) -> bool:
        """Whether nothing new is taken any more; for other threads, too."""
        return self.phase is not Phase.RUNNING

    def _seconds_to_drain(self) -> float | None:
        return None if self._drain_deadline is None else max(0.0, self._drain_deadline - time.monotonic())

    def _goes_on(self) -> bool:
        if self.phase is Phase.DRAINING:
            self._look_whether_drained()
        return self.phase is not Phase.STOPPING

    def _look_whether_drained(self) -> None:
        scheduler = self._core.scheduler
        if not scheduler.has_requests() and not self.is_step_in_flight:
            self.phase = Phase.STOPPING
        elif self._seconds_to_drain() == 0:
            self._abort_all("the time for running requests to finish is over")
        elif not self.is_step_in_flight and not scheduler.has_work():
            self._abort_all("the scheduler is paused, so they would never finish")

    def _abort_all(self, why: str) -> None:
        logger.info("aborting all requests: %s", why)
        self.phase = Phase.STOPPING
        self._core.scheduler.abort_all()
