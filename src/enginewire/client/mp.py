"""``MPClient``: what the sync and the asyncio client of an engine in another process share.

That is all but waiting: sockets, processes, start-up, sending, death. A face adds a receiver and a way to wait.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from enginewire.client.base import EngineCoreClient, EngineStatus, ExecutorChoice
from enginewire.client.inbox import Inbox
from enginewire.client.resources import BackgroundResources, closed_error
from enginewire.client.startup import EngineStartup, apply_ready_responses, wait_for_engines
from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineClientError, EngineDeadError, EngineDeath
from enginewire.host.executor_source import ExecutorSource, executor_source
from enginewire.host.manager import LAST_WORDS_S, CoreEngineProcManager
from enginewire.transport.endpoints import Endpoints, choose_endpoints
from enginewire.transport.peers import PeerWatch
from enginewire.transport.sockets import bind_pull, bind_router, receive_message, send_message
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ABORT, ADD, UTILITY, engine_identity
from enginewire.wire.handshake import EngineZmqAddresses
from enginewire.wire.messages import EngineCoreRequest

logger = logging.getLogger(__name__)


class MPClient(EngineCoreClient):
    """Client of an engine in another process; see :class:`SyncMPClient` and :class:`AsyncMPClient`.

    Usable when the constructor returns; otherwise all it made is gone and it raised.

    Args:
        config: copied; ``self.config`` is completed by what the engine reports.
        executor_class: overrides ``config.executor``.
        log_stats: overrides ``config.log_stats``.
        client_addresses: ``input_address`` and ``output_address`` to bind, when somebody else starts the engines and
            does the handshake.
        client_count: how many frontends share the engines.
        client_index: which of them this is.

    Raises:
        ConfigError: the executor cannot be found, or settings contradict each other.
        EngineStartupError: the engine could not be started; a ``TimeoutError`` too if time ran out.
        OSError: an address cannot be bound.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: ExecutorChoice = None,
        log_stats: bool | None = None,
        *,
        client_addresses: Mapping[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> None:
        self.config = config.copy()
        if log_stats is not None:
            self.config.log_stats = log_stats
        self.client_count = client_count
        self.client_index = client_index
        self.engine_index = self.config.data_parallel_rank
        self._identity = engine_identity(self.engine_index)
        self._pid = os.getpid()
        self.resources = BackgroundResources(self.config.shutdown_timeout_s, self.config.terminate_timeout_s)
        self._finalizer = weakref.finalize(self, self.resources)
        self._encoder = MsgpackEncoder(
            zero_copy_threshold=self.config.zero_copy_threshold, allow_pickle=self.config.allow_pickle
        )
        # Messages whose arrays ZeroMQ still reads, with what keeps those arrays alive.
        self._pending_messages: deque[tuple[zmq.MessageTracker, object]] = deque()
        self.inbox = Inbox(self.config, [self.engine_index], self._make_marker_handler())
        self._peer_watches: list[PeerWatch] = []
        try:
            self._start(executor_class, client_addresses)
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start(self, executor_class: ExecutorChoice, client_addresses: Mapping[str, str] | None) -> None:
        """Bind, launch, shake hands. Whatever fails here is cleaned up by the caller."""
        resources = self.resources
        launches = client_addresses is None and self.config.starts_engines
        # Before a folder is made: this may import much, and who is killed meanwhile should leave nothing behind.
        source = executor_source(executor_class or self.config.executor) if launches else None
        if client_addresses is not None:
            endpoints = Endpoints("", client_addresses["input_address"], client_addresses["output_address"])
        else:
            endpoints = choose_endpoints(self.config)
        resources.endpoints = endpoints
        started = time.monotonic()
        limit = self.config.max_frame_bytes
        resources.input_socket, input_address = bind_router(resources.context, endpoints.input, limit)
        resources.output_socket, output_address = bind_pull(resources.context, endpoints.output, limit)
        self._peer_watches = [PeerWatch(resources.input_socket), PeerWatch(resources.output_socket)]
        startup = EngineStartup(
            [self.engine_index],
            local=launches,
            addresses=EngineZmqAddresses(inputs=[input_address], outputs=[output_address]),
            handshake=client_addresses is None,
            max_model_len=self.config.max_model_len,
        )
        if client_addresses is None:
            resources.handshake_socket, address = bind_router(resources.context, endpoints.handshake, limit)
            if source is not None:
                spec = self._engine_spec(source, address, endpoints)
                resources.engine_manager = CoreEngineProcManager([spec], forward_log=self.config.forward_engine_log)
            else:
                logger.info("waiting for engine %s, started elsewhere, on %s", self.engine_index, address)
        manager = resources.engine_manager
        wait_for_engines(
            startup,
            resources.handshake_socket,
            resources.input_socket,
            started=started,
            ready_timeout_s=self.config.ready_timeout_s,
            hello_timeout_s=self.config.hello_timeout_s if launches else None,
            first_death=manager.first_death if manager else lambda: None,
            log_tail=lambda: manager.log_tail(self.engine_index) if manager else (),
        )
        apply_ready_responses(self.config, startup.responses)
        for watch in self._peer_watches:
            watch.settle()
        if resources.handshake_socket is not None:
            resources.handshake_socket.close(linger=0)

    def _engine_spec(self, source: ExecutorSource, handshake: str, endpoints: Endpoints) -> EngineSpec:
        return EngineSpec(
            config=self.config,
            log_stats=self.config.log_stats,
            executor=source.reference,
            executor_pickle=source.pickled,
            sys_path=[str(Path(entry or ".").absolute()) for entry in sys.path],
            engine_index=self.engine_index,
            handshake_address=handshake,
            local=True,
            headless=False,
            cleanup_paths=[endpoints.folder] if endpoints.folder else [],
        )

    # Death.

    def _make_marker_handler(self) -> Any:
        """Make what the receiver calls on a death marker; it must not keep the client alive."""
        me = weakref.ref(self)

        def on_death_marker() -> None:
            client = me()
            if client is None:
                return
            if client.resources.engine_manager is not None:
                client.resources.engine_manager.expect_death("it reported a fatal error")
            else:
                cause = "it reported a fatal error; its log is on the host where it runs"
                client._on_death(EngineDeath(client.engine_index, cause))

        return on_death_marker

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
        """Take note of the engine's death, from any thread, and wake everybody who waits."""
        raise NotImplementedError

    @property
    def engine_dead(self) -> bool:
        """Whether the engine is gone."""
        return self.inbox.death is not None

    def engine_statuses(self) -> list[EngineStatus]:
        death = self.inbox.death
        state = "ready" if death is None else "dead"
        return [EngineStatus(self.engine_index, state, death, len(self.inbox.live), int(death is not None))]

    def ensure_alive(self) -> None:
        """Raise if nothing can be asked of the engine.

        Raises:
            EngineDeadError: it is gone.
            ClientClosedError: this client was shut down.
            RuntimeError: this is a forked copy of the process that made the client.
        """
        self._ensure_own_process()
        self._ensure_open()

    def _ensure_open(self) -> None:
        if self.inbox.death is not None:
            raise self.inbox.death.exception()
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
        """Stop the engine if this client started it, and release everything. Idempotent, from any thread."""
        self.resources.close(timeout)
        self._finalizer.detach()  # only now: closing may have been interrupted

    # Sending. The caller holds the send lock (sync) or is the loop's thread (asyncio).

    def _send_add(self, request: EngineCoreRequest) -> None:
        self._ensure_open()  # under the lock: the socket is not closed before the message is out
        request.client_index = self.client_index
        self.inbox.admit(request.request_id)
        try:
            self._send(ADD, request)
        except BaseException:
            self.inbox.forget([request.request_id])
            raise

    def _send_abort(self, request_ids: Sequence[str]) -> None:
        """Send ABORT; no-op for no ids and for an engine that is gone (C-42)."""
        if not request_ids or self.engine_dead or self.resources.closing:
            return
        with contextlib.suppress(EngineDeadError):  # it is gone, and its requests with it
            self._send(ABORT, list(request_ids))
        self.inbox.forget(request_ids)

    def _send_utility(self, call_id: int, method: str, args: Sequence[Any]) -> None:
        self._ensure_open()
        self._send(UTILITY, (self.client_index, call_id, method, args))

    def _send(self, request_type: bytes, message: object) -> None:
        """Send one message.

        Arrays of at least ``zero_copy_threshold`` bytes are not copied: the message is kept until ZeroMQ is done with
        them (C-28).

        Raises:
            EncodeError: the message has a value that cannot go on the wire.
            EngineDeadError: the engine's connection is gone.
        """
        socket = self.resources.input_socket
        assert socket is not None
        payload, *arrays = self._encoder.encode(message)
        self._release_sent()
        try:
            for tracker in send_message(socket, (self._identity, request_type, payload), arrays):
                self._pending_messages.append((tracker, message))
        except zmq.ZMQError as exc:
            raise self._why_unreachable(exc).exception() from exc

    def _release_sent(self) -> None:
        """Let go of messages that ZeroMQ is done with."""
        while self._pending_messages and self._pending_messages[0][0].done:
            self._pending_messages.popleft()

    def _why_unreachable(self, exc: zmq.ZMQError) -> EngineDeath:
        """Find out why there is no connection to send on.

        A process that was killed loses its connections some milliseconds before its exit status is known, and that is
        what the caller should hear. So this waits, once in an engine's life, also under the lock and on a loop.
        """
        manager = self.resources.engine_manager
        death = self.inbox.death or (manager.wait_for_death(LAST_WORDS_S) if manager is not None else None)
        return death or EngineDeath(self.engine_index, f"its connection is gone ({exc.strerror})")

    def _look_after_peers(self) -> list[Any]:
        """Do what is due once a second: see whether a remote engine is lost, or was restarted and registers anew.

        Returns:
            messages for the consumer.
        """
        messages = self._read_input_socket()
        lost = [watch for watch in self._peer_watches if watch.has_lost_peer()]
        if messages:  # it registered anew, and its old connections are meant to go
            for watch in self._peer_watches:
                watch.settle()
        elif lost:
            self._connection_lost()
        if self.inbox.in_doubt:
            self._ask_for_losses()
        if (failures := self.inbox.take_losses()) is not None:
            messages.append(failures)
        return messages

    def _ask_for_losses(self) -> None:
        """Ask the engine which requests it knows, after a message was dropped that nobody could read.

        On tcp it was a stranger's, as like as not; but if it held a request's last output, nothing would follow, and
        its caller would wait for ever. Answers travel behind outputs, so what the answer leaves out has ended.
        """
        self.inbox.in_doubt = False
        answer: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        answer.add_done_callback(functools.partial(self.inbox.note_known, frozenset(self.inbox.live)))
        with contextlib.suppress(EngineClientError):  # gone or closed: whoever waits is told that
            self._send_utility(self.inbox.calls.start("get_request_ids", answer), "get_request_ids", ())

    def _connection_lost(self) -> None:
        """Take the loss of a connection for the engine's death: outputs may be lost with it, and nobody would know."""
        manager = self.resources.engine_manager
        if manager is None:
            cause = "the connection to it was lost; its process ended, or its host is gone or silent"
            self._on_death(EngineDeath(self.engine_index, cause))
        else:
            limit = self.config.max_frame_bytes
            manager.expect_death(f"the connection to it was lost, as by an output beyond max_frame_bytes ({limit})")

    def _read_input_socket(self) -> list[Any]:
        socket = self.resources.input_socket
        messages: list[Any] = []
        if socket is None or socket.closed:
            return messages
        self._release_sent()
        while True:
            try:
                frames = receive_message(socket)
            except zmq.ZMQError:
                return messages
            if (failures := self.inbox.ready_again(frames)) is not None:
                messages.append(failures)

    def __repr__(self) -> str:
        state = "closed" if self.resources.closed else "dead" if self.engine_dead else "ready"
        return f"<{type(self).__name__} engine={self.engine_index} {state} live={len(self.inbox.live)}>"
