"""Real server processes: ``enginewire serve`` on a port of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_S = 60.0
"""From launch to the line that says where it serves."""

SETTLE_S = 10.0
"""How long a state that should come may take."""


@dataclass
class Served:
    """A running server.

    Attributes:
        url: without a path.
        process: of the server.
        log_path: where its stderr goes.
    """

    url: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text()

    def engine(self) -> psutil.Process:
        """Return the engine's process."""
        (engine,) = self.engines()
        return engine

    def engines(self) -> list[psutil.Process]:
        """Return the engines' processes in the order in which they were started, which is that of their ranks."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if "enginewire.engine.main" in child.cmdline():
                    found.append(child)
        return sorted(found, key=lambda child: child.pid)

    def server_pid(self, index: int) -> int:
        """Return the process id of one of several server processes: of the last that said that it serves."""
        return int(re.findall(rf"server process {index} serves pid=(\d+)", self.log)[-1])

    def metric(self, name: str) -> float:
        """Return a metric's value, the sum over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        assert f"# TYPE {name} " in text, f"there is no metric {name}"
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    def num_running(self) -> float:
        """Return how many requests the engine runs."""
        return self.metric("vllm:num_requests_running")

    def num_live(self) -> float:
        """Return how many requests the engine has, running or waiting."""
        return self.num_running() + self.metric("vllm:num_requests_waiting")

    def signal(self, number: int) -> None:
        """Send the server's process a signal."""
        self.process.send_signal(number)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = SETTLE_S) -> None:
    """Wait until ``condition()`` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def serve(model: str | None, *args: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    """Run ``enginewire serve MODEL ARGS`` on a free port."""
    command = [sys.executable, "-m", "enginewire", "serve", *([model] if model else []), "--port", "0", *args]
    with tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
        )
        try:
            yield Served(_read_url(process, Path(log.name)), process, Path(log.name))
        finally:
            _stop(process)


def _read_url(process: subprocess.Popen[str], log_path: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, f"the server said {line!r} and logged:\n{log_path.read_text()}"
    return found[0]


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert process.stdout is not None
    process.stdout.close()
