"""A progress bar of one line on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self, TextIO

from enginewire.models import Progress

MIN_INTERVAL_S: Final = 0.1
"""Redrawing more often is work that nobody can see."""

BAR_WIDTH: Final = 24


@contextlib.contextmanager
def download_progress(*, enabled: bool | None = None) -> Iterator[Progress]:
    """Make a bar for ``resolve_model`` and ``pull``, which appears when something is downloaded."""
    megabyte = 1_000_000
    with contextlib.ExitStack() as stack:
        bars: dict[str, ProgressBar] = {}

        def report(done: int, total: int, what: str) -> None:
            if what not in bars:
                stack.close()
                bars[what] = stack.enter_context(ProgressBar(total // megabyte, f"{what}, MB", enabled=enabled))
            bars[what].update(done // megabyte, is_last=done >= total)

        yield report


class ProgressBar:
    """Shows how much of something is done. A context manager, which ends the line.

    Args:
        total: how much there is to do.
        what: shown in front.
        enabled: ``None``: only if stderr is a terminal.
        file: where it is drawn; default: stderr.
    """

    def __init__(self, total: int, what: str, *, enabled: bool | None = None, file: TextIO | None = None) -> None:
        self._total = total
        self._what = what
        self._file = sys.stderr if file is None else file
        # stderr is None in programs without a console.
        self._enabled = bool(total and self._file) and (self._is_terminal() if enabled is None else enabled)
        self._start = time.monotonic()
        self._next_draw = 0.0
        self._drawn_chars = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._enabled

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw again."""
        return self._enabled and time.monotonic() >= self._next_draw

    def update(self, done: int, note: str = "", *, is_last: bool = False) -> None:
        """Draw, unless the last time was a moment ago and there is more to come."""
        if self.is_due or (is_last and self._enabled):
            self._draw(done, note)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawn_chars:
            self._file.write("\n")
            self._file.flush()

    def _is_terminal(self) -> bool:
        try:
            return self._file.isatty()
        except ValueError:  # closed
            return False

    def _draw(self, done: int, note: str) -> None:
        now = time.monotonic()
        self._next_draw = now + MIN_INTERVAL_S
        filled = BAR_WIDTH * done // self._total
        bar = "█" * filled + "·" * (BAR_WIDTH - filled)
        line = f"{self._what} {bar} {done}/{self._total} {now - self._start:.1f} s{'  ' if note else ''}{note}"
        # Spaces wipe what a longer line left behind.
        self._write(f"\r{line}{' ' * (self._drawn_chars - len(line))}")
        self._drawn_chars = len(line)

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except UnicodeEncodeError:  # a terminal without these characters
            self._file.write(text.encode("ascii", "replace").decode())
        self._file.flush()
