"""The launcher: owns the engines and several server processes over them (``--api-server-count``).

It holds every socket on which somebody comes: the one for HTTP, from which all processes accept, and for each process
and engine the two on which they talk. So a process that dies takes no waiting connection with it, and the one that
takes its place is found where it was. The launcher itself serves nobody: it shakes hands with engines, watches their
processes, passes their deaths on, and adds up what the server processes have counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError, EngineClientError, EngineDeath, EngineStartupError, describe_exit
from enginewire.server.handshake_desk import READ_EVERY_S
from enginewire.server.lifeline import (
    AskEngine,
    Begin,
    Collect,
    EngineAnswers,
    EngineDied,
    ExpectDeath,
    Failed,
    FromProcess,
    Reported,
    Serving,
)
from enginewire.server.run import FLUSH_S, first, within
from enginewire.server.server_process import ServerProcess
from enginewire.server.settings import ServerSettings
from enginewire.server.shared_engines import SharedEngines
from enginewire.server.tally import Tally

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""How long a process may take to tell whether an engine answers; the engine has half of it."""

GRACE_S: Final = 5.0
"""How much longer than running requests a process may take to leave."""

SHORT_LIFE_S: Final = 10.0
MAX_SHORT_LIVES: Final = 3
"""A process that ends before its time, so often in a row, has no successor."""


async def launch(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    stopped: asyncio.Event,
    on_ready: Callable[[], None],
) -> int:
    """Serve with several processes until told to stop; return the exit status.

    Args:
        config: the engines'.
        settings: the server's.
        listener: where HTTP clients come.
        stopped: is set when it is to stop.
        on_ready: is called once all processes serve.

    Raises:
        ConfigError: what is asked for cannot be.
        EngineClientError: the engines cannot be started, or the server cannot go on.
    """
    if config.data_parallel_external_lb or config.data_parallel_hybrid_lb:
        raise ConfigError("several server processes over one engine or one node's are not part of this version")
    if config.restart_engine:
        raise ConfigError(
            "restart_engine needs a single server process in this version: leave one of restart_engine and "
            f"--api-server-count out, got restart_engine={config.restart_engine}, {settings.api_server_count} processes"
        )
    launcher = Launcher(config, settings, listener)
    drain_s: float | None = None
    try:
        starting = asyncio.create_task(launcher.start(), name="enginewire-start")
        if not await first(starting, stopped.wait()):
            logger.info("told to stop while the engines start")
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        starting.result()
        on_ready()
        drain_s = settings.shutdown_timeout_s
        failing = asyncio.create_task(launcher.keep_going(), name="enginewire-launcher")
        if await first(failing, stopped.wait()):
            raise failing.result()
        failing.cancel()
        return 0
    finally:
        await launcher.close(drain_s)


class Launcher:
    """The server processes, and what is done for them all.

    Args:
        config: the engines'.
        settings: the server's.
        listener: where HTTP clients come.
    """

    def __init__(self, config: EngineConfig, settings: ServerSettings, listener: socket.socket) -> None:
        self._config = config
        self._settings = settings
        self._listener = listener
        self._engines = SharedEngines(
            config, settings.api_server_count, self._engine_died, answers=self._does_engine_answer
        )
        self._processes: dict[int, ServerProcess] = {}
        self._awaiting: set[int] = set()
        """Processes that ended before there was one that serves."""
        self._short_lives: Counter[int] = Counter()
        self._tally = Tally()
        self._ready: dict[int, bytes] = {}
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._failure: asyncio.Future[EngineClientError] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up = False
        self._is_leaving = False

    async def start(self) -> None:
        """Start everything and wait until all processes serve; whatever fails, :meth:`close` cleans up.

        Raises:
            ConfigError: a setting cannot be, or a process refuses it.
            EngineStartupError: an engine or a process cannot be started, or time ran out.
        """
        await self._engines.open()
        for index in range(self._settings.api_server_count):
            self._start_process(index)  # they import their modules while the engines load theirs
        self._engines.start()
        # One that has ended has a successor only when another one serves, which may be later than that all do.
        while not (self._processes and all(process.is_serving for process in self._processes.values())):
            self._engines.check_start()
            if self._failure.done():
                raise self._failure.result()
            await asyncio.sleep(READ_EVERY_S)
        self._is_up = True

    async def keep_going(self) -> EngineClientError:
        """Do what is to be done while the processes serve; return why the server cannot go on."""
        reading = asyncio.create_task(self._engines.desk.keep_reading(), name="enginewire-handshakes")
        try:
            return await self._failure
        finally:
            reading.cancel()

    async def close(self, drain_s: float | None) -> None:
        """Stop the processes, then the engines.

        Args:
            drain_s: how long running requests may go on; ``None``: there are none.
        """
        self._is_leaving = True
        processes = list(self._processes.values())
        for process in processes:
            process.kill() if drain_s is None else process.terminate()
        ended = asyncio.gather(*(process.wait() for process in processes))
        if not await within((drain_s or 0) + FLUSH_S + GRACE_S, asyncio.shield(ended)):
            logger.warning("server processes did not leave in time and are killed")
            for process in processes:
                process.kill()
            await ended
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._close_rest, processes)

    def _close_rest(self, processes: list[ServerProcess]) -> None:
        for process in processes:
            process.close()
        config = self._config
        self._engines.close(0.0 if not self._is_up else config.shutdown_timeout_s + config.terminate_timeout_s)

    # The processes.

    def _start_process(self, index: int) -> None:
        doors = self._engines.doors[index].values()
        config = dataclasses.replace(
            self._config,
            executor_options={},  # the engines'; they may have no form outside this process
            ready_timeout_s=self._config.ready_timeout_s + GRACE_S,  # the launcher says first what is missing
        )
        begin = Begin(
            config=config,
            settings=self._settings,
            index=index,
            count=self._settings.api_server_count,
            log_level=logging.getLogger().getEffectiveLevel(),
            inputs=[door.descriptors[0] for door in doors],
            outputs=[door.descriptors[1] for door in doors],
            stats_address=self._engines.stats_address,
            local_ranks=[*self._engines.local_ranks],
            deaths=self._engines.deaths,
            ready=self._ready,
        )
        self._processes[index] = ServerProcess(begin, self._listener, self._on_message, self._on_end)

    def _on_message(self, process: ServerProcess, message: FromProcess) -> None:
        match message:
            case Serving():
                process.is_serving = True
                self._ready |= message.ready
                while self._awaiting:
                    self._start_process(self._awaiting.pop())
                logger.info("server process %d serves pid=%d", process.index, process.popen.pid)
            case Failed():
                if process.is_serving or not self._is_up:
                    self._fail((ConfigError if message.is_config_error else EngineClientError)(message.message))
                else:
                    logger.error("server process %d cannot take its place: %s", process.index, message.message)
            case ExpectDeath():
                self._engines.expect_death(message.engine_index, message.sign)
            case EngineAnswers():
                waiter = self._answers.get(message.engine_index)
                if waiter is not None and not waiter.done():
                    waiter.set_result(message.answers)
            case Collect():
                self._do(self._tally.collect(process, message, list(self._processes.values())))
            case Reported():
                self._tally.reported(process, message)

    def _on_end(self, process: ServerProcess) -> None:
        if not self._is_leaving:
            self._do(self._replace(process))

    async def _replace(self, process: ServerProcess) -> None:
        """Have another process take the place of one that has ended. The engines drop what they did for it."""
        how = describe_exit(await process.reap())
        process.close()
        self._tally.ended(process)
        index = process.index
        if self._is_leaving or self._failure.done():
            return
        logger.error("server process %d %s", index, how)
        is_short = time.monotonic() - process.started < SHORT_LIFE_S
        self._short_lives[index] = self._short_lives[index] + 1 if is_short else 0
        if self._short_lives[index] >= MAX_SHORT_LIVES:
            logger.error("server process %d has ended too soon too often; the others go on without it", index)
            del self._processes[index]
            if not self._processes:
                self._fail(EngineClientError("no server process is left"))
        elif self._ready:
            self._start_process(index)
        else:
            # Engines say once what they are, and this one may have been told: its successor hears it from another one.
            del self._processes[index]
            self._awaiting.add(index)
            if not self._processes:
                self._fail(EngineStartupError(f"server process {index} {how} before any served", stage="launch"))

    # What is done for them.

    def _engine_died(self, death: EngineDeath) -> None:
        for process in self._processes.values():
            process.send(EngineDied(death))

    async def _does_engine_answer(self, index: int) -> bool:
        """Have a process ask an engine something."""
        process = next((each for each in self._processes.values() if each.is_serving), None)
        if process is None:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[index] = waiter
        process.send(AskEngine(index))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await waiter
        except TimeoutError:
            return False
        finally:
            del self._answers[index]

    def _fail(self, error: EngineClientError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside the rest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
