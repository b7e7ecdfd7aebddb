"""How an engine process ends when it is told to (protocol I.1, C-60)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from enginewire.config import EngineConfig
from enginewire.testing.launched_engine import LaunchedEngine
from enginewire.testing.mock_frontend import MockFrontend
from enginewire.testing.waiting import wait_until
from enginewire.wire.messages import FinishReason

SUPPORT = str(Path(__file__).parents[1] / "support")

EXECUTORS = pytest.mark.parametrize("executor", ["echo", "stub_executors:HoldsGil"], ids=["inline", "child"])


def started(frontend: MockFrontend, executor: str = "echo", **settings: Any) -> LaunchedEngine:
    settings.setdefault("executor_options", {"step_time_s": 0.01})
    engine = frontend.launch(
        EngineConfig.create("echo", executor=executor, log_stats=False, **settings), sys_path=[SUPPORT]
    )
    frontend.shake_hands()
    return engine


@EXECUTORS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_shutdown_timeout_requests_are_aborted(executor: str, number: int) -> None:
    """I.1: every request ends with an ABORT output, no death marker, exit status 0."""
    with MockFrontend() as frontend:
        engine = started(frontend, executor, max_num_seqs=1)
        frontend.add("runs", [1, 2], max_tokens=10_000)
        frontend.add("waits", [1, 2], max_tokens=10_000)
        frontend.wait_tokens("runs", 1)
        engine.process.send_signal(number)
        for request_id in ("runs", "waits"):
            assert frontend.wait_finished(request_id).finish_reason is FinishReason.ABORT
        assert engine.wait_exit() == 0
        frontend.receive_rest()
        assert not frontend.is_marked_dead[0]
        assert engine.death_note() is None


@EXECUTORS
def test_with_a_shutdown_timeout_requests_finish_and_newcomers_are_refused(executor: str) -> None:
    """I.1: drain; ADD gives ABORT, a utility call fails with 'Server shutting down'. Defect 11: nothing is lost."""
    with MockFrontend() as frontend:
        engine = started(frontend, executor, shutdown_timeout_s=60)
        frontend.add("a", [1, 2], max_tokens=60)
        frontend.wait_tokens("a", 1)
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "told to stop" in engine.read_log(), 5, "notice of the signal")
        frontend.add("late", [1], max_tokens=1)
        assert frontend.wait_finished("late").finish_reason is FinishReason.ABORT
        for method in ("is_sleeping", "list_loras"):
            answer = frontend.wait_answer(frontend.call(method))
            assert answer.failure_message == "Server shutting down"
        assert frontend.wait_finished("a").finish_reason is FinishReason.LENGTH
        assert frontend.token_ids("a") == [1, 2] * 30
        assert engine.wait_exit() == 0


def test_a_second_signal_ends_draining() -> None:
    """Defect 12."""
    with MockFrontend() as frontend:
        engine = started(frontend, shutdown_timeout_s=60)
        frontend.add("a", [1, 2], max_tokens=100_000)
        frontend.wait_tokens("a", 1)
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "told to stop" in engine.read_log(), 5, "notice of the signal")
        so_far = len(frontend.token_ids("a"))
        frontend.wait_tokens("a", so_far + 3)
        engine.process.send_signal(signal.SIGTERM)
        assert frontend.wait_finished("a").finish_reason is FinishReason.ABORT
        assert engine.wait_exit() == 0


def test_many_signals_are_one() -> None:
    """Defect 12: also while it is on its way out."""
    with MockFrontend() as frontend:
        engine = started(frontend)
        frontend.add("a", [1], max_tokens=10_000)
        frontend.wait_tokens("a", 1)
        for _ in range(20):
            engine.process.send_signal(signal.SIGTERM)
        assert frontend.wait_finished("a").finish_reason is FinishReason.ABORT
        assert engine.wait_exit() == 0


def test_all_outputs_of_a_large_last_batch_arrive() -> None:
    """Defect 11: the output thread is flushed before the process ends."""
    with MockFrontend() as frontend:
        engine = started(frontend)
        for number in range(300):
            frontend.add(f"r{number}", [1], max_tokens=100_000)
        frontend.wait_tokens("r255", 1)  # the last that max_num_seqs lets in
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait_exit() == 0
        for number in range(300):
            assert frontend.wait_finished(f"r{number}").finish_reason is FinishReason.ABORT


def test_it_ends_although_its_frontend_reads_nothing_any_more() -> None:
    """A PUSH to a frontend that is gone must not hold the process beyond its linger."""
    with MockFrontend() as frontend:
        engine = started(frontend)
        frontend.add("a", [1], max_tokens=10_000)
        frontend.wait_tokens("a", 1)
        for pull in frontend._outputs:
            pull.close(0)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait_exit() == 0


@pytest.mark.parametrize("executor", ["echo", "stub_executors:HogsGilLoading"], ids=["inline", "child"])
def test_a_signal_while_the_model_loads_ends_it_at_once_and_cleanly(executor: str) -> None:
    """Defect 13."""
    with MockFrontend() as frontend:
        options = {"load_time_s": 600} if executor == "echo" else {}
        engine = frontend.launch(
            EngineConfig.create("echo", executor=executor, executor_options=options), sys_path=[SUPPORT]
        )
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        marker = "loading model" if executor == "echo" else "loading in pid"
        wait_until(lambda: marker in engine.read_log(), 5, "loading")
        children = psutil.Process(engine.pid).children()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait_exit() == 0
        assert engine.death_note() is None
        assert "stopped while starting" in engine.read_log()
        assert len(children) == (executor != "echo")
        for child in children:
            wait_until(lambda child=child: not child.is_running(), 5, "the end of the executor's process")


def test_a_signal_while_it_waits_for_init_ends_it() -> None:
    """Defect 13."""
    with MockFrontend() as frontend:
        engine = frontend.launch(EngineConfig.create("echo"))
        frontend.expect_handshake("HELLO")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait_exit() == 0
