"""Command lines that tests start and talk to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from command_line import COMMAND, DEADLINE_S, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Start command lines; those that are left at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*words: str, **options: object) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*COMMAND, *words], text=True, **(pipes | options))  # type: ignore[call-overload]
        started.append(process)
        return process

    yield start_one
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
