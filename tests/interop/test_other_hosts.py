"""vLLM engines on another host: a network namespace at the other end of a cable that can be cut."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from deployment import Deployment
from environments import Environment
from processes import ENGINE_FLAGS, Runner, expect_ready, poll_until

from enginewire.testing import free_tcp_port
from support.netns import Host, two_hosts

HEARTBEAT_TIMEOUT_S = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """One for the frontend, where the test is too, and one for the engines."""
    with two_hosts() as (near, far), near.entered():
        yield near, far


@pytest.fixture(scope="module")
def served(hosts: tuple[Host, Host], vllm: Environment, runner: Runner) -> Iterator[Deployment]:
    """Our server with internal load balancing, and two headless vLLM engines on the other host."""
    near, far = hosts
    where = ["--data-parallel-address", near.address, "--data-parallel-rpc-port", str(free_tcp_port())]
    silence = ["--set", f"heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}"]
    size = ["--data-parallel-size", "2"]
    with contextlib.ExitStack() as stack:
        serving = runner.serve(vllm.model, *size, "--data-parallel-size-local", "0", *where, *silence)
        server, url = stack.enter_context(serving)
        with far.entered():
            flags = ["--headless", *size, "--data-parallel-size-local", "2", *where, *ENGINE_FLAGS]
            engines = stack.enter_context(runner.vllm(vllm, "engines", *flags))
        expect_ready(f"{url}/ready", server, engines, timeout_s=600)
        poll_until(lambda: set(healths(url)) == {"ready"}, 600, "both engines", server, engines)
        yield Deployment(url, vllm.model.name, server, engines)


def healths(url: str) -> list[str]:
    """Return how each engine is, by its index."""
    return [engine["health"] for engine in httpx.get(f"{url}/state").json()["engines"]]


def test_both_engines_of_the_other_host_serve(served: Deployment) -> None:
    """Twelve at once: six each."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(served.streaming(max_tokens=100)) for _ in range(12)]
        served.expect_running(12)
        running = [engine["num_running"] for engine in served.get("/state").json()["engines"]]
        assert running == [6, 6]
        for lines in streams:
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_cut_cable_fails_what_runs_and_service_is_back_when_it_is_mended(
    served: Deployment, hosts: tuple[Host, Host]
) -> None:
    """Nobody says anything when a host is silent: the heartbeat finds out. The engines are not restarted."""
    _, far = hosts
    with served.streaming(max_tokens=1000) as one, served.streaming(max_tokens=1000) as other:
        served.expect_running(2)
        begin = time.monotonic()
        far.cut()
        ends = [[line for line in lines if line][-1] for lines in (one, other)]
        assert time.monotonic() - begin < HEARTBEAT_TIMEOUT_S + 5
    for end in ends:
        assert json.loads(end.removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert httpx.get(f"{served.url}/ready").status_code == 503
    far.restore()
    expect_ready(f"{served.url}/ready", served.server, served.engine, timeout_s=60)
    poll_until(lambda: healths(served.url) == ["ready"] * 2, 60, "both engines")
    served.expect_running(0)  # what ran before the cut is aborted
    with served.streaming(max_tokens=20) as lines:
        assert [line for line in lines if line][-1] == "data: [DONE]"
