"""The command line with the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import error_line, run

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]
TIMEOUT_S = 150.0


def test_the_default_model_answers_in_english() -> None:
    result = run("run", "What is the capital of France?", timeout_s=TIMEOUT_S)
    assert result.stdout == "The capital of France is Paris.\n"
    assert "finish: stop" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_raw_continues_the_text_in_this_process_too() -> None:
    words = ["run", "smollm2-135m", "--raw", "The capital of France is", "--max-tokens", "5"]
    result = run(*words, "--inproc", "--json", "--quiet", timeout_s=TIMEOUT_S)
    report = json.loads(result.stdout)
    assert "Paris" in report["text"]
    assert report["engine"] == "openvino"
    assert result.stderr == ""


def test_a_cut_model_file_is_told_in_one_line(tmp_path: Path) -> None:
    (path,) = run("pull").stdout.splitlines()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(path).read_bytes()[: 10 << 20])
    result = run("run", str(cut), "hi", timeout_s=TIMEOUT_S)
    assert result.returncode == 1
    assert "cut.gguf" in error_line(result)
