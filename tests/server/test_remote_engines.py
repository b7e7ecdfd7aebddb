"""A server over engines that somebody else starts, as its clients see it: losses and returns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from serving import Served, serve, wait_until
from test_many_engines import SLOW, complete, per_engine
from test_server_processes import STREAM, clients_of_each, events, streaming

from enginewire.testing import free_tcp_port

pytestmark = pytest.mark.timeout(240)

RETURN_S = 30.0
"""From the start of an engine's process to its first request, on a busy machine."""


class Node:
    """A command that runs one engine, started again and again on the same port.

    Args:
        port: where the frontend is.
        index: of the engine.
        size: how many engines there are in all.
    """

    def __init__(self, port: int, index: int = 0, size: int = 1) -> None:
        words = ["--headless", "-dpp", str(port), "-dp", str(size), "-dpl", "1", "-dpr", str(index)]
        self._command = [sys.executable, "-m", "enginewire", "serve", "echo", *words, *SLOW]
        self.start()

    def start(self) -> None:
        """Start it."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it, and its engine with it."""
        self.process.send_signal(number)
        self.process.wait(30)


@contextlib.contextmanager
def nodes(port: int, size: int) -> Iterator[list[Node]]:
    """Run a node for each engine."""
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(size):
            node = Node(port, index, size)
            stack.callback(node.end)
            started.append(node)
        yield started


@contextlib.contextmanager
def serve_over(port: int, size: int, *args: str) -> Iterator[Served]:
    """Serve with so many engines, all of them elsewhere."""
    words = ["-dp", str(size), "--data-parallel-size-local", "0", "-dpp", str(port)]
    with serve("echo", *words, *args) as served:
        yield served


def status(served: Served, path: str) -> int:
    return httpx.get(f"{served.url}{path}").status_code


def test_the_only_engine_is_lost_and_comes_back_while_the_server_runs() -> None:
    """Issue 4: requests fail within 2 s, /ready is 503, and a restart of the engine brings service back."""
    port = free_tcp_port()
    with (
        nodes(port, 1) as (node,),
        serve_over(port, 1) as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
    ):
        for deaths in (1, 2):
            with streaming([client]) as (lines,):
                wait_until(lambda: served.num_running() == 1, "it runs")
                killed = time.monotonic()
                node.end()
                error = json.loads(events(lines)[-1])["error"]
                assert time.monotonic() - killed < 2
                assert error["code"] == "engine_lost"
            assert (status(served, "/ready"), status(served, "/health")) == (503, 200)
            refused = complete(served, max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "retry-after" in refused.headers
            (engine,) = httpx.get(f"{served.url}/state").json()["engines"]
            assert (engine["health"], engine["num_running"], engine["num_deaths"]) == ("lost", 0, deaths)
            node.start()
            wait_until(lambda: status(served, "/ready") == 200, "it is back", timeout_s=RETURN_S)
            assert complete(served, max_tokens=3).json()["choices"][0]["text"] == "abc"
            assert per_engine(served, "enginewire:engine_up") == [1.0]


def test_an_engine_that_is_not_awaited_makes_the_server_unhealthy() -> None:
    """Issue 4: /health is 503 too when no return is awaited."""
    port = free_tcp_port()
    with nodes(port, 1) as (node,), serve_over(port, 1, "--set", "engine_return_timeout_s=0") as served:
        node.end()
        wait_until(lambda: status(served, "/health") == 503, "health says so")
        assert complete(served, max_tokens=1).json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("processes", [1, 2])
def test_one_of_two_engines_elsewhere_is_lost_and_comes_back(processes: int) -> None:
    port = free_tcp_port()
    with nodes(port, 2) as (_, second), serve_over(port, 2, "--api-server-count", str(processes)) as served:
        pinned = httpx.Client(base_url=served.url, timeout=30, headers={"X-data-parallel-rank": "1"})
        with pinned, streaming([pinned]) as (lines,):
            wait_until(lambda: per_engine(served, "vllm:num_requests_running") == [0, 1], "it runs")
            second.end()
            assert json.loads(events(lines)[-1])["error"]["code"] == "engine_lost"
        assert (status(served, "/ready"), status(served, "/health")) == (200, 200)
        assert {complete(served, max_tokens=2).status_code for _ in range(6)} == {200}
        second.start()
        wait_until(lambda: per_engine(served, "enginewire:engine_up") == [1, 1], "it is back", timeout_s=RETURN_S)
        assert complete(served, rank=1, max_tokens=2).status_code == 200
        assert per_engine(served, "enginewire:engine_deaths_total") == [0, 1]


def test_every_process_takes_an_engine_back_that_was_restarted() -> None:
    port = free_tcp_port()
    with (
        nodes(port, 1) as (node,),
        serve_over(port, 1, "--api-server-count", "2") as served,
        clients_of_each(served) as clients,
    ):
        node.end()
        for (client,) in clients:
            wait_until(lambda client=client: client.get("/ready").status_code == 503, "it knows")
        node.start()
        for (client,) in clients:
            wait_until(lambda client=client: client.get("/ready").status_code == 200, "it is back", RETURN_S)
            assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_that_is_started_twice_is_refused_and_the_first_goes_on(processes: int) -> None:
    """Remote engines: two ways back."""
    port = free_tcp_port()
    with (
        nodes(port, 1),
        serve_over(port, 1, "--api-server-count", str(processes)) as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
        streaming([client], max_tokens=200) as (lines,),
        nodes(port, 1),
    ):
        wait_until(lambda: "was started twice" in served.log, "the second one is refused", timeout_s=RETURN_S)
        assert events(lines)[-1] == "[DONE]"
        assert complete(served, max_tokens=2).status_code == 200
        assert per_engine(served, "enginewire:engine_deaths_total") == [0]


def test_a_killed_process_is_replaced_over_engines_elsewhere() -> None:
    port = free_tcp_port()
    with nodes(port, 2), serve_over(port, 2, "--api-server-count", "2") as served:
        victim = served.server_pid(1)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: served.server_pid(1) != victim, "it is replaced", timeout_s=RETURN_S)
        with clients_of_each(served) as clients:
            for (client,) in clients:
                assert client.post("/v1/completions", json=STREAM | {"max_tokens": 5}).status_code == 200
        assert per_engine(served, "enginewire:engine_deaths_total") == [0, 0]
