"""Starting and leaving: signals, draining."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from serving import Served, serve, wait_until
from test_disconnect import sent_request

from enginewire.testing import free_tcp_port

STEP = ["--executor-option", "step_time_s=0.01"]


def complete(served: Served, max_tokens: int, stream: bool = False) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": max_tokens, "stream": stream}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_running_requests_finish_and_refuses_new_ones(number: signal.Signals) -> None:
    with serve("echo", *STEP) as served, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, served, 200, stream) for stream in (False, True)]
        wait_until(lambda: served.num_running() == 2, "they run")
        engine = served.engine()
        served.signal(number)
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it drains")
        assert httpx.get(f"{served.url}/ready").json()["error"]["message"] == "draining"
        assert httpx.get(f"{served.url}/health").status_code == 200
        refused = complete(served, 1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        plain, stream = (future.result(20) for future in running)
        assert plain.json()["choices"][0]["finish_reason"] == "length"
        assert plain.json()["usage"]["completion_tokens"] == 200
        assert stream.text.endswith("data: [DONE]\n\n")
        assert served.process.wait(10) == 0
        assert not engine.is_running()
        assert "level=error" not in served.log


def test_what_does_not_finish_in_time_is_aborted_with_what_there_is() -> None:
    with serve("echo", *STEP, "--shutdown-timeout", "0.3") as served, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, served, 100_000, stream) for stream in (False, True)]
        wait_until(lambda: served.num_running() == 2, "they run")
        served.signal(signal.SIGTERM)
        start = time.monotonic()
        plain, stream = (future.result(20) for future in running)
        assert plain.json()["choices"][0]["finish_reason"] == "abort"
        assert plain.json()["choices"][0]["text"].startswith("abcabc")
        last, done = stream.text.rstrip("\n").split("\n\n")[-2:]
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"
        assert done == "data: [DONE]"
        assert served.process.wait(10) == 0
        assert time.monotonic() - start < 5


def test_second_signal_leaves_at_once() -> None:
    with (
        serve("echo", *STEP) as served,
        sent_request(served, "/v1/completions", {"prompt": "a", "max_tokens": 100_000}),
    ):
        wait_until(lambda: served.num_running() == 1, "it runs")
        engine = served.engine()
        served.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it drains")
        served.signal(signal.SIGTERM)
        assert served.process.wait(1) == 128 + signal.SIGTERM
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "no engine is left")


def test_idle_server_leaves_quickly_with_open_connections() -> None:
    with serve("echo") as served, httpx.Client(base_url=served.url) as client:
        assert client.get("/health").status_code == 200  # and the connection stays open
        start = time.monotonic()
        served.signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
        assert time.monotonic() - start < 3


def test_starting_server_answers_that_it_starts() -> None:
    port = free_tcp_port()  # it has to be known before the server says it
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", str(port)]
    command += ["--executor-option", "load_time_s=1.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(url), "it listens")
        early = httpx.get(f"{url}/ready")
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "starting"
        assert httpx.get(f"{url}/health").json() == {"status": "starting"}
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "it is ready")
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health"))
    except httpx.ConnectError:
        return False


def test_server_that_is_told_to_stop_while_it_starts_leaves_no_engine() -> None:
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", "0", "--executor-option", "load_time_s=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout:
        parent = psutil.Process(process.pid)
        wait_until(lambda: any("enginewire.engine" in " ".join(c.cmdline()) for c in parent.children()), "it starts")
        children = parent.children(recursive=True)
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    wait_until(lambda: not any(child.is_running() for child in children), "no engine is left")


def test_server_that_is_told_to_stop_while_it_waits_for_engines_elsewhere_leaves() -> None:
    port, rpc_port = free_tcp_port(), free_tcp_port()
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", str(port)]
    command += ["--data-parallel-size-local", "0", "--data-parallel-rpc-port", str(rpc_port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        assert any("waiting for engines" in line for line in process.stderr), "it ended without waiting"
        process.terminate()
        assert process.wait(20) == 0


def test_taken_port_is_one_line_and_a_status() -> None:
    with serve("echo") as served:
        command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", str(served.port)]
        failed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert failed.returncode == 1
        assert str(served.port) in failed.stderr
        assert failed.stderr.count("\n") == 1
