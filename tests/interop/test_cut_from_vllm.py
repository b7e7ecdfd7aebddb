"""Requests to vLLM's engines over a cable that is cut: each is whole, or fails and says why (issue 6)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from environments import Environment
from processes import ENGINE_FLAGS, VLLM_ENV, Runner, Running
from streams import Stream, states, until

from enginewire import AsyncLLM
from enginewire.errors import EngineClientError, EngineDeadError, EngineUnavailableError
from enginewire.testing import free_tcp_port
from support.netns import Host, two_hosts

CUT_S = 5.0
NUM_TOKENS = 400
SIZE = ["--data-parallel-size", "2"]
PATIENCE_S = 120.0
READY_S = 800.0
"""For two engines of vLLM that start at once on a busy machine."""

pytestmark = pytest.mark.anyio


@dataclass
class Site:
    """Two hosts; engines of vLLM are at the far end, and outlive their frontends."""

    vllm: Environment
    near: Host
    far: Host
    port: int
    engines: Running
    undisturbed: list[int]
    """Tokens of the text, of an engine that has nothing else to do."""

    @contextlib.asynccontextmanager
    async def frontend(self, heartbeat_s: float, failover: str, **settings: object) -> AsyncIterator[AsyncLLM]:
        llm = await AsyncLLM.create(
            str(self.vllm.model),
            **{
                "data_parallel_size": 2,
                "data_parallel_size_local": 0,
                "data_parallel_address": self.near.address,
                "data_parallel_rpc_port": self.port,
                "heartbeat_timeout_s": heartbeat_s,
                "failover": failover,
                "failover_timeout_s": PATIENCE_S,
                "forward_engine_log": False,
                "ready_timeout_s": READY_S,
                **settings,
            },
        )
        async with llm:
            await until(lambda: states(llm) == ["ready"] * 2, PATIENCE_S, "both engines")
            if not self.undisturbed:
                first = Stream(llm, NUM_TOKENS, 0)
                await first.expect_whole()
                self.undisturbed = first.token_ids
            yield llm


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Of frontends, where the test is too, and of engines."""
    with two_hosts() as (near, far), near.entered():
        yield near, far


@contextlib.contextmanager
def engines(hosts: tuple[Host, Host], vllm: Environment, runner: Runner, first: int) -> Iterator[Site]:
    near, far = hosts
    port = free_tcp_port()
    where = ["--data-parallel-address", near.address, "--data-parallel-rpc-port", str(port)]
    ranks = ["--data-parallel-size-local", str(2 - first), "--data-parallel-start-rank", str(first)]
    with far.entered():
        running = runner.vllm(vllm, "engines", "--headless", *SIZE, *ranks, *where, *ENGINE_FLAGS)
        engines = running.__enter__()
    try:
        yield Site(vllm, near, far, port, engines, [])
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def site(hosts: tuple[Host, Host], vllm: Environment, runner: Runner) -> Iterator[Site]:
    """Both engines are far."""
    with engines(hosts, vllm, runner, 0) as site:
        yield site


@pytest.mark.parametrize("failover", ["none", "resume"])
@pytest.mark.parametrize("heartbeat_s", [3, 10])
async def test_a_cut_of_five_seconds(site: Site, heartbeat_s: float, failover: str) -> None:
    """Below the heartbeat's time-out nobody notices. Above, requests fail, or go on when the engines are back."""
    async with site.frontend(heartbeat_s, failover) as llm, asyncio.timeout(2 * PATIENCE_S):
        running = [Stream(llm, NUM_TOKENS, rank) for rank in range(2)]
        for stream in running:
            await stream.began.wait()
        site.far.cut()
        sent_meanwhile = [Stream(llm, 40, rank) for rank in range(2)]
        await asyncio.sleep(CUT_S)
        site.far.restore()
        for stream in [*running, *sent_meanwhile]:
            if heartbeat_s < CUT_S and failover == "none":
                assert "the connection to it was lost" in await stream.cause()
            else:
                await stream.expect_whole()
                if heartbeat_s > CUT_S:
                    assert stream.token_ids == site.undisturbed[: stream.num_tokens]
        await until(lambda: states(llm) == ["ready"] * 2, PATIENCE_S, "both engines")
        for rank in range(2):
            await Stream(llm, 40, rank).expect_whole()


@pytest.mark.parametrize("failover", ["none", "resume"])
async def test_a_cut_for_good(site: Site, failover: str) -> None:
    """Everything fails with the cause; the frontend after that has the engines again, if the cable is mended."""
    try:
        async with (
            site.frontend(3, failover, failover_timeout_s=4, engine_return_timeout_s=8) as llm,
            asyncio.timeout(2 * PATIENCE_S),
        ):
            running = [Stream(llm, NUM_TOKENS, rank) for rank in range(2)]
            for stream in running:
                await stream.began.wait()
            site.far.cut()
            sent_meanwhile = [Stream(llm, 40, rank) for rank in range(2)]
            await until(lambda: states(llm) == ["lost"] * 2, PATIENCE_S, "both losses")
            await expect_refusal(llm, EngineUnavailableError)
            for stream in [*running, *sent_meanwhile]:
                cause = await stream.cause()
                assert "the connection to it was lost" in cause
                assert ("no engine took it over" in cause) is (failover == "resume")
            await until(lambda: states(llm) == ["dead"] * 2, PATIENCE_S, "both deaths")
            await expect_refusal(llm, EngineDeadError)
    finally:
        site.far.restore()
    async with site.frontend(3, failover) as llm:
        for rank in range(2):
            await Stream(llm, 40, rank).expect_whole()


async def test_requests_go_on_at_the_engine_on_this_side(
    hosts: tuple[Host, Host], vllm: Environment, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine is beside the frontend, which started it, the other at the far end of a cable that is cut twice."""
    for name, value in VLLM_ENV.items():
        monkeypatch.setenv(name, value)
    options = {"python": str(vllm.python), "args": ENGINE_FLAGS}
    ours = {"executor": "vllm", "data_parallel_size_local": 1, "executor_options": options}
    with engines(hosts, vllm, runner, 1) as site:
        async with site.frontend(3, "resume", **ours) as llm:
            for _ in range(2):
                streams = [Stream(llm, NUM_TOKENS, rank) for rank in range(2)]
                for stream in streams:
                    await stream.began.wait()
                site.far.cut()
                sent_meanwhile = Stream(llm, 40, 1)
                for stream in (*streams, sent_meanwhile):
                    await stream.expect_whole()
                assert states(llm) == ["ready", "lost"]
                await Stream(llm, 40).expect_whole()
                site.far.restore()
                await until(lambda: states(llm) == ["ready"] * 2, PATIENCE_S, "the far engine")
                await Stream(llm, 40, 1).expect_whole()
            assert [status.num_deaths for status in llm.engine_statuses()] == [0, 2]
            assert sum(status.num_lost for status in llm.engine_statuses()) == 0


async def expect_refusal(llm: AsyncLLM, kind: type[EngineClientError]) -> None:
    """Start a request for which there is no engine."""
    late = Stream(llm, 40)
    await late.task
    assert type(late.error) is kind
    assert "the connection to it was lost" in str(late.error)
