"""An engine process dies: everybody who waits hears of it within two seconds, and why."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_executors import InChildProcess, Obedient

from client_harness import MP_FACES, PATIENCE_S, Face, echo_face, fake_python, make_client, mp_client, request
from enginewire import EngineConfig, EngineDeadError, EngineStartupError
from enginewire.testing import wait_until

TOLD_WITHIN_S = 2.0


def engine_pid(face: Face) -> int:
    """Return the engine's process id."""
    manager = mp_client(face).resources.engine_manager
    assert manager is not None
    return manager.processes[0].popen.pid


@pytest.fixture(params=MP_FACES)
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    with echo_face(request.param, Obedient, executor_options={"step_time_s": 0.01}) as face:
        yield face


def test_a_killed_engine_fails_requests_and_calls_and_names_the_signal(face: Face) -> None:
    """C-26, C-27; defect 16; issue 2: all fail within 2 s and name the signal."""
    face.add_request(request("a", max_tokens=100_000))
    face.get_output()
    calls = [face.start("call_utility", "collective_rpc", "hang") for _ in range(4)]
    wait_until(lambda: face.pending_calls() == 4, PATIENCE_S, "four calls")

    def drain() -> Any:
        while True:
            face.get_output()

    os.kill(engine_pid(face), signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"engine 0 is dead: killed by signal 9 \(SIGKILL\)") as caught:
        drain()
    for call in calls:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            call.result(PATIENCE_S)
    assert time.monotonic() - killed < TOLD_WITHIN_S
    death = caught.value.death
    assert (death.engine_index, death.exit_code) == (0, -9)
    assert any("ready" in line for line in death.log_tail)
    assert face.pending_calls() == 0
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        face.add_request(request("b"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        face.is_sleeping()
    face.abort_requests(["a"])


def test_sending_in_the_moment_of_death_names_the_signal_too(face: Face) -> None:
    """C-27: the connection is gone some milliseconds before the exit status is known."""
    os.kill(engine_pid(face), signal.SIGKILL)

    def send_until_refused() -> None:
        deadline = time.monotonic() + PATIENCE_S
        for i in range(1_000_000):
            assert time.monotonic() < deadline
            face.add_request(request(f"r{i}"))
            time.sleep(0.0005)  # without a processor it cannot end

    with pytest.raises(EngineDeadError, match=r"killed by signal 9 \(SIGKILL\)"):
        send_until_refused()


def test_an_idle_engines_death_is_noticed_within_a_second(face: Face) -> None:
    """C-26."""
    os.kill(engine_pid(face), signal.SIGSEGV)
    killed = time.monotonic()
    wait_until(lambda: face.client.engine_dead, PATIENCE_S, "the note of its death")
    assert time.monotonic() - killed < 1.0
    with pytest.raises(EngineDeadError, match=r"signal 11 \(SIGSEGV\)"):
        face.get_output()


def test_an_engine_that_exits_gives_its_status_and_its_last_lines(face: Face) -> None:
    """C-27."""
    with pytest.raises(EngineDeadError, match="exited with status 3") as caught:
        face.collective_rpc("exit", args=(3,))
    assert caught.value.death.exit_code == 3
    assert "told to exit" in str(caught.value)


def test_even_an_exit_with_status_zero_is_a_death(face: Face) -> None:
    """Protocol I.2: any exit that nobody asked for."""
    with pytest.raises(EngineDeadError, match="exited with status 0"):
        face.collective_rpc("exit", args=(0,))


def test_the_engines_children_go_with_it(face: Face) -> None:
    """Issue 2: it takes its own children along."""
    (child,) = face.collective_rpc("spawn")
    os.kill(engine_pid(face), signal.SIGKILL)
    wait_until(lambda: not is_running(child), PATIENCE_S, "the end of the engine's child")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_loop_that_raises_says_what_and_where(kind: str) -> None:
    """C-27; issue 2: cause and traceback tail in the error."""
    with echo_face(kind, executor_options={"fail_at_step": 2}) as face:
        face.add_request(request("a", max_tokens=10))

        def drain() -> None:
            while True:
                face.get_output()

        with pytest.raises(EngineDeadError, match=r"engine 0 is dead: RuntimeError: .*step 2") as caught:
            drain()
        text = str(caught.value)
        assert "Traceback (most recent call last)" in text
        assert "echo.py" in text
        assert caught.value.death.exit_code == 1


def test_a_killed_child_of_the_engine_is_the_cause() -> None:
    """C-27: when a child of the engine was killed, that is the cause."""
    with echo_face("sync", InChildProcess) as face:
        (pid,) = face.collective_rpc("pid")
        assert pid != engine_pid(face)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"killed by signal 9 \(SIGKILL\)") as caught:
            face.get_output()
        assert caught.value.death.exit_code == 1


def test_the_first_cause_stays() -> None:
    """Rule 5 of the style guide."""
    with echo_face("sync", Obedient) as face:
        os.kill(engine_pid(face), signal.SIGKILL)
        causes = set()
        for _ in range(3):
            with pytest.raises(EngineDeadError) as caught:
                face.get_output()
            causes.add(caught.value.death)
        assert len(causes) == 1


MARKER_THEN = """
engine = MockEngine(spec.handshake_address, local=True, headless=False)
engine.__enter__()
engine.wait_started(60)
print("something terrible happened", flush=True)
engine.expect_add(60)
engine.die()
"""


@pytest.mark.parametrize(
    ("then", "cause"),
    [
        ("os._exit(5)", "exited with status 5"),
        ("wait_for_parent()", "it reported a fatal error, and its process has not ended since"),
    ],
)
def test_after_the_death_marker_the_exit_status_is_waited_for_a_second(
    then: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-27: the marker holds no cause, so the process's end is waited for, but not for ever."""
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, MARKER_THEN + then))
    with make_client("sync", EngineConfig.create("echo", forward_engine_log=False)) as client:
        client.add_request(request())
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=cause) as caught:
            client.get_output(timeout=PATIENCE_S)
        assert time.monotonic() - began < TOLD_WITHIN_S + 1
        assert "something terrible happened" in str(caught.value)


def test_an_engine_whose_child_holds_its_streams_is_noticed_all_the_same() -> None:
    """C-26: no end of file comes then, and the exit status is looked at."""
    with echo_face("sync", Obedient) as face:
        face.collective_rpc("spawn")  # inherits the engine's output
        os.kill(engine_pid(face), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            face.get_output()


def test_an_engine_that_floods_its_log_keeps_the_tail_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-27: bounded in lines and in their length."""
    flood = """
for i in range(2000):
    print("line", i)
print("x" * 1_000_000)
print("the end", flush=True)
os._exit(1)
"""
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, flood))
    with pytest.raises(EngineStartupError) as caught:
        make_client("sync", EngineConfig.create("echo", forward_engine_log=False))
    assert caught.value.log_tail[-1] == "the end"
    assert len(caught.value.log_tail) <= 40
    assert max(map(len, caught.value.log_tail)) <= 4096


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
@pytest.mark.usefixtures("quick_looks")
def test_an_output_beyond_the_limit_ends_the_engine_rather_than_a_wait(kind: str) -> None:
    """ZeroMQ refuses such a frame by dropping the connection: what was in it would be waited for in vain."""
    with echo_face(kind, Obedient, max_frame_bytes=100_000) as face:
        assert face.collective_rpc("big", args=(99_000,))
        call = face.start("collective_rpc", "big", args=(100_000,))
        with pytest.raises(EngineDeadError, match=r"connection to it was lost.*max_frame_bytes \(100000\)"):
            call.result(PATIENCE_S)


@pytest.mark.parametrize("words", ["b''", "b'garbage'", "bytes(100)", "b'\\xff' * 100_000"])
def test_last_words_that_make_no_sense_do_not_hide_the_exit_status(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-27."""
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, f"lifeline._socket.sendall({words})\nos._exit(4)"))
    with pytest.raises(EngineStartupError, match="exited with status 4") as caught:
        make_client("sync", EngineConfig.create("echo", forward_engine_log=False))
    assert caught.value.exit_code == 4


def test_a_traceback_survives_what_is_printed_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-27: the log's tail is short, and libraries print when they are torn down."""
    script = """
from enginewire.engine.spec import DeathNote
tail = ["  in the model", "ValueError: wrong"]
DeathNote(stage="startup", cause="ValueError: wrong", traceback_tail=tail).send(lifeline)
for i in range(100):
    print("tearing down", i, flush=True)
os._exit(1)
"""
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, script))
    with pytest.raises(EngineStartupError, match=r"ValueError: wrong \(its process exited with status 1\)") as caught:
        make_client("sync", EngineConfig.create("echo", forward_engine_log=False))
    assert "in the model" in str(caught.value)
    assert "tearing down 99" in str(caught.value)


def test_a_status_that_somebody_else_took_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-26, C-27: an application that waits for all of its children must not make a kill look like a clean exit."""
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with echo_face("sync") as face:
            os.kill(engine_pid(face), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="took its exit status") as caught:
                face.get_output()
            assert caught.value.death.exit_code is None
    finally:
        signal.signal(signal.SIGCHLD, previous)


@pytest.mark.parametrize("kind", MP_FACES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_kill_in_the_middle_of_traffic_gives_everybody_the_same_cause(kind: str, number: signal.Signals) -> None:
    """C-27: whatever comes first, a lost connection, an end of file or an exit status."""
    with echo_face(kind) as face:

        def work(step: int) -> None:
            for i in range(1_000_000):
                match step:
                    case 0:
                        face.call_utility("is_sleeping")
                    case 1:
                        face.add_request(request(f"{step}-{i}", max_tokens=100))
                        time.sleep(0.001)  # without a processor the engine cannot end
                    case _:
                        face.get_output()

        def outcome(step: int) -> BaseException | None:
            try:
                work(step)
            except BaseException as exc:
                return exc
            return None

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(outcome, step) for step in range(3)]
            wait_until(lambda: len(mp_client(face).inbox.live) > 10, PATIENCE_S, "traffic")
            os.kill(engine_pid(face), number)
            errors = [worker.result(PATIENCE_S) for worker in workers]
        assert all(isinstance(error, EngineDeadError) for error in errors), errors
        assert {error.death.cause for error in errors} == {f"killed by signal {number} ({number.name})"}  # type: ignore[union-attr]
