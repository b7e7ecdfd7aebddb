"""What a process has, before a soak and after it."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from dataclasses import dataclass

import psutil


@dataclass
class Census:
    """What is to be the same again once all is quiet. Threads are named, so that a failure names them.

    A loop's own helper threads (``asyncio_0``, ``uvloop_0``) are made as needed and stay; there are few.
    """

    threads: list[str]
    tasks: list[str]
    num_descriptors: int
    num_children: int
    files: int

    @classmethod
    def take(cls) -> Census:
        """Count."""
        gc.collect()
        try:
            tasks = sorted(task.get_name() for task in asyncio.all_tasks())
        except RuntimeError:  # no loop runs here
            tasks = []
        threads = [thread.name for thread in threading.enumerate()]
        return cls(
            sorted(name for name in threads if not name.startswith(("asyncio_", "uvloop_"))),
            tasks,
            len(os.listdir("/proc/self/fd")),
            len(psutil.Process().children(recursive=True)),
            sum(len(names) for _, _, names in os.walk(tempfile.gettempdir())),
        )


def memory_mb() -> float:
    """Return what this process holds."""
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20
