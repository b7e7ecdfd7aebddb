"""``enginewire serve --headless``: engines only, for a server elsewhere.

Each engine is a process of its own, which ends with this one, however that goes. One that dies takes no other with it,
but the exit status tells of it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from enginewire.cli.data_parallel import headless_ranks
from enginewire.cli.terminal import announce, say
from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath
from enginewire.host.manager import CoreEngineProcManager
from enginewire.host.vllm import VLLM
from enginewire.transport.endpoints import tcp_host

EXIT_ERROR: Final = 1

SIGNALLED: Final = 128
"""Plus the signal's number is the exit status after a signal that did not wait, as shells report it."""

SIGNAL_CHECK_S: Final = 0.5
"""How often waiting is interrupted: a signal that comes just before it begins does not end it."""


class HeadlessNode:
    """The engines of a node without a server.

    Args:
        config: of every engine; it has the node's first rank and how many there are here.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ranks = headless_ranks(config)
        self._address = f"tcp://{tcp_host(config.data_parallel_address)}:{config.data_parallel_rpc_port}"
        self._running = set(self._ranks)
        self._has_failed = False
        self._is_told_to_stop = False
        # What the manager's thread reports: the index of an engine that is ready, a death. `None` wakes the main
        # thread: a SimpleQueue's put is safe in a signal handler.
        self._events: queue.SimpleQueue[int | EngineDeath | None] = queue.SimpleQueue()

    def run(self) -> int:
        """Run the engines until all have ended or a signal stops them; return the exit status: 1 if one died.

        Raises:
            EngineStartupError: a process cannot be started.
        """
        config = self._config
        with self._stop_signals():
            manager = CoreEngineProcManager(self._specs(), on_ready=self._events.put)
            try:
                manager.watch_deaths(self._events.put)
                names = ", ".join(map(str, self._ranks))
                announce(f"Engine {names} of {config.data_parallel_size}: waiting for a frontend at {self._address}")
                while self._running and not self._is_told_to_stop:
                    self._take_event()
            finally:
                manager.shutdown(config.shutdown_timeout_s + config.terminate_timeout_s)
        for process in manager.processes.values():
            if process.death is not None:
                self._take_end(process.death)
        return EXIT_ERROR if self._has_failed else 0

    def _specs(self) -> list[EngineSpec]:
        sys_path = [str(Path(entry or ".").absolute()) for entry in sys.path]
        return [
            EngineSpec(
                config=self._config,
                handshake_address=self._address,
                engine_index=rank,
                local=False,
                headless=True,
                log_stats=self._config.log_stats,
                sys_path=sys_path,
            )
            for rank in self._ranks
        ]

    def _take_event(self) -> None:
        event = None
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=SIGNAL_CHECK_S)
        if isinstance(event, EngineDeath):
            self._take_end(event)
        elif event is not None:
            announce(f"Engine {event}: ready")

    def _take_end(self, death: EngineDeath) -> None:
        if death.engine_index not in self._running:
            return
        self._running.remove(death.engine_index)
        if not self._is_orderly(death):
            self._has_failed = True
            say(f"enginewire: error: engine {death.engine_index} is dead: {death.cause}")

    def _is_orderly(self, death: EngineDeath) -> bool:
        if self._config.executor == VLLM:  # its exit status means nothing
            return self._is_told_to_stop
        # SIGTERM itself ends one that has not come to hear of it in Python.
        return death.exit_code == 0 or (self._is_told_to_stop and death.exit_code == -signal.SIGTERM)

    @contextlib.contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Stop in good order at the first SIGTERM or SIGINT, end this process at the second."""

        def stop(number: int, frame: object) -> None:
            if self._is_told_to_stop:
                os._exit(SIGNALLED + number)  # the engines notice that and end themselves (C-62)
            self._is_told_to_stop = True
            self._events.put(None)

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
