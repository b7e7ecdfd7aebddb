"""``MPClient``: what the sync and the asyncio client of engines in other processes share.

That is all but waiting: sockets, processes, start-up, routing, sending. A face adds a receiver and a way to wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import zmq

from enginewire.client.balancer import make_balancer
from enginewire.client.base import EngineCoreClient, EngineStatus, ExecutorChoice
from enginewire.client.engines import Engine, Engines, EngineState, Link
from enginewire.client.inbox import Inbox
from enginewire.client.lookout import Lookout
from enginewire.client.outbox import Outbox
from enginewire.client.remembered import Memory, RememberedEngine
from enginewire.client.resources import BackgroundResources, closed_error
from enginewire.client.startup import EngineStartup, Reception, wait_for_engines
from enginewire.client.utilities import Call, Waiter, fail
from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.errors import (
    DuplicateRequestIdError,
    EngineClientError,
    EngineDeath,
    EngineStartupTimeout,
    EngineUnavailableError,
    InvalidRequestError,
    UtilityCallError,
)
from enginewire.host.executor_source import ExecutorSource, executor_source
from enginewire.host.launcher import LAST_WORDS_S, EngineManager
from enginewire.host.manager import CoreEngineProcManager
from enginewire.transport.endpoints import choose_endpoints
from enginewire.transport.sockets import bind_also, bind_router, receive_message
from enginewire.wire.frames import engine_identity
from enginewire.wire.messages import EngineCoreRequest

logger = logging.getLogger(__name__)

FIND_S: Final = 5.0
"""How long a new frontend waits for all engines of an earlier one, once some are there: they connect again within three
seconds."""

FIND_POLL_MS: Final = 50

W = TypeVar("W", bound=Waiter)


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
        self._pid = os.getpid()
        self.resources = BackgroundResources(self.config.shutdown_timeout_s, self.config.terminate_timeout_s)
        self._finalizer = weakref.finalize(self, self.resources)
        self.engines = Engines(self.config.engine_return_timeout_s)
        self.inbox = Inbox(self.config, self.engines)
        self.outbox = Outbox(self.config, client_index)
        self._balancer = make_balancer(self.config.load_balancer, client_count=client_count, client_index=client_index)
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
        """Bind, launch, shake hands. Whatever fails here is cleaned up by the caller."""
        config, resources = self.config, self.resources
        launches = client_addresses is None and config.starts_engines
        # Before a folder is made: this may import much, and who is killed meanwhile should leave nothing behind.
        source = executor_source(executor_class or config.executor) if launches else None
        started = time.monotonic()
        max_model_len = config.max_model_len
        reception: Reception | None = None
        memory: Memory | None = None
        remembered: dict[int, RememberedEngine] = {}
        if client_addresses is None:
            resources.endpoints = choose_endpoints(config)
            handshakes = self._bind_handshake(resources.endpoints.handshakes)
            memory = self._memory_at(handshakes[-1])
            remembered = {} if memory is None else memory.recall()
            addresses = {index: (engine.input, engine.output) for index, engine in remembered.items()}
            reception = Reception(resources.context, config, resources.endpoints, addresses)
            for index in config.managed_ranks:
                is_ours = index in config.local_ranks
                self.engines.add(Engine(index, reception.open_link(index), is_ours=is_ours))
            if source is not None:
                specs = [self._engine_spec(source, index, handshakes[0]) for index in config.local_ranks]
                resources.engine_manager = CoreEngineProcManager(specs, forward_log=config.forward_engine_log)
            if any(not engine.is_ours for engine in self.engines):
                logger.info("waiting for engines that are started elsewhere, on %s", handshakes[-1])
        else:
            self._open_given_links(client_addresses)
        self.inbox.links = tuple(dict.fromkeys(engine.link for engine in self.engines))
        # Engines that were another client's are on their links already, or will be, and say nothing.
        known: Mapping[int, bytes] = (client_addresses or {}).get("ready_responses", {})
        if memory is not None:
            at_home = {engine.link.input_address for engine in self.engines}
            known = {index: engine.ready for index, engine in remembered.items() if engine.input in at_home}
        expected = {
            engine.index: None
            if reception is None or engine.index in known
            else reception.expected(engine.index, engine.link)
            for engine in self.engines
        }
        startup = EngineStartup(expected, max_model_len=max_model_len)
        for index, payload in known.items():
            startup.on_ready_response(engine_identity(index), payload)
        manager = resources.engine_manager
        others = wait_for_engines(
            startup,
            resources.handshake_socket,
            self.engines,
            started=started,
            ready_timeout_s=config.ready_timeout_s,
            hello_timeout_s=config.hello_timeout_s,
            first_death=manager.first_death if manager else lambda: None,
            log_tail=lambda: manager.log_tail(config.local_ranks[0]) if manager else (),
            not_awaited=known,
        )
        self.lookout = Lookout(
            config,
            self.engines,
            self.inbox,
            self.outbox,
            resources,
            max_model_len=max_model_len,
            reception=reception,
            balancer=self._balancer,
            memory=memory,
        )
        for frames in others:
            self.lookout.take_handshake(frames)
        for engine in self.engines:
            ready = startup.ready_of(engine.index)
            if engine.index in known:
                self.lookout.remember(engine, ready, time.monotonic())
            else:
                self.lookout.welcome(engine, ready)
        if memory is not None:
            self._find_again(started)
        self._memory = memory

    def _find_again(self, started: float) -> None:
        """Wait for the engines of an earlier frontend; when one is there, not long for the others.

        Raises:
            EngineStartupTimeout: none of them answers, and none was restarted.
        """
        poller = zmq.Poller()
        for socket in (self.resources.handshake_socket, *(link.output_socket for link in self.inbox.links)):
            poller.register(socket, zmq.POLLIN)
        began = time.monotonic()
        while len(self.engines.ready) < len(self.engines):
            poller.poll(FIND_POLL_MS)
            for link in self.inbox.links:
                with contextlib.suppress(zmq.Again):
                    while True:  # outputs are for the frontend that was here before; answers are sorted out
                        self.inbox.sort(link, receive_message(link.output_socket))
            now = time.monotonic()
            self.lookout.look(now)
            if self.engines.ready and now - began > FIND_S:
                return
            if now - started > self.config.ready_timeout_s:
                raise EngineStartupTimeout(
                    f"none of the engines of an earlier frontend answered within {self.config.ready_timeout_s:g} s, "
                    "and none was restarted; start them again, or raise ready_timeout_s",
                    stage="ready",
                )

    def _open_given_links(self, client_addresses: Mapping[str, Any]) -> None:
        """Bind where somebody else has told engines to come."""
        ranks = self.config.managed_ranks
        manager: EngineManager | None = client_addresses.get("engine_manager")
        self.resources.engine_manager = manager
        if "inputs" in client_addresses:
            pairs = list(zip(client_addresses["inputs"], client_addresses["outputs"], strict=True))
        else:
            pairs = [(client_addresses["input_address"], client_addresses["output_address"])] * len(ranks)
        links: dict[tuple[str, str], Link] = {}
        for index, pair in zip(ranks, pairs, strict=True):
            if pair not in links:
                links[pair] = Link(self.resources.context, self.config, pair)
            self.engines.add(Engine(index, links[pair], is_ours=manager is not None and manager.has(index)))

    def _memory_at(self, handshake: str) -> Memory | None:
        """Return the memory of engines that are started elsewhere; they only find a port that stays the same."""
        config = self.config
        has_remote = len(config.local_ranks) < len(config.managed_ranks)
        return Memory(handshake) if has_remote and config.data_parallel_rpc_port else None

    def _bind_handshake(self, endpoints: Sequence[str]) -> list[str]:
        """Bind the handshake socket, which is read for the client's life; return its addresses."""
        first, *others = endpoints
        socket, address = bind_router(self.resources.context, first, self.config.max_frame_bytes)
        self.resources.handshake_socket = socket
        return [address, *(bind_also(socket, endpoint) for endpoint in others)]

    def _engine_spec(self, source: ExecutorSource, index: int, handshake: str) -> EngineSpec:
        endpoints = self.resources.endpoints
        return EngineSpec(
            config=self.config,
            log_stats=self.config.log_stats,
            executor=source.reference,
            executor_pickle=source.pickled,
            sys_path=[str(Path(entry or ".").absolute()) for entry in sys.path],
            engine_index=index,
            handshake_address=handshake,
            local=True,
            headless=False,
            cleanup_paths=[endpoints.folder] if endpoints is not None and endpoints.folder else [],
        )

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
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this client belongs to the process that made it; ZeroMQ sockets do not survive a fork. "
                "Make a client of its own in the child process"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engines that this client started, and release everything. Idempotent, from any thread."""
        if self._memory is not None and not any(not engine.is_ours for engine in self.engines.ready):
            self._memory.forget()
        self.resources.close(timeout)
        self._finalizer.detach()  # only now: closing may have been interrupted

    # Sending. The caller holds the send lock (sync) or is the loop's thread (asyncio).

    def _send_add(self, request: EngineCoreRequest) -> None:
        self._ensure_open()  # under the lock: the socket is not closed before the message is out
        for engine in self.engines:
            if request.request_id in engine.live:
                raise DuplicateRequestIdError(request.request_id)
        while True:
            engine = self._engine_for(request)
            try:
                self.outbox.add(engine, request)
                return
            except zmq.ZMQError as exc:
                error = self._unreachable(engine, exc)
                if request.data_parallel_rank is not None or not self.engines.ready:
                    raise error from exc

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
        if len(ready) == 1:
            return ready[0]
        if not ready:
            raise self._unavailable()
        for engine in ready:
            engine.load.in_flight = len(engine.live)
        engine = self.engines[self._balancer.pick(request, [engine.load for engine in ready])]
        engine.load.add()
        return engine

    def _send_abort(self, request_ids: Sequence[str]) -> None:
        """Send ABORT to the engines that have the requests; no-op for no ids and for engines that are gone (C-42).

        An id that nobody is known to have goes to all (defect 27).
        """
        if not request_ids or self.engine_dead or self.resources.closing:
            return
        owners = {
            request_id: engine for engine in self.engines for request_id in request_ids if request_id in engine.live
        }
        for engine in self.engines.ready:
            ids = [request_id for request_id in request_ids if owners.get(request_id, engine) is engine]
            with contextlib.suppress(zmq.ZMQError):  # it is gone, and its requests with it
                if ids:
                    self.outbox.abort(engine, ids)
        for request_id, engine in owners.items():
            engine.live.pop(request_id, None)

    def engine_index_of(self, request_id: str) -> int | None:
        return next((engine.index for engine in self.engines if request_id in engine.live), None)

    def _start_calls(
        self, method: str, args: Sequence[Any], make_waiter: Callable[[], W], engine_index: int | None = None
    ) -> list[Call[W]]:
        """Call a utility of every engine that is ready (C-33), or of one."""
        self._ensure_open()
        ready = [engine for engine in self.engines.ready if engine_index in (None, engine.index)]
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
        manager = self.resources.engine_manager if engine.is_ours else None
        death = manager.wait_for_death(LAST_WORDS_S, engine.index) if manager is not None else None
        self._on_death(death or EngineDeath(engine.index, f"its connection is gone ({exc.strerror})"))
        return self._unavailable(engine)

    def _unavailable(self, engine: Engine | None = None) -> EngineClientError:
        """Make the error for a request that cannot be sent, to this engine or to any."""
        if self.engines.death is not None:
            return self.engines.death.exception()
        death = self.engines.first_loss() if engine is None else engine.death
        return EngineUnavailableError(death or EngineDeath(engine.index if engine else 0, "it is not ready yet"))

    def __repr__(self) -> str:
        state = "closed" if self.resources.closed else "dead" if self.engine_dead else "ready"
        ranks = self.config.managed_ranks
        which = f"engine={ranks[0]}" if len(ranks) == 1 else f"engines={ranks[0]}-{ranks[-1]}"
        return f"<{type(self).__name__} {which} {state} live={len(self.inbox.live)}>"
