"""Processes that a test starts and whose whole family it ends: vLLM's and ours, each in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from environments import Environment

from enginewire.testing import free_tcp_port, wait_until

START_S = 300.0
"""From launch to ready: a vLLM engine takes a minute, and two at once on two busy cores take three."""

STOP_S = 30.0
LOG_TAIL = 4000

VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /is_sleeping and their like
    "GLOO_SOCKET_IFNAME": "lo",
}
ENGINE_FLAGS = ["--max-model-len", "1024", "--enforce-eager", "--dtype", "bfloat16"]
"""Of every vLLM engine: those that serve the same text must compute alike."""


@dataclass
class Running:
    """A process and its log (stdout and stderr)."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def expect(self, text: str, timeout_s: float = START_S) -> None:
        """Wait until it has printed ``text``; fail at once when it has ended."""
        wait_until(lambda: text in self.log or self._ended(text), timeout_s, f"{text!r} in {self._described()}")

    def expect_ready(self, url: str, timeout_s: float = START_S) -> None:
        """Wait until GET ``url`` answers 200; fail at once when the process has ended."""
        wait_until(lambda: _answers(url) or self._ended(url), timeout_s, f"an answer at {url} by {self._described()}")

    def children(self, word: str) -> list[psutil.Process]:
        """Return the processes below it whose name or command line has ``word``."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in family if word in child.name() or word in " ".join(child.cmdline())]

    def _ended(self, waited_for: str) -> bool:
        if self.process.poll() is not None and waited_for not in self.log:
            raise AssertionError(f"{self._described()} ended with status {self.process.returncode}:\n{self.tail}")
        return False

    @property
    def tail(self) -> str:
        """The end of its log."""
        return self.log[-LOG_TAIL:]

    def _described(self) -> str:
        return f"{self.log_path.name}"

    def stop(self) -> None:
        """End it and all that it started: asked first, killed at the end."""
        family = [self.process.pid, *(child.pid for child in _family(self.process.pid))]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in family[1:]:  # those that made a session of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL it and all that it started, and wait until they are gone."""
        family = _family(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(STOP_S)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Runner:
    """Starts processes and keeps their logs in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    @contextlib.contextmanager
    def run(self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Iterator[Running]:
        """Run a command in a session of its own; at the end nothing of it is left."""
        self._count += 1
        log_path = self._folder / f"{self._count:02}-{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        running = Running(process, log_path)
        try:
            yield running
        finally:
            running.stop()

    def vllm(
        self, vllm: Environment, name: str, *args: str, env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Running]:
        """Run ``vllm serve HF ARGS``."""
        command = [vllm.python, vllm.cli, "serve", vllm.model, *args]
        return self.run(f"vllm-{vllm.version}-{name}", command, {**VLLM_ENV, **(env or {})})

    def headless_vllm(self, vllm: Environment, port: int, *args: str) -> contextlib.AbstractContextManager[Running]:
        """Run a headless vLLM engine that reports to the frontend at ``port``."""
        where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
        return self.vllm(vllm, "engine", "--headless", *where, *ENGINE_FLAGS, *args)

    @contextlib.contextmanager
    def vllm_server(
        self, vllm: Environment, *args: str, env: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Running, str]]:
        """Run vLLM's own server and yield it with its URL, at once; ``expect_ready`` waits."""
        port = free_tcp_port()
        with self.vllm(vllm, "server", "--port", str(port), *args, env=env) as running:
            yield running, f"http://127.0.0.1:{port}"

    @contextlib.contextmanager
    def serve(self, model: str | Path, *args: str) -> Iterator[tuple[Running, str]]:
        """Run ``enginewire serve MODEL ARGS`` and yield it with its URL, at once."""
        port = free_tcp_port()
        command = [sys.executable, "-m", "enginewire", "serve", model, "--port", str(port), "--admin", *args]
        with self.run("enginewire-serve", command) as running:
            yield running, f"http://127.0.0.1:{port}"

    def headless(self, model: str, port: int, *args: str) -> contextlib.AbstractContextManager[Running]:
        """Run an engine of ours that reports to the frontend at ``port``."""
        where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
        command = [sys.executable, "-m", "enginewire", "serve", model, "--headless", *where, "--max-model-len", "1024"]
        return self.run("enginewire-engine", [*command, *args])
