"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from enginewire.testing import free_tcp_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, timeout: float = 30) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline() -> None:
    first, *_ = run("offline.py", "echo").splitlines()
    assert first == "The capital of France isThe capital of France is [length]"


def test_streaming() -> None:
    printed = run("streaming.py", "echo")
    for beginning in ("Once upon a … ", "In a far-awa… ", "It was a dar… "):
        assert beginning in printed


def test_chat() -> None:
    printed = run("chat.py", "echo")
    assert "> What is the capital of France?\nsystem\n" in printed
    assert "> What is it famous for?\n" in printed


def test_own_engine() -> None:
    """Errors that users will meet: an executor class that lives in a script."""
    assert run("own_engine.py").splitlines() == ["abcdefghijklmnopqrstu", "0123456789:;<=>?@ABCD", "ABCDEFGHIJKLMNOP"]


def test_engines_elsewhere() -> None:
    printed = run("engines_elsewhere.py", str(free_tcp_port()))
    assert printed.count("Engine 0 of 2: waiting for a frontend at tcp://127.0.0.1:") == 1
    for i in range(4):
        assert f"prompt {i}  → prompt {i} " in printed


def test_every_example_is_run() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    server_tests = (Path(__file__).parents[1] / "server/test_server_examples.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in tested or f'"{path.name}"' in server_tests, path.name


@pytest.mark.model
@pytest.mark.timeout(120)
def test_chat_with_the_real_model() -> None:
    assert "Paris" in run("chat.py", timeout=100)
