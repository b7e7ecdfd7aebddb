"""The leak check of ``conftest.py`` is itself checked: what it does not see, we do not claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()

LEAKING_TESTS = """
import os, socket, subprocess, sys, tempfile, threading
import zmq

kept = []

def test_thread():
    kept.append(threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True))
    kept[-1].start()

def test_context():
    kept.append(zmq.Context())

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_descriptor():
    kept.append(socket.socket())

def test_folder():
    kept.append(tempfile.mkdtemp(prefix="enginewire-"))

def test_clean():
    with zmq.Context() as context, context.socket(zmq.PAIR), socket.socket(), tempfile.TemporaryDirectory():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def test_end():
    process = next(it for it in kept if isinstance(it, subprocess.Popen))
    process.communicate()
"""


def test_every_kind_of_leak_is_reported_and_a_clean_test_is_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(re.sub(r"SETTLE_S = [\d.]+", "SETTLE_S = 0.05", CONFTEST))
    (tmp_path / "test_leaks.py").write_text(LEAKING_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    reported = set(re.findall(r"^ERROR test_leaks.py::(\w+) - Failed: left behind", run.stdout, re.MULTILINE))
    assert reported == {"test_thread", "test_context", "test_process", "test_descriptor", "test_folder"}, run.stdout
    assert "thread forgotten" in run.stdout
    assert "7 passed, 5 errors" in run.stdout
