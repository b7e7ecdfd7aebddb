"""Client gone means work gone."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Served, serve, wait_until

LONG = 3000
"""Tokens; a minute on the slow engine."""


@contextlib.contextmanager
def sent_request(served: Served, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a request over a connection that is closed at the end, with whatever there is left to read."""
    data = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # what is not read is soon felt
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), len(data), data)
        )
        yield connection


CHAT = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body", "num_live"),
    [
        ("/v1/completions", {"prompt": "abc", "stream": True}, 1),
        ("/v1/completions", {"prompt": "abc"}, 1),
        ("/v1/completions", {"prompt": "abc", "n": 3, "stream": True}, 3),
        ("/v1/completions", {"prompt": "abc", "n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}, 3),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 1),
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/completions", {"prompt": "a", "n": 8}, 8),  # half of them queued
    ],
)
def test_closing_the_connection_aborts_at_once(
    slow_echo: Served, path: str, body: dict[str, Any], num_live: int
) -> None:
    before = slow_echo.metric("enginewire:client_disconnects_total")
    with sent_request(slow_echo, path, {**body, "max_tokens": LONG}):
        wait_until(lambda: slow_echo.num_live() == num_live, "it runs")
    wait_until(lambda: slow_echo.num_live() == 0, "it is gone", timeout_s=2)
    wait_until(lambda: slow_echo.metric("enginewire:client_disconnects_total") == before + 1, "it is counted")
    assert slow_echo.metric("enginewire:num_completions_in_flight") == 0
    assert "status=499" in slow_echo.log


def test_closing_in_the_middle_of_a_stream_aborts(slow_echo: Served) -> None:
    with sent_request(
        slow_echo, "/v1/completions", {"prompt": "abc", "stream": True, "max_tokens": LONG}
    ) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
    wait_until(lambda: slow_echo.num_live() == 0, "it is gone", timeout_s=2)


@pytest.mark.parametrize("several", [{"prompt": ["abc" * 10] * 32}, {"prompt": "abc" * 10, "n": 32}])
def test_closing_a_stream_that_is_held_up_aborts(several: dict[str, Any]) -> None:
    """The server waits for its client to read, and the client leaves instead."""
    with serve("echo", "--executor-option", "step_time_s=0.001") as served:
        body = {**several, "stream": True, "max_tokens": 50_000}
        with sent_request(served, "/v1/completions", body):
            # 50,000 events of 180 bytes are more than the kernel's buffers take.
            wait_until(lambda: served.metric("vllm:generation_tokens_total") > 50_000, "it is held up", 60)
            assert served.num_live() == 32
        wait_until(lambda: served.num_live() == 0, "it is gone", timeout_s=5)
        assert served.metric("enginewire:client_disconnects_total") == 1
        assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_closing_before_the_body_is_complete_starts_nothing(slow_echo: Served) -> None:
    with socket.create_connection(("127.0.0.1", slow_echo.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: half\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt'
        )
    wait_until(lambda: "request_id=half" in slow_echo.log, "it is in the log")
    assert slow_echo.num_live() == 0


def test_aborting_by_id_ends_the_stream_with_what_there_is(slow_echo: Served) -> None:
    body = {"prompt": "abc", "stream": True, "max_tokens": LONG, "request_id": "to-abort", "n": 2}
    reasons = []
    with httpx.stream("POST", f"{slow_echo.url}/v1/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not reasons:
                aborted = httpx.post(f"{slow_echo.url}/abort_requests", json={"request_ids": ["to-abort", "unknown"]})
                assert aborted.json() == {"request_ids": ["to-abort", "unknown"]}
            reasons.append(json.loads(line[6:])["choices"][0]["finish_reason"])
    assert reasons.count("abort") == 2
    wait_until(lambda: slow_echo.num_live() == 0, "it is gone", timeout_s=2)
