"""What the engine's processes set up first: where prints and log lines go."""

from __future__ import annotations

import logging
import os
import sys


def send_stdout_to_stderr() -> None:
    """Let everything printed here, by native code too, go to stderr: standard output belongs to the parent."""
    sys.stdout.flush()
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines at once: the parent keeps the last ones, to say why an engine died.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper in our own process


def configure_logging(engine_index: int) -> None:
    """Log to stderr, each line with time, level and engine."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s engine={engine_index} %(message)s",
        force=True,
    )
