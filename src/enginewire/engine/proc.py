"""``EngineCoreProc``: an engine core in a process of its own: handshake, two I/O threads, a busy loop, an orderly end.

One thread decides: the main one. The input thread checks what arrives and queues it as events; the output thread sends
what it is given. A step runs in the main thread, or, for an executor that holds the interpreter lock, in a child
process, and then its result is an event like any other: the loop never waits for it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import zmq

from enginewire.config import EngineConfig
from enginewire.engine.core import EngineCore
from enginewire.engine.executor import Executor
from enginewire.engine.handshake import Handshake, ready_response
from enginewire.engine.input_thread import InputThread
from enginewire.engine.output_thread import OutputThread
from enginewire.engine.registry import load_executor_class
from enginewire.engine.scheduler import Request, StepOutput, error_output, run_step, synthetic_outputs
from enginewire.engine.spec import EngineSpec, describe
from enginewire.engine.utilities import SHUTTING_DOWN, UTILITIES, Answered, failure_text, invoke_utility
from enginewire.errors import DuplicateRequestIdError, InvalidRequestError
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityOutput,
    utility_output,
)
from enginewire.wire.profile import V0_25, WireProfile

if TYPE_CHECKING:
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)

Event = tuple[Callable[[Any], None], Any]
"""Something that happened, as a call to make in the main thread."""

READY_TIMEOUT_S: Final = 30.0
"""How long connecting sockets may take; it needs no peer, so more means that this host is stuck."""


class Phase(Enum):
    """Where an engine is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """Told to stop: what runs may finish, nothing new is taken."""
    STOPPING = "stopping"
    """Told to stop: everything was aborted."""


class StoppedWhileStarting(BaseException):
    """Told to stop while starting. No ``Exception``: no executor's constructor is to swallow it."""


class EngineCoreProc:
    """Runs an engine: :meth:`start`, :meth:`run`, :meth:`close`, all in the main thread.

    Args:
        spec: what to run, and whom to talk to.
        on_death: told why the loop died, before the frontends are.
    """

    def __init__(
        self,
        spec: EngineSpec,
        on_death: Callable[[BaseException], None] = lambda exc: None,
        profile: WireProfile = V0_25,
    ) -> None:
        self.spec = spec
        self.config = spec.config
        self.engine_index = spec.engine_index
        self.phase = Phase.STARTING
        self.core: EngineCore | None = None
        self._on_death = on_death
        self._profile = profile
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._backlog: deque[Event] = deque()
        """Events that came during a step and wait for its end, in order."""
        self._child: ExecutorProcess | None = None
        """The executor, if it runs in a process of its own."""
        self._step_in_flight = False
        """In that process."""
        self._input: InputThread | None = None
        self._output: OutputThread | None = None
        self._handshake: Handshake | None = None
        self._stop_signals = 0
        self._drain_deadline: float | None = None

    # Life.

    def start(self) -> None:
        """Shake hands, load the model, connect, say READY.

        Raises:
            EngineStartupError: the handshake failed.
            StoppedWhileStarting: told to stop meanwhile (:meth:`request_shutdown`).
            Exception: whatever the executor raises.
        """
        spec = self.spec
        self._handshake = Handshake(
            self._context, spec.handshake_address, spec.engine_index, local=spec.local, headless=spec.headless
        )
        addresses = self._handshake.hello()
        executor_class = load_executor_class(spec)
        logger.info("loading model=%s executor=%s", self.config.model, executor_class.__qualname__)
        began = time.monotonic()
        make_executor = self._start_child if executor_class.holds_gil else executor_class
        self.core = core = EngineCore(self.config, make_executor, spec.log_stats)
        logger.info("loaded in %.2f s, max_model_len=%d", time.monotonic() - began, core.max_model_len)
        ready = ready_response(core, executor_class.__qualname__, addresses, self._profile)
        self._output = OutputThread(
            self._context,
            addresses.outputs,
            self.engine_index,
            self.config,
            abort=self.receive_abort,
            failed=self.thread_failed,
        )
        self._output.start()
        self._input = InputThread(self._context, addresses.inputs, self.engine_index, ready, self.config, self)
        self._input.start()
        self._input.connected.wait(READY_TIMEOUT_S)
        self.phase = Phase.RUNNING
        self._handshake.ready()
        logger.info("ready")

    def _start_child(self, _: EngineConfig) -> Executor:
        from enginewire.engine.worker_process import ExecutorProcess  # a subprocess's price only for those who need it

        self._child = ExecutorProcess(self.spec, self._step_came)
        return self._child

    def run(self) -> None:
        """Serve until told to stop. What breaks the loop is told to the frontends, and raised.

        Returns after an orderly stop, with every request answered.
        """
        try:
            while self.phase is not Phase.STOPPING:
                self._handle_events()
                self._advance()
                if self.phase is Phase.DRAINING:
                    self._look_whether_drained()
            self._refuse_the_rest()
            logger.info("stopped")
        except BaseException as exc:
            logger.critical("the engine dies: %s", describe(exc), exc_info=exc)
            self._on_death(exc)
            if self._output is not None:
                self._output.put_dead()
            raise

    def close(self) -> None:
        """Send what is queued, stop the threads, release the executor and the sockets. Once, in any phase."""
        self.phase = Phase.STOPPING
        self._stop_input()
        if self._output is not None:
            self._output.stop()
        if self._handshake is not None:
            self._handshake.close()
        if self.core is not None:
            try:
                self._shut_down_executor(self.core)
            except Exception:
                logger.exception("the executor's shutdown failed")
        self._context.term()

    def _stop_input(self) -> None:
        if self._input is not None:
            self._input.stop()
            self._input = None

    def _shut_down_executor(self, core: EngineCore) -> None:
        if self._step_in_flight and self._child is not None:
            self._child.shutdown(wait=False)  # nobody wants that step's result
        else:
            core.shutdown()

    def request_shutdown(self) -> None:
        """Stop: drain or abort as configured; asked again, abort. For signal handlers in the main thread.

        Raises:
            StoppedWhileStarting: while starting: there is nothing to drain, and loading a model may take minutes.
        """
        if self.phase is Phase.STARTING:
            raise StoppedWhileStarting
        self._stop_signals += 1
        self._events.put((self._on_stop_signal, None))  # a SimpleQueue's put is safe in a signal handler

    # The loop.

    def _handle_events(self) -> None:
        """Handle what has happened; wait for something to happen if there is nothing to do meanwhile."""
        if not self._step_in_flight:
            self._handle_backlog()
        if self._step_in_flight or not self._core.scheduler.has_work():
            self._flush_synthetic()
            try:
                handle, argument = self._events.get(timeout=self._seconds_to_drain())
            except queue.Empty:
                self._abort_all("the time for running requests to finish is over")
                return
            handle(argument)
        while not self._events.empty():
            handle, argument = self._events.get_nowait()
            handle(argument)

    def _handle_backlog(self) -> None:
        while self._backlog:
            handle, argument = self._backlog.popleft()
            handle(argument)

    def _advance(self) -> None:
        """Do a step, or start one, if there is one to do."""
        self._flush_synthetic()
        if self._step_in_flight or self.phase is Phase.STOPPING:
            return
        step_input = self._core.schedule()
        if step_input is None:
            return
        if self._child is not None:
            self._step_in_flight = True
            self._child.start_step(step_input)
        else:
            result = run_step(self._core.executor, step_input)
            self._notice_aborts()
            self._finish_step(result)

    def _finish_step(self, result: StepOutput) -> None:
        core = self._core
        for client_index, message in core.update(result).items():
            self._send(client_index, message)
        self._flush_synthetic()
        core.post_step()

    def _notice_aborts(self) -> None:
        """Apply the aborts that came during the step, so that its tokens for them are dropped.

        They stay in the backlog too, in their place among the ADDs: this one only ends what was running before.
        """
        while not self._events.empty():
            event = self._events.get_nowait()
            self._backlog.append(event)
            if event[0] == self._on_abort:
                self._core.abort_requests(event[1])

    def _step_came(self, result: StepOutput | BaseException) -> None:
        """Take the result of a step in another process. Called in its reader thread."""
        self._events.put((self._on_step_result, result))

    # Events, in the main thread.

    def _on_step_result(self, result: StepOutput | BaseException) -> None:
        self._step_in_flight = False
        if isinstance(result, BaseException):
            raise result
        self._finish_step(result)
        self._handle_backlog()  # before the events that came after those in it

    def _on_add(self, request: Request) -> None:
        if self._backlog and self._step_in_flight:  # must not overtake a utility call that waits for the step
            self._backlog.append((self._on_add, request))
            return
        if self._is_ending:
            aborted = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self._send(request.client_index, synthetic_outputs([aborted]))
            return
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
        if self._backlog and self._step_in_flight:  # it may concern an ADD that waits there
            self._backlog.append((self._on_abort, request_ids))

    def _on_utility(self, call: UtilityCall) -> None:
        if self._step_in_flight:
            self._backlog.append((self._on_utility, call))
            return
        if self._is_ending:
            self.answer_utility(call.client_index, utility_output(call.call_id, failure_message=SHUTTING_DOWN))
            return
        answer = self._invoke(call)
        self._flush_synthetic()  # the ABORT outputs of a pause come before its answer
        answer()

    def _on_stop_signal(self, _: None) -> None:
        if self.phase is Phase.RUNNING:
            logger.info("told to stop, shutdown_timeout_s=%g", self.config.shutdown_timeout_s)
            self._core.fail_pauses(SHUTTING_DOWN)
            if self.config.shutdown_timeout_s > 0 and self._stop_signals < 2:
                self.phase = Phase.DRAINING
                self._drain_deadline = time.monotonic() + self.config.shutdown_timeout_s
            else:
                self._abort_all("told to stop")
        elif self.phase is Phase.DRAINING:
            self._abort_all("told again to stop")

    def _abort_all(self, why: str) -> None:
        logger.info("aborting all requests: %s", why)
        self.phase = Phase.STOPPING
        self._core.scheduler.abort_all()

    # The orderly end.

    def _look_whether_drained(self) -> None:
        scheduler = self._core.scheduler
        if not scheduler.has_requests():
            self.phase = Phase.STOPPING
        elif not self._step_in_flight and not scheduler.has_work():
            self._abort_all("the scheduler is paused, so they would never finish")

    def _refuse_the_rest(self) -> None:
        """Answer whoever asked too late; nobody can ask after that."""
        self._flush_synthetic()
        self._stop_input()
        in_flight, self._step_in_flight = self._step_in_flight, False  # no handler waits for it any more
        self._handle_backlog()
        while not self._events.empty():
            handle, argument = self._events.get_nowait()
            if handle == self._on_step_result:
                in_flight = False
            else:
                handle(argument)
        self._step_in_flight = in_flight

    @property
    def _is_ending(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.STOPPING)

    def _seconds_to_drain(self) -> float | None:
        if self.phase is not Phase.DRAINING or self._drain_deadline is None:
            return None
        return max(0.0, self._drain_deadline - time.monotonic())

    # Called by the input thread.

    def receive_request(self, request: EngineCoreRequest) -> None:
        """Check a request and queue it; one that cannot be run is answered here and now."""
        try:
            self._events.put((self._on_add, self._core.preprocess_add_request(request)))
        except Exception as exc:  # noqa: BLE001 - whatever it is, it concerns this request only
            self._send(request.client_index, synthetic_outputs([error_output(request.request_id, exc)]))

    def receive_abort(self, request_ids: list[str]) -> None:
        """Queue an abort."""
        self._events.put((self._on_abort, request_ids))

    def receive_utility(self, call: UtilityCall) -> None:
        """Answer a call that needs no executor, also in mid-step; queue the others."""
        if UTILITIES.get(call.method) is not Answered.AT_ONCE:
            self._events.put((self._on_utility, call))
        elif self._is_ending:
            self.answer_utility(call.client_index, utility_output(call.call_id, failure_message=SHUTTING_DOWN))
        else:
            self._invoke(call)()

    def refuse_request(self, request_id: str, client_index: int, why: InvalidRequestError) -> None:
        """Answer a request with an ERROR output."""
        self._send(client_index, synthetic_outputs([error_output(request_id, why)]))

    def answer_utility(self, client_index: int, answer: UtilityOutput) -> None:
        """Answer a utility call."""
        self._send(client_index, EngineCoreOutputs(utility_output=answer))

    def thread_failed(self, exc: BaseException) -> None:
        """End the engine: one of its threads is gone."""

        def raise_it(_: None) -> None:
            raise exc

        self._events.put((raise_it, None))

    # Sending.

    def _invoke(self, call: UtilityCall) -> Callable[[], None]:
        """Call a utility; return what answers it."""
        try:
            result = invoke_utility(self._core, call.method, call.args)
        except Exception as exc:  # noqa: BLE001 - it is the caller's to know
            return partial(self._answer_failure, call, exc)
        if isinstance(result, Future):
            return partial(result.add_done_callback, partial(self._answer_future, call))
        return partial(self.answer_utility, call.client_index, utility_output(call.call_id, result))

    def _answer_future(self, call: UtilityCall, future: Future[Any]) -> None:
        exc = future.exception()
        if exc is not None:
            self._answer_failure(call, exc)
        else:
            self.answer_utility(call.client_index, utility_output(call.call_id, future.result()))

    def _answer_failure(self, call: UtilityCall, exc: BaseException) -> None:
        logger.warning("utility method=%s call_id=%d failed: %s", call.method, call.call_id, describe(exc))
        text = SHUTTING_DOWN if str(exc) == SHUTTING_DOWN else failure_text(call.method, exc)
        self.answer_utility(call.client_index, utility_output(call.call_id, failure_message=text))

    def _flush_synthetic(self) -> None:
        for client_index, message in self._core.scheduler.take_synthetic().items():
            self._send(client_index, message)

    def _send(self, client_index: int, message: EngineCoreOutputs) -> None:
        assert self._output is not None, "nothing is sent before start()"
        self._output.put(client_index, message)

    @property
    def _core(self) -> EngineCore:
        assert self.core is not None, "no core before start()"
        return self.core
