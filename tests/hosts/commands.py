"""Our command line on hosts of a test's own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from netns import Host

ENDED_WITHIN_S = 30.0
"""How long a process that was asked to end may take, whatever has become of its connections."""


@contextlib.contextmanager
def command(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command line on a host; its stderr goes to the test's. Fails if it does not end when it is asked to."""
    with host.entered():
        process = subprocess.Popen([sys.executable, "-m", "enginewire", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdout is not None
        process.terminate()
        try:
            process.wait(ENDED_WITHIN_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def engines(host: Host, frontend: Host, *words: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run echo engines that report to a frontend on another host."""
    return command(host, "serve", "echo", "--headless", "-dpa", frontend.address, *words)
