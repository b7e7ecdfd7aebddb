"""``engine="vllm"`` with restarts and failover: a rank's processes are killed, and no request is lost (issue 6)."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from deployment import SETTLE_S
from environments import Environment
from processes import ENGINE_FLAGS, START_S, VLLM_ENV, lives
from streams import Stream, states, until

from enginewire import AsyncLLM
from enginewire.client.mp import MPClient

NUM_TOKENS = 400


def launcher_of(llm: AsyncLLM, rank: int) -> psutil.Process:
    """Return the process that we started for a rank; vLLM's engine is below it."""
    client = llm._client
    assert isinstance(client, MPClient)
    manager = client.resources.engine_manager
    assert manager is not None
    return psutil.Process(manager.processes[rank].popen.pid)


def engine_of(llm: AsyncLLM, rank: int) -> psutil.Process:
    (engine,) = [child for child in launcher_of(llm, rank).children() if "EngineCore" in " ".join(child.cmdline())]
    return engine


def family() -> list[psutil.Process]:
    """Return all that this process and its children have started."""
    return psutil.Process().children(recursive=True)


@pytest.mark.anyio
async def test_killed_ranks_are_started_again_and_no_request_is_lost(
    vllm: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one rank's engine process, whose requests go on at the other; then everything of both: they wait."""
    for name, value in VLLM_ENV.items():
        monkeypatch.setenv(name, value)
    ever: set[psutil.Process] = set()
    llm = await AsyncLLM.create(
        str(vllm.model),
        executor="vllm",
        executor_options={"python": str(vllm.python), "args": ENGINE_FLAGS},
        data_parallel_size=2,
        failover="resume",
        failover_timeout_s=START_S,
        restart_engine=2,
        ready_timeout_s=START_S,
        forward_engine_log=False,
    )
    async with llm, asyncio.timeout(3 * START_S):
        ever.update(family())
        streams = [Stream(llm, NUM_TOKENS, rank) for rank in range(2)]
        for stream in streams:
            await stream.began.wait()
        engine_of(llm, 1).kill()
        for stream in streams:
            await stream.expect_whole()
        assert states(llm)[0] == "ready"
        await until(lambda: states(llm) == ["ready"] * 2, START_S, "the rank that was killed")
        assert [status.num_restarts for status in llm.engine_statuses()] == [0, 1]
        await Stream(llm, 40, 1).expect_whole()

        ever.update(family())
        streams = [Stream(llm, NUM_TOKENS, rank) for rank in range(2)]
        for stream in streams:
            await stream.began.wait()
        for rank in range(2):
            os.killpg(launcher_of(llm, rank).pid, signal.SIGKILL)
        await until(lambda: "ready" not in states(llm), SETTLE_S, "both losses")
        for stream in streams:
            await stream.expect_whole()
        await until(lambda: states(llm) == ["ready"] * 2, START_S, "both ranks")
        assert [status.num_restarts for status in llm.engine_statuses()] == [1, 2]
        assert sum(status.num_lost for status in llm.engine_statuses()) == 0
        for rank in range(2):
            await Stream(llm, 40, rank).expect_whole()
        ever.update(family())
    await until(lambda: not any(map(lives, ever)), SETTLE_S, "the end of all processes")
