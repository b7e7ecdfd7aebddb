"""What the tests of the frontends share. Engines are echo engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginewire import LLM, AsyncLLM, SamplingParams

DEADLINE_S = 10.0

ENDLESS = 100_000
"""Tokens of a request that a test does not wait for."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Block until something can be seen, or fail."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.002)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait on the loop until something can be seen, or fail."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        await asyncio.sleep(0.002)


def num_running(llm: LLM | AsyncLLM) -> int | None:
    """Return how many requests the engine had when it last said so."""
    stats = llm.scheduler_stats
    return None if stats is None else stats.num_running_reqs + stats.num_waiting_reqs


def echo(text: str, max_tokens: int) -> str:
    """Return what the echo engine answers, for ASCII."""
    return (text * (max_tokens // len(text) + 1))[:max_tokens]


def params(**changes: Any) -> SamplingParams:
    """Make parameters of a short request."""
    return SamplingParams(**({"max_tokens": 8} | changes))


def children() -> set[int]:
    """Return the ids of our child processes: the engines."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:  # the thread ended meanwhile
            continue
    return found


def kill_engine(started_since: set[int]) -> None:
    """Kill the engine processes that this test started."""
    engines = children() - started_since
    assert engines
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
