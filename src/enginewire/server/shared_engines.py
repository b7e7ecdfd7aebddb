"""``SharedEngines``: the launcher's side of the engines that several server processes share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from enginewire.client.reception import parallel_config
from enginewire.client.startup import Expected
from enginewire.config import EngineConfig
from enginewire.coordinator.process import DPCoordinator
from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath, EngineStartupTimeout, startup_error
from enginewire.host.executor_source import ExecutorSource, executor_source
from enginewire.host.manager import CoreEngineProcManager
from enginewire.server.handshake_desk import HandshakeDesk
from enginewire.transport.endpoints import Endpoints, choose_endpoints
from enginewire.transport.listeners import listen
from enginewire.transport.sockets import make_context
from enginewire.wire.handshake import EngineZmqAddresses

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Door:
    """Where an engine and a server process meet.

    Attributes:
        descriptors: of the sockets that listen for the engine's input and output.
        addresses: theirs.
    """

    descriptors: tuple[int, int]
    addresses: tuple[str, str]


class SharedEngines:
    """Owns the engines' processes, their coordinator, the handshake, and the doors between them and server processes.

    Args:
        config: the engines'.
        num_processes: how many server processes there are.
        on_death: called on the loop when an engine that was started here has ended.
        answers: tells whether an engine answers a question now.

    Attributes:
        local_ranks: the engines whose processes are watched here.
        doors: by server process, then by rank.
        stats_address: where the coordinator publishes; ``None``: there is none.
        deaths: of engines so far.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_processes: int,
        on_death: Callable[[EngineDeath], None],
        answers: Callable[[int], Awaitable[bool]],
    ) -> None:
        self.local_ranks = config.local_ranks
        self.doors: list[dict[int, Door]] = []
        self.stats_address: str | None = None
        self.deaths: list[EngineDeath] = []
        # vLLM's come by tcp and say that they are headless, whoever starts them.
        self._near_ranks = range(0) if config.starts_vllm else config.local_ranks
        self._config = config
        self._num_processes = num_processes
        self._on_death = on_death
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._owned = contextlib.ExitStack()
        self._manager: CoreEngineProcManager | None = None

    async def open(self) -> None:
        """Open the sockets and start the coordinator; whatever fails, :meth:`close` cleans up.

        Raises:
            ConfigError: ipc is wanted and there is no folder for it.
            EngineStartupError: the coordinator cannot be started.
            OSError: an address cannot be bound.
        """
        config = self._config
        self._endpoints = choose_endpoints(config)
        self._owned.callback(self._endpoints.remove)
        self.doors = [self._open_doors(self._endpoints, process) for process in range(self._num_processes)]
        relayed: dict[str, str] = {}
        if len(config.managed_ranks) > 1:
            folder = self._endpoints.folder
            coordinator = await asyncio.to_thread(DPCoordinator.start, config, folder=folder, own_process=True)
            self._owned.callback(coordinator.shutdown)
            self.stats_address = coordinator.addresses.frontend_stats_publish_address
            relayed = structs.asdict(coordinator.addresses)
        group = parallel_config(config)
        expected = {index: self._expected(index, relayed, group) for index in config.managed_ranks}
        context = make_context()
        self._owned.callback(context.destroy, linger=0)
        handshakes = self._endpoints.handshakes
        self.desk = HandshakeDesk(context, handshakes, expected, config.max_frame_bytes, self._answers)
        self._owned.callback(self.desk.close)

    def start(self) -> None:
        """Start the engines that are to be started here.

        Raises:
            ConfigError: the executor cannot be found.
            EngineStartupError: a process cannot be started.
        """
        config = self._config
        self._started = time.monotonic()
        if config.starts_engines:
            source = executor_source(config.executor)
            specs = [self._engine_spec(source, index) for index in config.local_ranks]
            self._manager = CoreEngineProcManager(specs, forward_log=config.forward_engine_log)
            self._manager.watch_deaths(self._died)
        if len(self.local_ranks) < len(config.managed_ranks):
            logger.info("waiting for engines that are started elsewhere, on %s", self.desk.addresses[-1])

    def check_start(self) -> None:
        """Take what engines say, and see that they come along.

        Raises:
            EngineStartupError: one cannot be started, or time ran out.
        """
        self.desk.read()
        if self.deaths:
            raise startup_error(self.deaths[0])
        config, missing = self._config, self.desk.missing()
        waited = time.monotonic() - self._started
        if waited > config.ready_timeout_s and missing:
            raise EngineStartupTimeout(
                f"not ready within {config.ready_timeout_s:g} s: {missing}. Slow loading of weights is the usual "
                "cause; ready_timeout_s (environment: VLLM_ENGINE_READY_TIMEOUT_S) raises the limit",
                stage="ready",
            )
        if waited > config.hello_timeout_s and not self.desk.all_local_said_hello:
            raise EngineStartupTimeout(
                f"no word from a local engine process within {config.hello_timeout_s:g} s: {missing}. It only has "
                "to start Python for that; hello_timeout_s raises the limit",
                stage="hello",
            )

    def expect_death(self, engine_index: int, sign: str) -> None:
        """Have the death of an engine that seems to be dying reported soon."""
        if self._manager is not None:
            self._manager.expect_death(sign, engine_index)

    def close(self, stop_s: float) -> None:
        """Stop the engines, killing those that have not left after so many seconds, and close everything."""
        if self._manager is not None:
            self._manager.shutdown(stop_s)
        self._owned.close()

    def _died(self, death: EngineDeath) -> None:
        def tell() -> None:
            self.deaths.append(death)
            self._on_death(death)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(tell)

    def _open_doors(self, endpoints: Endpoints, process: int) -> dict[int, Door]:
        doors: dict[int, Door] = {}
        for index in self._config.managed_ranks:
            wanted = endpoints.of_link(f"{index}.{process}", is_local=index in self._near_ranks)
            (inputs, input_address), (outputs, output_address) = [self._listen(endpoint) for endpoint in wanted]
            doors[index] = Door((inputs, outputs), (input_address, output_address))
        return doors

    def _listen(self, endpoint: str) -> tuple[int, str]:
        listener, address = listen(endpoint)
        return self._owned.enter_context(listener).fileno(), address

    def _expected(self, index: int, relayed: dict[str, str], group: dict[str, Any]) -> Expected:
        inputs, outputs = zip(*(doors[index].addresses for doors in self.doors), strict=True)
        addresses = EngineZmqAddresses(inputs=[*inputs], outputs=[*outputs], **relayed)
        return Expected(
            addresses,
            is_local=index in self._near_ranks,
            parallel_config=group,
            heartbeat_s=(self._config.heartbeat_interval_s, self._config.heartbeat_timeout_s),
        )

    def _engine_spec(self, source: ExecutorSource, index: int) -> EngineSpec:
        folder = self._endpoints.folder
        return EngineSpec(
            config=self._config,
            log_stats=self._config.log_stats,
            executor=source.reference,
            executor_pickle=source.pickled,
            sys_path=[str(Path(entry or ".").absolute()) for entry in sys.path],
            engine_index=index,
            handshake_address=self.desk.addresses[0],
            cleanup_paths=[folder] if folder else [],
        )
