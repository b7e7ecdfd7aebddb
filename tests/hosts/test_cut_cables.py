"""Requests over a cable that is cut: each is whole, or fails and says why, and nothing hangs (issue 6)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import commands
import pytest
import zmq
from followed import Followed
from netns import Host, two_hosts

from enginewire import AsyncLLM, RequestOutput
from enginewire.errors import (
    EngineClientError,
    EngineDeadError,
    EngineUnavailableError,
    UtilityCallError,
)
from enginewire.testing import free_tcp_port
from enginewire.transport.peers import PeerWatch
from enginewire.transport.sockets import bind_router, connect_dealer, make_context

PATIENCE_S = 60.0
"""For processes that start, and engines that are found again, on a busy machine."""

STEP_S = 0.02
NUM_TOKENS = 300
"""Six seconds: longer than the cut."""

ENDLESS = 100_000
CUT_S = 5.0
TAKEN_OVER_WITHIN_S = 4.0
RETURNED_WITHIN_S = 8.0
SIZE = 2


class Stream(Followed):
    """A request whose every token is known beforehand: the prompt's, again and again."""

    def __init__(self, llm: AsyncLLM, name: str, num_tokens: int, rank: int | None = None) -> None:
        super().__init__(llm, f"{name} at {rank}: one after the other, and no two alike. ", num_tokens, rank)

    def check(self, output: RequestOutput) -> None:
        super().check(output)
        (completion,) = output.outputs
        assert output.prompt_token_ids is not None
        expected = itertools.islice(itertools.cycle(output.prompt_token_ids), len(completion.token_ids))
        assert completion.token_ids == list(expected), "no gap, and no token twice"


@dataclass
class Site:
    """A frontend with two engines: one is beside it or none, the others are at the far end of the cable."""

    llm: AsyncLLM
    failover: str
    num_near: int

    def is_far(self, rank: int) -> bool:
        return rank >= self.num_near

    def start(self, name: str, num_tokens: int) -> list[Stream]:
        """Start a request on each engine."""
        return [Stream(self.llm, name, num_tokens, rank) for rank in range(SIZE)]

    def states(self) -> list[str]:
        return [status.state for status in self.llm.engine_statuses()]

    async def ids(self, rank: int) -> list[str]:
        """Ask an engine which requests it knows."""
        answer: list[str] = await self.llm._client.call_utility_async("get_request_ids", engine_index=rank)
        return answer

    async def expect_answer(self, rank: int) -> None:
        """Ask an engine, which may be lost before it answers."""
        with contextlib.suppress(UtilityCallError):
            await self.ids(rank)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Of frontends, where the test is too, and of engines."""
    with two_hosts() as pair, pair[0].entered():
        yield pair


@contextlib.asynccontextmanager
async def sites(hosts: tuple[Host, Host], heartbeat_s: float, return_timeout_s: float | None):
    """Start four at the same cable: with and without failover, with and without an engine on this side."""
    near, far = hosts
    async with contextlib.AsyncExitStack() as stack:

        async def site(failover: str, num_near: int) -> Site:
            port, num_far = free_tcp_port(), SIZE - num_near
            words = ["-dp", str(SIZE), "-dpl", str(num_far), "-dpr", str(num_near), "-dpp", str(port)]
            stack.enter_context(commands.engines(far, near, "--executor-option", f"step_time_s={STEP_S}", *words))
            llm = await AsyncLLM.create(
                "echo",
                data_parallel_size=SIZE,
                data_parallel_size_local=num_near,
                data_parallel_address=near.address,
                data_parallel_rpc_port=port,
                heartbeat_interval_s=1.0,
                heartbeat_timeout_s=heartbeat_s,
                failover=failover,
                failover_timeout_s=PATIENCE_S if return_timeout_s is None else TAKEN_OVER_WITHIN_S,
                engine_return_timeout_s=return_timeout_s,
                forward_engine_log=False,
                executor_options={"step_time_s": STEP_S},
            )
            await stack.enter_async_context(llm)
            return Site(llm, failover, num_near)

        yield await asyncio.gather(*(site(*kind) for kind in itertools.product(("none", "resume"), (0, 1))))
        async with asyncio.timeout(PATIENCE_S):
            await stack.aclose()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.05)


@dataclass
class Cut:
    """What was under way when the cable was cut, and what was begun before anybody could notice."""

    running: dict[int, list[Stream]]
    begun: dict[int, list[Stream]]
    left: list[Stream]
    calls: list[asyncio.Task[None]]

    @classmethod
    async def make(cls, far: Host, sites: list[Site]) -> Cut:
        """Cut it under load; in the silence start more, leave something, and call every engine."""
        running = {id(site): site.start("running", NUM_TOKENS) for site in sites}
        left = [stream for site in sites for stream in site.start("left", ENDLESS)]
        for stream in (*itertools.chain(*running.values()), *left):
            await stream.began.wait()
        far.cut()
        begun = {id(site): site.start("begun", 20) for site in sites}
        calls = [asyncio.create_task(site.expect_answer(rank)) for site in sites for rank in range(SIZE)]
        await asyncio.sleep(0.5)
        for stream in left:
            stream.task.cancel()
        return cls(running, begun, left, calls)

    def of(self, site: Site) -> list[Stream]:
        return self.running[id(site)] + self.begun[id(site)]


pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

HEARTBEATS = (3, pytest.param(10, marks=pytest.mark.slow))


@pytest.mark.parametrize("heartbeat_s", HEARTBEATS)
async def test_a_cut_of_five_seconds(hosts: tuple[Host, Host], heartbeat_s: float) -> None:
    """Below the heartbeat's time-out nobody notices. Above, failover has a request go on at the other engine or, where
    both are far, at the same once it is back; without failover it fails. Afterwards all engines serve.
    """
    _, far = hosts
    async with sites(hosts, heartbeat_s, None) as four, asyncio.timeout(2 * PATIENCE_S):
        cut = await Cut.make(far, four)
        await asyncio.sleep(CUT_S - 0.5)
        far.restore()
        is_noticed = heartbeat_s < CUT_S
        for site in four:
            for stream in cut.of(site):
                if is_noticed and site.is_far(stream.rank) and site.failover == "none":
                    assert "the connection to it was lost" in await stream.cause()
                else:
                    assert await stream.is_whole(), (site, stream.rank, stream.error)
        await asyncio.gather(*cut.calls)
        for site in four:
            await until(lambda site=site: site.states() == ["ready"] * SIZE)
            num_deaths = [status.num_deaths for status in site.llm.engine_statuses()]
            assert num_deaths == [int(is_noticed and site.is_far(rank)) for rank in range(SIZE)]
            for stream in site.start("after", 20):
                assert await stream.is_whole()
            for rank in range(SIZE):  # what was left, or went on elsewhere, runs nowhere
                while await site.ids(rank):
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("heartbeat_s", HEARTBEATS)
async def test_a_cut_for_good(hosts: tuple[Host, Host], heartbeat_s: float) -> None:
    """What has another engine goes on there; all else fails with the cause, and so does what comes later."""
    _, far = hosts
    async with sites(hosts, heartbeat_s, RETURNED_WITHIN_S) as four, asyncio.timeout(2 * PATIENCE_S):
        cut = await Cut.make(far, four)
        for site in four:
            await until(lambda site=site: set(site.states()[site.num_near :]) == {"lost"})
            if not site.num_near:  # another refusal than that of a dead client: they may return
                await expect_refusal(site, EngineUnavailableError)
        for site in four:
            for stream in cut.of(site):
                if not site.is_far(stream.rank) or (site.failover == "resume" and site.num_near):
                    assert await stream.is_whole(), (site, stream.rank, stream.error)
                elif site.failover == "none":
                    assert re.search(f"engine {stream.rank}: the connection to it was lost", await stream.cause())
                else:
                    assert re.search("connection to it was lost.* no engine took it over", await stream.cause())
        await asyncio.gather(*cut.calls)
        for site in four:
            await until(lambda site=site: set(site.states()[site.num_near :]) == {"dead"})
            if site.num_near:
                assert await Stream(site.llm, "late", 20).is_whole()
                while await site.ids(0):
                    await asyncio.sleep(0.05)
            else:
                assert "it did not return within" in await expect_refusal(site, EngineDeadError)


async def expect_refusal(site: Site, kind: type[EngineClientError]) -> str:
    """Start a request for which there is no engine; return why it is refused."""
    late = Stream(site.llm, "late", 20)
    await late.task
    assert type(late.error) is kind
    assert "the connection to it was lost" in str(late.error)
    return str(late.error)


async def test_an_engine_notices_a_silent_frontend_also_if_a_request_came_last(hosts: tuple[Host, Host]) -> None:
    """Otherwise it works for nobody, and a frontend that is back has to wait for it to find out."""
    near, far = hosts
    port = free_tcp_port()
    slow = ("--executor-option", f"step_time_s={STEP_S}", "--set", "shutdown_timeout_s=600")
    with commands.engines(far, near, "-dpp", str(port), *slow):
        async with await AsyncLLM.create(
            "echo",
            data_parallel_size_local=0,
            data_parallel_address=near.address,
            data_parallel_rpc_port=port,
            heartbeat_interval_s=0.3,
            heartbeat_timeout_s=1.0,
        ) as llm:
            stream = Stream(llm, "endless", ENDLESS)
            await stream.began.wait()
            far.cut()
            stream.task.cancel()
    # It ends within the time that ``engines`` gives it, although requests may go on for longer.


async def test_a_peer_that_has_nothing_to_send_connects_again_after_a_long_silence(hosts: tuple[Host, Host]) -> None:
    """As vLLM's engines, which have no heartbeat of their own: they have to be told that they were given up.

    The kernel forgets what it has not told in two minutes; here in a second.
    """
    near, far = hosts
    Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text("1")  # of this thread's host
    with make_context() as here, make_context() as there:
        router, address = bind_router(here, f"tcp://{near.address}:*", 1000, (0.3, 1.0))
        watch = PeerWatch(router)
        with far.entered():
            dealer = connect_dealer(there, address, b"me", 1000)
        try:
            dealer.send(b"here")
            assert router.recv_multipart() == [b"me", b"here"]
            watch.settle()
            router.send_multipart([b"me", b"a message, so that no heartbeat is expected"])
            dealer.recv()
            far.cut()
            await until(watch.has_lost_peer)
            await asyncio.sleep(3.0)
            far.restore()
            await until(lambda: reaches(router, b"me"))
        finally:
            watch.monitor.close()
            router.close()
            dealer.close()


def reaches(router: zmq.Socket[bytes], identity: bytes) -> bool:
    try:
        router.send_multipart([identity, b"again"])
    except zmq.ZMQError:  # EHOSTUNREACH: nobody of that name is connected
        return False
    return True
