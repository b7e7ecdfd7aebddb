"""Running the command line as users do: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import psutil

from enginewire.testing.waiting import wait_until

COMMAND = [sys.executable, "-m", "enginewire"]
DEADLINE_S = 30.0
"""For a process to start, to say something, or to end; this machine may be busy."""

Start = Callable[..., "subprocess.Popen[str]"]


def run(
    *words: str, stdin: str = "", timeout_s: float = DEADLINE_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    return subprocess.run([*COMMAND, *words], input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env)


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a failed command says, after checking that it is one line for people."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("enginewire: error: ")
    return lines[0]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes below a running one: the engine and what it started."""
    return psutil.Process(process.pid).children(recursive=True)


def engine_of(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait for the engine process of a command line, and return it."""
    return wait_until(lambda: descendants(process), DEADLINE_S, "start of an engine process")[0]


def wait_for_exit_of(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    """Wait until processes that are nobody's children here any more are gone."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    assert not alive


def read_some(process: subprocess.Popen[str]) -> str:
    """Return the first of what a process prints, as soon as it is there."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 65536).decode()
