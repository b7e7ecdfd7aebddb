"""``ServerProcess``: one of the launcher's server processes, as the launcher sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from enginewire.engine.channel import Channel
from enginewire.errors import EngineStartupError
from enginewire.host.process import child_environment
from enginewire.server.lifeline import Begin, FromProcess, Line, from_process
from enginewire.server.state import ServerState

LEAVE_S: Final = 5.0
"""How long a process that has hung up may take to end."""


class ServerProcess:
    """A process with a fresh interpreter, in a session of its own: Ctrl-C in a terminal is for the launcher.

    Args:
        begin: what it is told first.
        listener: where HTTP clients come.
        on_message: called on the loop with what it says.
        on_end: called on the loop when it has hung up.

    Attributes:
        index: which of the processes it is.
        is_serving: whether it serves requests.
        latest: what it has counted, as of its last report.

    Raises:
        EngineStartupError: no process can be started.
    """

    def __init__(
        self,
        begin: Begin,
        listener: socket.socket,
        on_message: Callable[[ServerProcess, FromProcess], None],
        on_end: Callable[[ServerProcess], None],
    ) -> None:
        self.index = begin.index
        self.is_serving = False
        self.latest: ServerState | None = None
        self.started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), listener.fileno()]
            module = [sys.executable, "-P", "-m", "enginewire.server.process"]
            try:
                self.popen = subprocess.Popen(
                    [*module, "--lifeline-fd", str(descriptors[0]), "--listen-fd", str(descriptors[1])],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # ours is for the program that started us
                    pass_fds=[*descriptors, *begin.inputs, *begin.outputs],
                    start_new_session=True,
                    env=child_environment(),
                )
            except OSError as exc:
                ours.close()
                raise EngineStartupError(f"cannot start a server process: {exc.strerror}", stage="launch") from exc
        self._line = Line(
            Channel(ours),
            from_process,
            lambda message: self._on_loop(lambda: on_message(self, message)),
            lambda: self._on_loop(lambda: on_end(self)),
        )
        self.send(begin)

    def send(self, message: Struct) -> None:
        """Tell it something."""
        self._line.send(message)

    def terminate(self) -> None:
        """Have it finish what it has and leave."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end; return its exit status. Once it has hung up, that does not take long."""
        return await asyncio.to_thread(self.popen.wait)

    async def reap(self) -> int:
        """Return the exit status of a process that has hung up."""
        try:
            return await asyncio.to_thread(self.popen.wait, LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return await self.wait()

    def close(self) -> None:
        """Close the lifeline."""
        self._line.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)
