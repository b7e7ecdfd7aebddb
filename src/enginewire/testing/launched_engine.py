"""``LaunchedEngine``: a real engine process without a client that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Final

from enginewire.engine.channel import Channel
from enginewire.engine.spec import DeathNote, EngineSpec, receive_death_note

EXIT_S: Final = 10.0


class LaunchedEngine:
    """An engine process and our end of its lifeline.

    Attributes:
        process: the process; its stderr goes to ``log``.
        log: path of a file with everything it printed.
    """

    def __init__(self, spec: EngineSpec, log: str) -> None:
        self.log = log
        ours, theirs = socket.socketpair()
        with theirs, open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "enginewire.engine.main", "--lifeline-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        self.lifeline = Channel(ours)
        self.lifeline.send(spec.encode())

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def wait_exit(self, timeout_s: float = EXIT_S) -> int:
        """Wait for its end and return its exit status."""
        return self.process.wait(timeout_s)

    def death_note(self) -> DeathNote | None:
        """Wait for its note or its end."""
        return receive_death_note(self.lifeline)

    def read_log(self) -> str:
        """Return what it has printed so far."""
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def close(self) -> None:
        """Kill it, and its children, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.lifeline.close()
