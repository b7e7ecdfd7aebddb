"""Signals in a process that has used OpenVINO, which exchanges its threads' signal stacks. It needs no model."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

BEGIN = """
import os, signal, threading
from enginewire.executors.openvino_probe import GrammarProbe
"""

END = """
signal.signal(signal.SIGTERM, lambda number, frame: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
print("and goes on")
"""

IN_ORDER_OF_CREATION = "probes = [GrammarProbe(), GrammarProbe()]\nwhile probes: del probes[0]"

BY_ANOTHER_THREAD = """
probes = [GrammarProbe()]
thread = threading.Thread(target=probes.clear)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("faulthandler", [False, True], ids=["plain", "faulthandler"])
@pytest.mark.parametrize("use", [IN_ORDER_OF_CREATION, BY_ANOTHER_THREAD], ids=["in-order", "other-thread"])
def test_a_signal_finds_its_stack_after_pipelines_are_released(use: str, faulthandler: bool) -> None:
    """Issue: an engine in the caller's process leaves the caller's signals alone (Ctrl-C was a SIGSEGV)."""
    command = [sys.executable, *(["-X", "faulthandler"] if faulthandler else []), "-c", BEGIN + use + END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["handled", "and goes on", ""]), done.stderr
