"""``BusyLoop``: what an engine process does in its main thread: handle events, do or start a step, and again.

The input thread checks what arrives and puts it here as events (:class:`EventReceiver`). A step runs in this thread,
or, for an executor that holds the interpreter lock, in a child process, and then its result is an event like any
other: the loop never waits for it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from enginewire.engine.admission import Request
from enginewire.engine.core import EngineCore
from enginewire.engine.frontends import COORDINATOR
from enginewire.engine.step import StepInput, StepOutput, error_output, run_step, synthetic_outputs
from enginewire.engine.utilities import SHUTTING_DOWN, UTILITIES, Answered, failure_text, invoke_utility
from enginewire.errors import DuplicateRequestIdError, InvalidRequestError
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    utility_output,
)

if TYPE_CHECKING:
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)


class EventKind(Enum):
    """What happened; with each comes its argument."""

    ADD = auto()
    """A :class:`Request`, checked."""
    ABORT = auto()
    """A list of request ids."""
    FRONTEND_LOST = auto()
    """A client index: nobody is there any more who would want what its requests bring."""
    START_WAVE = auto()
    """The coordinator says that ranks in lock-step are to run: the wave, and the rank that knows already, if any."""
    UTILITY = auto()
    """A :class:`UtilityCall` that is not answered at once."""
    STEP_DONE = auto()
    """The :class:`StepOutput` of a step in another process."""
    STOP = auto()
    """Told to stop; ``None``."""
    FAILED = auto()
    """The engine cannot go on: an exception."""


Event = tuple[EventKind, Any]
Events = queue.SimpleQueue[Event]


class Output(Protocol):
    """Where messages for clients go: the output thread. Safe in any thread."""

    def put(self, client_index: int, message: EngineCoreOutputs, method: str = "") -> None:
        """Hand over a message, without waiting; ``method`` is the utility that it answers."""

    def catch_up(self) -> None:
        """Wait for the output thread if it is far behind."""


class Phase(Enum):
    """Where an engine is in its life, as far as its loop knows."""

    RUNNING = auto()
    DRAINING = auto()
    """Told to stop: what is here may finish, nothing new is taken."""
    STOPPING = auto()
    """Nothing runs any more; the loop ends."""


class BusyLoop:
    """Drives an engine core until it is told to stop. Implements the input thread's ``Receiver``.

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
        self._child = child
        self._reports_load = reports_load
        self._backlog: deque[Event] = deque()
        """Events that wait for the end of the step during which they came, in order."""
        self._drain_deadline: float | None = None
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
        if self.is_step_in_flight:
            return
        self._output.catch_up()
        step_input = self._core.schedule()
        if step_input is None:
            self._have_no_step()
        else:
            self._carry_out(step_input)

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
        if self._reports_load:
            self._report_load()
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
        self.is_step_in_flight = False
        self._finish_step(result)
        self._handle_backlog()  # before the events that came after those in it

    def _on_add(self, request: Request) -> None:
        if self.is_step_in_flight and self._backlog:  # must not overtake a utility call that waits for the step
            self._backlog.append((EventKind.ADD, request))
        elif self._is_ending:
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
            self.refuse_request(newcomer.request_id, newcomer.client_index, InvalidRequestError(str(exc)))

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
        elif self._is_ending:
            self._answer_failure(call, SHUTTING_DOWN)
        else:
            answer = self._invoke(call)
            self._flush_synthetic()  # the ABORT outputs of a pause come before its answer
            answer()

    def _on_stop(self, _: None) -> None:
        if self.phase is Phase.DRAINING:
            self._abort_all("told to stop again")
        elif self.phase is Phase.RUNNING:
            timeout_s = self._core.config.shutdown_timeout_s
            logger.info("told to stop, shutdown_timeout_s=%g", timeout_s)
            self._core.fail_pauses(SHUTTING_DOWN)
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
    def _is_ending(self) -> bool:
        return self.phase is not Phase.RUNNING

    def _seconds_to_drain(self) -> float | None:
        return None if self._drain_deadline is None else max(0.0, self._drain_deadline - time.monotonic())

    def _goes_on(self) -> bool:
        if self.phase is Phase.DRAINING:
            self._look_whether_drained()
        return self.phase is not Phase.STOPPING

    def _look_whether_drained(self) -> None:
        scheduler = self._core.scheduler
        if not scheduler.has_requests():
            self.phase = Phase.STOPPING
        elif self._seconds_to_drain() == 0:
            self._abort_all("the time for running requests to finish is over")
        elif not self.is_step_in_flight and not scheduler.has_work():
            self._abort_all("the scheduler is paused, so they would never finish")

    def _abort_all(self, why: str) -> None:
        logger.info("aborting all requests: %s", why)
        self.phase = Phase.STOPPING
        self._core.scheduler.abort_all()

    # Called in the input thread.

    def receive_request(self, request: EngineCoreRequest) -> None:
        """Check a request and queue it; one that cannot be run is answered here and now."""
        try:
            self._events.put((EventKind.ADD, self._core.preprocess_add_request(request)))
        except Exception as exc:  # noqa: BLE001 - whatever it is, it concerns this request only
            self._send(request.client_index, synthetic_outputs([error_output(request.request_id, exc)]))

    def receive_abort(self, request_ids: list[str]) -> None:
        """Queue an abort."""
        self._events.put((EventKind.ABORT, request_ids))

    def receive_utility(self, call: UtilityCall) -> None:
        """Answer a call that needs no executor, also in mid-step; queue the others."""
        if UTILITIES.get(call.method) is not Answered.AT_ONCE:
            self._events.put((EventKind.UTILITY, call))
        elif self._is_ending:
            self._answer_failure(call, SHUTTING_DOWN)
        else:
            self._invoke(call)()

    def frontend_lost(self, client_index: int) -> None:
        """Queue the end of a frontend."""
        self._events.put((EventKind.FRONTEND_LOST, client_index))
        self._send(client_index, EngineCoreOutputs())  # of nothing: lets go of what waits to be sent to it

    def receive_start_wave(self, wave: int, excluded: int | None) -> None:
        """Queue the coordinator's word."""
        self._events.put((EventKind.START_WAVE, (wave, excluded)))

    def refuse_request(self, request_id: str, client_index: int, why: InvalidRequestError) -> None:
        """Answer a request with an ERROR output."""
        self._send(client_index, synthetic_outputs([error_output(request_id, why)]))

    def answer_utility(self, client_index: int, answer: UtilityOutput) -> None:
        """Answer a utility call."""
        self._send(client_index, EngineCoreOutputs(utility_output=answer))

    def thread_failed(self, exc: BaseException) -> None:
        """End the engine: one of its threads is gone."""
        self._events.put((EventKind.FAILED, exc))

    # Utility calls.

    def _invoke(self, call: UtilityCall) -> Callable[[], None]:
        """Call a utility; return what answers it."""
        try:
            result = invoke_utility(self._core, call.method, call.args)
        except Exception as exc:  # noqa: BLE001 - it is the caller's to know
            return partial(self._answer_failure, call, failure_text(call.method, exc))
        if isinstance(result, Future):
            return partial(result.add_done_callback, partial(self._answer_later, call))
        return partial(self._answer, call, utility_output(call.call_id, result))

    def _answer_later(self, call: UtilityCall, future: Future[Any]) -> None:
        exc = future.exception()
        if exc is None:
            self._answer(call, utility_output(call.call_id, future.result()))
        else:
            text = str(exc)
            self._answer_failure(call, text if text == SHUTTING_DOWN else failure_text(call.method, exc))

    def _answer_failure(self, call: UtilityCall, text: str) -> None:
        logger.warning("utility method=%s call_id=%d: %s", call.method, call.call_id, text)
        self._answer(call, utility_output(call.call_id, failure_message=text))

    def _answer(self, call: UtilityCall, answer: UtilityOutput) -> None:
        self._send(call.client_index, EngineCoreOutputs(utility_output=answer), call.method)
