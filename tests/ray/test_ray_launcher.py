"""Engines placed by Ray: real actors, and engines in them that wait for a frontend which is not there."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from ray_cluster import EngineProcess, TestCluster, engine_processes, raylet_of

import ray
from enginewire import EngineConfig, EngineStartupError
from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath
from enginewire.host import ray_engine
from enginewire.host.launch import make_launcher
from enginewire.host.launcher import EngineLauncher
from enginewire.host.ray_actors import CoreEngineActorManager
from enginewire.testing import free_tcp_port, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

PATIENCE_S = 60.0
Deaths = queue.Queue[EngineDeath]


def spec(rank: int = 0, *, address: str | None = None) -> EngineSpec:
    config = EngineConfig.create("echo", data_parallel_size=8, data_parallel_backend="ray")
    address = address or f"tcp://127.0.0.1:{free_tcp_port()}"
    return EngineSpec(config=config, engine_index=rank, handshake_address=address, local=False, headless=True)


@contextmanager
def launched(*ranks: int, resources: Mapping[str, float] | None = None) -> Iterator[tuple[EngineLauncher, Deaths]]:
    """Have engines placed; yields their launcher, and the deaths that it reports."""
    settings = {"data_parallel_backend": "ray", "ray_resources": resources or {"CPU": 1}}
    launcher = make_launcher(EngineConfig.create("echo", **settings))
    assert isinstance(launcher, CoreEngineActorManager)
    deaths: Deaths = queue.Queue()
    launcher.watch_deaths(deaths.put)
    try:
        for rank in ranks:
            launcher.start(spec(rank))
        yield launcher, deaths
    finally:
        launcher.shutdown(0)


def pids() -> list[int]:
    return [process.pid for process in engine_processes()]


def running(count: int = 1, *, besides: tuple[EngineProcess, ...] = ()) -> list[EngineProcess]:
    """Wait for so many engine processes."""

    def found() -> list[EngineProcess]:
        known = {process.pid for process in besides}
        there = [process for process in engine_processes() if process.pid not in known]
        return there if len(there) == count else []

    return wait_until(found, PATIENCE_S, f"the start of {count} engine processes")


def test_an_engine_that_dies_tells_how_through_its_actor() -> None:
    with launched(0) as (launcher, deaths):
        (engine,) = running()
        assert launcher.has(0)
        assert launcher.first_death() is None
        os.kill(engine.pid, signal.SIGKILL)
        death = deaths.get(timeout=PATIENCE_S)
        assert (death.engine_index, death.exit_code) == (0, -signal.SIGKILL)
        assert death.cause == "killed by signal 9 (SIGKILL)"
        assert launcher.first_death() == launcher.wait_for_death(0, 0) == death


def test_an_engine_that_cannot_start_says_why() -> None:
    with launched() as (launcher, deaths):
        launcher.start(spec(3, address="nowhere"))
        death = deaths.get(timeout=PATIENCE_S)
        assert death.engine_index == 3
        assert "nowhere" in death.cause
        assert any("nowhere" in line for line in death.log_tail)
        assert launcher.log_tail(3) == death.log_tail


def test_a_rank_whose_engine_died_is_started_again_and_its_death_is_forgotten() -> None:
    """C-55."""
    with launched(0, 1) as (launcher, deaths):
        first = tuple(running(2))
        os.kill(first[0].pid, signal.SIGKILL)
        rank = deaths.get(timeout=PATIENCE_S).engine_index
        launcher.start(spec(rank))
        assert launcher.first_death() is None
        (again,) = running(besides=first)
        os.kill(again.pid, signal.SIGKILL)
        assert deaths.get(timeout=PATIENCE_S).engine_index == rank
        assert launcher.wait_for_death(0, 1 - rank) is None


def test_a_new_engine_takes_the_place_of_one_that_still_runs() -> None:
    with launched(0) as (launcher, deaths):
        (former,) = running()
        launcher.start(spec(0))
        (current,) = running(besides=(former,))
        wait_until(lambda: [current.pid] == pids(), PATIENCE_S, "the end of the former engine")
        assert launcher.first_death() is None
        os.kill(current.pid, signal.SIGKILL)
        assert "SIGKILL" in deaths.get(timeout=PATIENCE_S).cause
        assert deaths.empty()


def test_an_actor_that_is_killed_takes_its_engine_along() -> None:
    """Children of an actor outlive it; an engine is on a lifeline."""
    with launched(0) as (launcher, deaths):
        (engine,) = running()
        wait_until(lambda: launcher.current[0].node, PATIENCE_S, "the actor's first answer")  # type: ignore[attr-defined]
        os.kill(engine.actor, signal.SIGKILL)
        death = deaths.get(timeout=PATIENCE_S)
        assert death.cause == "its actor is gone (node 127.0.0.1): its worker process has died"
        wait_until(lambda: not engine_processes(), PATIENCE_S, "the end of its engine")


def test_a_node_that_is_lost_takes_its_engine_along_and_another_takes_its_place(cluster: TestCluster) -> None:
    with launched(*range(4)) as (launcher, deaths):
        engines = running(4)
        node = next(node for node in cluster.nodes if any(each.raylet == raylet_of(node) for each in engines))
        lost = [each for each in engines if each.raylet == raylet_of(node)]
        cluster.lose(node)
        ranks = {(death := deaths.get(timeout=PATIENCE_S)).engine_index for _ in lost}
        assert "its actor is gone" in death.cause
        wait_until(lambda: not {each.pid for each in lost} & {*pids()}, PATIENCE_S, "the end of the node's engines")
        cluster.replace(node)
        for rank in ranks:
            launcher.start(spec(rank))
        running(4)
        assert launcher.first_death() is None


def test_a_rank_that_is_taken_out_leaves_nothing_and_is_no_death() -> None:
    with launched(0, 1) as (launcher, deaths):
        running(2)
        launcher.stop(1, PATIENCE_S)
        assert len(engine_processes()) == 1
        assert launcher.first_death() is None
        launcher.stop(1, PATIENCE_S)  # once more: it is not there
        assert deaths.empty()


def test_one_that_does_not_leave_is_killed() -> None:
    with launched(0) as (launcher, deaths):
        (engine,) = running()
        wait_until(lambda: launcher.current[0].node, PATIENCE_S, "the actor's first answer")  # type: ignore[attr-defined]
        os.kill(engine.pid, signal.SIGSTOP)
        launcher.stop(0, 0.1)
        assert not engine_processes()
        assert deaths.empty()


def test_a_death_that_only_the_connection_shows_has_the_log() -> None:
    """Death is decided by the transport; Ray sees nothing of an engine that is stopped."""
    with launched(0) as (launcher, deaths):
        (engine,) = running()
        wait_until(lambda: launcher.current[0].node, PATIENCE_S, "the actor's first answer")  # type: ignore[attr-defined]
        os.kill(engine.pid, signal.SIGSTOP)
        launcher.expect_death("the connection to it was lost", 0)
        death = deaths.get(timeout=PATIENCE_S)
        assert death.cause == "the connection to it was lost (it ran on node 127.0.0.1)"


def test_one_for_which_there_is_no_room_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_engine, "PLACED_S", 0.5)
    with launched(0, 1, resources={"CPU": 2}) as (launcher, _), caplog.at_level(logging.INFO):
        running(2)
        launcher.start(spec(2))
        wait_until(lambda: "engine=2 waits for Ray" in caplog.text, PATIENCE_S, "a word on it")
        assert "it needs {'CPU': 2}, and {'CPU': 3.0} is free" in caplog.text
        launcher.stop(0, PATIENCE_S)
        wait_until(lambda: "engine=2 runs on node" in caplog.text, PATIENCE_S, "its placement")
        running(2)


def test_shutdown_gives_back_what_was_never_placed() -> None:
    with launched(0, resources={"CPU": 64}) as (launcher, deaths):
        launcher.shutdown(PATIENCE_S)
        with pytest.raises(EngineStartupError, match="shut down"):
            launcher.start(spec(1))
        assert deaths.empty()


def test_resources_that_cannot_be_are_refused() -> None:
    with launched(resources={"CPU": 0.00001}) as (launcher, _), pytest.raises(EngineStartupError, match="Ray takes no"):
        launcher.start(spec())


def test_the_cluster_is_left_to_whoever_connected_to_it() -> None:
    with launched(0):
        pass
    assert ray.is_initialized()
