"""How a command line ends when it is told to, and that its engine ends with it."""

from __future__ import annotations

import signal

import pytest
from command_line import DEADLINE_S, Start, descendants, engine_of, read_some, wait_for_exit_of

RUN = ["run", "echo", "hello ", "--max-tokens", "100000", "--executor-option", "step_time_s=0.02"]
LOAD = ["run", "echo", "hello ", "--executor-option", "load_time_s=60"]


@pytest.mark.parametrize("where", [[], ["--inproc"]], ids=["subprocess", "inproc"])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_stream_and_its_engine(
    start: Start, where: list[str], number: signal.Signals, exit_code: int
) -> None:
    process = start(*RUN, *where)
    read_some(process)
    below = descendants(process)
    assert bool(below) == (not where)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code
    assert errors == ""
    wait_for_exit_of(below)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_engine_that_still_loads(start: Start, number: signal.Signals, exit_code: int) -> None:
    process = start(*LOAD)
    engine = engine_of(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code
    assert errors == ""
    wait_for_exit_of([engine])


def test_a_killed_command_line_leaves_no_engine(start: Start) -> None:
    """C-62."""
    process = start(*RUN)
    read_some(process)
    below = descendants(process)
    process.kill()
    wait_for_exit_of(below)


def test_a_killed_engine_is_named_with_its_signal(start: Start) -> None:
    """C-27."""
    process = start(*RUN)
    read_some(process)
    engine_of(process).kill()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.startswith("enginewire: error: engine 0 is dead: killed by signal 9 (SIGKILL)")
    assert len(errors.splitlines()) == 1


def test_a_killed_engine_is_started_again_and_the_text_goes_on(start: Start) -> None:
    """Issue 6: a single engine that restarts is waited for."""
    words = ["run", "echo", "hello ", "--max-tokens", "300", "--executor-option", "step_time_s=0.02"]
    process = start(*words, "--restart-engine", "1", "--failover", "exact", "--quiet")
    begin = read_some(process)
    engine_of(process).kill()
    rest, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert begin + rest == "hello " * 50 + "\n"
