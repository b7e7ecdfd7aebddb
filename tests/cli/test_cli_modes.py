"""Servers and engines of one deployment, put together by flags as a user does."""

from __future__ import annotations

import re
import socket
import subprocess
from collections import Counter

import httpx
import pytest
from command_line import DEADLINE_S, Start

from enginewire.testing import free_tcp_port

NUM_REQUESTS = 6

MODES = {
    "all engines here": ("-dp 2", [], {0: 3, 1: 3}),
    "one here, one elsewhere": ("-dp 2 -dpl 1 -dpp PORT", ["-dp 2 -dpr 1 -dpl 1 -dpp PORT"], {0: 3, 1: 3}),
    "all elsewhere, on two nodes": (
        "-dp 3 -dpl 0 -dpp PORT",
        ["-dp 3 -dpl 2 -dpp PORT", "-dp 3 -dpr 2 -dpp PORT"],
        {0: 2, 1: 2, 2: 2},
    ),
    "hybrid": ("-dp 4 -dpr 2 -dpp PORT", [], {2: 3, 3: 3}),
    "external": ("-dp 2 -dpn 1 -dpp PORT", [], {1: 6}),
    "external, engine elsewhere": ("-dp 2 -dpn 1 -dpl 0 -dpp PORT", ["-dp 2 -dpr 1 -dpp PORT"], {1: 6}),
}


def url_of(process: subprocess.Popen[str]) -> str:
    """Wait until a server serves; return where."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, process.communicate(timeout=DEADLINE_S)[1]
    return found[0]


def completed_by_engine(url: str) -> Counter[int]:
    """Return how many requests each engine has completed, by the server's metrics."""
    lines = re.findall(
        r'^vllm:request_success_total\{engine="(\d+)",finished_reason="length".*\} (\S+)$',
        httpx.get(f"{url}/metrics").text,
        re.MULTILINE,
    )
    return Counter({int(index): int(float(count)) for index, count in lines})


@pytest.mark.parametrize("mode", MODES)
def test_requests_reach_the_engines_of_the_mode(start: Start, mode: str) -> None:
    """Protocol A.4, K.1. Equal requests one after the other are spread evenly."""
    flags, nodes, expected = MODES[mode]
    port = str(free_tcp_port())
    engines = [start("serve", "echo", "--headless", *node.replace("PORT", port).split()) for node in nodes]
    server = start("serve", "echo", "--port", "0", "--load-balancer", "inflight", *flags.replace("PORT", port).split())
    url = url_of(server)
    for _ in range(NUM_REQUESTS):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 5}, timeout=DEADLINE_S)
        assert answer.json()["choices"][0]["text"] == "hello"
    assert completed_by_engine(url) == expected
    for process in (server, *engines):
        process.terminate()
    for process in (server, *engines):
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("flags", ["-dp 2 -dpl 0", "-dp 2 -dpl 0 --api-server-count 2"])
def test_a_meeting_port_that_is_taken_is_one_line(start: Start, flags: str) -> None:
    with socket.create_server(("127.0.0.1", free_tcp_port())) as other:
        port = other.getsockname()[1]
        server = start("serve", "echo", "--port", "0", *flags.split(), "-dpp", str(port))
        _, log = server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 1
    assert log.splitlines()[-1] == (
        f"enginewire: error: cannot bind tcp://127.0.0.1:{port}: Address already in use; another process listens there"
    )
    assert "Traceback" not in log
