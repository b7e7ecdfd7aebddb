"""Engines are killed, stopped, added and taken out under mixed load, and every request is accounted for (issue 6)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from census import Census, memory_mb
from chaos import Chaos, client_of
from load import Load
from story import MINUTES, Story

from enginewire import AsyncLLM, SamplingParams

uvloop.new_event_loop().close()  # it keeps a pipe until the process ends, which is no leak

Show = Callable[[str], None]

QUIET_S = 60.0
NUM_ENGINES = 3
SETTINGS: dict[str, Any] = {
    "data_parallel_size": NUM_ENGINES,
    "failover": "resume",
    "failover_timeout_s": 60.0,
    "restart_engine": 1000,
    "restart_window_s": 0.0,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.004},
}
MOST_GROWTH_MB = 40.0
"""What memory may grow by between the first third of a run and its end: allocators keep what peaks needed."""


async def soak(story: Story, llm: AsyncLLM, *, num_users: int, pace: float) -> None:
    """Torment engines under load, then check that all is as before."""
    client = client_of(llm)
    loop_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
    client.on_engine_change = lambda status: story.tell("engine", f"{status.index} is {status.state}")
    await quiet(llm)
    before = Census.take()
    load, chaos = Load(llm, story, num_users), Chaos(llm, story, pace)
    begun = [asyncio.ensure_future(load.run()), asyncio.ensure_future(chaos.run())]
    memory = 0.0
    next_report = 60.0
    while story.elapsed < story.seconds and not (load.errors or chaos.errors):
        await asyncio.sleep(0.5)
        if not memory and story.elapsed > story.seconds / 3:
            memory = memory_mb()
        if story.elapsed > next_report:
            next_report += 60.0
            story.say(f"{story.elapsed:.0f} s, {memory_mb():.0f} MB, {dict(sorted(story.counts.items()))}")
    chaos.finish()
    await begun[1]
    load.finish()
    await begun[0]
    assert load.errors + chaos.errors == []
    await llm.resume_generation()
    await quiet(llm)
    await settled(client, before)
    assert memory_mb() < memory + MOST_GROWTH_MB
    assert loop_errors == []
    if story.seconds > 60:
        assert story.counts["request: finish"] > story.counts["request: unavailable"], "there were engines"
    assert client.inbox.dropped == 0, "no message made no sense"
    story.say(str(dict(sorted(story.counts.items()))))


async def quiet(llm: AsyncLLM) -> None:
    """Have as many engines as in the beginning, all of which serve."""
    async with asyncio.timeout(QUIET_S):
        while any(status.state != "ready" for status in llm.engine_statuses()):
            await asyncio.sleep(0.05)
        await llm.scale_elastic_ep(NUM_ENGINES)
        while any(status.state != "ready" for status in llm.engine_statuses()):
            await asyncio.sleep(0.05)
        for rank in range(NUM_ENGINES):
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            told = [output.outputs[0] async for output in llm.generate("quiet", params, data_parallel_rank=rank)]
            assert (told[-1].text, told[-1].engine_index) == ("quiet", rank)


async def settled(client: Any, before: Census) -> None:
    """Wait until nothing is left of anything: on the engines, in the client, in this process."""
    deadline = time.monotonic() + QUIET_S
    while (left := await what_is_left(client)) or Census.take() != before:
        assert time.monotonic() < deadline, f"left: {left}; before {before}, now {Census.take()}"
        await asyncio.sleep(0.1)


async def what_is_left(client: Any) -> dict[str, object]:
    """Return what is not empty, by name."""
    failover = client.inbox.failover
    left: dict[str, object] = {
        "live": client.inbox.live,
        "calls": len(client.inbox.calls),
        "arrived": len(client._arrivals.messages),
        "pending": len(client.outbox.pending),
        "untold": len(client.engines.untold),
        "flights": len(failover._flights),
        "attempts": len(failover._attempts),
        "waiting": len(failover._waiting),
    }
    for engine in client.engines:
        ids = await client.call_utility_async("get_request_ids", engine_index=engine.index)
        left |= {
            f"engine {engine.index} live": engine.live,
            f"engine {engine.index} stale": engine.stale,
            f"engine {engine.index} runs": ids,
            f"engine {engine.index} load": engine.load.running + engine.load.waiting,
        }
    return {name: what for name, what in left.items() if what}


def run(
    name: str, seconds: float, show: Show, *, num_users: int, pace: float, factory: Any = None, **settings: Any
) -> None:
    """Run one soak; if it fails, tell what happened last."""
    story = Story(name, seconds, show)

    async def main() -> None:
        async with await AsyncLLM.create("echo", **{**SETTINGS, **settings}) as llm:
            await soak(story, llm, num_users=num_users, pace=pace)

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
    except BaseException:
        story.say(f"\n{story}")
        raise


@pytest.mark.timeout(240)
def test_a_quarter_of_a_minute(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6, shows: make soak, in short."""
    caplog.set_level(logging.ERROR, "enginewire")  # what is captured stays
    run("short", 12.0, show, num_users=16, pace=2.0)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_many_minutes(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6, shows: random kills, stops, scale steps, disconnects and aborts; counts return to zero, no leak."""
    caplog.set_level(logging.ERROR, "enginewire")
    run("long", MINUTES * 40, show, num_users=32, pace=1.0, factory=uvloop.new_event_loop)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_over_tcp_who_is_stopped_for_long_is_lost(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6, shows: the same with heartbeats, and with engines that die of an error, for a third of the time."""
    caplog.set_level(logging.ERROR, "enginewire")
    settings: dict[str, Any] = {
        "transport": "tcp",
        "heartbeat_interval_s": 0.2,
        "heartbeat_timeout_s": 1.0,
        "executor_options": {**SETTINGS["executor_options"], "fail_at_step": 3000},
    }
    run("tcp", MINUTES * 20, show, num_users=32, pace=1.0, **settings)
