"""Two ranks in lock-step, as real processes, with a coordinator and frontends of raw sockets (protocol H, J.4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.testing import free_tcp_port
from enginewire.testing.mock_coordinator import MockCoordinator
from enginewire.testing.mock_frontend import MockFrontend, UtilityFailed
from enginewire.wire.frames import engine_identity
from enginewire.wire.messages import FinishReason

SUPPORT = str(Path(__file__).parents[1] / "support")
LOCK_STEP = "enginewire.executors.lock_step:LockStepEchoExecutor"


def config(executor: str = LOCK_STEP, **settings: Any) -> EngineConfig:
    settings.setdefault("executor_options", {"step_time_s": 0.001})
    return EngineConfig.create("echo", executor=executor, data_parallel_size=2, log_stats=False, **settings)


class Deployment:
    """Two ranks, each with a frontend of its own, and a coordinator (or none)."""

    def __init__(self, settings: EngineConfig, *, with_coordinator: bool = True) -> None:
        ports = [free_tcp_port(), free_tcp_port()]
        parallel_config = {
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": ports[0],
            "_data_parallel_master_port_list": ports[1:],
            "data_parallel_size": 2,
        }
        self.coordinator = MockCoordinator()
        self.ranks = [
            MockFrontend(
                engine_index=rank,
                coordinator=self.coordinator if with_coordinator else None,
                parallel_config=parallel_config,
            )
            for rank in range(2)
        ]
        for rank in self.ranks:
            rank.launch(settings, sys_path=[SUPPORT])
        for rank in self.ranks:
            rank.expect_handshake("HELLO")
            rank.send_init()
        if with_coordinator:
            self.coordinator.wait_subscribed(2)
            self.coordinator.say_ready()
        self.ready = []
        for rank in self.ranks:
            rank.expect_ready_responses()
            self.ready.append(rank.expect_handshake("READY"))
            rank.utility("get_request_ids")  # every connection is made

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.coordinator.__exit__(None, None, None)

    def run_wave(self, wave: int, request_id: str = "warm") -> None:
        """Do what a frontend and a coordinator do for a request: it goes to rank 0, and the others wake."""
        self.ranks[0].add(request_id, [1, 2], current_wave=wave, max_tokens=3)
        self.coordinator.start_wave(wave, 0)
        self.ranks[0].wait_finished(request_id)
        self.coordinator.wait_complete(wave)

    def pause(self, mode: str = "abort") -> None:
        calls = [rank.call("pause_scheduler", mode, True) for rank in self.ranks]
        for rank, call_id in zip(self.ranks, calls, strict=True):
            assert rank.wait_answer(call_id).failure_message is None


@pytest.fixture(params=[LOCK_STEP, "stub_executors:LockStepHoldsGil"], ids=["inline", "child"])
def pair(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    deployment = Deployment(config(request.param))
    yield deployment
    deployment.close()


def test_ranks_say_that_they_belong_together(pair: Deployment) -> None:
    """B.4, B.5: their number, and a hash that frontends compare."""
    assert [rank.ready[0].data_parallel_size for rank in pair.ranks] == [2, 2]
    hashes = {ready.parallel_config_hash for ready in pair.ready}
    assert len(hashes) == 1
    assert len(str(hashes.pop())) == 64


def test_a_wave_begins_with_a_request_and_ends_when_nobody_has_work(pair: Deployment) -> None:
    """J.4: the counts and the end are reported with the wave; then everything rests."""
    pair.run_wave(0)
    pair.run_wave(1, "again")
    for number, rank in enumerate(pair.ranks):
        rank.utility("get_request_ids")
        assert rank.utility("is_sleeping") is False, number
    assert pair.ranks[0].token_ids("again") == [1, 2, 1]


def test_a_request_of_an_old_wave_wakes_the_others_through_the_coordinator(pair: Deployment) -> None:
    """J.4, as observed: no progress until the other rank has been told."""
    pair.run_wave(0)
    pair.ranks[1].add("late", [5], current_wave=0, max_tokens=3)
    report = pair.coordinator.wait_start(1, engine_index=1)
    assert report.outputs == []
    assert pair.ranks[1].outputs_of("late") == []
    pair.coordinator.start_wave(1, 1)
    pair.ranks[1].wait_finished("late")
    assert pair.ranks[1].token_ids("late") == [5, 5, 5]
    load = pair.coordinator.wait_load(0, 0, engine_index=1)
    assert load.scheduler_stats is not None
    assert load.scheduler_stats.current_wave == 1
    pair.coordinator.wait_complete(1)


@pytest.mark.parametrize("exclude", [None, 0, engine_identity(0)], ids=repr)
def test_whoever_is_excluded_starts_by_itself(pair: Deployment, exclude: object) -> None:
    """J.4, defect 9: the excluded rank as a number, as the identity that vLLM's frontends send, or nobody."""
    pair.ranks[0].add("a", [1], max_tokens=40)
    pair.coordinator.wait_start(0, engine_index=0)  # or the wave might be over before the request is there
    pair.coordinator.start_wave(0, exclude)
    pair.ranks[0].wait_finished("a")
    pair.coordinator.wait_complete(0)


def test_old_and_unreadable_words_of_the_coordinator_start_nothing(pair: Deployment) -> None:
    """J.4."""
    pair.run_wave(0)
    pair.coordinator.receive_rest().clear()
    for wave, exclude in ((0, None), (-1, None), (2**60, None), ("1", None)):
        pair.coordinator.start_wave(wave, exclude)
    pair.run_wave(1, "next")
    assert not [report for report in pair.coordinator.receive_rest() if (report.start_wave or 0) > 1]


def test_a_pause_of_engines_at_rest_is_agreed_on_and_ends_a_wave(pair: Deployment) -> None:
    """H, as recorded: rank 0 reports the end of a wave, and both answer."""
    pair.pause()
    pair.coordinator.wait_complete(0)
    assert [rank.utility("is_scheduler_paused") for rank in pair.ranks] == [True, True]
    pair.ranks[0].add("a", [1, 2], current_wave=1, max_tokens=2)
    pair.coordinator.start_wave(1, 0)
    pair.ranks[0].utility("get_request_ids")
    assert pair.ranks[0].outputs_of("a") == []
    for rank in pair.ranks:
        rank.utility("resume_scheduler")
    pair.ranks[0].wait_finished("a")
    pair.coordinator.wait_complete(1)
    pair.run_wave(2)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_no_rank_pauses_before_all_do(pair: Deployment, mode: str) -> None:
    """H: the first steps along meanwhile; resuming then is refused."""
    first, second = pair.ranks
    second.add("b", [7], max_tokens=20_000 if mode != "wait" else 300)
    pair.coordinator.start_wave(0, 1)
    second.wait_tokens("b", 1)
    call_id = first.call("pause_scheduler", mode, True)
    with pytest.raises(UtilityFailed, match="resume_scheduler called while pause is still in flight"):
        first.utility("resume_scheduler")
    seen = len(second.token_ids("b"))
    second.wait_tokens("b", seen + 40)  # it is not held up
    first.receive_rest()
    answered = {message.utility_output.call_id for message in first.messages[0] if message.utility_output}
    assert call_id not in answered
    other_id = second.call("pause_scheduler", mode, True)
    assert first.wait_answer(call_id).failure_message is None
    assert second.wait_answer(other_id).failure_message is None
    pair.coordinator.wait_complete(0)
    if mode == "keep":
        seen = len(second.token_ids("b"))
        for rank in pair.ranks:
            rank.utility("resume_scheduler")
        second.wait_tokens("b", seen + 10)
    else:
        ended = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
        assert second.wait_finished("b").finish_reason is ended


def test_sleep_and_wake_up_are_agreed_on_too(pair: Deployment) -> None:
    calls = [rank.call("sleep", 1, "abort") for rank in pair.ranks]
    for rank, call_id in zip(pair.ranks, calls, strict=True):
        assert rank.wait_answer(call_id).failure_message is None
        assert rank.utility("is_sleeping") is True
    for rank in pair.ranks:
        assert rank.utility("wake_up", None) is True
    pair.coordinator.wait_complete(1)  # of the pause, and of the step in which they met again
    pair.run_wave(2)


def test_a_pause_within_a_pause_is_answered_at_once(pair: Deployment) -> None:
    pair.pause("keep")
    assert pair.ranks[0].utility("pause_scheduler", "keep", False) is None
    assert pair.ranks[0].utility("sleep", 0, "abort") is None
    for rank in pair.ranks:
        rank.utility("resume_scheduler")
    pair.run_wave(2)


@pytest.mark.parametrize("timeout_s", [0.0, 10.0], ids=["abort", "drain"])
def test_ranks_that_are_told_to_stop_end_in_good_order(timeout_s: float) -> None:
    """I.1: with work at one of them; draining, the others step along until it is done."""
    deployment = Deployment(config(shutdown_timeout_s=timeout_s))
    try:
        busy = deployment.ranks[0]
        busy.add("a", [1], max_tokens=300)
        deployment.coordinator.start_wave(0, 0)
        busy.wait_tokens("a", 5)
        for rank in deployment.ranks:
            assert rank.engine is not None
            rank.engine.process.terminate()
        ended = FinishReason.LENGTH if timeout_s else FinishReason.ABORT
        assert busy.wait_finished("a").finish_reason is ended
        assert [rank.engine.wait_exit() for rank in deployment.ranks if rank.engine is not None] == [0, 0]
    finally:
        deployment.close()


def test_a_rank_that_is_killed_takes_the_group_along_with_the_reason() -> None:
    """Restart of lock-step ranks is per group: none of them can step without the others."""
    deployment = Deployment(config())
    try:
        first, second = deployment.ranks
        first.add("a", [1], max_tokens=100_000)
        deployment.coordinator.start_wave(0, 0)
        first.wait_tokens("a", 5)
        assert second.engine is not None
        second.engine.process.kill()
        first.wait_death_marker()
        assert first.engine is not None
        note = first.engine.death_note()
        assert note is not None
        assert "rank 1 is gone" in note.cause
        assert first.engine.wait_exit() == 1
    finally:
        deployment.close()


def test_ranks_at_rest_do_not_outlive_one_another() -> None:
    """One that is left could not be joined by the other's successor."""
    deployment = Deployment(config())
    try:
        first, second = deployment.ranks
        assert first.engine is not None
        assert second.engine is not None
        first.engine.process.kill()
        second.wait_death_marker()
        note = second.engine.death_note()
        assert note is not None
        assert note.cause == "RankLost: rank 0 is gone: it closed the connection"
    finally:
        deployment.close()


def test_without_a_coordinator_each_rank_tells_its_own_client() -> None:
    """J.2: offline data parallel."""
    deployment = Deployment(config(), with_coordinator=False)
    try:
        for rank in deployment.ranks:
            rank.add("a", [1, 2], max_tokens=20)
        for rank in deployment.ranks:
            rank.wait_finished("a")
            rank.wait(lambda rank=rank: any(m.wave_complete == 0 for m in rank.messages[0]) or None, "its end")
    finally:
        deployment.close()


def test_one_rank_alone_is_an_engine_like_any_other() -> None:
    with MockFrontend() as frontend:
        frontend.launch(config())
        frontend.shake_hands()
        frontend.add("a", [1, 2], max_tokens=3)
        frontend.wait_finished("a")
        frontend.utility("pause_scheduler", "keep", True)
        frontend.utility("resume_scheduler")
        assert frontend.ready[0].data_parallel_size == 1


def test_other_executors_do_not_care_about_ranks() -> None:
    """B.2: parallel_config of a model that does not step together is ignored, with a log line."""
    with MockFrontend(parallel_config={"data_parallel_size": 2}) as frontend:
        engine = frontend.launch(config("echo"))
        frontend.shake_hands()
        frontend.add("a", [1], max_tokens=1)
        frontend.wait_finished("a")
        assert "INIT's parallel_config is ignored" in engine.read_log()


def test_ranks_that_cannot_meet_do_not_start() -> None:
    with MockFrontend(parallel_config={"data_parallel_size": 2}) as frontend:
        engine = frontend.launch(config())
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        assert engine.wait_exit() == 1
        note = engine.death_note()
        assert note is not None
        assert "INIT's parallel_config must have" in note.cause
