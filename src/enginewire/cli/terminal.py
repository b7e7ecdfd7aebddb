"""What goes to stderr: messages, a status line, the progress of a download."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

WIPE_LINE = "\r\x1b[K"


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
