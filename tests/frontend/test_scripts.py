"""Scripts as users write them: no main guard, no clean-up, on standard input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(script: str) -> list[str]:
    """Feed a script to a fresh interpreter; return what it prints."""
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_script_on_standard_input_needs_no_main_guard(multiprocess: bool) -> None:
    script = f"""
from enginewire import LLM, SamplingParams
llm = LLM("echo", multiprocess_mode={multiprocess})
for output in llm.generate(["ab", "cd"], SamplingParams(max_tokens=4)):
    print(output.outputs[0].text)
"""
    assert run(script) == ["abab", "cdcd"]


@pytest.mark.parametrize("frontend", ["LLM", "AsyncLLM"])
def test_a_script_that_ends_without_shutdown_leaves_no_engine(frontend: str) -> None:
    script = f"""
import asyncio, contextlib, os
from pathlib import Path
from enginewire import {frontend}, SamplingParams
llm = {frontend}("echo")
params = SamplingParams(max_tokens=4)
async def stream():
    return [output async for output in llm.generate("ab", params)]
print((asyncio.run(stream()) if {frontend == "AsyncLLM"} else llm.generate("ab", params))[-1].outputs[0].text)
for task in Path("/proc/self/task").iterdir():
    with contextlib.suppress(OSError):  # the thread ended meanwhile
        print((task / "children").read_text())
"""
    text, *children = run(script)
    assert text == "abab"
    pids = [int(pid) for line in children for pid in line.split()]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_error_that_ends_a_script_is_its_own() -> None:
    script = """
from enginewire import LLM
llm = LLM("echo")
try:
    llm.generate("")
except ValueError as exc:
    print(exc)
"""
    assert run(script) == ["the prompt is empty; it must have at least one token"]
