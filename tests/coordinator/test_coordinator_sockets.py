"""A real coordinator between raw sockets: engines and frontends as the wire describes them, and worse ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from enginewire import EngineConfig, EngineStartupError
from enginewire.coordinator import DPCoordinator
from enginewire.coordinator.process import CoordinatorProcess
from enginewire.testing import wait_until
from enginewire.wire.frames import engine_identity
from enginewire.wire.messages import EngineCoreOutputs, SchedulerStats

TIMEOUT_S = 20.0


class Peer:
    """A subscriber that collects what it gets."""

    def __init__(self, world: World, address: str, identity: bytes = b"") -> None:
        self.socket = world.socket(zmq.XSUB)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(address)
        self.got: list[list[bytes]] = []

    def subscribe(self) -> None:
        self.socket.send(b"\x01")

    def read(self) -> list[list[bytes]]:
        while self.socket.poll(0):
            self.got.append(self.socket.recv_multipart())
        return self.got

    def gets(self, *frames: bytes) -> None:
        """Wait for a message, and drop it and all before it."""
        wait_until(lambda: list(frames) in self.read(), TIMEOUT_S, f"{frames} comes")
        del self.got[: self.got.index(list(frames)) + 1]


class Engine(Peer):
    """An engine's two sockets to a coordinator."""

    def __init__(self, world: World, index: int) -> None:
        addresses = world.coordinator.addresses
        super().__init__(world, addresses.coordinator_input, engine_identity(index))
        self.index = index
        self.push = world.socket(zmq.PUSH)
        self.push.connect(addresses.coordinator_output)
        self.subscribe()

    def report(self, **fields: Any) -> None:
        self.push.send(msgspec.msgpack.encode(EngineCoreOutputs(engine_index=self.index, **fields)))

    def counts(self, waiting: int, running: int) -> None:
        self.report(scheduler_stats=SchedulerStats(num_waiting_reqs=waiting, num_running_reqs=running))

    def close(self) -> None:
        self.push.close()
        self.socket.close()


class Frontend(Peer):
    """A frontend's socket to a coordinator."""

    def __init__(self, world: World) -> None:
        super().__init__(world, world.coordinator.addresses.frontend_stats_publish_address)
        self.subscribe()

    def states(self) -> list[Any]:
        return [msgspec.msgpack.decode(payload) for (payload,) in self.read()]

    def sees(self, *state: object, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for a publication."""
        wait_until(lambda: list(state) in self.states(), timeout_s, f"{list(state)} is published")


class World:
    """A coordinator and those who talk to it."""

    def __init__(self, coordinator: DPCoordinator) -> None:
        self.coordinator = coordinator
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        self.sockets.append(socket)
        return socket

    def close(self) -> None:
        self.coordinator.shutdown()
        for socket in self.sockets:
            socket.close()
        self.context.term()

    def engines(self, count: int = 2) -> list[Engine]:
        engines = [Engine(self, index) for index in range(count)]
        for engine in engines:
            engine.gets(b"READY")
        return engines


def config(**settings: Any) -> EngineConfig:
    settings = {"data_parallel_size": 2, "wire_version": "0.25.1", **settings}
    return EngineConfig.create("echo", **settings)


@pytest.fixture(params=["thread-ipc", "thread-tcp", "process-ipc", "process-tcp"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    where, transport = request.param.split("-")
    folder = str(tmp_path_factory.mktemp("c")) if transport == "ipc" else None
    coordinator = DPCoordinator.start(
        config(data_parallel_lock_step=True), folder=folder, own_process=where == "process"
    )
    made = World(coordinator)
    yield made
    made.close()
    assert not coordinator.is_alive


def test_counts_go_from_engines_to_every_frontend(world: World) -> None:
    """C-50, protocol J.2 and J.3."""
    engines = world.engines()
    frontends = [Frontend(world), Frontend(world)]
    engines[0].counts(1, 2)
    engines[1].counts(3, 4)
    for frontend in frontends:
        frontend.sees([[1, 2], [3, 4]], 0, False)


def test_a_frontend_that_comes_late_is_told_how_things_are(world: World) -> None:
    engines = world.engines()
    engines[0].counts(5, 6)
    Frontend(world).sees([[5, 6], [0, 0]], 0, False)
    Frontend(world).sees([[5, 6], [0, 0]], 0, False, timeout_s=4)  # before the 5 s that unchanged counts wait


def test_a_request_to_resting_engines_wakes_them_until_the_wave_ends(world: World) -> None:
    """C-50, protocol J.4."""
    engines = world.engines()
    frontend, other = Frontend(world), Frontend(world)
    other.sees([[0, 0], [0, 0]], 0, False)
    frontend.socket.send(msgspec.msgpack.encode([1, 0]))
    for engine in engines:
        engine.gets(b"\x02", msgspec.msgpack.encode([0, 1]))
    other.sees(None, 0, True)
    engines[0].report(wave_complete=0)
    other.sees(None, 1, False)
    engines[1].report(start_wave=1)
    engines[0].gets(b"\x02", msgspec.msgpack.encode([1, 1]))
    frontend.sees(None, 1, True)


def test_ready_waits_for_engines_not_for_subscriptions(world: World) -> None:
    """Defect 29: one engine that subscribes twice, or leaves and comes back, is one engine."""
    with zmq.Context() as context:  # whose end waits until the connections are closed
        first = context.socket(zmq.XSUB)
        first.connect(world.coordinator.addresses.coordinator_input)
        first.send(b"\x01")
        first.send(b"\x01")
        first.close()
    again = Engine(world, 0)
    again.subscribe()
    assert not again.socket.poll(300), "nobody is ready yet"
    second = Engine(world, 1)
    second.gets(b"READY")
    again.gets(b"READY")


def test_a_restarted_rank_is_told_ready_and_its_old_counts_are_gone(world: World) -> None:
    """It waits for READY before it serves; what it had before its death must not keep requests away from it."""
    engines = world.engines()
    frontend = Frontend(world)
    engines[1].counts(7, 8)
    frontend.sees([[0, 0], [7, 8]], 0, False)
    frontend.got.clear()
    engines[1].close()
    frontend.sees([[0, 0], [0, 0]], 0, False)
    Engine(world, 1).gets(b"READY")


def test_counts_of_a_rank_that_is_back_outlive_its_old_connection(world: World) -> None:
    """A silent host's connection ends long after its engine was started again elsewhere."""
    engines = world.engines()
    frontend = Frontend(world)
    engines[1].counts(7, 8)
    frontend.sees([[0, 0], [7, 8]], 0, False)
    engines.append(Engine(world, 1))
    engines[2].counts(2, 3)
    frontend.sees([[0, 0], [2, 3]], 0, False)
    engines[1].close()
    engines[0].counts(1, 0)
    frontend.sees([[1, 0], [2, 3]], 0, False)
    engines[2].close()
    frontend.sees([[1, 0], [0, 0]], 0, False)


def test_no_frame_ends_it(world: World) -> None:
    """Defect 30."""
    engines = world.engines()
    frontend = Frontend(world)
    deep = b"\x91" * 10_000
    for garbage in (b"", b"\xc1", b"\x93\x01", deep, b"\x00" * 50, msgspec.msgpack.encode({"a": 1}), os.urandom(200)):
        engines[0].push.send(garbage)
        engines[0].push.send_multipart([garbage, garbage])
        engines[0].socket.send(b"\x02" + garbage)
        frontend.socket.send(b"\x92" + garbage)
        frontend.socket.send_multipart([b"\x92\x00\x00", garbage])
    engines[0].report(scheduler_stats=SchedulerStats(num_running_reqs=1), start_wave=-1)
    engines[1].push.send(msgspec.msgpack.encode(EngineCoreOutputs(engine_index=9, wave_complete=1)))
    engines[1].counts(2, 1)
    wait_until(lambda: any(s[0] and s[0][1] == [2, 1] for s in frontend.states()), TIMEOUT_S, "counts are published")


def test_a_deployment_that_grew_has_more_counts(world: World) -> None:
    """Protocol J.6."""
    world.engines()
    frontend = Frontend(world)
    frontend.socket.send(msgspec.msgpack.encode(["SCALE_ELASTIC_EP", 3]))
    frontend.sees([[0, 0], [0, 0], [0, 0]], 0, False)
    newcomer = Engine(world, 2)
    newcomer.gets(b"READY")
    newcomer.counts(1, 1)
    frontend.sees([[0, 0], [0, 0], [1, 1]], 0, False)


def test_a_killed_coordinator_is_back_on_the_same_addresses() -> None:
    """Engines and frontends connect again by themselves, and the wave is learnt from them."""
    coordinator = DPCoordinator.start(config(data_parallel_lock_step=True), own_process=True)
    assert isinstance(coordinator, CoordinatorProcess)
    world = World(coordinator)
    try:
        addresses, pid = coordinator.addresses, coordinator.pid
        engines = world.engines()
        frontend = Frontend(world)
        frontend.sees([[0, 0], [0, 0]], 0, False)
        os.kill(pid, signal.SIGKILL)
        # A socket subscribes again when its owner looks at it, so look at both.
        wait_until(lambda: min(len(engine.read()) for engine in engines), TIMEOUT_S, "both are told READY again")
        assert coordinator.addresses == addresses
        assert coordinator.pid != pid
        assert coordinator.is_alive
        frontend.got.clear()
        frontend.socket.send(msgspec.msgpack.encode([0, 41]))
        frontend.sees(None, 41, True)
        engines[1].report(scheduler_stats=SchedulerStats(num_running_reqs=1, current_wave=41))
        frontend.sees([[0, 0], [0, 1]], 41, True)
    finally:
        world.close()
    assert not psutil.pid_exists(coordinator.pid)


PARENT = """
import sys
from enginewire import EngineConfig
from enginewire.coordinator import DPCoordinator
coordinator = DPCoordinator.start(EngineConfig.create("echo", data_parallel_size=2), own_process=True)
print(coordinator.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_it_ends_with_its_parent(how: signal.Signals | None) -> None:
    """However that ends: killed, or by leaving without a word."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if how is not None:
            parent.send_signal(how)
        parent.stdin.close()
        wait_until(lambda: not psutil.pid_exists(pid), TIMEOUT_S, "the coordinator ends")


FORKING = """
import os, sys
from enginewire import EngineConfig
from enginewire.coordinator import DPCoordinator
coordinator = DPCoordinator.start(EngineConfig.create("echo", data_parallel_size=2), own_process=True)
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(coordinator.pid, child, flush=True)
os._exit(0)
"""


def test_it_ends_with_its_parent_though_a_fork_of_that_lives_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, child = map(int, parent.stdout.readline().split())
        wait_until(lambda: not psutil.pid_exists(pid), TIMEOUT_S, "the coordinator ends")
        assert psutil.pid_exists(child), "and not because of that"


@pytest.mark.parametrize("own_process", [False, True])
def test_an_address_that_is_taken_is_said(own_process: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    missing = str(tmp_path_factory.mktemp("c") / "missing")
    threads = threading.active_count()
    with pytest.raises(EngineStartupError, match=f"the coordinator .*cannot bind ipc://{missing}/waves: No such file"):
        DPCoordinator.start(config(), folder=missing, own_process=own_process)
    assert threading.active_count() == threads


def test_a_host_that_is_not_ours_cannot_be_bound() -> None:
    elsewhere = config(data_parallel_size_local=0, data_parallel_address="192.0.2.1")
    with pytest.raises(EngineStartupError, match=r"cannot bind tcp://192\.0\.2\.1:\*"):
        DPCoordinator.start(elsewhere)


def test_shutdown_takes_no_time_and_may_be_repeated() -> None:
    for own_process in (False, True):
        coordinator = DPCoordinator.start(config(), own_process=own_process)
        started = time.monotonic()
        coordinator.shutdown()
        coordinator.shutdown()
        assert time.monotonic() - started < 4
        assert not coordinator.is_alive
