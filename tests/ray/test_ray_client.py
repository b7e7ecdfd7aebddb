"""A client whose four engines Ray has placed: they serve, and what is lost costs no request (issue 6)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import TestCluster, engine_processes, raylet_of

from enginewire import AsyncLLM, SamplingParams
from enginewire.errors import RequestLostError

NUM_STREAMS = 32
BACK_WITHIN_S = 60.0
PROGRAM_S = 120.0
SETTINGS: dict[str, Any] = {
    "data_parallel_backend": "ray",
    "data_parallel_size": 4,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.02},
}
RESTARTED: dict[str, Any] = {"failover": "exact", "restart_engine": 10, "restart_window_s": 0.0}

PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def prompt_for(rank: int | None) -> str:
    """Make a prompt, which is what an engine repeats."""
    return f"rank {rank}: so it goes on and on, and no two words are alike. "


def whole_text(rank: int | None) -> str:
    """Return what an engine that nothing happens to answers."""
    assert PARAMS.max_tokens is not None
    return (prompt_for(rank) * PARAMS.max_tokens)[: PARAMS.max_tokens]


async def text_of(llm: AsyncLLM, rank: int | None, started: asyncio.Semaphore) -> str:
    """Run a request on one engine; return its text."""
    text, is_started = "", False
    async for output in llm.generate(prompt_for(rank), PARAMS, data_parallel_rank=rank):
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


def lose(cluster: TestCluster) -> tuple[Any, int]:
    """Lose a node that has engines; return it, and how many it had."""
    raylets = [process.raylet for process in engine_processes()]
    node = next(node for node in cluster.nodes if raylet_of(node) in raylets)
    cluster.lose(node)
    return node, raylets.count(raylet_of(node))


@pytest.mark.anyio
async def test_a_killed_actor_and_a_lost_node_cost_no_request(cluster: TestCluster) -> None:
    async with AsyncLLM("echo", **SETTINGS, **RESTARTED) as llm:
        assert len({process.raylet for process in engine_processes()}) > 1, "they are spread over nodes"
        undisturbed = [whole_text(i % 4) for i in range(NUM_STREAMS)]
        assert await under_load(llm, lambda: None) == undisturbed

        assert await under_load(llm, lambda: os.kill(engine_processes()[0].actor, signal.SIGKILL)) == undisturbed
        await back(llm, 1)

        lost: list[Any] = []
        assert await under_load(llm, lambda: lost.append(lose(cluster))) == undisturbed
        (node, num_lost), *_ = lost
        await back(llm, 1 + num_lost)
        elsewhere = engine_processes()
        assert len(elsewhere) == 4, "the lost node's are gone, and others are on the nodes that are left"
        assert {process.raylet for process in elsewhere} <= cluster.raylets()
        cluster.replace(node)  # in this thread: Ray sets signal handlers
        assert await under_load(llm, lambda: None) == undisturbed
        assert sum(status.num_lost for status in llm.engine_statuses()) == 0
        assert sum(status.num_moved for status in llm.engine_statuses()) >= (1 + num_lost) * NUM_STREAMS // 4


@pytest.mark.anyio
async def test_without_failover_requests_of_a_lost_node_fail_with_the_cause(cluster: TestCluster) -> None:
    async with AsyncLLM("echo", **SETTINGS) as llm:
        lost: list[Any] = []
        results = await under_load(llm, lambda: lost.append(lose(cluster)))
        (node, num_lost), *_ = lost
        cluster.replace(node)  # in this thread: Ray sets signal handlers
        errors = [result for result in results if isinstance(result, BaseException)]
        assert len(errors) == num_lost * NUM_STREAMS // 4
        assert all(result == whole_text(i % 4) for i, result in enumerate(results) if isinstance(result, str))
        assert all(isinstance(error, RequestLostError) for error in errors)
        assert all("connection to it was lost" in str(error) or "its actor is gone" in str(error) for error in errors)
        states = [status.state for status in llm.engine_statuses()]
        assert states.count("dead") == num_lost
        alive = states.index("ready")
        assert await text_of(llm, alive, asyncio.Semaphore(0)) == whole_text(alive)


@pytest.mark.anyio
async def test_engines_come_and_go_under_load() -> None:
    """Grow and shrink: no request fails, and nothing is left of those that went."""
    async with AsyncLLM("echo", **{**SETTINGS, "data_parallel_size": 2}, failover="exact", drain_timeout_s=0.5) as llm:
        is_over = False

        async def load() -> list[str]:
            texts = []
            while not is_over:
                texts.append(await text_of(llm, None, asyncio.Semaphore(0)))
            return texts

        running = [asyncio.ensure_future(load()) for _ in range(8)]
        for size in (4, 1, 2):
            await llm.scale_elastic_ep(size)
            assert len(engine_processes()) == size
            assert len(llm.engine_statuses()) == size
        is_over = True
        texts = [text for texts in await asyncio.gather(*running) for text in texts]
        assert {*texts} == {whole_text(None)}


DRIVER = """
import concurrent.futures, os, signal, sys
import ray
from enginewire import LLM, SamplingParams

def on_term(number, frame):
    print("told to stop", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_term)
    settings = {"data_parallel_backend": "ray", "data_parallel_size": 2, "forward_engine_log": False}
    if "thread" in sys.argv:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            made = threads.submit(lambda: LLM("echo", **settings)).result()
    else:
        made = LLM("echo", **settings)
    with made as llm:
        assert signal.getsignal(signal.SIGTERM) is on_term
        os.kill(os.getpid(), signal.SIGTERM)
        (output,) = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
        print(len(output.outputs[0].token_ids), flush=True)
        if "wait" in sys.argv:
            signal.pause()
    print(ray.is_initialized(), flush=True)
"""


@pytest.fixture
def driver(cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A program of its own that finds the cluster by RAY_ADDRESS."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    (tmp_path / "driver.py").write_text(DRIVER)
    return [sys.executable, str(tmp_path / "driver.py")]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_program_that_is_not_connected_is_for_the_time_it_has_engines(where: str, driver: list[str]) -> None:
    """And its handler of SIGTERM stays, which Ray replaces: we are a library."""
    done = subprocess.run([*driver, where], capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.stdout.splitlines() == ["told to stop", "3", "False"], done.stderr


def test_a_program_that_is_killed_leaves_no_engine(driver: list[str]) -> None:
    with subprocess.Popen([*driver, "wait"], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == ["told to stop\n", "3\n"]
        assert len(engine_processes()) == 2
        program.kill()
