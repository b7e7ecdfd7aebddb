"""``EngineCoreProc``: an engine core in a process of its own: handshake, two I/O threads, a busy loop, an orderly end.

The main thread decides (``busy_loop``), the input thread reads and checks, the output thread encodes and sends.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import zmq

from enginewire.config import EngineConfig
from enginewire.engine.busy_loop import BusyLoop, EventKind, Events
from enginewire.engine.core import EngineCore
from enginewire.engine.executor import Executor
from enginewire.engine.frontends import Frontend
from enginewire.engine.handshake import INIT_TIMEOUT_S, Handshake, ready_response
from enginewire.engine.input_thread import InputThread
from enginewire.engine.output_thread import OutputThread
from enginewire.engine.registry import load_executor_class
from enginewire.engine.spec import EngineSpec, describe
from enginewire.engine.step import StepOutput
from enginewire.wire.profile import profile_named

if TYPE_CHECKING:
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 30.0
"""How long connecting sockets may take; it needs no peer, so more means that this host is stuck."""


class StoppedWhileStarting(BaseException):
    """Told to stop while starting. No ``Exception``: no executor's constructor is to swallow it."""


class EngineCoreProc:
    """An engine's process: :meth:`start`, :meth:`run_busy_loop`, :meth:`close`, all in the main thread.

    Args:
        spec: what to run, and whom to talk to.
        on_death: told why the loop died, before the frontends are.
    """

    def __init__(
        self,
        spec: EngineSpec,
        on_death: Callable[[BaseException], None] = lambda exc: None,
    ) -> None:
        self.spec = spec
        self.core: EngineCore | None = None
        self._on_death = on_death
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events: Events = queue.SimpleQueue()
        self._child: ExecutorProcess | None = None
        self._handshake: Handshake | None = None
        self._input: InputThread | None = None
        self._output: OutputThread | None = None
        self._loop: BusyLoop | None = None
        """There is one once the engine has started."""
        self._is_closing = False

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
        # A headless engine may be started long before its frontend.
        addresses = self._handshake.hello(math.inf if spec.headless else INIT_TIMEOUT_S)
        executor_class = load_executor_class(spec)
        logger.info("loading model=%s executor=%s", spec.config.model, executor_class.__qualname__)
        began = time.monotonic()
        make_executor = self._start_child if executor_class.holds_gil else executor_class
        self.core = core = EngineCore(spec.config, make_executor, spec.log_stats)
        logger.info("loaded in %.2f s, max_model_len=%d", time.monotonic() - began, core.max_model_len)
        told = None if spec.config.wire_version is None else profile_named(spec.config.wire_version)
        frontends = [Frontend(told) for _ in addresses.inputs]
        index = spec.engine_index
        self._output = output = OutputThread(self._context, addresses.outputs, frontends, index, spec.config)
        loop = BusyLoop(core, self._events, output.put, self._child)
        ready = ready_response(core, executor_class.__qualname__, index, addresses, told)
        # A process that was started by its only frontend ends with it: the lifeline sees to that.
        watch = not spec.local or len(frontends) > 1
        self._input = InputThread(
            self._context, addresses.inputs, frontends, index, ready, spec.config, loop, watch=watch
        )
        output.start_for(loop)
        self._input.start()
        self._input.connected.wait(CONNECT_TIMEOUT_S)
        self._loop = loop
        self._handshake.ready()
        logger.info("ready")

    def run_busy_loop(self) -> None:
        """Serve until told to stop; returns when every request is answered.

        Raises:
            BaseException: what broke the loop. The frontends have been told that the engine is dead.
        """
        assert self._loop is not None, "run_busy_loop() before start()"
        try:
            self._loop.run()
            self._stop_input()
            self._loop.refuse_the_rest()
            logger.info("stopped")
        except BaseException as exc:
            logger.critical("the engine dies: %s", describe(exc), exc_info=exc)
            self._on_death(exc)
            if self._output is not None:
                self._output.put_dead()
            raise

    def close(self) -> None:
        """Send what is queued, stop the threads, release the executor and the sockets. Once, in any phase."""
        self._is_closing = True
        self._stop_input()
        if self._output is not None:
            self._output.stop()
        if self._handshake is not None:
            self._handshake.close()
        try:
            if self._child is not None and self._loop is not None and self._loop.is_step_in_flight:
                self._child.shutdown(wait=False)  # nobody wants that step's result
            elif self.core is not None:
                self.core.shutdown()
        except Exception:
            logger.exception("the executor's shutdown failed")
        self._context.term()

    def request_shutdown(self) -> None:
        """Stop: drain or abort as configured; asked again, abort. For signal handlers in the main thread.

        Raises:
            StoppedWhileStarting: while starting: there is nothing to drain, and loading a model may take minutes.
        """
        if self._is_closing:
            return
        if self._loop is None:
            raise StoppedWhileStarting
        self._events.put((EventKind.STOP, None))  # a SimpleQueue's put is safe in a signal handler

    def wake(self) -> None:
        """Make the main thread look up, so that it runs pending signal handlers. For any thread."""
        self._events.put((EventKind.ABORT, []))  # of no request: nothing by itself

    def _start_child(self, _: EngineConfig) -> Executor:
        from enginewire.engine.worker_process import ExecutorProcess  # the price of subprocess only where it is needed

        self._child = ExecutorProcess(self.spec, self._step_came)
        return self._child

    def _step_came(self, result: StepOutput | BaseException) -> None:
        """Take a step's result, or the child's death. Called in a thread of the child's handle."""
        kind = EventKind.FAILED if isinstance(result, BaseException) else EventKind.STEP_DONE
        self._events.put((kind, result))

    def _stop_input(self) -> None:
        if self._input is not None:
            self._input.stop()
            self._input = None
