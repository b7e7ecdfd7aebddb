"""Several engines behind one frontend, where one side is vLLM's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from deployment import Deployment
from environments import Environment
from processes import Runner, expect_ready

from enginewire.testing import free_tcp_port


@pytest.fixture(scope="module")
def two_of_ours(vllm: Environment, runner: Runner) -> Iterator[Deployment]:
    """Two API servers and the coordinator of vLLM, over two OpenVINO engines of ours."""
    port = free_tcp_port()
    size = ["--data-parallel-size", "2"]
    where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
    api_only = [*size, "--data-parallel-size-local", "0", *where, "--api-server-count", "2", "--max-model-len", "1024"]
    with (
        runner.headless("smollm2-135m", port, *size) as engines,
        runner.vllm_server(vllm, *api_only) as (server, url),
    ):
        expect_ready(f"{url}/health", server, engines)
        yield Deployment(url, str(vllm.model), server, engines)


def finished_by_engine(served: Deployment) -> dict[str, float]:
    """Return how many requests each engine has finished, by its index, as vLLM counts them."""
    counts: dict[str, float] = {}
    for labels, value in re.findall(r"^vllm:request_success_total\{(.*)\} (\S+)$", served.get("/metrics").text, re.M):
        engine = re.search(r'engine="(\d+)"', labels)
        assert engine is not None
        counts[engine[1]] = counts.get(engine[1], 0) + float(value)
    return counts


def test_vllms_servers_and_coordinator_spread_requests_over_our_engines(two_of_ours: Deployment) -> None:
    """Forty at once, over as many connections, so that both servers get some."""

    async def ask_all() -> list[str]:
        async def ask(number: int) -> str:
            async with openai.AsyncOpenAI(base_url=f"{two_of_ours.url}/v1", api_key="x", max_retries=0) as client:
                completion = await client.completions.create(
                    model=two_of_ours.model, prompt=f"{number}, ", max_tokens=16, extra_body={"ignore_eos": True}
                )
                return completion.choices[0].finish_reason

        return await asyncio.gather(*map(ask, range(40)))

    assert asyncio.run(ask_all()) == ["length"] * 40
    counts = finished_by_engine(two_of_ours)
    assert sum(counts.values()) == 40
    assert min(counts["0"], counts["1"]) >= 12


def test_utilities_of_vllms_frontend_reach_both_engines(two_of_ours: Deployment) -> None:
    """It sends them to every engine and waits for all."""
    two_of_ours.post("/reset_prefix_cache")
    assert two_of_ours.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_disconnect_frees_the_engine_that_had_the_request(two_of_ours: Deployment) -> None:
    """The frontend remembers where each request went."""
    with two_of_ours.streaming(max_tokens=900):
        two_of_ours.expect_running(1)
    two_of_ours.expect_running(0)
    assert httpx.get(f"{two_of_ours.url}/health").status_code == 200
