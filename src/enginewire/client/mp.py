"""``MPClient``: what the sync and the asyncio client of engines in other processes share.

That is all but waiting: sockets, processes, start-up, routing, sending. A face adds a receiver and a way to wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import zmq

from enginewire.client.balancer import make_balancer
from enginewire.client.base import EngineCoreClient, ExecutorChoice
from enginewire.client.engines import Engine, Engines, EngineState
from enginewire.client.failover import Failover
from enginewire.client.inbox import Inbox
from enginewire.client.launch import Launch
from enginewire.client.outbox import Outbox
from enginewire.client.remembered import Memory
from enginewire.client.resources import BackgroundResources, closed_error
from enginewire.client.status import EngineStatus
from enginewire.client.utilities import Call, Waiter, fail
from enginewire.config import EngineConfig
from enginewire.errors import (
    DuplicateRequestIdError,
    EngineClientError,
    EngineDeath,
    EngineUnavailableError,
    InvalidRequestError,
    UtilityCallError,
)
from enginewire.host.launcher import LAST_WORDS_S
from enginewire.wire.messages import EngineCoreRequest

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Waiter)

_clients: weakref.WeakSet[MPClient] = weakref.WeakSet()


def _disown_clients() -> None:
    for client in _clients:
        client._is_copy = True


os.register_at_fork(after_in_child=_disown_clients)  # asking for the process id takes as long as sending a message


class MPClient(EngineCoreClient):
    """Client of engines in other processes; see :class:`SyncMPClient` and :class:`AsyncMPClient`.

    Usable when the constructor returns; otherwise all it made is gone and it raised.

    Args:
        config: copied; ``self.config`` is completed by what the engines report.
        executor_class: overrides ``config.executor``.
        log_stats: overrides ``config.log_stats``.
        client_addresses: where to bind, when somebody else starts the engines and does the handshake:
            ``input_address`` and ``output_address`` for all engines, or ``inputs`` and ``outputs``, lists with one for
            each of ``config.managed_ranks``. ``engine_manager``, if given, knows of those engines' processes what
            ``CoreEngineProcManager`` would. ``ready_responses``, by rank, are those of engines that were another
            client's on these addresses: they are awaited there and say nothing more of themselves.
        client_count: how many frontends share the engines.
        client_index: which of them this is.

    Attributes:
        engines: those of ``config.managed_ranks``.

    Raises:
        ConfigError: the executor cannot be found, or settings contradict each other.
        EngineStartupError: an engine could not be started; a ``TimeoutError`` too if time ran out.
        OSError: an address cannot be bound.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: ExecutorChoice = None,
        log_stats: bool | None = None,
        *,
        client_addresses: Mapping[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> None:
        self.config = config.copy()
        if log_stats is not None:
            self.config.log_stats = log_stats
        self.client_count = client_count
        self.client_index = client_index
        self._is_copy = False
        """In a forked child, of which ZeroMQ knows nothing."""
        _clients.add(self)
        self._balancer = make_balancer(self.config.load_balancer, client_count=client_count, client_index=client_index)
        self.resources = BackgroundResources(self.config.shutdown_timeout_s, self.config.terminate_timeout_s)
        self._finalizer = weakref.finalize(self, self.resources)
        self.engines = Engines(self.config.engine_return_timeout_s)
        self.inbox = Inbox(self.config, self.engines)
        self.outbox = Outbox(self.config, client_index)
        if self.config.failover != "none":
            self.inbox.failover = Failover(
                self.config.failover,
                self.config.failover_timeout_s,
                self.engines,
                self.outbox,
                self._balancer,
                self.resources.send_lock,
            )
        self._memory: Memory | None = None
        me = weakref.ref(self)

        def on_change(status: EngineStatus) -> None:
            client = me()
            if client is not None and client.on_engine_change is not None:
                client.on_engine_change(status)

        self.engines.on_change = on_change
        try:
            self._start(executor_class, client_addresses)
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start(self, executor_class: ExecutorChoice, client_addresses: Mapping[str, Any] | None) -> None:
        """Bring the engines up. Whatever fails here is cleaned up by the caller."""
        launch = Launch(self.config, self.engines, self.inbox, self.outbox, self.resources, self._balancer)
        self.lookout = launch.run(executor_class, client_addresses)
        self._memory = launch.memory

    # Death.

    def start_engine_core_monitor(self) -> None:
        """Have the deaths of engine processes reported to this client, without keeping it alive (C-26)."""
        manager = self.resources.engine_manager
        if manager is None:
            return
        me = weakref.ref(self)

        def on_death(death: EngineDeath) -> None:
            client = me()
            if client is not None:
                client._on_death(death)

        manager.watch_deaths(on_death)

    def _on_death(self, death: EngineDeath) -> None:
        """Take note of an engine's death, from any thread, and have everybody told who waits on it."""
        if self.engines.lost(death):
            self._wake_receiver()

    def _wake_receiver(self) -> None:
        """Have the receiver look at once, from any thread."""
        raise NotImplementedError

    @property
    def engine_dead(self) -> bool:
        """Whether all engines are gone for good."""
        return self.engines.death is not None

    def engine_statuses(self) -> list[EngineStatus]:
        return [self.engines.status(engine) for engine in self.engines]

    def ensure_alive(self) -> None:
        """Raise if nothing can be asked of any engine, now or later.

        Raises:
            EngineDeadError: they are gone.
            ClientClosedError: this client was shut down.
            RuntimeError: this is a forked copy of the process that made the client.
        """
        self._ensure_own_process()
        self._ensure_open()

    def _ensure_open(self) -> None:
        if self.engines.death is not None:
            raise self.engines.death.exception()
        if self.resources.closing:
            raise closed_error()

    def _ensure_own_process(self) -> None:
        """Refuse to work in a forked child. Before any lock: a thread that does not exist there may hold it."""
        if self._is_copy:
            raise RuntimeError(
                "this client belongs to the process that made it; ZeroMQ sockets do not survive a fork. "
                "Make a client of its own in the child process"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engines that this client started, and release everything. Idempotent, from any thread."""
        self.resources.close(timeout)
        self._finalizer.detach()  # only now: closing may have been interrupted

    # Sending. The caller holds the send lock (sync) or is the loop's thread (asyncio).

    def _send_add(self, request: EngineCoreRequest) -> None:
        self._ensure_open()  # under the lock: the socket is not closed before the message is out
        request_id, owners = request.request_id, self.engines.owners
        if request_id in owners:
            raise DuplicateRequestIdError(request_id)
        coordination = self.lookout.coordination
        if coordination is not None:
            request.current_wave = coordination.wave
        while True:
            engine = self._engine_for(request)
            owners[request_id] = engine  # before it is sent: its only output may be faster than us
            try:
                if self.inbox.failover is not None:
                    self.inbox.failover.begins(engine, request)
                self.outbox.add(engine, request)
            except BaseException as exc:
                owners.pop(request_id, None)
                if self.inbox.failover is not None:
                    self.inbox.failover.forget(request_id)
                if not isinstance(exc, zmq.ZMQError):
                    raise
                error = self._unreachable(engine, exc)
                if request.data_parallel_rank is not None or not self.engines.ready:
                    raise error from exc
            else:
                if coordination is not None:
                    coordination.first_request(engine)
                return

    def _engine_for(self, request: EngineCoreRequest) -> Engine:
        """Choose the engine that gets a request: the one that it names, or the load balancer's choice (C-51)."""
        rank, ready = request.data_parallel_rank, self.engines.ready
        if rank is not None:
            engine = self.engines.get(rank)
            if engine is None:
                ranks = ", ".join(str(each.index) for each in self.engines)
                raise InvalidRequestError(
                    f"data_parallel_rank is {rank}, and this client has engines {ranks}",
                    request_id=request.request_id,
                    parameter="data_parallel_rank",
                )
            if engine.state is not EngineState.READY:
                raise self._unavailable(engine)
            return engine
        if not ready:
            raise self._unavailable()
        return self.engines.pick(request, self._balancer, ready)

    def _send_abort(self, request_ids: Sequence[str]) -> None:
        """Send ABORT to the engines that have the requests; no-op for no ids and for engines that are gone (C-42).

        An id that nobody is known to have goes to all (defect 27).
        """
        if not request_ids or self.engine_dead or self.resources.closing:
            return
        # Thousands may be aborted at once: a loop over all of them for each step.
        owners, failover = self.engines.owners, self.inbox.failover
        owned = [owners.pop(request_id, None) for request_id in request_ids]
        if failover is not None:
            request_ids = [failover.forget(request_id) for request_id in request_ids]
        unknown = [each for each, owner in zip(request_ids, owned, strict=True) if owner is None]
        for engine in self.engines:
            known = [each for each, owner in zip(request_ids, owned, strict=True) if owner is engine]
            ids = known + unknown
            if ids and engine.state in (EngineState.READY, EngineState.LEAVING):
                with contextlib.suppress(zmq.ZMQError):  # it is gone, and its requests with it
                    self.outbox.abort(engine, ids)
            for request_id in known:
                engine.live.pop(request_id, None)

    def engine_index_of(self, request_id: str) -> int | None:
        engine = self.engines.owners.get(request_id)
        return None if engine is None else engine.index

    def _start_calls(
        self, method: str, args: Sequence[Any], make_waiter: Callable[[], W], engine_index: int | None = None
    ) -> list[Call[W]]:
        """Call a utility of every engine that is ready (C-33), or of one."""
        self._ensure_open()
        ready = self.engines.ready
        if engine_index is not None:
            ready = tuple(engine for engine in ready if engine.index == engine_index)
        if not ready:
            raise self._unavailable(self.engines.get(engine_index))
        calls: list[Call[W]] = []
        try:
            for engine in ready:
                call = self.inbox.calls.start(method, make_waiter(), engine.index)
                calls.append(call)
                try:
                    self.outbox.call(engine, call.call_id, method, args)
                except zmq.ZMQError as exc:
                    error = self._unreachable(engine, exc)
                    if len(ready) == 1:
                        raise error from exc
                    fail(call.waiter, UtilityCallError(str(error), method=method, engine_index=engine.index))
        except BaseException:
            self._forget_calls(calls)
            raise
        return calls

    def _forget_calls(self, calls: Sequence[Call[Any]]) -> None:
        for call in calls:
            self.inbox.calls.forget(call.call_id)

    def _unreachable(self, engine: Engine, exc: zmq.ZMQError) -> EngineClientError:
        """Find out why there is no connection to send on, and take the engine for lost.

        A process that was killed loses its connections some milliseconds before its exit status is known, and that is
        what the caller should hear. So this waits, once in an engine's life, also under the lock and on a loop.
        """
        manager, death = self.resources.engine_manager, None
        sign = f"its connection is gone ({exc.strerror})"
        if engine.is_ours and manager is not None:
            manager.expect_death(sign, engine.index)  # a process that is stopped, or hangs, is to end, too
            death = manager.wait_for_death(LAST_WORDS_S, engine.index)
        self._on_death(death or EngineDeath(engine.index, sign))
        return self._unavailable(engine)

    def _unavailable(self, engine: Engine | None = None) -> EngineClientError:
        """Make the error for a request that cannot be sent, to this engine or to any."""
        if self.engines.death is not None:
            return self.engines.death.exception()
        if engine is None:
            death = self.engines.first_loss() or EngineDeath(0, "it is not ready yet")
        else:
            death = engine.death or EngineDeath(engine.index, f"it is {engine.state}")
        return EngineUnavailableError(death)

    def dp_engines_running(self) -> bool:
        coordination = self.lookout.coordination
        return coordination is not None and coordination.engines_running

    def __repr__(self) -> str:
        state = "closed" if self.resources.closed else "dead" if self.engine_dead else "ready"
        ranks = self.config.managed_ranks
        which = f"engine={ranks[0]}" if len(ranks) == 1 else f"engines={ranks[0]}-{ranks[-1]}"
        return f"<{type(self).__name__} {which} {state} live={len(self.inbox.live)}>"
