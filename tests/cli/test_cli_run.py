"""``enginewire run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from command_line import DEADLINE_S, Start, error_line, read_some, run

NEVER_ENDS = ["--max-tokens", "100000", "--executor-option", "step_time_s=0.02"]


@pytest.mark.parametrize("where", [[], ["--inproc"]], ids=["subprocess", "inproc"])
def test_the_text_goes_to_stdout_and_the_statistics_to_stderr(where: list[str]) -> None:
    result = run("run", "echo", "hello ", "--max-tokens", "9", *where)
    assert result.stdout == "hello hel\n"
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    for part in ("ready in ", "first token after ", "6 prompt + 9 new tokens", " tokens/s", "finish: length"):
        assert part in line


def test_the_text_streams_as_it_comes(start: Start) -> None:
    process = start("run", "echo", "hello ", *NEVER_ENDS)
    assert "hello ".startswith(read_some(process)[:6])
    assert process.poll() is None


def test_with_json_one_object_tells_everything() -> None:
    result = run("run", "echo", "grüß", "--max-tokens", "4", "--json", "--quiet")
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["text"] == "grü"
    assert report["token_ids"] == list("grü".encode())
    assert report["finish_reason"] == "length"
    assert report["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "cached_tokens": 0}
    assert report["model"] == report["engine"] == "echo"
    assert 0 < report["timings"]["first_token_s"] <= report["timings"]["total_s"]
    assert report["timings"]["ready_s"] > 0


def test_a_single_argument_is_the_prompt() -> None:
    result = run("run", "--engine", "echo", "hello", "--max-tokens", "5")
    assert result.stdout == "hello\n"


def test_options_may_stand_anywhere() -> None:
    result = run("run", "echo", "--max-tokens", "5", "hello", "-q")
    assert (result.stdout, result.stderr) == ("hello\n", "")


def test_a_dash_reads_the_prompt_from_standard_input() -> None:
    result = run("run", "echo", "-", "--max-tokens", "7", stdin="ab\ncd\n")
    assert result.stdout == "ab\ncdab\n"


def test_a_stop_string_ends_the_text() -> None:
    result = run("run", "echo", "one two three", "--stop", "thr")
    assert result.stdout == "one two \n"
    assert "finish: stop" in result.stderr


def test_the_chat_template_is_applied_when_asked_for() -> None:
    result = run("run", "echo", "hello", "--chat", "--system", "be nice", "--max-tokens", "64")
    assert result.stdout.startswith("system\nbe nice")


def test_executor_options_and_settings_reach_the_engine() -> None:
    result = run("run", "echo", "ab", "--executor-option", "max_model_len=50", "--set", "max_model_len=12", "--json")
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 10


def test_an_executor_in_a_module_of_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text(
        textwrap.dedent("""
            from enginewire.executors import EchoExecutor

            class Shout(EchoExecutor):
                def step(self):
                    outputs = super().step()
                    for output in outputs:
                        output.new_token_ids = [ord(chr(i).upper()) for i in output.new_token_ids]
                    return outputs
        """)
    )
    command = [sys.executable, "-P", "-m", "enginewire", "run", "echo", "hey", "--max-tokens", "3"]
    command += ["--engine", "shouting:Shout"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.stdout == "HEY\n", result.stderr


def test_the_engine_s_log_is_shown_only_when_asked_for() -> None:
    assert len(run("run", "echo", "a", "--max-tokens", "1").stderr.splitlines()) == 1
    assert "engine=0" in run("run", "echo", "a", "--max-tokens", "1", "--verbose").stderr


def test_a_reader_that_has_seen_enough_is_no_error(start: Start) -> None:
    process = start("run", "echo", "hello ", *NEVER_ENDS)
    read_some(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 128 + 13
    assert process.stderr.read() == ""


def test_the_installed_script_is_the_same_command() -> None:
    script = os.path.join(sysconfig.get_path("scripts"), "enginewire")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.stdout.startswith("enginewire ")


ERRORS = {
    "temperature": (["run", "echo", "hi", "--temperature", "5"], "temperature must be", "got 5.0"),
    "NaN": (["run", "echo", "hi", "--temperature", "nan"], "temperature must be", "got nan"),
    "max_tokens": (["run", "echo", "hi", "--max-tokens", "0"], "max_tokens must be an integer of at least 1", "got 0"),
    "no prompt": (["run", "echo", ""], "the prompt is empty", ""),
    "long prompt": (["run", "echo", "hello", "--executor-option", "max_model_len=4"], "prompt", "4"),
    "unknown model": (["run", "smollm", "hi", "--engine", "echo"], "unknown model 'smollm'", "did you mean"),
    "no such file": (["pull", "./missing.gguf"], "missing.gguf: there is no such file or folder", ".gguf file"),
    "unknown alias": (["pull", "llama"], "unknown model 'llama'", "known are"),
    "unknown engine": (["run", "--engine", "vortex", "hi"], "unknown executor 'vortex'", "known: echo, openvino"),
    "no such module": (["run", "--engine", "nope:Engine", "hi"], "executor 'nope:Engine' cannot be imported", "nope"),
    "unknown option": (["run", "echo", "hi", "--executor-option", "speed=1"], "has no option speed", "step_time_s"),
    "unknown setting": (["run", "echo", "hi", "--set", "speed=1"], "unknown setting speed", "max_model_len"),
    "setting of its own": (["run", "echo", "hi", "--set", "model=x"], "--set cannot set model", "MODEL"),
    "dies": (["run", "echo", "hi", "--executor-option", "fail_at_step=2"], "engine 0 is dead: RuntimeError", "step 2"),
    "dies here": (["run", "echo", "hi", "--executor-option", "fail_at_step=2", "--inproc"], "engine 0 is dead", "step"),
    "too slow": (
        ["run", "echo", "hi", "--executor-option", "load_time_s=60", "--set", "ready_timeout_s=1"],
        "not ready within 1 s",
        "ready_timeout_s",
    ),
    "restart here": (
        ["run", "echo", "hi", "--inproc", "--restart-engine", "1"],
        "--inproc has the engine",
        "leave out",
    ),
    "failover here": (["run", "echo", "hi", "--inproc", "--failover", "exact"], "--inproc has the engine", "leave out"),
    "raw system": (["run", "echo", "hi", "--raw", "--system", "x"], "--system needs a chat template", "--raw"),
}


FAILURES = [
    ERRORS[name][0] for name in ("unknown model", "no such file", "unknown alias", "dies", "dies here", "too slow")
]
"""Not of the command line itself."""


@pytest.mark.parametrize(("words", "what", "hint"), ERRORS.values(), ids=ERRORS.keys())
def test_what_goes_wrong_is_told_in_one_line(words: list[str], what: str, hint: str) -> None:
    result = run(*words)
    line = error_line(result)
    assert what in line
    assert hint in line
    assert result.returncode == (1 if words in FAILURES else 2)


USAGE_ERRORS = {
    "no prompt": ["run"],
    "not a number": ["run", "echo", "hi", "--max-tokens", "many"],
    "no value": ["run", "echo", "hi", "--executor-option", "speed"],
    "unknown option": ["run", "echo", "hi", "--loud"],
    "contradiction": ["run", "echo", "hi", "--raw", "--chat"],
    "unknown command": ["jump"],
    "nothing": [],
}


@pytest.mark.parametrize("words", USAGE_ERRORS.values(), ids=USAGE_ERRORS.keys())
def test_wrong_usage_is_told_apart(words: list[str]) -> None:
    result = run(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: enginewire")
    assert result.stdout == ""


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    assert "random.gguf" in error_line(run("run", str(path), "hi", "--engine", "echo"))
