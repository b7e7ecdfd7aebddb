"""The engine dies."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from serving import Served, serve, wait_until

LONG = 100_000


def run(served: Served, path: str, stream: bool) -> tuple[float, str]:
    """Ask for a long text; return when that ended, and how."""
    body = {"max_tokens": LONG, "stream": stream, "ignore_eos": True}
    if path == "/v1/completions":
        body["prompt"] = "abc"
    else:
        body["messages"] = [{"role": "user", "content": "abc"}]
    text = ""
    with httpx.stream("POST", served.url + path, json=body, timeout=30) as response:
        for data in response.iter_text():
            text += data
    return time.monotonic(), f"{response.status_code} {text}"


@pytest.fixture
def served() -> Iterator[Served]:
    with serve("echo", "--executor-option", "step_time_s=0.01") as served:
        yield served


def test_killed_engine_ends_everything_within_two_seconds(served: Served) -> None:
    kinds = [(path, stream) for path in ("/v1/completions", "/v1/chat/completions") for stream in (True, False)]
    kinds += kinds[:2]
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
        running = [pool.submit(run, served, *kind) for kind in kinds]
        wait_until(lambda: served.num_running() == len(kinds), "all six run")
        killed = time.monotonic()
        served.engine().kill()
        for (_, stream), future in zip(kinds, running, strict=True):
            ended, response = future.result(10)
            assert ended - killed < 2
            if stream:
                assert response.startswith("200 ")
                last = response.rstrip("\n").rsplit("\n\n", 1)[1]
                assert last.startswith('data: {"error":{')
                assert response.count('"error"') == 1
                assert "[DONE]" not in response
            else:
                assert response.startswith("503 ")
                assert '"code":"engine_dead"' in response
            assert "SIGKILL" in response
    for path in ("/health", "/ready"):
        response = httpx.get(served.url + path)
        assert time.monotonic() - killed < 2
        assert response.status_code == 503
        assert "SIGKILL" in response.json()["error"]["message"]
    begin = time.monotonic()
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"})
    assert time.monotonic() - begin < 1
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert served.log.count("logger=enginewire.server.health") == 1


def test_official_client_raises_in_the_middle_of_a_stream(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = sdk.completions.create(model="echo", prompt="abc", max_tokens=LONG, stream=True)
        next(iter(stream))
        served.engine().kill()
        with pytest.raises(openai.APIError, match="is dead"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            sdk.completions.create(model="echo", prompt="abc")


def test_idle_server_notices_a_death(served: Served) -> None:
    served.engine().kill()
    wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, "health says so", timeout_s=2)
    assert httpx.get(f"{served.url}/ready").status_code == 503
    assert served.metric("enginewire:engine_up") == 0
    assert httpx.get(f"{served.url}/version").status_code == 200


def test_process_exits_with_the_engine_when_told_to() -> None:
    with serve("echo", "--exit-on-engine-death", "--executor-option", "step_time_s=0.01") as served:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, served, "/v1/completions", True)
            wait_until(lambda: served.num_running() == 1, "it runs")
            served.engine().kill()
            _, response = running.result(10)
        assert '"error"' in response
        assert served.process.wait(5) == 1
        assert "SIGKILL" in served.log


def test_idle_process_exits_with_the_engine_when_told_to() -> None:
    with serve("echo", "--exit-on-engine-death") as served:
        served.engine().kill()
        assert served.process.wait(5) == 1


def test_engine_that_fails_a_step_is_reported_with_its_cause() -> None:
    with serve("echo", "--executor-option", "fail_at_step=3") as served:
        response = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert "fail_at_step" in served.log


def test_stopped_engine_is_not_ready_but_not_dead() -> None:
    """It may go on; only its own answers tell."""
    with serve("echo", "--stall-timeout", "0.8") as served:
        engine = served.engine()
        engine.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it is not ready")
            assert "not answered" in httpx.get(f"{served.url}/ready").text
            assert httpx.get(f"{served.url}/health").status_code == 200
        finally:
            engine.send_signal(signal.SIGCONT)
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 200, "it is ready again")


def test_busy_engine_that_makes_no_progress_is_not_ready() -> None:
    """Its loop answers, its executor does not come back from a step."""
    with serve("echo", "--stall-timeout", "0.8", "--executor-option", "step_time_s=3") as served:
        assert httpx.get(f"{served.url}/ready").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a", "max_tokens": 1}
            running = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=30)
            wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it is not ready")
            assert httpx.get(f"{served.url}/health").status_code == 200
            assert running.result(20).status_code == 200
        assert httpx.get(f"{served.url}/ready").status_code == 200


def test_server_whose_engine_cannot_start_says_why_and_exits() -> None:
    with pytest.raises(AssertionError, match="could not start"), serve("echo", "--executor-option", "load_time_s=-1"):
        pass
