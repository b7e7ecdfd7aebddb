"""Engines and their coordinator, as a coordinator and frontends of raw sockets see them. Engines step on their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewire.config import EngineConfig
from enginewire.testing.mock_coordinator import MockCoordinator
from enginewire.testing.mock_frontend import MockFrontend
from enginewire.wire.frames import START_DP_WAVE
from enginewire.wire.messages import EngineCoreOutputs, FinishReason

SUPPORT = str(Path(__file__).parents[1] / "support")


def config(executor: str = "echo", **settings: Any) -> EngineConfig:
    settings.setdefault("executor_options", {"step_time_s": 0.002, "num_gpu_blocks": 8, "block_size": 4})
    settings.setdefault("log_stats", False)
    return EngineConfig.create("echo", executor=executor, **settings)


def start(frontend: MockFrontend, coordinator: MockCoordinator, settings: EngineConfig, **fields: Any) -> None:
    """Do the whole start-up."""
    frontend.launch(settings, sys_path=[SUPPORT], **fields)
    frontend.expect_handshake("HELLO")
    frontend.send_init()
    coordinator.wait_subscribed(1)
    frontend.expect_ready_responses()
    coordinator.say_ready()
    frontend.expect_handshake("READY")


@pytest.fixture(scope="module", params=["echo", "stub_executors:HoldsGil"], ids=["inline", "child"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[MockFrontend, MockCoordinator]]:
    with MockCoordinator() as coordinator, MockFrontend(num_clients=2, coordinator=coordinator) as frontend:
        start(frontend, coordinator, config(request.param, max_num_seqs=2))
        for client_index in (0, 1):  # now every connection is made, and none looks like a test's leak
            frontend.wait_answer(frontend.call("is_sleeping", client_index=client_index), client_index=client_index)
        yield frontend, coordinator


@pytest.fixture
def frontend(pair: tuple[MockFrontend, MockCoordinator]) -> Iterator[MockFrontend]:
    pair[0].forget()
    pair[1].receive_rest().clear()
    yield pair[0]
    pair[0].utility("get_request_ids")  # between steps, so that what was reported about the last one has been


@pytest.fixture
def coordinator(pair: tuple[MockFrontend, MockCoordinator]) -> MockCoordinator:
    return pair[1]


def test_an_engine_is_ready_when_the_coordinator_has_all_of_them() -> None:
    """Protocol B.3: it subscribes before its ready response, and says READY after the coordinator has."""
    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        frontend.launch(config())
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        frontend.expect_ready_responses()
        coordinator.wait_subscribed(1)
        with pytest.raises(TimeoutError):
            frontend.expect_handshake("READY", timeout_s=0.3)
        coordinator.say_ready()
        frontend.expect_handshake("READY")
        coordinator.say_ready()  # for another engine, which was restarted
        frontend.add("a", [1], max_tokens=1)
        frontend.wait_finished("a")


def test_an_engine_that_waits_for_the_others_can_be_stopped() -> None:
    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        engine = frontend.launch(config())
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        coordinator.wait_subscribed(1)
        engine.process.terminate()
        assert engine.wait_exit() == 0


def test_the_load_is_reported_whenever_it_changes(frontend: MockFrontend, coordinator: MockCoordinator) -> None:
    """J.2, defect 15: running and waiting, and the cache's use; nothing while they stay as they are."""
    for request_id in ("a", "b", "c"):
        frontend.add(request_id, [1, 2, 3], max_tokens=30 if request_id == "c" else 20)
    busy = coordinator.wait_load(2, 1).scheduler_stats
    assert busy is not None
    for request_id in ("a", "b", "c"):
        frontend.wait_finished(request_id)
    last = coordinator.wait_load(1, 0)
    coordinator.wait_load(0, 0)
    idle = coordinator.wait_report(
        lambda report: report.scheduler_stats is not None and report.scheduler_stats.kv_cache_usage == 0,
        "an empty cache",
    )
    assert last.scheduler_stats is not None
    assert 0 < last.scheduler_stats.kv_cache_usage <= 1
    for report in (last, idle):
        assert (report.outputs, report.utility_output, report.wave_complete) == ([], None, None)
        assert report.scheduler_stats is not None
        # Engines that step on their own: their steps have no common order that a coordinator could go by.
        assert (report.scheduler_stats.step_counter, report.scheduler_stats.current_wave) == (0, 0)
    frontend.utility("get_request_ids")
    assert coordinator.receive_rest() == []


def test_few_reports_are_made_about_many_steps(frontend: MockFrontend, coordinator: MockCoordinator) -> None:
    frontend.add("a", [1], max_tokens=30)
    frontend.wait_finished("a")
    coordinator.wait_load(0, 0)
    frontend.utility("get_request_ids")
    assert len(coordinator.receive_rest()) <= 1, "of 30 steps: waiting, running, none, and none with an empty cache"


def test_clients_are_told_which_requests_ended(frontend: MockFrontend, coordinator: MockCoordinator) -> None:
    """D.5: by themselves or by their own abort, each client its own."""
    frontend.add("ends", [1], max_tokens=2)
    frontend.add("aborted", [1], max_tokens=29)
    frontend.add("other", [1], client_index=1, max_tokens=2)
    frontend.wait_tokens("aborted", 1)
    frontend.abort("aborted")
    frontend.wait_finished("ends")
    frontend.wait_finished("other", client_index=1)

    def told(client_index: int) -> list[str]:
        messages = frontend.messages[client_index]
        return sorted(request_id for message in messages for request_id in message.finished_requests or ())

    frontend.wait(lambda: told(0) == ["aborted", "ends"] or None, "the list of what ended")
    frontend.wait(lambda: told(1) == ["other"] or None, "the other client's", client_index=1)
    coordinator.wait_load(0, 0)


def test_a_paused_engine_reports_what_waits(frontend: MockFrontend, coordinator: MockCoordinator) -> None:
    frontend.utility("pause_scheduler", "abort", True)
    frontend.add("a", [1], max_tokens=2)
    coordinator.wait_load(0, 1)
    frontend.utility("resume_scheduler")
    frontend.wait_finished("a")
    coordinator.wait_load(0, 0)


def test_waves_are_nothing_to_engines_that_step_on_their_own(
    frontend: MockFrontend, coordinator: MockCoordinator
) -> None:
    """J.4."""
    coordinator.start_wave(0, None)
    coordinator.start_wave(7, 1)
    frontend.add("a", [1], current_wave=3, max_tokens=2)
    frontend.wait_finished("a")
    coordinator.wait_load(0, 0)
    frontend.utility("get_request_ids")
    assert all(report.start_wave is report.wave_complete is None for report in coordinator.receive_rest())


@pytest.mark.parametrize(
    "frames",
    [
        (START_DP_WAVE,),
        (START_DP_WAVE, b"\xc1"),
        (START_DP_WAVE, msgspec.msgpack.encode([1])),
        (START_DP_WAVE, msgspec.msgpack.encode(["1", None])),
        (START_DP_WAVE, msgspec.msgpack.encode([1.0, None])),
        (START_DP_WAVE, msgspec.msgpack.encode([1, "0"])),
        (START_DP_WAVE, msgspec.msgpack.encode([-1, b"123"])),
        (b"\x00", msgspec.msgpack.encode(["a", [1], None, {}, None, 0.0, None, None, None])),
        (b"\x03", msgspec.msgpack.encode([0, 1, "is_sleeping", []])),
        (b"",),
        (b"READY", b"READY"),
        (b"ready",),
    ],
    ids=str,
)
def test_what_no_coordinator_says_is_dropped(
    frontend: MockFrontend, coordinator: MockCoordinator, frames: tuple[bytes, ...]
) -> None:
    """Defect 2's like: a message may not end the reader, and a coordinator is no frontend."""
    coordinator.publish(*frames)
    frontend.add("after", [7, 8], max_tokens=2)
    frontend.wait_finished("after")
    assert frontend.outputs_of("a") == []


def test_in_external_mode_nobody_wants_the_counts() -> None:
    """J.2: each engine has its own frontend."""
    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        start(frontend, coordinator, config(data_parallel_size=2, data_parallel_external_lb=True))
        frontend.add("a", [1], max_tokens=2)
        frontend.wait_finished("a")
        frontend.utility("get_request_ids")
        assert coordinator.receive_rest() == []
        assert not any(message.finished_requests for message in frontend.messages[0])


def test_a_restarted_coordinator_is_subscribed_to_again() -> None:
    """Defect 29's other side: what a coordinator forgot, it is told again."""
    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        start(frontend, coordinator, config())
        coordinator.restart()
        coordinator.wait_subscribed(1)
        coordinator.say_ready()
        frontend.add("a", [1], max_tokens=2)
        coordinator.wait_load(0, 0)


def test_an_engines_death_is_not_the_coordinators_business() -> None:
    """I.1: the marker goes to frontends; a coordinator could not read it."""
    options = {"fail_at_step": 2}
    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        start(frontend, coordinator, config(executor_options=options))
        frontend.add("a", [1], max_tokens=9)
        frontend.wait_death_marker()
        assert frontend.engine is not None
        frontend.engine.wait_exit()
        assert all(isinstance(report, EngineCoreOutputs) for report in coordinator.receive_rest())


# Two handshakes (protocol B.6).


def test_an_engine_of_another_node_shakes_hands_with_rank_0_and_then_with_its_own_frontend() -> None:
    with (
        MockCoordinator() as coordinator,
        MockFrontend(engine_index=1, coordinator=coordinator) as rank_0,
        MockFrontend(engine_index=1) as own,
    ):
        rank_0.addresses.frontend_stats_publish_address = "tcp://127.0.0.1:9"
        own.launch(config(), handshake_address=rank_0.handshake_address, client_handshake_address=own.handshake_address)
        hello = rank_0.expect_handshake("HELLO")
        assert (hello.local, hello.headless) == (False, False)
        rank_0.send_init()
        hello = own.expect_handshake("HELLO")
        assert (hello.local, hello.headless) == (True, False)
        own.send_init()
        coordinator.wait_subscribed(1)
        own.expect_ready_responses()
        assert own.ready[0].dp_stats_address == "tcp://127.0.0.1:9", "relayed from rank 0"
        coordinator.say_ready()
        ready = own.expect_handshake("READY")
        assert (ready.local, ready.headless) == (True, False)
        ready = rank_0.expect_handshake("READY")
        assert (ready.local, ready.headless) == (False, False)
        own.add("a", [1, 2], max_tokens=3)
        assert own.wait_finished("a").finish_reason is FinishReason.LENGTH
        assert rank_0.messages == [[]]
        coordinator.wait_load(0, 0, engine_index=1)


def test_a_hello_that_died_with_its_frontend_is_said_again() -> None:
    """Any order of start: a frontend that was restarted before it answered does not know of the engine."""
    with MockFrontend(host="127.0.0.1") as frontend:
        frontend.launch(config(), local=False, headless=True)
        frontend.expect_handshake("HELLO")
        frontend.restart_handshake()
        frontend.shake_hands()
        frontend.add("a", [1], max_tokens=1)
        frontend.wait_finished("a")
