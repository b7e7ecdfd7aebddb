"""A client whose four engines Ray has placed: they serve, and what is lost costs no request (issue 6)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from ray_cluster import TestCluster, engine_processes, raylet_of

from enginewire import AsyncLLM, SamplingParams
from enginewire.errors import RequestLostError

NUM_STREAMS = 32
BACK_WITHIN_S = 60.0
SETTINGS: dict[str, Any] = {
    "data_parallel_backend": "ray",
    "data_parallel_size": 4,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.02},
}
RESTARTED: dict[str, Any] = {"failover": "exact", "restart_engine": 10, "restart_window_s": 0.0}

PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


async def text_of(llm: AsyncLLM, rank: int, started: asyncio.Semaphore) -> str:
    """Run a request on one engine; its text, or the cause of its end."""
    text, is_started = "", False
    async for output in llm.generate(f"rank {rank}: so it goes on and on. ", PARAMS, data_parallel_rank=rank):
        text = output.outputs[0].text
        if not is_started:
            started.release()
            is_started = True
    return text


async def under_load(llm: AsyncLLM, disturb: Callable[[], object]) -> list[str | BaseException]:
    """Run requests on all engines, and do something once all have begun."""
    started = asyncio.Semaphore(0)
    running = [asyncio.ensure_future(text_of(llm, i % 4, started)) for i in range(NUM_STREAMS)]
    for _ in range(NUM_STREAMS):
        await started.acquire()
    disturb()
    return await asyncio.gather(*running, return_exceptions=True)


async def back(llm: AsyncLLM, num_restarts: int) -> None:
    """Wait until every engine serves, after so many restarts."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while True:
            statuses = llm.engine_statuses()
            is_back = all(status.state == "ready" for status in statuses)
            if is_back and sum(status.num_restarts for status in statuses) >= num_restarts:
                return
            await asyncio.sleep(0.05)


def lose(cluster: TestCluster) -> Any:
    """Lose a node that has engines; return it."""
    raylets = {process.raylet for process in engine_processes()}
    node = next(node for node in cluster.nodes if raylet_of(node) in raylets)
    cluster.lose(node)
    return node


@pytest.mark.anyio
async def test_a_killed_actor_and_a_lost_node_cost_no_request(cluster: TestCluster) -> None:
    async with AsyncLLM("echo", **SETTINGS, **RESTARTED) as llm:
        assert len({process.raylet for process in engine_processes()}) > 1, "they are spread over nodes"
        undisturbed = await under_load(llm, lambda: None)
        assert all(isinstance(text, str) and len(text) == PARAMS.max_tokens for text in undisturbed)

        assert await under_load(llm, lambda: os.kill(engine_processes()[0].actor, signal.SIGKILL)) == undisturbed
        await back(llm, 1)

        lost: list[Any] = []
        assert await under_load(llm, lambda: lost.append(lose(cluster))) == undisturbed
        cluster.replace(lost[0])  # in this thread: Ray sets signal handlers
        await back(llm, 2)
        assert len(engine_processes()) == 4
        assert await under_load(llm, lambda: None) == undisturbed
        assert sum(status.num_lost for status in llm.engine_statuses()) == 0


@pytest.mark.anyio
async def test_without_failover_requests_of_a_lost_node_fail_with_the_cause(cluster: TestCluster) -> None:
    async with AsyncLLM("echo", **SETTINGS) as llm:
        lost: list[Any] = []
        results = await under_load(llm, lambda: lost.append(lose(cluster)))
        cluster.replace(lost[0])  # in this thread: Ray sets signal handlers
        errors = [result for result in results if isinstance(result, BaseException)]
        assert 0 < len(errors) < NUM_STREAMS
        assert all(isinstance(error, RequestLostError) for error in errors)
        assert all("connection to it was lost" in str(error) or "its actor is gone" in str(error) for error in errors)
        dead = {status.index for status in llm.engine_statuses() if status.state == "dead"}
        alive = next(status.index for status in llm.engine_statuses() if status.state == "ready")
        assert len(errors) == len(dead) * NUM_STREAMS // 4
        assert len(await text_of(llm, alive, asyncio.Semaphore(0))) == PARAMS.max_tokens
