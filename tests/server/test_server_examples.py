"""The examples run, against an engine that cannot do everything and one that can."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Served, serve

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(served: Served, name: str) -> str:
    command = [sys.executable] if name.endswith(".py") else ["sh"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), served.url], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_openai_client_says_what_the_engine_cannot_do(echo: Served) -> None:
    shown = output(echo, "openai_client.py")
    assert shown.count("sampled: 'Once upon a ") == 2
    assert "structured: Error code: 400 - response_format: this engine does not support" in shown


def test_httpx_client(echo: Served) -> None:
    shown = output(echo, "httpx_client.py")
    assert "request id: example-1" in shown
    assert "error: 400 temperature must be" in shown


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(echo: Served) -> None:
    shown = output(echo, "curl.sh")
    assert "data: [DONE]" in shown
    assert "vllm:generation_tokens_total" in shown


@pytest.mark.model
@pytest.mark.timeout(180)
def test_openai_client_on_the_real_model() -> None:
    with serve("smollm2-135m") as served:
        shown = output(served, "openai_client.py")
    assert "Paris" in shown
    assert "structured: {'name': " in shown
