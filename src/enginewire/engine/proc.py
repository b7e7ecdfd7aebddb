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
from msgspec import UNSET

from enginewire.config import EngineConfig
from enginewire.engine.busy_loop import BusyLoop
from enginewire.engine.core import EngineCore
from enginewire.engine.events import EventKind, Events
from enginewire.engine.executor import Executor
from enginewire.engine.frontends import Frontend
from enginewire.engine.handshake import INIT_TIMEOUT_S, Handshake, ready_response
from enginewire.engine.input_thread import InputThread
from enginewire.engine.output_thread import OutputThread
from enginewire.engine.receiver import EventReceiver
from enginewire.engine.registry import load_executor_class
from enginewire.engine.spec import EngineSpec, describe
from enginewire.engine.step import StepOutput
from enginewire.wire.handshake import EngineHandshakeMetadata, FrontendInfo
from enginewire.wire.profile import profile_named

if TYPE_CHECKING:
    from enginewire.engine.ranks import RankGroup
    from enginewire.engine.worker_process import ExecutorProcess

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 30.0
"""How long connecting sockets may take; it needs no peer, so more means that this host is stuck."""

SIGNAL_CHECK_S: Final = 0.5
"""How often waiting is interrupted: a signal that comes just before it begins does not end it."""


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
        self._handshakes: list[Handshake] = []
        self._group: RankGroup | None = None
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
        init = self._shake_hands()
        addresses = init.addresses
        executor_class = load_executor_class(spec)
        group = self._join(init) if executor_class.lock_step else None
        reports_load = addresses.coordinator_output is not None and not spec.config.data_parallel_external_lb
        logger.info("loading model=%s executor=%s", spec.config.model, executor_class.__qualname__)
        began = time.monotonic()
        make_executor = self._start_child if executor_class.holds_gil else executor_class
        self.core = core = EngineCore(spec.config, make_executor, spec.log_stats, reports_load=reports_load)
        logger.info("loaded in %.2f s, max_model_len=%d", time.monotonic() - began, core.max_model_len)
        if group is not None:
            core.executor.join_group(group.rank, init.parallel_config)
        elif init.parallel_config:
            logger.info("INIT's parallel_config is ignored: this executor has no ranks that step together")
        self._connect(core, executor_class.__qualname__, init, group, reports_load=reports_load)
        ready_hash = UNSET if group is None else spec.parallel_config_hash or deployment_hash(spec, group.size)
        for handshake in reversed(self._handshakes):  # this node's frontend first (protocol B.6)
            handshake.ready(ready_hash)
        logger.info("ready")

    def _shake_hands(self) -> EngineHandshakeMetadata:
        """Say HELLO, and return what INIT says; where there are two, it is put together of both (protocol B.6)."""
        spec = self.spec
        # A headless engine may be started long before its frontend.
        timeout_s = math.inf if spec.headless else INIT_TIMEOUT_S
        if not spec.client_handshake_address:
            return self._hello(spec.handshake_address, timeout_s, local=spec.local, headless=spec.headless)
        init = self._hello(spec.handshake_address, timeout_s, local=False, headless=False)
        own = self._hello(spec.client_handshake_address, timeout_s, local=spec.local, headless=spec.headless)
        init.addresses.inputs, init.addresses.outputs = own.addresses.inputs, own.addresses.outputs
        init.enginewire = own.enginewire
        return init

    def _hello(self, address: str, timeout_s: float, *, local: bool, headless: bool) -> EngineHandshakeMetadata:
        handshake = Handshake(self._context, address, self.spec.engine_index, local=local, headless=headless)
        self._handshakes.append(handshake)
        return handshake.hello(timeout_s)

    def _join(self, init: EngineHandshakeMetadata) -> RankGroup | None:
        """Meet the other ranks, if there are any."""
        from enginewire.engine.ranks import ParallelConfig, RankGroup  # few engines have ranks

        parallel = ParallelConfig.from_init(init.parallel_config)
        if parallel is None:
            return None
        rank = self.spec.engine_index
        logger.info("meeting %d ranks at %s:%d", parallel.size, parallel.host, parallel.port)
        self._group = RankGroup(rank, parallel.size, parallel.host, parallel.port, self.spec.config.ready_timeout_s)
        return self._group

    def _connect(
        self,
        core: EngineCore,
        executor_name: str,
        init: EngineHandshakeMetadata,
        group: RankGroup | None,
        *,
        reports_load: bool,
    ) -> None:
        """Start the threads and wait until all engines are there."""
        spec, config, addresses = self.spec, self.spec.config, init.addresses
        coordinator = addresses.coordinator_output
        outputs = addresses.outputs if coordinator is None else [*addresses.outputs, coordinator]
        told = None if config.wire_version is None else profile_named(config.wire_version)
        frontends = [Frontend(told) for _ in outputs]
        self._output = output = OutputThread(
            self._context, outputs, frontends, spec.engine_index, config, has_coordinator=coordinator is not None
        )
        loop = self._make_loop(core, output, group, reports_load=reports_load, has_coordinator=coordinator is not None)
        receiver = EventReceiver(core, self._events, output, lambda: loop.is_ending)
        num_ranks = 1 if group is None else group.size
        ready = ready_response(core, executor_name, spec.engine_index, addresses, told, num_ranks)
        self._input = InputThread(
            self._context,
            addresses.inputs,
            frontends,
            spec.engine_index,
            ready,
            config,
            receiver,
            coordinator=addresses.coordinator_input,
            heartbeat_s=_heartbeat_s(init),
            # A process that was started by its only frontend ends with it: the lifeline sees to that.
            watch=not spec.local or len(addresses.inputs) > 1,
        )
        output.start_for(receiver)
        self._input.start()
        self._input.connected.wait(CONNECT_TIMEOUT_S)
        if coordinator is not None:
            logger.info("waiting for the other engines")
            while not self._input.all_listen.wait(SIGNAL_CHECK_S):
                pass  # the handler of a signal has run, if there was one
        if group is not None:
            group.watch(receiver.thread_failed)
        self._loop = loop

    def _make_loop(
        self,
        core: EngineCore,
        output: OutputThread,
        group: RankGroup | None,
        *,
        reports_load: bool,
        has_coordinator: bool,
    ) -> BusyLoop:
        if group is None:
            return BusyLoop(core, self._events, output, self._child, reports_load=reports_load)
        from enginewire.engine.lock_step import LockStepLoop  # few engines have ranks

        return LockStepLoop(
            core,
            self._events,
            output,
            self._child,
            reports_load=reports_load,
            group=group,
            has_coordinator=has_coordinator,
        )

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
        for handshake in self._handshakes:
            handshake.close()
        try:
            if self._child is not None and self._loop is not None and self._loop.is_step_in_flight:
                self._child.shutdown(wait=False)  # nobody wants that step's result
            elif self.core is not None:
                self.core.shutdown()
        except Exception:
            logger.exception("the executor's shutdown failed")
        if self._group is not None:
            self._group.close()
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
        self._loop.stop()

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


def _heartbeat_s(init: EngineHandshakeMetadata) -> tuple[float, float] | None:
    """Return the heartbeat that a frontend of ours has.

    With vLLM's, silence costs nothing: neither side closes the connection, and what was sent arrives in the end.
    """
    if not isinstance(init.enginewire, FrontendInfo) or init.enginewire.heartbeat_ms is None:
        return None
    interval_ms, timeout_ms = init.enginewire.heartbeat_ms
    return interval_ms / 1000, timeout_ms / 1000


def deployment_hash(spec: EngineSpec, num_ranks: int) -> str:
    """Make what ranks in lock-step say in READY, so that their frontend notices two that do not belong together."""
    import hashlib  # 2 ms of every start otherwise

    said = f"{spec.config.model}\n{spec.executor}\n{num_ranks}"
    return hashlib.sha256(said.encode()).hexdigest()
