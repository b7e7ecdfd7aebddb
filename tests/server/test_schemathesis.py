"""The server against its own description, by a tool that reads it: schemathesis invents requests, good and bad."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import Served, serve

from enginewire.server import admin

pytestmark = pytest.mark.timeout(240)

NOT_CHECKED = "positive_data_acceptance"
"""What contradicts itself across fields, is too long or does not exist is refused; JSON Schema cannot say all of it."""

ENGINE = ["echo", "--max-model-len", "64"]
"""Completions end soon: most invented requests do not say how long they may be."""


def assert_as_described(served: Served, folder: Path, *arguments: str, max_examples: int) -> None:
    """Let schemathesis loose: no 5xx, no undescribed status, header or body, bad requests refused, keys wanted."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    command += ["--phases", "coverage,fuzzing", "--checks", "all", "--exclude-checks", NOT_CHECKED]
    command += ["--max-examples", str(max_examples), "--seed", "1", "--generation-database", "none"]
    command += ["--request-timeout", "20", "--suppress-health-check", "all", "--no-color", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=220)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) generated, \1 passed", run.stdout)
    assert passed, run.stdout
    assert int(passed[1]) > 100, run.stdout
    assert served.num_live() == 0
    assert "level=error" not in served.log


def complete(served: Served) -> str:
    body = {"prompt": "abc", "max_tokens": 4}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=20)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def test_no_request_gets_a_5xx_or_what_is_not_described(tmp_path: Path) -> None:
    """Issue 3."""
    with serve(*ENGINE) as served:
        assert_as_described(served, tmp_path, max_examples=25)
        assert complete(served) == "abca"


def test_a_key_is_wanted_wherever_the_description_says_so(tmp_path: Path) -> None:
    with serve(*ENGINE, "--api-key", "secret") as served:
        assert_as_described(served, tmp_path, "--header", "Authorization: Bearer secret", max_examples=3)


def test_the_admin_endpoints_are_as_described(tmp_path: Path) -> None:
    """Without those that generate: a paused engine makes them wait, rightly. ``/collective_rpc`` is left out as well:
    a made-up timeout of a nanosecond is a 504, rightly.
    """
    paths = "|".join(sorted({endpoint.path for endpoint in admin.ENDPOINTS} - {"/collective_rpc"}))
    with serve(*ENGINE, "--admin", "--set", "enable_elastic_ep=false") as served:  # any number may come
        assert_as_described(served, tmp_path, "--include-path-regex", f"^({paths})$", max_examples=15)
        for path in ("/wake_up", "/resume"):
            httpx.post(served.url + path, timeout=20).raise_for_status()
        assert complete(served) == "abca"
