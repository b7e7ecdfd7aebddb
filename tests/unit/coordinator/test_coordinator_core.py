"""``Coordinator`` decides from messages and a clock that the test moves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire import EngineConfig
from enginewire.coordinator.core import MAX_INTERVAL_S, MIN_INTERVAL_S, STEP_GRACE_S, Coordinator
from enginewire.coordinator.process import coordinator_addresses
from enginewire.wire.messages import EngineCoreOutputs, SchedulerStats
from enginewire.wire.profile import V0_25, V0_32, WireProfile


class Told:
    """A coordinator, and what it says."""

    def __init__(self, size: int = 2, *, lock_step: bool = True, version: str | None = "0.25.1") -> None:
        self.engines: list[Any] = []
        self.frontends: list[Any] = []
        self.now = 100.0
        self.core = Coordinator(
            size, lock_step=lock_step, wire_version=version, to_engines=self._engines, to_frontends=self._frontends
        )

    def _engines(self, frames: list[bytes]) -> None:
        self.engines.append("READY" if frames == [b"READY"] else msgspec.msgpack.decode(frames[1]))

    def _frontends(self, payload: bytes) -> None:
        self.frontends.append(msgspec.msgpack.decode(payload))

    def ready(self) -> Told:
        """Let everybody listen, and the first publication pass."""
        self.core.subscribed(self.core.size, self.now)
        self.publish()
        self.said()
        return self

    def publish(self) -> float:
        """Let time pass until the next publication, and return how long that was."""
        waited = self.core.next_publication(self.now)
        self.now += waited
        self.core.publish(self.now)
        return waited

    def counts(
        self, index: int, waiting: int, running: int, *, wave: int = 0, step: int = 1, profile: WireProfile = V0_25,
        kv: float = 0.0, skipped: int = 0,
    ) -> None:  # fmt: skip
        stats = SchedulerStats(
            num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped, num_running_reqs=running, current_wave=wave,
            step_counter=step, kv_cache_usage=kv,
        )  # fmt: skip
        self.report(EngineCoreOutputs(engine_index=index, scheduler_stats=stats), profile)

    def report(self, outputs: EngineCoreOutputs, profile: WireProfile = V0_25) -> None:
        self.core.reported([msgspec.msgpack.encode(profile.outputs_of(outputs))], self.now)

    def ask(self, *message: object) -> None:
        self.core.asked(msgspec.msgpack.encode(message), self.now)

    def said(self) -> tuple[list[Any], list[Any]]:
        """Return what was said to engines and frontends since the last call."""
        said = (self.engines, self.frontends)
        self.engines, self.frontends = [], []
        return said


def test_nobody_is_told_anything_before_all_engines_listen() -> None:
    """Protocol J.1."""
    told = Told(3)
    told.core.subscribed(1, told.now)
    told.core.subscribed(2, told.now)
    assert told.said() == ([], [])
    assert told.core.next_publication(told.now) == float("inf")
    told.core.subscribed(2, told.now)  # one left and came back
    assert told.said() == ([], [])
    told.core.subscribed(3, told.now)
    assert told.said() == (["READY"], [])
    assert told.publish() == pytest.approx(STEP_GRACE_S)
    assert told.said() == ([], [[[[0, 0]] * 3, 0, False]])


def test_whoever_listens_later_is_told_that_all_are_ready() -> None:
    """A restarted rank waits for READY; without it it would wait for ever."""
    told = Told().ready()
    told.core.subscribed(2, told.now)
    assert told.said() == (["READY"], [])
    told.report(EngineCoreOutputs(engine_index=0, start_wave=4))
    told.said()
    told.core.subscribed(1, told.now)
    assert told.said() == (["READY", [4, None]], []), "and starts with the others, if they run (defect 32)"


def test_counts_are_published_at_most_every_100_ms() -> None:
    """Protocol J.3."""
    told = Told(lock_step=False).ready()
    told.counts(0, 1, 2)
    assert told.publish() == pytest.approx(MIN_INTERVAL_S)
    told.now += 10 * MIN_INTERVAL_S
    told.counts(1, 3, 4)
    assert told.publish() == 0, "the last one is long ago, and these engines do not wait for each other"
    assert told.said()[1] == [[[[1, 2], [0, 0]], 0, False], [[[1, 2], [3, 4]], 0, False]]
    assert told.publish() == MAX_INTERVAL_S
    assert told.said()[1] == [[[[1, 2], [3, 4]], 0, False]]


def test_the_same_counts_again_are_no_change() -> None:
    told = Told(lock_step=False).ready()
    told.counts(0, 0, 0)
    assert told.core.next_publication(told.now) == pytest.approx(MAX_INTERVAL_S)


def test_requests_that_were_skipped_wait_too() -> None:
    """Protocol D.10."""
    told = Told(1, lock_step=False).ready()
    told.counts(0, 1, 0, skipped=2)
    told.publish()
    assert told.said()[1] == [[[[3, 0]], 0, False]]


def test_a_frontend_that_comes_late_does_not_wait_five_seconds() -> None:
    told = Told().ready()
    told.now += 1
    told.core.frontend_joined(told.now)
    assert told.publish() <= MIN_INTERVAL_S


def test_an_engine_that_is_gone_has_nothing_to_do() -> None:
    """Otherwise what it had would keep requests away from it after its restart."""
    told = Told(lock_step=False).ready()
    told.counts(1, 5, 9)
    told.publish()
    told.core.engine_gone(1, told.now)
    told.publish()
    assert told.said()[1] == [[[[0, 0], [5, 9]], 0, False], [[[0, 0], [0, 0]], 0, False]]
    told.core.engine_gone(1, told.now)
    told.core.engine_gone(7, told.now)
    assert told.core.next_publication(told.now) == pytest.approx(MAX_INTERVAL_S)


@pytest.mark.parametrize(
    ("version", "profile", "shown"),
    [
        ("0.25.1", V0_25, [[1, 2]]),
        ("0.25.1", V0_32, [[1, 2]]),
        ("0.32.0", V0_25, [[1, 2, 0.5]]),
        (None, V0_25, [[1, 2]]),
        (None, V0_32, [[1, 2, 0.5]]),
    ],
)
def test_counts_have_the_form_that_frontends_know(version: str | None, profile: WireProfile, shown: object) -> None:
    """Protocol M.3. A frontend of 0.25 cannot read three numbers, one of 0.32 not two."""
    told = Told(1, lock_step=False, version=version)
    told.core.subscribed(1, told.now)
    told.publish()
    (first,) = told.said()[1]
    assert first == [None if version is None else [[0, 0, 0.0][: len(shown[0])]], 0, False]  # type: ignore[index]
    told.counts(0, 1, 2, kv=0.5, profile=profile)
    told.publish()
    assert told.said()[1] == [[shown, 0, False]]


def test_engines_run_once_they_say_so() -> None:
    """Defect 31: paused engines do not start; the next request must be able to wake them."""
    told = Told().ready()
    told.ask(1, 0)
    assert told.said() == ([[0, 1]], [[None, 0, True]])
    told.ask(0, 0)
    assert told.said() == ([[0, 0]], [[None, 0, True]]), "nothing ran yet: another start may have been lost"
    told.counts(0, 0, 1)
    told.publish()
    assert told.said()[1] == [[[[0, 1], [0, 0]], 0, True]]
    told.ask(1, 0)
    assert told.said() == ([], []), "they run"


def test_counts_of_an_ended_wave_do_not_start_the_next() -> None:
    told = Told().ready()
    told.ask(1, 0)
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=0))
    told.counts(1, 0, 1, wave=0, step=9)
    told.publish()
    assert told.said()[1] == [[None, 0, True], [None, 1, False], [[[0, 0], [0, 1]], 1, False]]


def test_frontends_of_0_32_are_told_of_running_engines_by_these_alone() -> None:
    """Protocol M.3."""
    told = Told(version="0.32.0").ready()
    told.ask(1, 0)
    assert told.said() == ([[0, 1]], [])
    told.report(EngineCoreOutputs(engine_index=0, start_wave=0), V0_32)
    assert told.said() == ([[0, 0]], [[None, 0, True]])


@pytest.mark.parametrize(
    ("target", "exclude"), [(1, 1), (b"\x01\x00", 1), (None, None), (b"\x01", None), (2, None), (-1, None)]
)
def test_the_engine_that_gets_the_request_is_left_out(target: object, exclude: int | None) -> None:
    """Defect 9: as a number, whatever the frontend sent; whoever is not there cannot be left out."""
    told = Told().ready()
    told.ask(target, 0)
    assert told.said()[0] == [[0, exclude]]


def test_nobody_is_left_out_when_the_frontend_is_behind() -> None:
    """Protocol J.4."""
    told = Told().ready()
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=6))
    told.said()
    told.ask(1, 3)
    assert told.said() == ([[7, None]], [[None, 7, True]])


def test_a_coordinator_that_was_restarted_learns_the_wave() -> None:
    told = Told().ready()
    told.ask(1, 12)
    assert told.said()[0] == [[12, 1]]
    told.counts(0, 0, 1, wave=12)
    assert told.core.engines_running
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=12))
    assert told.core.current_wave == 13


def test_waves_only_go_forward() -> None:
    told = Told().ready()
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=4))
    assert told.said() == ([], [[None, 5, False]])
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=4))
    told.report(EngineCoreOutputs(engine_index=1, start_wave=4))
    assert told.said() == ([], [])
    told.report(EngineCoreOutputs(engine_index=1, start_wave=5))
    assert told.said() == ([[5, 1]], [[None, 5, True]])
    told.report(EngineCoreOutputs(engine_index=1, start_wave=5))
    assert told.said() == ([], [])


def test_engines_that_do_not_run_in_lock_step_have_no_waves() -> None:
    """Protocol J.4."""
    told = Told(lock_step=False).ready()
    told.ask(1, 0)
    told.report(EngineCoreOutputs(engine_index=0, start_wave=3))
    told.report(EngineCoreOutputs(engine_index=0, wave_complete=3))
    assert told.said() == ([], [])
    assert (told.core.current_wave, told.core.engines_running) == (0, False)


def test_a_deployment_grows_and_shrinks() -> None:
    """Protocol J.6."""
    told = Told(lock_step=False).ready()
    told.counts(1, 1, 1)
    told.publish()
    told.ask("SCALE_ELASTIC_EP", 3)
    told.publish()
    told.core.subscribed(3, told.now)
    told.counts(2, 2, 2)
    told.publish()
    told.ask("SCALE_ELASTIC_EP", 1)
    told.publish()
    engines, frontends = told.said()
    assert engines == ["READY"]
    assert [counts for counts, _, _ in frontends] == [
        [[0, 0], [1, 1]], [[0, 0], [1, 1], [0, 0]], [[0, 0], [1, 1], [2, 2]], [[0, 0]],
    ]  # fmt: skip


def test_a_smaller_deployment_may_be_complete_already() -> None:
    told = Told(3)
    told.core.subscribed(2, told.now)
    told.ask("SCALE_ELASTIC_EP", 2)
    assert told.said()[0] == ["READY"]


@pytest.mark.parametrize(
    "message",
    [
        [], [1], [1, 2, 3], ["SCALE_ELASTIC_EP", 0], ["SCALE_ELASTIC_EP", 1 << 17], ["SCALE_ELASTIC_EP", True],
        ["SCALE", 4], [0, -1], [0, 1 << 60], [0, 1.0], [True, 1], {}, None, "x", [0, None], [[0], 0],
    ],
)  # fmt: skip
def test_what_is_no_request_is_dropped(message: object) -> None:
    """Defect 30."""
    told = Told().ready()
    told.core.asked(msgspec.msgpack.encode(message), told.now)
    assert told.said() == ([], [])
    assert told.core.size == 2


@pytest.mark.parametrize(
    "outputs",
    [
        EngineCoreOutputs(engine_index=2, start_wave=5),
        EngineCoreOutputs(engine_index=-1, scheduler_stats=SchedulerStats(num_running_reqs=1)),
        EngineCoreOutputs(start_wave=-5),
        EngineCoreOutputs(wave_complete=1 << 60),
        EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=-1)),
        EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=1, kv_cache_usage=float("nan"))),
    ],
)
def test_what_cannot_be_is_dropped(outputs: EngineCoreOutputs) -> None:
    """Defect 30: an engine that is not there, numbers that would be passed on to everybody."""
    told = Told().ready()
    told.report(outputs)
    assert told.said() == ([], [])
    assert told.core.next_publication(told.now) == pytest.approx(MAX_INTERVAL_S)


@given(st.lists(st.binary(max_size=40), max_size=3), st.binary(max_size=40))
def test_no_bytes_end_it(frames: list[bytes], payload: bytes) -> None:
    """Defect 30."""
    told = Told().ready()
    told.core.reported(frames, told.now)
    told.core.asked(payload, told.now)
    told.publish()


HERE, THERE = "127.0.0.1", "10.0.0.7"


@pytest.mark.parametrize(
    ("settings", "folder", "expected"),
    [
        ({}, "/f", ("ipc:///f/waves", "ipc:///f/counts", "ipc:///f/stats")),
        ({}, None, (HERE, HERE, HERE)),
        ({"data_parallel_size_local": 2}, "/f", (THERE, THERE, "ipc:///f/stats")),
        ({"data_parallel_size_local": 0}, None, (THERE, THERE, HERE)),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, "/f", (THERE, THERE, THERE)),
        ({"data_parallel_external_lb": True}, "/f", (THERE, THERE, THERE)),
    ],
)
def test_it_binds_where_its_peers_can_reach_it(
    settings: dict[str, Any], folder: str | None, expected: tuple[str, ...]
) -> None:
    """Protocol A.3: the frontends of internal load balancing are here, those of the others may be anywhere."""
    config = EngineConfig.create("echo", data_parallel_size=4, data_parallel_address=THERE, **settings)
    addresses = coordinator_addresses(config, folder)
    assert (
        addresses.coordinator_input, addresses.coordinator_output, addresses.frontend_stats_publish_address
    ) == tuple(where if "ipc" in where else f"tcp://{where}:*" for where in expected)  # fmt: skip
