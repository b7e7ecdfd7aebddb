"""Two ranks in lock-step, as real processes, under a real coordinator; frontends of raw sockets (protocol J.4, H)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from enginewire import EngineConfig
from enginewire.coordinator import DPCoordinator
from enginewire.testing import free_tcp_port, wait_until
from enginewire.testing.mock_frontend import MockFrontend
from enginewire.wire.frames import engine_identity
from enginewire.wire.profile import profile_named

LOCK_STEP = "enginewire.executors.lock_step:LockStepEchoExecutor"
TIMEOUT_S = 20.0


@dataclass
class Where:
    """A coordinator's addresses as ``MockFrontend`` wants them."""

    input_address: str
    output_address: str


class Deployment:
    """Two ranks, each with a frontend of its own that also listens to the coordinator."""

    def __init__(self, version: str, folder: Path) -> None:
        ports = [free_tcp_port(), free_tcp_port()]
        settings = EngineConfig.create(
            "echo", executor=LOCK_STEP, executor_options={"step_time_s": 0.001}, wire_version=version,
            data_parallel_size=2, data_parallel_lock_step=True,
        )  # fmt: skip
        self.coordinator = DPCoordinator.start(settings, folder=str(folder))
        addresses = self.coordinator.addresses
        where: Any = Where(addresses.coordinator_input, addresses.coordinator_output)
        parallel_config = {
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": ports[0],
            "_data_parallel_master_port_list": ports[1:],
            "data_parallel_size": 2,
        }
        profile = profile_named(version)
        assert profile is not None
        self.ranks = [
            MockFrontend(engine_index=rank, coordinator=where, parallel_config=parallel_config, profiles=[profile])
            for rank in range(2)
        ]
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stats = self.context.socket(zmq.XSUB)
        self.stats.connect(addresses.frontend_stats_publish_address)
        self.stats.send(b"\x01")
        self.states: list[Any] = []
        for rank in self.ranks:
            rank.launch(settings)
        for rank in self.ranks:
            rank.expect_handshake("HELLO")
            rank.send_init()
        for rank in self.ranks:  # neither is ready before both listen, and the coordinator says so
            rank.expect_ready_responses()
            rank.expect_handshake("READY")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.stats.close(linger=0)
        self.context.term()
        self.coordinator.shutdown()

    def first_request(self, target: object, wave: int) -> None:
        self.stats.send(msgspec.msgpack.encode([target, wave]))

    def wait_state(self, which: Callable[[Any], bool], what: str) -> Any:
        """Wait for a publication, and forget it and those before it."""

        def found() -> list[Any]:
            while self.stats.poll(0):
                self.states.append(msgspec.msgpack.decode(self.stats.recv()))
            return [state for state in self.states if which(state)][:1]

        try:
            (state,) = wait_until(found, TIMEOUT_S, what)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}; published since the last: {self.states}") from None
        del self.states[: self.states.index(state) + 1]
        return state

    def wait_rest(self, wave: int) -> None:
        """Wait until the engines rest before this wave, or a later one: one may pass before its request comes."""
        self.wait_state(lambda state: state[1] >= wave and not state[2], f"rest before wave {wave}")


@pytest.fixture(params=["0.25.1", "0.32.0"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(request.param, tmp_path_factory.mktemp("c"))
    yield deployment
    deployment.close()


@pytest.mark.parametrize("as_target", [int, engine_identity], ids=["number", "identity"])
def test_waves_start_with_requests_and_end_when_nobody_has_work(
    pair: Deployment, as_target: Callable[[int], object]
) -> None:
    """Now to one rank, now to the other; neither steps without the other, so both were woken."""
    for wave in range(8):
        target = wave % 2
        pair.ranks[target].add(f"r{wave}", [1, 2, 3], current_wave=wave, max_tokens=4)
        pair.first_request(as_target(target), wave)
        pair.wait_state(lambda state: state[2], "running engines")
        pair.ranks[target].wait_finished(f"r{wave}")
        pair.wait_rest(wave + 1)


def test_a_request_of_an_old_wave_starts_the_present_one(pair: Deployment) -> None:
    """J.4: its frontend believes that the engines run, so it asks for nothing, and the engine itself does."""
    pair.ranks[0].add("a", [1], current_wave=0, max_tokens=2)
    pair.first_request(0, 0)
    pair.ranks[0].wait_finished("a")
    pair.wait_rest(1)
    pair.ranks[1].add("late", [1, 2], current_wave=0, max_tokens=3)
    pair.ranks[1].wait_finished("late")
    pair.wait_rest(2)


def test_a_frontend_that_is_behind_wakes_everybody(pair: Deployment) -> None:
    pair.ranks[0].add("a", [1], current_wave=0, max_tokens=2)
    pair.first_request(0, 0)
    pair.ranks[0].wait_finished("a")
    pair.wait_rest(1)
    pair.first_request(1, 0)
    pair.ranks[1].add("b", [1], current_wave=0, max_tokens=2)
    pair.ranks[1].wait_finished("b")
    pair.wait_rest(2)


def test_counts_are_those_of_the_engines(pair: Deployment) -> None:
    pair.ranks[1].add("long", [1], max_tokens=100_000)
    pair.first_request(1, 0)
    pair.ranks[1].wait_tokens("long", 5)
    pair.wait_state(lambda state: state[0] and state[0][0][:2] == [0, 0] and state[0][1][:2] == [0, 1], "one runs")
    pair.ranks[1].abort("long")
    pair.wait_state(lambda state: state[0] and state[0][1][:2] == [0, 0] and state[1:] == [1, False], "none runs")


def test_a_request_to_paused_engines_runs_when_they_resume(pair: Deployment) -> None:
    """H and defect 31: paused ranks discard the start, and nobody believes that they run."""
    calls = [rank.call("pause_scheduler", "keep", False) for rank in pair.ranks]
    for rank, call_id in zip(pair.ranks, calls, strict=True):
        assert rank.wait_answer(call_id).failure_message is None
    pair.wait_rest(1)
    pair.ranks[0].add("a", [1, 2], current_wave=1, max_tokens=2)
    pair.first_request(0, 1)
    pair.wait_state(lambda state: state[0] is not None and not state[2], "engines that do not run")
    assert pair.ranks[0].outputs_of("a") == []
    for rank in pair.ranks:
        rank.utility("resume_scheduler")
    pair.first_request(0, 1)
    pair.ranks[0].wait_finished("a")
    pair.wait_rest(2)
