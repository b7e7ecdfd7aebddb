"""Engines that are killed, stopped or given up in the middle of something: nothing hangs, errors name the cause."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from fault_executors import WorksOnce

from client_harness import PATIENCE_S, request
from enginewire import (
    AsyncLLM,
    ClientClosedError,
    EngineClientError,
    EngineDeadError,
    EngineStartupError,
    EngineUnavailableError,
    RequestLostError,
    RequestOutput,
    SamplingParams,
)
from enginewire.client import restarts
from enginewire.client.mp import MPClient

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

START_S = 60.0
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 2,
    "failover": "exact",
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.005},
}
TEXT = "round and round it goes. "
LENGTH = 400


def client_of(llm: AsyncLLM) -> MPClient:
    client = llm._client
    assert isinstance(client, MPClient)
    return client


def manager_of(llm: AsyncLLM) -> Any:
    """Return what has the engine processes."""
    return client_of(llm).resources.engine_manager


def send_signal(llm: AsyncLLM, rank: int, number: int = signal.SIGKILL) -> int:
    """Send a signal to an engine's current process; return its id."""
    pid: int = manager_of(llm).processes[rank].popen.pid
    os.kill(pid, number)
    return pid


async def until(condition: Callable[[], object], what: str, seconds: float = START_S) -> None:
    """Wait until something can be seen, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.01)


async def until_states(llm: AsyncLLM, *states: str) -> None:
    await until(lambda: tuple(status.state for status in llm.engine_statuses()) == states, f"engines to be {states}")


class Streams:
    """Streams that run, so many on each rank."""

    def __init__(self, llm: AsyncLLM, num_each: int = 3, length: int = LENGTH) -> None:
        self._llm = llm
        self._length = length
        num_engines = len(llm.engine_statuses())
        self._started = [asyncio.Event() for _ in range(num_each * num_engines)]
        self._tasks = [asyncio.ensure_future(self._read(i, i % num_engines)) for i in range(len(self._started))]

    async def _read(self, i: int, rank: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=self._length, ignore_eos=True)
        last: RequestOutput | None = None
        async for output in self._llm.generate(TEXT, params, data_parallel_rank=rank):
            self._started[i].set()
            last = output
        assert last is not None
        return last

    async def run(self) -> Streams:
        """Wait until each has delivered something."""
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(event.wait() for event in self._started))
        return self

    async def outcomes(self) -> list[RequestOutput | BaseException]:
        async with asyncio.timeout(START_S):
            return await asyncio.gather(*self._tasks, return_exceptions=True)

    async def assert_whole(self) -> None:
        """Wait until all have the text of an undisturbed run."""
        for outcome in await self.outcomes():
            assert isinstance(outcome, RequestOutput), repr(outcome)
            assert outcome.outputs[0].text == (TEXT * LENGTH)[: self._length]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines started again without much of a pause."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.05)


@pytest.mark.usefixtures("soon")
async def test_an_engine_that_is_killed_while_it_starts_again_is_started_once_more() -> None:
    """Issue 6: what waits for it goes on when it is there in the end."""
    settings = {**SETTINGS, "data_parallel_size": 1, "restart_engine": 3}
    async with AsyncLLM("echo", **settings) as llm:
        streams = await Streams(llm).run()
        send_signal(llm, 0)
        for num_restarts in (1, 2):
            await until(lambda count=num_restarts: llm.engine_statuses()[0].num_restarts == count, "its next start")
            with pytest.raises(EngineUnavailableError, match="killed by signal 9"):
                await llm.check_health()
            send_signal(llm, 0)
        await streams.assert_whole()
        assert (llm.engine_statuses()[0].num_restarts, llm.engine_statuses()[0].num_deaths) == (3, 3)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_in_a_crash_loop_what_waits_fails_with_its_cause_and_what_can_goes_on(
    num_engines: int, tmp_path: Path
) -> None:
    """Issue 6: a crash loop ends in a clear state."""
    options = {"step_time_s": 0.005, "mark": str(tmp_path / "mark"), "then": "raise", "works": num_engines}
    settings = {**SETTINGS, "data_parallel_size": num_engines, "restart_engine": 2, "executor_options": options}
    async with AsyncLLM("echo", engine=WorksOnce, **settings) as llm:
        streams = await Streams(llm).run()
        send_signal(llm, num_engines - 1)
        if num_engines == 1:
            for outcome in await streams.outcomes():
                assert isinstance(outcome, EngineDeadError)
                assert "RuntimeError: it worked" in str(outcome)
                assert "started again 2 times, ended each time, and is given up" in str(outcome)
        else:
            await until_states(llm, "ready", "dead")
            await streams.assert_whole()
            assert client_of(llm).inbox.live == set()


@pytest.mark.parametrize("restart_engine", [0, 1])
async def test_all_engines_are_killed_one_after_another_while_their_requests_wait(restart_engine: int) -> None:
    """C-27: with restarts they wait and go on; without, everybody hears why."""
    async with AsyncLLM("echo", restart_engine=restart_engine, **SETTINGS) as llm:
        streams = await Streams(llm).run()
        send_signal(llm, 0)
        await until(lambda: llm.engine_statuses()[0].num_deaths, "the first death")
        send_signal(llm, 1)
        await until(lambda: llm.engine_statuses()[1].num_deaths, "the last death")
        if restart_engine:
            await streams.assert_whole()
        else:
            for outcome in await streams.outcomes():
                assert isinstance(outcome, EngineDeadError)
                assert "engine 1 is dead: killed by signal 9 (SIGKILL)" in str(outcome)
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                await llm.scale_elastic_ep(3)


@pytest.mark.usefixtures("soon")
async def test_all_engines_are_killed_at_once_and_no_request_is_blamed() -> None:
    """One is noticed first; its requests are not sent to others that have ended, too, and count no death of those."""
    async with AsyncLLM("echo", restart_engine=5, **{**SETTINGS, "data_parallel_size": 4}) as llm:
        for round_ in range(1, 4):
            streams = await Streams(llm, 4).run()
            for index in range(4):
                send_signal(llm, index)
            await streams.assert_whole()
            await until(lambda: all(s.num_deaths == round_ for s in llm.engine_statuses()), "all deaths")  # noqa: B023
            await until_states(llm, *["ready"] * 4)


async def test_a_newcomer_and_an_old_engine_are_killed_while_growing() -> None:
    """C-54: growing fails with the newcomer's cause; what ran on the other goes on, and it is back."""
    async with AsyncLLM("echo", restart_engine=1, **SETTINGS) as llm:
        streams = await Streams(llm).run()
        growing = asyncio.ensure_future(llm.scale_elastic_ep(4))
        await until(lambda: len(llm.engine_statuses()) == 4, "newcomers")
        send_signal(llm, 1)
        send_signal(llm, 3)
        with pytest.raises(EngineStartupError, match="engine 3 could not start: killed by signal 9"):
            await growing
        await streams.assert_whole()
        await until_states(llm, "ready", "ready")


@pytest.mark.parametrize("victim", ["the one that leaves", "one that stays", "both"])
async def test_engines_are_killed_while_shrinking(victim: str) -> None:
    """C-54: requests go on where there is an engine, and in the end there are as many engines as there were to be."""
    async with AsyncLLM("echo", restart_engine=1, **SETTINGS) as llm:
        streams = await Streams(llm).run()
        shrinking = asyncio.ensure_future(llm.scale_elastic_ep(1))
        await until(lambda: llm.engine_statuses()[1].state == "leaving", "it leaves")
        if victim != "one that stays":
            send_signal(llm, 1)
        if victim != "the one that leaves":
            send_signal(llm, 0)
        async with asyncio.timeout(START_S):
            await shrinking
        await streams.assert_whole()
        await until_states(llm, "ready")


@pytest.mark.parametrize("restart_engine", [0, 1])
async def test_an_engine_that_is_stopped_for_longer_than_the_heartbeat_is_lost_and_its_process_ended(
    restart_engine: int,
) -> None:
    """Over tcp: what ran there goes on elsewhere; were the process continued, it would run for nobody."""
    settings = {**SETTINGS, "transport": "tcp", "heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.0}
    async with AsyncLLM("echo", restart_engine=restart_engine, **settings) as llm:
        former = manager_of(llm).processes[1]
        streams = await Streams(llm).run()
        send_signal(llm, 1, signal.SIGSTOP)
        await streams.assert_whole()
        await until_states(llm, "ready", "ready" if restart_engine else "dead")
        death = llm.engine_statuses()[1].death
        assert death is not None
        assert "the connection to it was lost" in death.cause
        assert "its process has not ended since" in death.cause
        await until(lambda: not former.is_running, "its process to end")


async def test_a_sender_finds_that_a_stopped_engine_is_gone_and_its_process_is_ended() -> None:
    """C-27: whoever notices first, the cause is told and nothing is left that works for nobody."""
    settings = {**SETTINGS, "transport": "tcp", "heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.0}
    async with AsyncLLM("echo", **settings) as llm:
        client = client_of(llm)
        process = manager_of(llm).processes[1]
        send_signal(llm, 1, signal.SIGSTOP)
        engine = client.engines[1]
        mine = request("mine")
        mine.data_parallel_rank = 1

        def is_unreachable() -> bool:
            try:
                client.outbox.abort(engine, ["nobody"])
            except zmq.ZMQError:
                return True
            return False

        async with asyncio.timeout(START_S):  # without a turn for the receiver, which would notice it, too
            while not is_unreachable():
                time.sleep(0.01)
        with pytest.raises(EngineUnavailableError, match=r"connection is gone|process has not ended since"):
            await client.add_request_async(mine)
        await until_states(llm, "ready", "dead")
        await until(lambda: not process.is_running, "its process to end")


async def test_an_engine_that_is_stopped_for_a_while_goes_on_where_it_was() -> None:
    """Over ipc there is no heartbeat: silence alone is no death."""
    async with AsyncLLM("echo", **SETTINGS) as llm:
        streams = await Streams(llm).run()
        send_signal(llm, 1, signal.SIGSTOP)
        await until(lambda: not client_of(llm).engines[0].live, "the other's requests to end")
        send_signal(llm, 1, signal.SIGCONT)
        await streams.assert_whole()
        assert [status.num_deaths for status in llm.engine_statuses()] == [0, 0]


async def test_the_last_engine_that_serves_is_not_taken_out() -> None:
    """C-54, C-55: ranks leave from the end, and those that would stay are dead."""
    async with AsyncLLM("echo", **SETTINGS) as llm:
        send_signal(llm, 0)
        await until_states(llm, "dead", "ready")
        with pytest.raises(EngineClientError, match="would stay, are dead"):
            await llm.scale_elastic_ep(1)
        await llm.scale_elastic_ep(2)
        await llm.scale_elastic_ep(3)
        await until_states(llm, "dead", "ready", "ready")
        params = SamplingParams(temperature=0, max_tokens=3)
        told = [output.outputs[0].engine_index async for output in llm.generate(TEXT, params)]
        assert told[-1] in (1, 2)
        await llm.scale_elastic_ep(2)
        await until_states(llm, "dead", "ready")


async def killed(llm: AsyncLLM) -> None:
    send_signal(llm, 1)
    await until(lambda: llm.engine_statuses()[1].state == "lost", "its death")


async def starting(llm: AsyncLLM) -> None:
    send_signal(llm, 1)
    await until(lambda: llm.engine_statuses()[1].state == "starting", "its start")


async def all_killed(llm: AsyncLLM) -> None:
    send_signal(llm, 0)
    send_signal(llm, 1)
    await until(lambda: all(status.state == "lost" for status in llm.engine_statuses()), "their deaths")


async def stopped(llm: AsyncLLM) -> None:
    send_signal(llm, 1, signal.SIGSTOP)


async def growing(llm: AsyncLLM) -> None:
    growing = asyncio.ensure_future(llm.scale_elastic_ep(4))
    growing.add_done_callback(lambda future: future.exception())
    await until(lambda: len(llm.engine_statuses()) == 4, "newcomers")


async def shrinking(llm: AsyncLLM) -> None:
    shrinking = asyncio.ensure_future(llm.scale_elastic_ep(1))
    shrinking.add_done_callback(lambda future: future.exception())
    await until(lambda: llm.engine_statuses()[1].state == "leaving", "it leaves")


@pytest.mark.parametrize("during", [killed, starting, all_killed, stopped, growing, shrinking])
async def test_shutting_down_in_the_middle_ends_everything(during: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """C-22, C-27: in bounded time, with nothing left, and everybody who waits is told."""
    async with AsyncLLM("echo", restart_engine=5, terminate_timeout_s=2.0, **SETTINGS) as llm:
        streams = await Streams(llm, length=100_000).run()
        call = asyncio.ensure_future(llm.collective_rpc("sleep_for", args=(60.0,)))
        await until(lambda: len(client_of(llm).inbox.calls), "the call")
        await during(llm)
        began = time.monotonic()
        async with asyncio.timeout(START_S):
            await asyncio.to_thread(llm.shutdown)
        assert time.monotonic() - began < 2.0 + PATIENCE_S
        for outcome in await streams.outcomes():
            if isinstance(outcome, RequestOutput):
                assert outcome.outputs[0].finish_reason == "abort"
            else:
                assert isinstance(outcome, ClientClosedError | RequestLostError)
        with pytest.raises(Exception, match=r"shut down|lost meanwhile"):
            await call
