"""Engines that are added and taken out while others serve (C-54)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_executors import WorksOnce

from client_harness import PATIENCE_S
from enginewire import (
    AsyncLLM,
    ConfigError,
    EngineClientError,
    EngineConfig,
    EngineStartupError,
    RequestLostError,
    RequestOutput,
    SamplingParams,
    UtilityCallError,
)
from enginewire.client import dp
from enginewire.client.dp import DPLBAsyncMPClient
from enginewire.client.engines import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

START_S = 60.0
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 2,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.005},
}


def client_of(llm: AsyncLLM) -> DPLBAsyncMPClient:
    client = llm._client
    assert isinstance(client, DPLBAsyncMPClient)
    return client


class Load:
    """Constant load: so many streams at any time, each of which has to be right.

    Attributes:
        errors: of those that were not.
        num_done: of those that were.
        ranks: where they ended.
    """

    def __init__(self, llm: AsyncLLM, num_streams: int = 16, num_tokens: int = 60) -> None:
        self._llm = llm
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self.errors: list[BaseException] = []
        self.num_done = 0
        self.ranks: set[int | None] = set()

    @asynccontextmanager
    async def on(self) -> AsyncIterator[Load]:
        """Keep it up while the block runs; what runs at the end may finish."""
        self._is_over = False
        async with asyncio.TaskGroup() as group:
            for i in range(self._num_streams):
                group.create_task(self._stream_after_stream(i))
            try:
                yield self
            finally:
                self._is_over = True

    async def _stream_after_stream(self, i: int) -> None:
        prompt = f"stream {i} of many. "
        expected = (prompt * self._num_tokens)[: self._num_tokens]
        while not self._is_over:
            try:
                last: RequestOutput | None = None
                params = SamplingParams(temperature=0, max_tokens=self._num_tokens, ignore_eos=True)
                async for output in self._llm.generate(prompt, params):
                    last = output
                assert last is not None
                assert last.outputs[0].text == expected
                self.ranks.add(last.outputs[0].engine_index)
                self.num_done += 1
            except Exception as exc:
                self.errors.append(exc)
                return

    async def go_on(self, count: int = 64) -> None:
        """Wait until so many more are done, and look again where they are done."""
        self.ranks.clear()
        goal = self.num_done + count
        async with asyncio.timeout(START_S):
            while self.num_done < goal and not self.errors:
                await asyncio.sleep(0.02)


async def test_growing_and_shrinking_under_load_fails_no_request() -> None:
    """Issue 6, shows: 2 → 4 → 1 under constant load, 0 failed."""
    changes: list[tuple[int, str]] = []
    async with AsyncLLM("echo", **SETTINGS) as llm:
        client = client_of(llm)
        client.on_engine_change = lambda status: changes.append((status.index, status.state))
        async with Load(llm).on() as load:
            await load.go_on()
            assert load.ranks == {0, 1}
            num_blocks = llm.config.num_gpu_blocks
            assert num_blocks is not None
            await llm.scale_elastic_ep(4)
            assert [status.state for status in llm.engine_statuses()] == ["ready"] * 4
            assert (llm.config.data_parallel_size, llm.config.num_gpu_blocks) == (4, 2 * num_blocks)
            await load.go_on(128)
            assert load.ranks == {0, 1, 2, 3}
            assert await llm.is_sleeping() is False, "utilities reach all of them"
            await llm.scale_elastic_ep(1)
            assert [status.index for status in llm.engine_statuses()] == [0]
            assert (llm.config.data_parallel_size, llm.config.num_gpu_blocks) == (1, num_blocks // 2)
            await load.go_on()
            assert load.ranks == {0}
        assert load.errors == []
        launcher = client.lookout.returns.launcher
        assert launcher is not None
        assert [launcher.has(index) for index in range(4)] == [True, False, False, False]
        assert len(client.inbox.links) == 1
        assert client.inbox.live == set()
        await llm.scale_elastic_ep(2)
        async with Load(llm).on() as load:
            await load.go_on()
            assert load.ranks == {0, 1}
        assert load.errors == []
    assert changes[:4] == [(2, "starting"), (3, "starting"), (2, "ready"), (3, "ready")]
    assert changes[4:7] == [(1, "leaving"), (2, "leaving"), (3, "leaving")]
    assert changes[7:] == [(1, "removed"), (2, "removed"), (3, "removed"), (1, "starting"), (1, "ready")]


@pytest.mark.parametrize("failover", ["none", "exact"])
async def test_what_is_not_done_in_time_moves_by_the_failover_rule_or_fails_with_the_cause(failover: str) -> None:
    """C-54: within a limit; then it moves or fails."""
    async with AsyncLLM("echo", failover=failover, **SETTINGS) as llm:

        async def stream(i: int) -> RequestOutput:
            params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
            async for output in llm.generate("round and round. ", params, data_parallel_rank=i % 2):
                last = output
                started[i].set()
            return last

        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.ensure_future(stream(i)) for i in range(8)]
        await asyncio.gather(*(event.wait() for event in started))
        await llm.scale_elastic_ep(1, drain_timeout=0.1)
        told = await asyncio.gather(*streams, return_exceptions=True)
        for i, outcome in enumerate(told):
            if failover == "none" and i % 2:
                assert isinstance(outcome, RequestLostError)
                assert "engine 1: it was taken out, and the request was not done within 0.1 s" in str(outcome)
            else:
                assert isinstance(outcome, RequestOutput)
                assert outcome.outputs[0].text == ("round and round. " * 60)[:1000]
        assert client_of(llm).inbox.live == set()


async def test_a_newcomer_that_cannot_start_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """C-54."""
    options = {"step_time_s": 0.005, "mark": str(tmp_path / "mark"), "then": "raise", "works": 2}
    settings = {**SETTINGS, "executor_options": options, "restart_engine": 3}
    async with AsyncLLM("echo", engine=WorksOnce, **settings) as llm:
        async with Load(llm).on() as load:
            await load.go_on(16)
            with pytest.raises(EngineStartupError, match="RuntimeError: it worked 2 times"):
                await llm.scale_elastic_ep(4)
            assert [(status.index, status.state) for status in llm.engine_statuses()] == [(0, "ready"), (1, "ready")]
            await load.go_on(32)
        assert load.errors == []
        assert llm.config.data_parallel_size == 2
        assert not llm.is_scaling


async def test_a_newcomer_that_is_killed_later_is_started_again() -> None:
    """restart_engine holds for those that joined."""
    async with AsyncLLM("echo", restart_engine=1, failover="exact", **SETTINGS) as llm:
        await llm.scale_elastic_ep(3)
        async with Load(llm).on() as load:
            await load.go_on(16)
            manager: Any = client_of(llm).resources.engine_manager
            os.kill(manager.processes[2].popen.pid, signal.SIGKILL)
            async with asyncio.timeout(START_S):
                while llm.engine_statuses()[2].num_restarts < 1 or llm.engine_statuses()[2].state != "ready":
                    await asyncio.sleep(0.05)
            await load.go_on()
            assert load.ranks == {0, 1, 2}
        assert load.errors == []


async def test_only_one_scaling_at_a_time_and_cancelling_takes_it_back() -> None:
    async with AsyncLLM("echo", **SETTINGS) as llm:
        growing = asyncio.ensure_future(llm.scale_elastic_ep(3))
        async with asyncio.timeout(PATIENCE_S):
            while not llm.is_scaling:
                await asyncio.sleep(0)
        with pytest.raises(EngineClientError, match="is being changed"):
            await llm.scale_elastic_ep(1)
        growing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await growing
        assert len(llm.engine_statuses()) == 2
        endless = SamplingParams(max_tokens=100_000, ignore_eos=True)
        stream = llm.generate("on and on", endless, data_parallel_rank=1)
        await anext(stream)
        shrinking = asyncio.ensure_future(llm.scale_elastic_ep(1))
        async with asyncio.timeout(PATIENCE_S):
            while llm.engine_statuses()[1].state != "leaving":
                await asyncio.sleep(0)
        shrinking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shrinking
        assert [status.state for status in llm.engine_statuses()] == ["ready", "ready"]
        await anext(stream)
        await stream.aclose()


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", 65_537])
async def test_what_is_no_number_of_engines_is_refused(size: Any) -> None:
    config = EngineConfig.create("echo", **SETTINGS)
    client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
    client.config = config
    with pytest.raises(ConfigError, match="must be an integer from 1 to 65536"):
        await client.scale_elastic_ep(size)


@pytest.mark.parametrize("drain_timeout", ["x", -1, float("nan"), float("inf"), True])
async def test_what_is_no_time_is_refused_before_anything_is_touched(drain_timeout: Any) -> None:
    async with AsyncLLM("echo", **SETTINGS) as llm:
        with pytest.raises(ConfigError, match="drain_timeout must be seconds, 0 or more"):
            await llm.scale_elastic_ep(1, drain_timeout)
        assert [status.state for status in llm.engine_statuses()] == ["ready", "ready"]


async def test_few_start_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that serve go on serving, however many are asked for."""
    monkeypatch.setattr(dp, "STARTING_AT_ONCE", 2)
    async with AsyncLLM("echo", **SETTINGS) as llm:
        returns = client_of(llm).lookout.returns
        start, at_once = returns.start, []

        def counted(engine: Engine, now: float) -> None:
            start(engine, now)
            at_once.append(sum(not returns.is_up(index) for index in range(2, engine.index + 1)))

        monkeypatch.setattr(returns, "start", counted)
        await llm.scale_elastic_ep(7)
        assert len(at_once) == 5
        assert max(at_once) <= 2
        assert [status.state for status in llm.engine_statuses()] == ["ready"] * 7


async def test_a_call_to_an_engine_that_is_taken_out_fails_with_the_cause() -> None:
    """C-32: nobody waits for an answer of an engine that is gone by our own will."""
    async with AsyncLLM("echo", terminate_timeout_s=1.0, **SETTINGS) as llm:
        client = client_of(llm)

        def call(seconds: float) -> asyncio.Future[Any]:
            arguments = ("collective_rpc", "sleep_for", None, (seconds,))
            return asyncio.ensure_future(client.call_utility_async(*arguments, engine_index=1))

        short = call(0.3)
        await asyncio.sleep(0)
        await llm.scale_elastic_ep(1, drain_timeout=PATIENCE_S)
        assert await short == [0.3], "it is waited for, as requests are"
        await llm.scale_elastic_ep(2)
        long = call(60.0)
        await asyncio.sleep(0)
        await llm.scale_elastic_ep(1, drain_timeout=0)
        with pytest.raises(UtilityCallError, match=r"the engine was taken out meanwhile|Server shutting down"):
            await long
        assert len(client.inbox.calls) == 0


async def test_taking_out_is_not_interrupted_half_way() -> None:
    """C-54: cancelled while engines are being stopped, it ends when they are gone, and the rest can be scaled again."""
    async with AsyncLLM("echo", terminate_timeout_s=1.0, **SETTINGS) as llm:
        client = client_of(llm)
        manager: Any = client.resources.engine_manager
        process = manager.processes[1]
        os.kill(process.popen.pid, signal.SIGSTOP)  # takes as long as it may, and is killed
        shrinking = asyncio.ensure_future(llm.scale_elastic_ep(1, drain_timeout=0))
        async with asyncio.timeout(PATIENCE_S):
            while manager.has(1):
                await asyncio.sleep(0)
        for _ in range(2):
            shrinking.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(EngineClientError, match="is being changed"):
            await llm.scale_elastic_ep(3)
        with pytest.raises(asyncio.CancelledError):
            await shrinking
        assert not process.is_running
        assert [status.index for status in llm.engine_statuses()] == [0]
        assert llm.config.data_parallel_size == 1
        await llm.scale_elastic_ep(2)
        assert [status.state for status in llm.engine_statuses()] == ["ready", "ready"]


async def test_an_engine_that_ends_while_it_leaves_is_started_again_if_it_is_to_stay_after_all() -> None:
    """C-55."""
    async with AsyncLLM("echo", restart_engine=1, **SETTINGS) as llm:
        stream = llm.generate("on and on", SamplingParams(max_tokens=100_000, ignore_eos=True), data_parallel_rank=0)
        await anext(stream)
        shrinking = asyncio.ensure_future(llm.scale_elastic_ep(1))
        leaving = llm.generate("on and on", SamplingParams(max_tokens=100_000, ignore_eos=True), data_parallel_rank=1)
        await anext(leaving)
        async with asyncio.timeout(PATIENCE_S):
            while llm.engine_statuses()[1].state != "leaving":
                await asyncio.sleep(0)
            manager: Any = client_of(llm).resources.engine_manager
            os.kill(manager.processes[1].popen.pid, signal.SIGKILL)
            while llm.engine_statuses()[1].state != "dead":
                await asyncio.sleep(0)
            shrinking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await shrinking
        with pytest.raises(RequestLostError, match="engine 1: killed by signal 9"):
            async for _ in leaving:
                pass
        async with asyncio.timeout(START_S):
            while llm.engine_statuses()[1].state != "ready":
                await asyncio.sleep(0.05)
        await anext(stream)
        await stream.aclose()


async def test_a_newcomer_that_is_stopped_before_it_is_heard_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-54: its HELLO is read when it is gone already, and makes sense."""
    async with AsyncLLM("echo", **SETTINGS) as llm:
        client = client_of(llm)
        handshake = client.resources.handshake_socket
        assert handshake is not None
        growing = asyncio.ensure_future(llm.scale_elastic_ep(3))
        async with asyncio.timeout(START_S):
            while len(llm.engine_statuses()) < 3:
                await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(client.lookout, "look", lambda now: [])
            assert handshake.poll(START_S * 1000), "it says HELLO"
            growing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await growing
        assert handshake.poll(0), "it is gone, and nobody has heard it"
        await llm.scale_elastic_ep(3)
        assert [status.state for status in llm.engine_statuses()] == ["ready"] * 3
        assert client.inbox.dropped == 0
