"""Waiting for what can be observed, under a deadline, rather than for time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

POLL_S: Final = 0.005
"""Short beside what tests wait for, long beside what a predicate costs."""


def wait_until(predicate: Callable[[], T], timeout_s: float, what: str) -> T:
    """Call ``predicate`` until it gives something true, and return that.

    Raises:
        TimeoutError: it did not in time; says that ``what`` did not happen.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s: {what} did not happen")
        time.sleep(POLL_S)
    return value
