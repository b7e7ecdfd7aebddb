"""Taking turns at an engine that lives in this process and can do one thing at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """A lock with two kinds of users: many callers, who are let in first, and one who steps the engine in a loop.

    A plain lock would starve the callers: the loop takes it again before a thread that waits for it has woken up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._num_callers = 0

    @property
    def are_mine(self) -> bool:
        """Whether this thread has its turn already; it would wait for itself."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Take the next turn."""
        with self._changed:
            self._num_callers += 1
            try:
                self._take(patient=False)
            finally:
                self._num_callers -= 1
        yield from self._turn()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Take a turn when no caller wants one."""
        with self._changed:
            self._take(patient=True)
        yield from self._turn()

    def _take(self, *, patient: bool) -> None:
        while self._holder is not None or (patient and self._num_callers):
            self._changed.wait()
        self._holder = threading.get_ident()

    def _turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._holder = None
                self._changed.notify_all()
