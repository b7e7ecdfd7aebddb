"""Real engines that are killed and started again by the client that started them (issue 6)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fault_executors import WorksOnce

from client_harness import MP_FACES, PATIENCE_S, Face, echo_face, mp_client, request, status_of, wait_state
from enginewire import EngineDeadError, EngineUnavailableError, FinishReason
from enginewire.client import restarts
from enginewire.client.status import EngineStatus
from enginewire.testing import wait_until
from enginewire.wire.messages import LoRARequest

START_S = 30.0
"""For starting an engine process on a busy machine."""


def kill(face: Face, rank: int = 0) -> int:
    """Kill an engine; return its process id."""
    manager = mp_client(face).resources.engine_manager
    assert manager is not None
    pid: int = manager.processes[rank].popen.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_back(face: Face, num_restarts: int, rank: int = 0) -> EngineStatus:
    """Wait until an engine was started again so often, and serves."""

    def is_back() -> bool:
        status = status_of(face, rank)
        return status.num_restarts == num_restarts and status.state == "ready"

    wait_until(is_back, START_S, f"engine {rank} to be back")
    return status_of(face, rank)


def receive_for_ever(face: Face) -> None:
    """Take what there is, until there is nothing more."""
    while True:
        face.get_output()


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_killed_engine_is_started_again_and_serves(kind: str) -> None:
    """C-55; issue 6: what ran fails with the cause, calls say what goes on, then it is back, again and again."""
    with echo_face(kind, restart_engine=2, executor_options={"step_time_s": 0.005}) as face:
        pids = set()
        for i in range(2):
            face.add_request(request(f"r{i}", max_tokens=100_000))
            assert face.outputs(1)[0].finish_reason is None
            call = face.start("collective_rpc", "sleep_for", None, (60.0,))
            pids.add(kill(face))
            last = face.outputs(1)[0]
            while last.finish_reason is None:
                last = face.outputs(1)[0]
            assert last.finish_reason is FinishReason.ERROR
            assert last.stop_reason == "engine_lost: engine 0: killed by signal 9 (SIGKILL)"
            assert "killed by signal 9" in str(call.exception(PATIENCE_S))
            assert status_of(face).is_awaited
            with pytest.raises(EngineUnavailableError, match=r"not available: killed by signal 9 \(SIGKILL\)"):
                face.add_request(request("too early"))
            status = wait_back(face, num_restarts=i + 1)
            assert (status.num_deaths, status.is_awaited, status.num_in_flight) == (i + 1, False, 0)
            assert status.death is not None, "its last cause of death can still be read"
            assert face.is_sleeping() is False
            face.add_request(request(f"after-{i}"))
            assert face.outputs(4)[-1].finish_reason is FinishReason.LENGTH
        assert len({*pids, mp_client(face).resources.engine_manager.processes[0].popen.pid}) == 3  # type: ignore[union-attr]
        assert mp_client(face).inbox.live == set()
        assert len(mp_client(face).inbox.links) == 1
        endpoints = mp_client(face).resources.endpoints
        assert endpoints is not None
        assert endpoints.folder is not None
        assert sorted(os.listdir(endpoints.folder)) == ["handshake", "i0.3", "o0.3"], "no former one's socket is left"
        pids.add(kill(face))
        status = wait_state(face, "dead")
        cause = "killed by signal 9 (SIGKILL); it was started again 2 times, ended each time, and is given up"
        assert status.death is not None
        assert status.death.cause.startswith(cause)
        with pytest.raises(EngineDeadError, match="started again 2 times"):
            receive_for_ever(face)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_one_of_four_is_started_again_and_gets_load_again(kind: str) -> None:
    """Issue 6: under its identity, while the others serve."""
    changes: list[tuple[int, str]] = []
    with echo_face(kind, data_parallel_size=4, restart_engine=1) as face:
        face.client.on_engine_change = lambda status: changes.append((status.index, status.state))
        kill(face, 2)
        wait_until(lambda: status_of(face, 2).num_deaths == 1, PATIENCE_S, "its death")
        for i in range(9):
            face.add_request(request(f"meanwhile-{i}", max_tokens=1))
        ended = {output.request_id: output.finish_reason for output in face.outputs(9)}
        assert set(ended.values()) == {FinishReason.LENGTH}
        wait_back(face, 1, rank=2)
        # It is told once the engine is back.
        wait_until(lambda: changes == [(2, "lost"), (2, "starting"), (2, "ready")], PATIENCE_S, "news of all this")
        for i in range(8):
            face.add_request(request(f"later-{i}", max_tokens=10_000))
        assert [face.client.engine_index_of(f"later-{i}") for i in range(8)].count(2) == 2
        assert face.add_lora(LoRARequest("adapter", 1, "/adapter")) is True, "utilities reach it"


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
@pytest.mark.parametrize(
    ("then", "settings", "cause"),
    [
        ("raise", {}, "RuntimeError: it worked once (its process exited with status 1); it was started again 2 times"),
        ("hang", {"ready_timeout_s": 4.0}, "it does not come up: engine 0 has said HELLO and is not ready; it was"),
    ],
)
def test_an_engine_that_cannot_start_again_is_given_up(
    kind: str, then: str, settings: dict[str, Any], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6: a death while starting counts, and a crash loop ends in a clear state."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.05)
    options = {"mark": str(tmp_path / "mark"), "then": then}
    with echo_face(kind, WorksOnce, restart_engine=2, executor_options=options, **settings) as face:
        kill(face)
        status = wait_state(face, "dead")
        assert status.death is not None
        assert status.death.cause.startswith(cause)
        assert (status.num_deaths, status.num_restarts, status.is_awaited) == (3, 2, False)
        with pytest.raises(EngineDeadError, match="is given up"):
            receive_for_ever(face)
        manager = mp_client(face).resources.engine_manager
        assert manager is not None
        wait_until(
            lambda: not any(process.is_running for process in manager.processes.values()), PATIENCE_S, "no process"
        )


def test_shutting_down_while_an_engine_is_started_again_leaves_nothing() -> None:
    """C-22."""
    with echo_face("sync", restart_engine=5, executor_options={"load_time_s": 0.5}) as face:
        kill(face)
        wait_until(lambda: status_of(face).num_restarts, PATIENCE_S, "its restart")


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_an_engine_that_is_back_does_not_look_as_busy_as_it_was(kind: str) -> None:
    """C-51, C-55: its last report was of requests that went down with it; it gets its share of load at once."""
    settings = {"data_parallel_size": 2, "restart_engine": 1, "executor_options": {"step_time_s": 0.005}}
    with echo_face(kind, **settings) as face:
        for i in range(20):
            one = request(f"busy-{i}", max_tokens=100_000)
            one.data_parallel_rank = 1
            face.add_request(one)
        engine = mp_client(face).engines[1]
        wait_until(lambda: face.outputs(1) and engine.load.running == 20, PATIENCE_S, "its report")
        kill(face, 1)
        while not (message := face.get_output()).outputs or message.outputs[0].finish_reason is None:
            pass
        assert len(message.outputs) == 20
        assert message.scheduler_stats is not None, "gauges hear of it, too"
        assert message.scheduler_stats.num_running_reqs == 0
        assert (engine.load.running, engine.load.waiting) == (0, 0)
        wait_back(face, 1, rank=1)
        for i in range(8):
            face.add_request(request(f"later-{i}", max_tokens=10_000))
        assert [face.client.engine_index_of(f"later-{i}") for i in range(8)].count(1) == 4
