"""Engines that die, and engines whose parent dies: who is told what, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from enginewire.config import EngineConfig
from enginewire.testing.launched_engine import LaunchedEngine
from enginewire.testing.mock_frontend import MockFrontend
from enginewire.testing.waiting import wait_until
from enginewire.wire.handshake import EngineZmqAddresses

SUPPORT = str(Path(__file__).parents[1] / "support")


def launched(frontend: MockFrontend, executor: str = "echo", model: str = "echo", **settings: Any) -> LaunchedEngine:
    config = EngineConfig.create(model, executor=executor, **settings)
    return frontend.launch(config, sys_path=[SUPPORT])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# While it runs.


@pytest.mark.parametrize("executor", ["echo", "stub_executors:HoldsGil"], ids=["inline", "child"])
def test_a_step_that_raises_is_told_to_every_frontend(executor: str) -> None:
    """C-60, I.1, defect 33: the marker to all, the cause in the note, a status that is not 0."""
    with MockFrontend(num_clients=2) as frontend:
        engine = launched(frontend, executor, executor_options={"fail_at_step": 3})
        frontend.shake_hands()
        frontend.add("a", [1, 2, 3], max_tokens=10)
        for client_index in (0, 1):
            frontend.wait_death_marker(client_index=client_index)
        assert frontend.token_ids("a") == [1, 2]
        assert engine.wait_exit() == 1
        note = engine.death_note()
        assert note is not None
        assert note.stage == "running"
        assert note.cause == "RuntimeError: failing at step 3, as fail_at_step asks"
        assert any("in step" in line for line in note.traceback_tail)
        assert "failing at step 3" in engine.read_log()


def test_the_note_is_there_before_the_marker() -> None:
    """C-27: whoever sees the marker can name the cause."""
    with MockFrontend() as frontend:
        engine = launched(frontend, executor_options={"fail_at_step": 1})
        frontend.shake_hands()
        frontend.add("a", [1], max_tokens=10)
        frontend.wait_death_marker()
        note = engine.death_note()
        assert note is not None
        assert "failing at step 1" in note.cause


def test_the_death_of_the_executors_process_is_the_engines_cause() -> None:
    """C-27: when a child of the engine was killed, that is the cause."""
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:HoldsGil", executor_options={"step_time_s": 0.01})
        frontend.shake_hands()
        (child,) = frontend.utility("collective_rpc", "pid")
        assert psutil.Process(child).ppid() == engine.pid
        frontend.add("a", [1], max_tokens=10_000)
        frontend.wait_tokens("a", 1)
        os.kill(child, signal.SIGKILL)
        frontend.wait_death_marker()
        assert engine.wait_exit() == 1
        note = engine.death_note()
        assert note is not None
        assert note.cause == "executor process killed by signal 9 (SIGKILL)"


def test_an_executors_process_that_dies_while_nothing_runs_is_noticed() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:HoldsGil")
        frontend.shake_hands()
        (child,) = frontend.utility("collective_rpc", "pid")
        os.kill(child, signal.SIGSEGV)
        frontend.wait_death_marker()
        assert engine.wait_exit() == 1
        note = engine.death_note()
        assert note is not None
        assert note.cause == "executor process killed by signal 11 (SIGSEGV)"


def test_the_death_of_an_executors_process_is_noticed_although_a_fork_of_it_lives() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:Forks")
        frontend.shake_hands()
        (child,) = frontend.utility("collective_rpc", "pid")
        (fork,) = psutil.Process(child).children()
        os.kill(child, signal.SIGKILL)
        frontend.wait_death_marker()
        assert engine.wait_exit() == 1
        os.kill(fork.pid, signal.SIGKILL)


def test_an_executors_process_that_dies_in_a_call_ends_the_engine_too() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:HoldsGil")
        frontend.shake_hands()
        frontend.call("collective_rpc", "kill")
        frontend.wait_death_marker()
        assert engine.wait_exit() == 1


# While it starts.


@pytest.mark.parametrize(
    ("executor", "cause"),
    [
        ("stub_executors:FailsToLoad", "ModelError: no such file: /nowhere/model.gguf"),
        ("stub_executors:FailsToLoadInChild", "ModelError: no such file: /nowhere/model.gguf"),
        ("no_such_executor", "ConfigError: unknown executor 'no_such_executor'; known: echo, openvino"),
        ("no_such_module:Class", "ConfigError: executor 'no_such_module:Class' cannot be imported"),
    ],
)
def test_an_engine_that_cannot_load_says_why(executor: str, cause: str) -> None:
    """C-24: exit status 1, the cause in the note and on stderr; no death marker, as no loop ran."""
    with MockFrontend() as frontend:
        engine = launched(frontend, executor)
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        note = engine.death_note()
        assert note is not None
        assert note.stage == "startup"
        assert note.cause.startswith(cause)
        assert engine.wait_exit() == 1
        assert cause.split(": ", 1)[1] in engine.read_log()
        frontend.receive_rest()
        assert frontend.messages == [[]]
        assert frontend.is_marked_dead == [False]


def test_options_that_the_executor_does_not_know_are_a_readable_cause() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend, executor_options={"speed": 9})
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        note = engine.death_note()
        assert note is not None
        assert note.cause.startswith("ConfigError: executor 'echo' has no option speed; it has load_time_s")


def test_a_process_that_just_exits_leaves_its_status() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:ExitsWhileLoading")
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        assert engine.wait_exit() == 7
        assert engine.death_note() is None


@pytest.mark.parametrize(
    ("addresses", "cause"),
    [
        (
            EngineZmqAddresses(inputs=["ipc:///x"], outputs=["ipc:///y"], coordinator_input="ipc:///z"),
            "EngineStartupError: INIT must give both addresses of the coordinator, or none",
        ),
        (EngineZmqAddresses(inputs=[], outputs=[]), "EngineStartupError: INIT must give as many input as output"),
        (EngineZmqAddresses(inputs=["ipc:///x"], outputs=[]), "EngineStartupError: INIT must give as many input"),
    ],
)
def test_an_init_that_cannot_be_followed_is_refused(addresses: EngineZmqAddresses, cause: str) -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend)
        frontend.expect_handshake("HELLO")
        frontend.send_init(addresses)
        note = engine.death_note()
        assert note is not None
        assert note.cause.startswith(cause)
        assert engine.wait_exit() == 1


def test_an_init_that_is_no_init_is_refused() -> None:
    with MockFrontend() as frontend:
        engine = launched(frontend)
        frontend.expect_handshake("HELLO")
        frontend._handshake.send_multipart([frontend._identity, b"\xc1"])
        note = engine.death_note()
        assert note is not None
        assert "not a valid EngineHandshakeMetadata" in note.cause


# When its parent dies.

PARENT = """
import sys
from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.testing.launched_engine import LaunchedEngine

address, executor, support, log, folder = sys.argv[1:]
spec = EngineSpec(
    config=EngineConfig.create("echo", executor=executor, executor_options={"step_time_s": 0.05}),
    handshake_address=address,
    sys_path=[support],
    cleanup_paths=[folder, folder + ".sock"],
)
engine = LaunchedEngine(spec, log)
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("executor", "phase"),
    [
        ("echo", "hello"),
        ("stub_executors:HogsGilLoading", "loading"),
        ("echo", "running"),
        ("stub_executors:HogsGil", "running"),
    ],
)
def test_an_engine_does_not_outlive_its_parent(executor: str, phase: str, tmp_path: Path) -> None:
    """C-62: killed by SIGKILL in any phase, and with it whatever its executor runs in."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "input").touch()
    log = tmp_path / "log"
    with MockFrontend() as frontend:
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PARENT), frontend.handshake_address, executor, SUPPORT, log, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with parent:
            assert parent.stdout is not None
            engine = psutil.Process(int(parent.stdout.readline()))
            frontend.expect_handshake("HELLO")
            if phase == "loading":
                frontend.send_init()
                wait_until(lambda: "loading in pid" in log.read_text(), 10, "loading")
            elif phase == "running":
                frontend.send_init()
                frontend.expect_ready_responses()
                frontend.add("a", [1, 2], max_tokens=100_000)
                frontend.wait_tokens("a", 2)
            children = engine.children()
            assert len(children) == (executor != "echo" and phase != "hello")
            parent.kill()
        for process in (engine, *children):
            wait_until(lambda process=process: is_gone(process.pid), 5, f"the end of {process}")
        assert not folder.exists()


def test_the_executors_process_does_not_outlive_a_killed_engine() -> None:
    """C-62: the child is in native code that holds the interpreter lock."""
    with MockFrontend() as frontend:
        engine = launched(frontend, "stub_executors:HogsGilLoading")
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        wait_until(lambda: "loading in pid" in engine.read_log(), 10, "loading")
        (child,) = psutil.Process(engine.pid).children()
        engine.process.kill()
        assert engine.wait_exit() == -signal.SIGKILL
        wait_until(lambda: is_gone(child.pid), 5, "the end of the executor's process")


def test_an_engine_whose_parent_said_nothing_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "enginewire.engine.main", "--lifeline-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    ours.close()
    assert process.wait(10) == 1


def test_an_engine_started_by_hand_explains_itself() -> None:
    done = subprocess.run([sys.executable, "-m", "enginewire.engine.main"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "usage: python -m enginewire.engine.main --lifeline-fd N" in done.stderr
