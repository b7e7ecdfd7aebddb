"""What is known about several engines, from what a frontend says; no engine, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from enginewire.client.status import EngineStatus
from enginewire.config import EngineConfig
from enginewire.errors import EngineDeath, UtilityCallError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.stats import IterationStats, StatLogger
from enginewire.server import health
from enginewire.server.engine_state import Health
from enginewire.server.health import EngineMonitor
from enginewire.server.snapshot import snapshot
from enginewire.server.state import ServerState
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.stats import SchedulerStats

READY = EngineCoreReadyResponse(
    max_model_len=16, num_gpu_blocks=4, block_size=16, dtype="float32", vllm_version="0.25.1"
)
KILLED = EngineDeath(1, "killed by signal 9 (SIGKILL)")


class FakeLLM:
    """A frontend of several engines that do what the test says.

    Attributes:
        paused: whether each is paused; an exception is raised, a future awaited.
    """

    def __init__(self, num_engines: int) -> None:
        self.statuses = [EngineStatus(index, "ready") for index in range(num_engines)]
        self.paused: list[bool | Exception | asyncio.Future[bool]] = [False] * num_engines
        self.stat_logger: StatLogger | None = None
        self.on_engine_change: Callable[[EngineStatus], None] | None = None
        self.is_scaling = False

    def take_out(self, index: int) -> None:
        """Have the last engine taken out, as a client tells it."""
        status = self.statuses.pop(index)
        assert self.on_engine_change is not None
        self.on_engine_change(replace(status, state="removed"))

    def engine_statuses(self) -> list[EngineStatus]:
        return self.statuses

    def change(self, index: int, **changes: Any) -> None:
        """Have an engine's status changed."""
        self.statuses[index] = replace(self.statuses[index], **changes)

    async def is_engine_paused(self, index: int) -> bool:
        answer = self.paused[index]
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, asyncio.Future) else answer


class Clock:
    """Monotonic seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(health, "time", clock)
    return clock


def make(num_engines: int) -> tuple[FakeLLM, EngineMonitor, ServerState]:
    """Make a monitor of so many engines that wants a sign of progress every 10 s."""
    llm = FakeLLM(num_engines)
    state = ServerState.of(EngineConfig.create("echo", max_model_len=4096, data_parallel_size=num_engines), "m", 1000.0)
    return llm, EngineMonitor(cast("AsyncLLM", llm), state, 10.0), state


def running(test: Callable[[Clock], Coroutine[Any, Any, None]]) -> Callable[[Clock], None]:
    """Run a test on a loop of its own."""

    def run(clock: Clock) -> None:
        asyncio.run(test(clock))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def healths(state: ServerState) -> list[str]:
    return [str(engine.health) for engine in state.engines.values()]


@running
async def test_one_engine_of_several_that_dies_takes_neither_readiness_nor_the_others(clock: Clock) -> None:
    """C-55. Its death is told by /health: nobody will restart it."""
    llm, monitor, state = make(3)
    state.record(1, SchedulerStats(num_running_reqs=4), IterationStats(1000.0))
    llm.change(1, state="dead", death=KILLED, num_deaths=1)
    assert monitor.why_not_ready() is None
    assert healths(state) == ["ready", "dead", "ready"]
    assert (state.engine(1).death, state.engine(1).num_deaths, state.engine(1).num_running) == (KILLED.cause, 1, 0)
    assert monitor.first_death() == KILLED
    assert await monitor.wait_died() == KILLED
    assert not monitor.are_all_dead()


@running
async def test_no_engine_left_is_not_ready_and_every_cause_is_told(clock: Clock) -> None:
    llm, monitor, _ = make(2)
    llm.change(0, state="dead", death=EngineDeath(0, "exited with status 3"))
    llm.change(1, state="dead", death=KILLED)
    reason = monitor.why_not_ready()
    assert reason == f"engine 0 is dead: exited with status 3; engine 1 is dead: {KILLED.cause}"
    assert monitor.are_all_dead()


@running
async def test_a_lost_engine_that_is_awaited_is_no_death(clock: Clock) -> None:
    """Issue 4: with one engine /ready is 503 while it is away, and /health stays."""
    llm, monitor, state = make(1)
    llm.change(0, state="lost", death=EngineDeath(0, "the connection was lost"), num_deaths=1, is_awaited=True)
    assert monitor.why_not_ready() == "engine 0 is lost: the connection was lost"
    assert monitor.first_death() is None
    llm.change(0, state="starting")
    assert monitor.why_not_ready() == "engine 0 is starting: the connection was lost"
    assert healths(state) == ["starting"]
    llm.change(0, state="ready", is_awaited=False)
    assert monitor.why_not_ready() is None
    assert (healths(state), state.engine(0).num_deaths) == (["ready"], 1)


@running
async def test_a_lost_engine_beside_one_that_is_ready_keeps_nobody_away(clock: Clock) -> None:
    llm, monitor, state = make(2)
    llm.change(1, state="lost", death=KILLED, num_deaths=1, is_awaited=True)
    assert monitor.why_not_ready() is None
    assert healths(state) == ["ready", "lost"]


@running
async def test_one_engine_that_does_not_answer_is_stalled_and_the_others_are_not(clock: Clock) -> None:
    """Each is asked by itself, so that the silent one does not keep the others' answers back."""
    llm, monitor, state = make(3)
    llm.paused[1] = silent = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(monitor.watch())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.now += 8
    for index, engine in monitor._answering():
        if index != 1:
            await monitor._ping(index, engine)
    clock.now += 8
    assert monitor.why_not_ready() is None
    assert healths(state) == ["ready", "stalled", "ready"]
    for index in (0, 2):
        llm.change(index, state="dead", death=EngineDeath(index, "gone"))
    assert "engine 1 has not answered for 16 s" in (monitor.why_not_ready() or "")
    silent.set_result(False)
    await asyncio.sleep(0)
    assert monitor.why_not_ready() is None
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@running
async def test_a_busy_engine_without_progress_is_stalled_by_its_own_messages_alone(clock: Clock) -> None:
    llm, monitor, state = make(2)
    for index in range(2):
        llm.change(index, num_in_flight=1)
    for _ in range(4):
        clock.now += 4
        monitor.record(0, None, IterationStats(clock.now))
        await monitor.refresh()
    assert healths(state) == ["ready", "stalled"]
    monitor.record(1, None, IterationStats(clock.now))
    await monitor.refresh()
    assert healths(state) == ["ready", "ready"]


@running
async def test_an_idle_engine_may_be_silent(clock: Clock) -> None:
    llm, monitor, state = make(1)
    for _ in range(10):
        clock.now += 4
        await monitor.refresh()
    llm.change(0, num_in_flight=1)
    monitor.look()
    assert healths(state) == ["ready"]


@running
async def test_a_paused_engine_is_not_ready_even_beside_others(clock: Clock) -> None:
    """What the balancer sends there would wait."""
    llm, monitor, state = make(2)
    llm.paused[1] = True
    await monitor.refresh()
    assert monitor.why_not_ready() == "engine 1 is paused"
    assert healths(state) == ["ready", "paused"]
    monitor.sleeping(True)
    assert healths(state) == ["asleep", "asleep"]
    llm.paused[1] = False
    await monitor.refresh()
    assert monitor.why_not_ready() is None


@running
async def test_an_engine_that_begins_anew_is_not_thought_paused(clock: Clock) -> None:
    llm, monitor, state = make(2)
    llm.paused = [True, True]
    await monitor.refresh()
    llm.paused[1] = False
    llm.change(1, num_deaths=1)
    monitor.look()
    assert healths(state) == ["paused", "ready"]


@running
async def test_an_engine_that_does_not_know_the_question_is_ready(clock: Clock) -> None:
    llm, monitor, state = make(1)
    llm.paused[0] = UtilityCallError("no such method", method="is_scheduler_paused")
    clock.now += 60
    await monitor.refresh()
    assert healths(state) == ["ready"]


@running
async def test_draining_is_told_for_all_but_those_that_are_gone(clock: Clock) -> None:
    llm, monitor, state = make(2)
    llm.change(1, state="dead", death=KILLED)
    monitor.draining()
    assert monitor.why_not_ready() == "draining"
    assert healths(state) == ["draining", "dead"]


def test_every_word_for_health_has_its_place_in_the_documents() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert [word for word in Health if f"`{word}`" not in text] == []


@running
async def test_an_engine_that_was_taken_out_is_gone_from_health_and_state_and_its_counts_stay(clock: Clock) -> None:
    """Issue 6: sums do not go back, and counts go on when there is an engine of that rank again."""
    llm, monitor, state = make(2)
    state.record(1, SchedulerStats(num_running_reqs=4), IterationStats(1000.0, num_generation_tokens=7))
    llm.change(1, num_deaths=2, num_restarts=2, num_moved=5)
    monitor.look()
    llm.change(1, state="leaving", num_in_flight=4)
    monitor.look()
    assert healths(state) == ["ready", "leaving"]
    assert monitor.why_not_ready() is None
    llm.change(1, num_moved=8, num_lost=1)  # between two looks
    llm.take_out(1)
    monitor.look()
    now = snapshot(state, clock.now)
    assert [engine.index for engine in now.engines] == [0]
    assert (now.num_deaths, now.num_restarts, now.num_moved, now.num_lost) == (2, 2, 8, 1)
    assert now.num_generation_tokens == 7
    llm.statuses.append(EngineStatus(1, "starting"))
    llm.paused.append(False)
    monitor.look()
    assert healths(state) == ["ready", "starting"]
    llm.change(1, state="ready", num_deaths=1, num_moved=1)
    monitor.look()
    now = snapshot(state, clock.now)
    assert [(engine.index, engine.num_deaths, engine.num_running) for engine in now.engines] == [(0, 0, 0), (1, 3, 0)]
    assert (now.num_deaths, now.num_moved) == (3, 9)


@running
async def test_an_engine_that_cannot_be_put_in_or_dies_while_it_leaves_is_no_death_of_the_server(clock: Clock) -> None:
    """With --exit-on-engine-death a newcomer would take the others with it."""
    llm, monitor, _ = make(3)
    llm.is_scaling = True
    llm.change(2, state="dead", death=KILLED, num_deaths=1)
    monitor.look()
    assert monitor.first_death() is None
    llm.change(1, state="leaving", ready=READY)
    monitor.look()
    llm.change(1, state="dead", death=KILLED, num_deaths=1)
    monitor.look()
    assert monitor.first_death() is None
    llm.change(0, state="dead", death=EngineDeath(0, "gone"), ready=READY)
    monitor.look()
    assert monitor.first_death() == EngineDeath(0, "gone")
    llm.is_scaling = False  # it was called off, and the two are the server's again
    assert monitor.first_death() is not None
