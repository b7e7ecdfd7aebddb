"""What goes to stderr: messages, a status line, the progress of a download; and a screen to draw on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

WIPE_LINE = "\r\x1b[K"

ENTER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, without a cursor: what was there before comes back with it."""

FALLBACK_SIZE: Final = (80, 24)

LEAVE_SCREEN: Final = "\x1b[?25h\x1b[?1049l"


def say(text: str) -> None:
    """Write a line to stderr. Nobody may be there to read it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def announce(text: str) -> None:
    """Write a line to stdout, at once, for programs that start this one; to stderr if nobody reads that."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        say(text)


def is_terminal() -> bool:
    """Whether stderr is one, so that a line may be drawn and drawn again."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def one_line(exc: BaseException) -> str:
    """Put an error into one line: its first, and its last where the first only introduces it."""
    lines = [line.lstrip(" |") for line in str(exc).splitlines() if line.strip(" |")]
    if not lines:
        return type(exc).__name__
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


@contextlib.contextmanager
def status(text: str, *, enabled: bool = True) -> Iterator[None]:
    """Show a line while something goes on, and wipe it afterwards; only on a terminal."""
    if not (enabled and is_terminal()):
        yield
        return
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(WIPE_LINE)
            sys.stderr.flush()


def fetch(model: str, *, check: bool = False) -> Path:
    """Find a model; show how a download comes along: a bar on a terminal, else a line when something begins.

    Args:
        model: see ``resolve_model``.
        check: read what is there, and fetch it again if it was damaged.
    """
    from enginewire.frontend.progress import download_progress
    from enginewire.models import ALIASES, pull, resolve_model

    find = pull if check and model in ALIASES else resolve_model
    if is_terminal():
        with download_progress() as progress:
            return find(model, progress=progress)
    told: set[str] = set()

    def tell(done: int, total: int, what: str) -> None:
        if what not in told:
            told.add(what)
            say(f"{model}: {what}, {total / 1e6:.0f} MB")

    return find(model, progress=tell)


class Screen:
    """The terminal, while something is drawn on it over and over. Afterwards it is as it was, however that comes about.

    Keys arrive at once and are not shown. Ctrl-Z gives the terminal back until the program goes on.
    """

    def __enter__(self) -> Self:
        import termios

        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: list[Any] = [] if self._keys is None else termios.tcgetattr(self._keys)
        self._on_suspend = signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTSTP, self._on_suspend)
        self._leave()

    def size(self) -> tuple[int, int]:
        """Return how many columns and lines there are now."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(sys.stdout.fileno())  # not $COLUMNS, which does not follow
            if columns and lines:
                return columns, lines
        return FALLBACK_SIZE

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines and nothing else. Each is to be narrower than the screen."""
        _write("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")

    def key(self, timeout_s: float) -> str:
        """Return what is typed within so many seconds, else nothing."""
        if self._keys is None:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._keys], [], [], timeout_s)
        if not ready:
            return ""
        return os.read(self._keys, 1).decode(errors="replace") or "q"  # the terminal has been closed

    def _enter(self) -> None:
        import tty

        if self._keys is not None:
            tty.setcbreak(self._keys)
        _write(ENTER_SCREEN)

    def _leave(self) -> None:
        import termios

        _write(LEAVE_SCREEN)
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
