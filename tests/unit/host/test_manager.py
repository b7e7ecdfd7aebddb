"""Engines come and go under one manager: real processes, which wait for a frontend that is not there."""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginewire import EngineConfig, EngineStartupError
from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath
from enginewire.host import manager as manager_module
from enginewire.host.launcher import EngineLauncher
from enginewire.host.manager import CoreEngineProcManager
from enginewire.testing import free_tcp_port, wait_until

PATIENCE_S = 30.0


def spec(rank: int = 0, *, address: str | None = None) -> EngineSpec:
    config = EngineConfig.create("echo", data_parallel_size=8)
    address = address or f"tcp://127.0.0.1:{free_tcp_port()}"
    return EngineSpec(config=config, engine_index=rank, handshake_address=address)


@contextmanager
def launched(*ranks: int) -> Iterator[tuple[CoreEngineProcManager, queue.Queue[EngineDeath]]]:
    """Start engines; yields their manager, and the deaths that it reports."""
    manager = CoreEngineProcManager([spec(rank) for rank in ranks], forward_log=False)
    deaths: queue.Queue[EngineDeath] = queue.Queue()
    manager.watch_deaths(deaths.put)
    try:
        yield manager, deaths
    finally:
        manager.shutdown(0)


def pid_of(manager: CoreEngineProcManager, rank: int = 0) -> int:
    return manager.processes[rank].popen.pid


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def kill(manager: CoreEngineProcManager, deaths: queue.Queue[EngineDeath], rank: int = 0) -> EngineDeath:
    os.kill(pid_of(manager, rank), signal.SIGKILL)
    return deaths.get(timeout=PATIENCE_S)


def test_a_rank_whose_engine_died_is_started_again_and_its_death_is_forgotten() -> None:
    """A death belongs to an incarnation (C-55)."""
    with launched(0, 1) as (manager, deaths):
        launcher: EngineLauncher = manager
        death = kill(manager, deaths)
        assert launcher.first_death() == launcher.wait_for_death(0) == launcher.wait_for_death(0, 0) == death
        assert "SIGKILL" in death.cause
        launcher.start(spec())
        assert launcher.first_death() is None
        assert launcher.wait_for_death(0, 0) is None
        assert launcher.log_tail(0) == ()
        again = kill(manager, deaths)
        assert again.engine_index == 0
        assert launcher.wait_for_death(0, 0) is again
        assert launcher.wait_for_death(0, 1) is None


def test_all_may_have_died_before_one_is_started_again() -> None:
    """The one thread that watches does not end with the last process."""
    with launched(0) as (manager, deaths):
        thread = manager._thread
        for _ in range(3):
            kill(manager, deaths)
            assert thread.is_alive()
            manager.start(spec())
        assert manager.first_death() is None
    assert not thread.is_alive()


def test_a_rank_may_be_added_and_one_that_cannot_start_says_why() -> None:
    with launched(0) as (manager, deaths):
        manager.start(spec(5))
        assert is_there(pid_of(manager, 5))
        manager.start(spec(6, address="nowhere"))
        death = deaths.get(timeout=PATIENCE_S)
        assert death.engine_index == 6
        assert "nowhere" in death.cause
        assert manager.wait_for_death(0, 5) is None


def test_a_rank_that_is_taken_out_leaves_nothing_and_is_no_death() -> None:
    with launched(0, 1) as (manager, deaths):
        pid = pid_of(manager, 1)
        manager.stop(1, PATIENCE_S)
        assert not is_there(pid)
        assert manager.first_death() is None
        assert manager.log_tail(1) == ()
        manager.stop(1, PATIENCE_S)  # once more: it is not there
        assert kill(manager, deaths).engine_index == 0  # and nothing was reported before


def test_one_that_does_not_leave_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    with launched(0, 1) as (manager, deaths):
        pid = pid_of(manager, 1)
        wait_until(lambda: handles_sigterm(pid), PATIENCE_S, "its start")
        os.kill(pid, signal.SIGSTOP)
        manager.stop(1, 0.1)
        assert not is_there(pid)
        assert "engines [1] did not leave" in caplog.text
        assert deaths.empty()


def test_a_rank_that_died_can_be_taken_out() -> None:
    with launched(0, 1) as (manager, deaths):
        kill(manager, deaths, 1)
        manager.stop(1, PATIENCE_S)
        assert manager.first_death() is None


def test_one_that_is_given_up_is_ended_and_a_new_engine_takes_its_place() -> None:
    """As one that is stopped: continued, it would work for nobody. Its end is none of the new one's."""
    with launched(0) as (manager, deaths):
        former = pid_of(manager)
        os.kill(former, signal.SIGSTOP)
        manager.expect_death("its connection was lost", 0)
        death = deaths.get(timeout=PATIENCE_S)
        assert death.cause == "its connection was lost, and its process has not ended since"
        wait_until(lambda: not is_there(former), PATIENCE_S, "the end of the former engine")
        manager.start(spec())
        assert manager.wait_for_death(0, 0) is None
        again = kill(manager, deaths)
        assert "SIGKILL" in again.cause
        assert "has not ended" not in again.cause


def test_the_end_of_one_that_was_replaced_while_it_lived_is_not_reported() -> None:
    with launched(0, 1) as (manager, deaths):
        former = pid_of(manager)
        manager.start(spec())
        wait_until(lambda: not is_there(former), PATIENCE_S, "the end of the former engine")
        assert kill(manager, deaths, 1).engine_index == 1
        assert deaths.empty()
        assert manager.wait_for_death(0, 0) is None


def test_a_death_is_reported_before_the_next_engine_of_its_rank_is_started() -> None:
    """Or a report that was held up would be taken for the new engine's."""
    with launched(0) as (manager, _):
        reporting, go_on = threading.Event(), threading.Event()

        def report(death: EngineDeath) -> None:
            reporting.set()
            assert go_on.wait(PATIENCE_S)
            order.append("reported")

        order: list[str] = []
        manager.watch_deaths(report)
        os.kill(pid_of(manager), signal.SIGKILL)
        assert reporting.wait(PATIENCE_S)

        def start() -> None:
            manager.start(spec())
            order.append("started")

        starter = threading.Thread(target=start)
        starter.start()
        starter.join(0.3)  # it must not end
        assert starter.is_alive()
        go_on.set()
        starter.join(PATIENCE_S)
        assert order == ["reported", "started"]


def test_nothing_is_started_after_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    with launched(0) as (manager, _):
        manager.shutdown(0)
        started: list[Any] = []
        make = manager_module.EngineProcess

        def remember(*args: Any, **kwargs: Any) -> Any:
            started.append(make(*args, **kwargs))
            return started[-1]

        monkeypatch.setattr(manager_module, "EngineProcess", remember)
        with pytest.raises(EngineStartupError, match="shut down"):
            manager.start(spec())
        assert not any(is_there(process.popen.pid) for process in started)


def test_shutdown_ends_newcomers_too() -> None:
    with launched(0) as (manager, _):
        manager.start(spec(1))
        pids = [pid_of(manager, rank) for rank in (0, 1)]
        manager.shutdown(PATIENCE_S)
        assert not any(map(is_there, pids))
