"""Bringing a client's engines up: sockets, processes, start-up, under one deadline.

Three ways lead to an engine that is ready: we start its process; it is started elsewhere and says HELLO; or it was
another client's before, is on its link already and says nothing. With addresses that somebody else chose there is no
handshake: that is his business.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq

from enginewire.client.balancer import LoadBalancer
from enginewire.client.base import ExecutorChoice
from enginewire.client.coordination import CoordinatorLink
from enginewire.client.engines import Engine, Engines
from enginewire.client.inbox import Inbox
from enginewire.client.link import Link
from enginewire.client.lookout import Lookout
from enginewire.client.outbox import Outbox
from enginewire.client.reception import Reception
from enginewire.client.remembered import Memory, RememberedEngine
from enginewire.client.resources import BackgroundResources
from enginewire.client.restarts import Restarts
from enginewire.client.returns import Returns
from enginewire.client.startup import EngineStartup, given_up, wait_for_engines
from enginewire.config import EngineConfig
from enginewire.errors import EngineStartupError, EngineStartupTimeout
from enginewire.transport.endpoints import Endpoints, choose_endpoints, tcp_host
from enginewire.transport.sockets import bind_also, bind_router, receive_message
from enginewire.wire.frames import engine_identity

if TYPE_CHECKING:
    from enginewire.engine.spec import EngineSpec
    from enginewire.host.executor_source import ExecutorSource
    from enginewire.host.launcher import EngineLauncher, EngineManager

logger = logging.getLogger(__name__)

FIND_S: Final = 5.0
"""How long a new frontend waits for all engines of an earlier one, once some are there: they connect again within three
seconds."""

FIND_POLL_MS: Final = 50


class Launch:
    """One start of one client. What it opens belongs to the client's resources from the moment that it is open.

    Args:
        config: of the client; completed by what the engines report.
        engines: to be filled.
        balancer: see :class:`Lookout`.

    Attributes:
        memory: of engines that are started elsewhere, if they can find back.
    """

    def __init__(
        self,
        config: EngineConfig,
        engines: Engines,
        inbox: Inbox,
        outbox: Outbox,
        resources: BackgroundResources,
        balancer: LoadBalancer,
    ) -> None:
        self.memory: Memory | None = None
        self._config = config
        self._engines = engines
        self._inbox = inbox
        self._outbox = outbox
        self._resources = resources
        self._balancer = balancer
        self._started = time.monotonic()
        self._max_model_len = config.max_model_len
        self._reception: Reception | None = None
        self._launcher: EngineLauncher | None = None
        self._specs: dict[int, EngineSpec] = {}
        self._known: Mapping[int, bytes] = {}
        """Ready responses of engines that were another client's."""

    def run(self, executor_class: ExecutorChoice, client_addresses: Mapping[str, Any] | None) -> Lookout:
        """Do it all and return what watches the engines from then on. Arguments and errors are :class:`MPClient`'s."""
        stats_address: str | None = None
        if client_addresses is None:
            self._receive_engines(executor_class)
            if self._resources.coordinator is not None:
                stats_address = self._resources.coordinator.addresses.frontend_stats_publish_address
        else:
            self._use_given_links(client_addresses)
            self._known = client_addresses.get("ready_responses", {})
            stats_address = client_addresses.get("stats_update_address")
        self._inbox.links = tuple(dict.fromkeys(engine.link for engine in self._engines))
        lookout = self._wait()
        if self.memory is not None:
            self._find_again(lookout)
        self._connect_to_coordinator(lookout, stats_address)
        return lookout

    # Where engines come to.

    def _receive_engines(self, executor_class: ExecutorChoice) -> None:
        # Imported here: whoever is given its addresses starts nothing, and has connected before all that is loaded.
        from enginewire.coordinator import DPCoordinator
        from enginewire.host.executor_source import executor_source
        from enginewire.host.launch import make_launcher

        config, resources = self._config, self._resources
        # Before a folder is made: this may import much, and who is killed meanwhile should leave nothing behind.
        source = executor_source(executor_class or config.executor) if config.starts_engines else None
        launcher = None if source is None else make_launcher(config)
        self._launcher = resources.engine_manager = launcher
        endpoints = resources.endpoints = choose_endpoints(config, None if launcher is None else launcher.host)
        handshakes = self._bind_handshake(endpoints.handshakes)
        if config.data_parallel_lock_step and config.data_parallel_size > 1 and config.managed_ranks[0] == 0:
            resources.coordinator = DPCoordinator.start(config, folder=endpoints.folder)
        remembered: dict[int, RememberedEngine] = {}
        if len(config.local_ranks) < len(config.managed_ranks) and config.data_parallel_rpc_port:
            self.memory = Memory(handshakes[-1])  # another port would not be found again
            remembered = self.memory.recall()
        known_addresses = {index: (engine.input, engine.output) for index, engine in remembered.items()}
        reception = Reception(resources.context, config, endpoints, known_addresses, resources.coordinator)
        for index in config.managed_ranks:
            link = reception.open_link(index)
            if index in remembered and link.input_address == remembered[index].input:
                self._known = {**self._known, index: remembered[index].ready}
            is_ours = index in config.local_ranks
            restarts = Restarts(config.restart_engine, config.restart_window_s) if is_ours else None
            self._engines.add(Engine(index, link, is_ours=is_ours, restarts=restarts))
        self._reception = reception
        if source is not None and launcher is not None:
            for index in config.local_ranks:
                self._specs[index] = self._engine_spec(source, index, handshakes[0], endpoints)
                launcher.start(self._specs[index])
        if any(not engine.is_ours for engine in self._engines):
            logger.info("waiting for engines that are started elsewhere, on %s", handshakes[-1])

    def _bind_handshake(self, endpoints: Sequence[str]) -> list[str]:
        """Bind the handshake socket, which is read for the client's life; return its addresses."""
        first, *others = endpoints
        socket, address = bind_router(self._resources.context, first, self._config.max_frame_bytes)
        self._resources.handshake_socket = socket
        return [address, *(bind_also(socket, endpoint) for endpoint in others)]

    def _engine_spec(self, source: ExecutorSource, index: int, handshake: str, endpoints: Endpoints) -> EngineSpec:
        from enginewire.engine.spec import EngineSpec

        config = self._config.copy()  # as it was asked for: what engines report is written into the client's
        addresses = {"handshake_address": handshake}
        if config.meets_at_rank_0:  # protocol B.6
            host = tcp_host(config.data_parallel_address)
            addresses = {
                "handshake_address": f"tcp://{host}:{config.data_parallel_rpc_port}",
                "client_handshake_address": handshake,
            }
        return EngineSpec(
            config=config,
            log_stats=config.log_stats,
            executor=source.reference,
            executor_pickle=source.pickled,
            sys_path=[str(Path(entry or ".").absolute()) for entry in sys.path],
            engine_index=index,
            local=not config.starts_by_tcp,
            headless=config.starts_by_tcp,
            cleanup_paths=[endpoints.folder] if endpoints.folder else [],
            **addresses,
        )

    def _use_given_links(self, client_addresses: Mapping[str, Any]) -> None:
        """Bind where somebody else has told engines to come."""
        ranks = self._config.managed_ranks
        manager: EngineManager | None = client_addresses.get("engine_manager")
        self._resources.engine_manager = manager
        if "inputs" in client_addresses:
            pairs = list(zip(client_addresses["inputs"], client_addresses["outputs"], strict=True))
        else:
            pairs = [(client_addresses["input_address"], client_addresses["output_address"])] * len(ranks)
        links: dict[tuple[str, str], Link] = {}
        for index, pair in zip(ranks, pairs, strict=True):
            if pair not in links:
                links[pair] = Link(self._resources.context, self._config, pair)
            self._engines.add(Engine(index, links[pair], is_ours=manager is not None and manager.has(index)))

    # Waiting.

    def _wait(self) -> Lookout:
        """Wait for the engines that start, and have all of them watched."""
        config, resources, reception = self._config, self._resources, self._reception
        expected = {
            engine.index: None
            if reception is None or engine.index in self._known
            else reception.expected(engine.index, engine.link)
            for engine in self._engines
        }
        if reception is not None:
            first = next(iter(self._engines))
            expected |= {index: reception.expected(index, first.link) for index in config.other_ranks}
        startup = EngineStartup(expected, max_model_len=self._max_model_len)
        for index, payload in self._known.items():
            startup.on_ready_response(engine_identity(index), payload)
        manager = resources.engine_manager
        others = wait_for_engines(
            startup,
            resources.handshake_socket,
            self._engines,
            started=self._started,
            ready_timeout_s=config.ready_timeout_s,
            hello_timeout_s=config.hello_timeout_s,
            first_death=manager.first_death if manager else lambda: None,
            log_tail=lambda: manager.log_tail(config.local_ranks[0]) if manager else (),
            not_awaited=self._known,
        )
        parts = (config, self._engines, self._inbox, self._outbox, resources)
        returns = Returns(
            *parts,
            max_model_len=self._max_model_len,
            reception=reception,
            memory=self.memory,
            launcher=self._launcher,
            specs=self._specs,
        )
        for frames in others:
            returns.take_handshake(frames)
        for engine in self._engines:
            ready = startup.ready_of(engine.index)
            if engine.index in self._known:
                returns.remember(engine, ready, time.monotonic())
            else:
                returns.welcome(engine, ready)
        return Lookout(*parts, returns, self._balancer)

    def _find_again(self, lookout: Lookout) -> None:
        """Wait for the engines of an earlier frontend; when one is there, not long for the others.

        If all that come were started anew, nothing is left of the earlier deployment: all are awaited.

        Raises:
            EngineStartupTimeout: none of them answers, and none was restarted.
            EngineStartupError: whoever wanted this client does not any longer.
        """
        engines, inbox, limit = self._engines, self._inbox, self._config.ready_timeout_s
        links = {engine.index: engine.link for engine in engines}
        began = time.monotonic()
        while len(engines.ready) < len(engines):
            poller = zmq.Poller()  # one that is started anew has another link, and its old one is closed
            for socket in (self._resources.handshake_socket, *(link.output_socket for link in inbox.links)):
                poller.register(socket, zmq.POLLIN)
            poller.poll(FIND_POLL_MS)
            for link in inbox.links:
                with contextlib.suppress(zmq.Again):
                    while True:  # outputs are for the frontend that was here before; answers are sorted out
                        inbox.sort(link, receive_message(link.output_socket))
            now = time.monotonic()
            lookout.look(now)
            if now - began > FIND_S and any(engine.link is links[engine.index] for engine in engines.ready):
                return
            if (event := given_up.get()) is not None and event.is_set():
                raise EngineStartupError("given up while waiting for the engines of an earlier frontend", stage="ready")
            if now - self._started > limit:
                raise EngineStartupTimeout(
                    f"none of the engines of an earlier frontend answered within {limit:g} s, and none was restarted; "
                    "start them again, or raise ready_timeout_s",
                    stage="ready",
                )

    def _connect_to_coordinator(self, lookout: Lookout, address: str | None) -> None:
        """Subscribe to the coordinator that we started, were told of, or that the engines tell of (protocol B.4)."""
        for engine in self._engines:
            told = engine.ready.dp_stats_address if engine.ready is not None else None
            if told is not None and address is not None and told != address:
                raise EngineStartupError(
                    f"engine {engine.index} says that its coordinator publishes at {told}, and it should be {address}; "
                    "were the engines started for one deployment?",
                    stage="ready",
                    engine_index=engine.index,
                )
            address = address or told
        if address is not None:
            # Of the engine's own kind: a rank of a dense model counts as one of one.
            has_waves = any(
                engine.ready is not None and engine.ready.data_parallel_size > 1 for engine in self._engines
            )
            lookout.coordination = CoordinatorLink(self._resources.context, address, self._engines, has_waves=has_waves)
