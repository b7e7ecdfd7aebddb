"""Processes that a test starts and whose whole family it ends: vLLM's and ours, each in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from environments import Environment

from enginewire.testing import free_tcp_port

START_S = 300.0
"""From launch to ready: a vLLM engine takes a minute, and two at once on two busy cores take three."""

STOP_S = 30.0
POLL_S = 0.25
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
        poll_until(lambda: text in self.log, timeout_s, f"{text!r} in {self.log_path.name}", self)

    def children(self, word: str) -> list[psutil.Process]:
        """Return the processes below it whose name or command line has ``word``."""
        return [child for child in _family(self.process.pid) if word in _title(child)]

    @property
    def tail(self) -> str:
        """The end of its log."""
        return self.log[-LOG_TAIL:]

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


def _title(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:  # a zombie has no command line
        return ""


def lives(process: psutil.Process) -> bool:
    """Tell whether it still runs; one that has ended and was not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(url: str) -> bool:
    """Tell whether GET ``url`` answers 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def poll_until(predicate: Callable[[], object], timeout_s: float, what: str, *processes: Running) -> None:
    """Wait for what takes seconds, without taking a processor from it; fail at once when a process has ended."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        for running in processes:
            if running.process.poll() is not None and not predicate():
                status = running.process.returncode
                raise AssertionError(f"{running.log_path.name} ended with status {status}:\n{running.tail}")
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


def expect_ready(url: str, *processes: Running, timeout_s: float = START_S) -> None:
    """Wait until GET ``url`` answers 200; fail at once when one of the processes that should see to it has ended."""
    poll_until(lambda: answers(url), timeout_s, f"200 at {url}", *processes)


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
        self, vllm: Environment, name: str, *args: str | Path, env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Running]:
        """Run ``vllm serve HF ARGS``; a model in ARGS is served instead."""
        model = [] if args and isinstance(args[0], Path) else [vllm.model]
        command = [vllm.python, vllm.cli, "serve", *model, *args]
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
    def serve(
        self, model: str | Path, *args: str, env: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Running, str]]:
        """Run ``enginewire serve MODEL ARGS`` and yield it with its URL, at once."""
        port = free_tcp_port()
        command = [sys.executable, "-m", "enginewire", "serve", model, "--port", str(port), "--admin", *args]
        with self.run("enginewire-serve", command, env) as running:
            yield running, f"http://127.0.0.1:{port}"

    def headless(self, model: str, port: int, *args: str) -> contextlib.AbstractContextManager[Running]:
        """Run an engine of ours that reports to the frontend at ``port``."""
        where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
        command = [sys.executable, "-m", "enginewire", "serve", model, "--headless", *where, "--max-model-len", "1024"]
        return self.run("enginewire-engine", [*command, *args])
