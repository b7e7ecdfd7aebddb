"""Command lines that tests start and talk to."""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from command_line import COMMAND, DEADLINE_S, Start

from enginewire.cli import serve


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


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give back the signal handlers that a command sets."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture
def parse_serve() -> Callable[[str], argparse.Namespace]:
    """Return what reads the flags of ``enginewire serve``."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return lambda words: parser.parse_args(words.split())
