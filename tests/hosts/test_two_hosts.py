"""A server on one host, engines on another, a cable between them: every mode, and what happens when it is cut."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import commands
import httpx
import pytest
from netns import Host, two_hosts

from enginewire.testing import wait_until

PATIENCE_S = 60.0
"""For processes that start, and engines that are found again, on a busy machine."""

HEARTBEAT = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_timeout_s=2")
"""A cable that is cut is noticed after two seconds."""

HTTP_PORT = 8000
"""Nobody else is on these hosts."""

pytestmark = pytest.mark.timeout(240)


@dataclass
class Server:
    """A server on a host, spoken to on the same host."""

    host: Host
    url: str

    def get(self, path: str) -> httpx.Response:
        with self.host.entered():
            return httpx.get(self.url + path, timeout=PATIENCE_S)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "echo", "prompt": "hello", "max_tokens": 5, **fields}
        with self.host.entered():
            return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.ConnectError:  # not yet
            return False

    def running(self) -> dict[str, float]:
        """Return how many requests each engine runs, by its index."""
        found = re.findall(r'^vllm:num_requests_running\{.*engine="(\d+)".*\} (\S+)$', self.get("/metrics").text, re.M)
        return {index: float(count) for index, count in found}


class Stream(threading.Thread):
    """A stream that goes on until somebody ends it."""

    def __init__(self, server: Server, rank: int | None = None) -> None:
        super().__init__(name="test-stream")
        self._server = server
        self._headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        self.num_events = 0
        self.last: dict[str, Any] = {}
        self._is_enough = False
        self.start()

    def end(self) -> None:
        """Hang up."""
        self._is_enough = True
        self.join(PATIENCE_S)

    def run(self) -> None:
        body = {"model": "echo", "prompt": "hello", "max_tokens": 100_000, "stream": True}
        url = f"{self._server.url}/v1/completions"
        with (
            self._server.host.entered(),
            httpx.stream("POST", url, json=body, headers=self._headers, timeout=PATIENCE_S) as response,
        ):
            for line in response.iter_lines():
                if self._is_enough:
                    return
                if line.startswith("data: {"):
                    self.last = json.loads(line.removeprefix("data: "))
                    self.num_events += 1


@contextlib.contextmanager
def server(host: Host, *words: str) -> Iterator[Server]:
    with commands.command(host, "serve", "echo", "--port", str(HTTP_PORT), "-dpa", host.address, *HEARTBEAT, *words):
        yield Server(host, f"http://127.0.0.1:{HTTP_PORT}")


def engines(host: Host, frontend: Host, *words: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return commands.engines(host, frontend, "--executor-option", "step_time_s=0.01", *HEARTBEAT, *words)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


MODES = {
    "internal": (["-dp", "2", "-dpl", "0"], ["-dp", "2", "-dpl", "2"], {"0", "1"}),
    "hybrid": (
        ["-dp", "4", "-dpl", "0", "-dpr", "2", "--data-parallel-hybrid-lb"],
        ["-dp", "4", "-dpl", "2", "-dpr", "2"],
        {"2", "3"},
    ),
    "external": (["-dp", "2", "-dpl", "0", "-dpn", "1"], ["-dp", "2", "-dpl", "1", "-dpr", "1"], {"1"}),
}
"""Flags of the server and of the engines, and the engines that the server has."""


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_cable_fails_what_runs_and_service_returns_with_it(hosts: tuple[Host, Host], mode: str) -> None:
    """Issue 5, "two hosts"; remote engines: link restored."""
    near, far = hosts
    server_words, engine_words, ranks = MODES[mode]
    with server(near, *server_words) as served, engines(far, near, *engine_words):
        wait_until(served.is_ready, PATIENCE_S, "readiness")
        assert set(served.running()) == ranks
        assert served.complete().json()["choices"][0]["text"] == "hello"
        streams = [Stream(served, int(rank)) for rank in sorted(ranks)]
        wait_until(lambda: all(stream.num_events for stream in streams), PATIENCE_S, "first tokens of each engine")

        far.cut()
        began = time.monotonic()
        for stream in streams:
            stream.join(PATIENCE_S)
            assert not stream.is_alive()
            assert stream.last["error"]["code"] == "engine_lost"
            assert "connection" in stream.last["error"]["message"]
        assert time.monotonic() - began < 20.0
        refused = served.complete()
        assert refused.status_code == 503, refused.text
        assert not served.is_ready()

        far.restore()
        wait_until(served.is_ready, PATIENCE_S, "return of the engines")
        assert served.complete().json()["choices"][0]["text"] == "hello"
        wait_until(lambda: set(served.running().values()) == {0.0}, PATIENCE_S, "end of what nobody waits for")


def test_a_cut_cable_leaves_the_engine_on_this_side_alone(hosts: tuple[Host, Host]) -> None:
    """One engine is here, the other behind the cable; requests go on where there is one."""
    near, far = hosts
    slow = ("--executor-option", "step_time_s=0.01")
    with (
        server(near, "-dp", "2", "-dpl", "1", *slow) as served,
        engines(far, near, "-dp", "2", "-dpl", "1", "-dpr", "1"),
    ):
        wait_until(served.is_ready, PATIENCE_S, "readiness")
        here, there = (Stream(served, rank) for rank in (0, 1))
        wait_until(lambda: here.num_events and there.num_events, PATIENCE_S, "first tokens of each engine")
        far.cut()
        there.join(PATIENCE_S)
        assert there.last["error"]["code"] == "engine_lost"
        before = here.num_events
        for _ in range(4):
            assert served.complete().status_code == 200
        wait_until(lambda: here.num_events > before, PATIENCE_S, "more tokens of the engine here")
        here.end()
        far.restore()
        wait_until(lambda: len(served.running()) == 2 and is_back(served, 1), PATIENCE_S, "return of the other")


def is_back(served: Server, rank: int) -> bool:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 2}
    with served.host.entered():
        response = httpx.post(
            f"{served.url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=PATIENCE_S
        )
    return response.status_code == 200


def test_two_nodes_with_servers_and_engines_of_their_own_serve_each_by_itself(hosts: tuple[Host, Host]) -> None:
    """Hybrid mode as a balancer in front sees it: a cut cable concerns nobody, as nothing runs over it."""
    near, far = hosts
    words = ("-dp", "4", "-dpl", "2", "--data-parallel-hybrid-lb", "-dpr")
    with server(near, *words, "0") as one, server(far, *words, "2") as other:
        for served in (one, other):
            wait_until(served.is_ready, PATIENCE_S, "readiness")
        far.cut()
        for served, ranks in ((one, {"0", "1"}), (other, {"2", "3"})):
            assert served.complete().status_code == 200
            assert set(served.running()) == ranks


def test_a_server_that_is_started_again_finds_the_engines_on_the_other_host(hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    words = ("-dp", "2", "-dpl", "0")
    with engines(far, near, "-dp", "2", "-dpl", "2"):
        for _ in range(2):
            with server(near, *words) as served:
                wait_until(served.is_ready, PATIENCE_S, "readiness")
                assert served.complete().json()["choices"][0]["text"] == "hello"
