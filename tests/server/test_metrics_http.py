"""``/metrics`` and ``/state`` of a running server."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, serve, wait_until

COMPLETIONS = "/v1/completions"


class Counters:
    """What has been counted since this was made; other tests use the same server."""

    def __init__(self, served: Served) -> None:
        self._url = f"{served.url}/metrics"
        self._before = self._read()

    def __call__(self, name: str, **labels: str) -> float:
        """Return the growth of all series of a name that have these labels."""
        now = self._read()
        return sum(
            now[series] - self._before.get(series, 0)
            for series in now
            if series[0] == name and labels.items() <= dict(series[1]).items()
        )

    def _read(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        response = httpx.get(self._url)
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }


@pytest.fixture
def counted(slow_echo: Served) -> Counters:
    wait_until(lambda: slow_echo.num_live() == 0, "earlier tests' requests are gone")
    return Counters(slow_echo)


def state(served: Served) -> Any:
    response = httpx.get(f"{served.url}/state")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def stream(served: Served, **fields: object) -> Generator[dict[str, Any], None, None]:
    """Yield the events of a completion; stopping early closes the connection."""
    body = {"prompt": "abcdef", "stream": True, "stream_options": {"include_usage": True}, **fields}
    with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_a_request_counts_the_same_streamed_or_not(slow_echo: Served, counted: Counters) -> None:
    httpx.post(slow_echo.url + COMPLETIONS, json={"prompt": "abcdef", "max_tokens": 5}, timeout=20).raise_for_status()
    *_, last = stream(slow_echo, max_tokens=5)
    assert last["usage"]["completion_tokens"] == 5
    assert counted("enginewire:http_requests_total", endpoint=COMPLETIONS, method="POST", status="200") == 2
    assert counted("vllm:request_success_total", finished_reason="length") == 2
    assert counted("vllm:prompt_tokens_total") == 12
    assert counted("vllm:generation_tokens_total") == 10
    assert counted("vllm:time_to_first_token_seconds_count") == 2
    assert counted("vllm:inter_token_latency_seconds_count") == 8
    assert counted("vllm:inter_token_latency_seconds_bucket", le="0.01") <= 2, "the engine takes 0.02 s for a token"
    assert counted("vllm:e2e_request_latency_seconds_count") == 2
    assert counted("vllm:request_queue_time_seconds_count") == 2
    assert counted("enginewire:num_completions_in_flight") == 0


def test_each_of_n_completions_counts(slow_echo: Served, counted: Counters) -> None:
    body = {"prompt": "abcdef", "max_tokens": 3, "n": 2}
    httpx.post(slow_echo.url + COMPLETIONS, json=body, timeout=20).raise_for_status()
    assert counted("vllm:request_success_total") == 2
    assert counted("vllm:request_generation_tokens_sum") == 6


def test_a_client_that_leaves_is_counted_and_its_work_ends(slow_echo: Served, counted: Counters) -> None:
    events = stream(slow_echo, max_tokens=5000)
    next(events)
    assert state(slow_echo)["num_in_flight"] == 1
    assert counted("enginewire:num_completions_in_flight") == 1
    events.close()
    wait_until(lambda: counted("enginewire:client_disconnects_total", endpoint=COMPLETIONS) == 1, "it is counted")
    wait_until(lambda: slow_echo.num_live() == 0, "the engine is idle")
    assert counted("vllm:request_success_total", finished_reason="abort") == 1
    assert counted("enginewire:http_requests_total", endpoint=COMPLETIONS, status="499") == 1
    assert counted("vllm:e2e_request_latency_seconds_count") == 0


def test_paths_that_clients_make_up_make_no_series(slow_echo: Served, counted: Counters) -> None:
    for path in ("/one", "/two", "/v1/models/three", "/v1/models/four/five"):
        assert httpx.get(slow_echo.url + path).status_code == 404
    assert counted("enginewire:http_requests_total", endpoint="unknown", method="GET", status="404") == 2
    assert counted("enginewire:http_requests_total", endpoint="/v1/models/{model}", status="404") == 2
    assert counted("enginewire:http_requests_total", status="404") == 4


def test_a_refused_request_is_counted_and_reaches_no_engine(slow_echo: Served, counted: Counters) -> None:
    body = {"prompt": "abc", "temperature": -1}
    assert httpx.post(slow_echo.url + COMPLETIONS, json=body).status_code == 400
    assert counted("enginewire:http_requests_total", endpoint=COMPLETIONS, status="400") == 1
    assert counted("vllm:request_success_total") == 0
    assert counted("vllm:prompt_tokens_total") == 0


def test_the_state_follows_a_stream(slow_echo: Served, counted: Counters) -> None:
    served_before = state(slow_echo)["num_requests_served"]
    events = stream(slow_echo, max_tokens=200)
    next(events)
    wait_until(lambda: state(slow_echo)["engines"][0]["num_running"] == 1, "it runs")
    wait_until(lambda: state(slow_echo)["engines"][0]["generation_tokens_per_s"] > 5, "tokens flow")
    engine = state(slow_echo)["engines"][0]
    assert (engine["health"], engine["num_waiting"], engine["death"]) == ("ready", 0, None)
    events.close()
    wait_until(lambda: state(slow_echo)["num_requests_served"] == served_before + 1, "it is over")
    assert sum(state(slow_echo)["engines"][0]["generation_history"]) > 5


def test_a_dead_engine_is_seen_in_both() -> None:
    with serve("echo") as served:
        served.engine().send_signal(signal.SIGKILL)
        wait_until(lambda: state(served)["engines"][0]["health"] == "dead", "the death is noticed")
        engine = state(served)["engines"][0]
        assert (engine["num_deaths"], engine["num_running"]) == (1, 0)
        assert "SIGKILL" in engine["death"]
        assert served.metric("enginewire:engine_up") == 0
        assert served.metric("enginewire:engine_deaths_total") == 1
