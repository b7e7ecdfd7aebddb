"""Stopping and looking into the engine over HTTP."""

from __future__ import annotations

import concurrent.futures

import httpx
import pytest
from serving import Served, serve, wait_until


def test_admin_endpoints_are_not_there_unless_asked_for(slow_echo: Served) -> None:
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc"):
        assert httpx.post(slow_echo.url + path).status_code == 404
    assert "/sleep" not in httpx.get(f"{slow_echo.url}/openapi.json").json()["paths"]


def test_pause_makes_not_ready_but_stays_healthy(http: httpx.Client) -> None:
    assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "ok"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    ready = http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "engine 0 is paused")
    assert "retry-after" in ready.headers
    assert http.get("/health").status_code == 200
    assert http.get("/state").json()["engines"][0]["health"] == "paused"
    assert http.post("/resume").status_code == 200
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.get("/ready").status_code == 200


def test_sleep_and_wake_up(http: httpx.Client) -> None:
    assert http.post("/sleep", params={"level": 1}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/ready").json()["error"]["message"] == "engine 0 is asleep"
    assert http.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).status_code == 200
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("/sleep", {"level": 7}, "level"),
        ("/sleep", {"level": "deep"}, "level"),
        ("/sleep", {"mode": "never"}, "mode"),
        ("/pause", {"mode": "never"}, "mode"),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache"),
        ("/wake_up", {"tags": "everything"}, "tags"),
    ],
)
def test_wrong_parameters_are_a_400(http: httpx.Client, path: str, params: dict[str, str], param: str) -> None:
    response = http.post(path, params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_prefix_cache_can_be_reset(http: httpx.Client) -> None:
    assert http.post("/reset_prefix_cache").json() == {"success": True}


def test_collective_rpc_returns_one_result_per_worker(http: httpx.Client) -> None:
    made = http.post("/collective_rpc", json={"method": "echo", "args": [1], "kwargs": {"a": "b"}})
    assert made.json() == {"results": [{"args": [1], "kwargs": {"a": "b"}}]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"method": "raise_error", "args": ["broken on purpose"]}, "broken on purpose"),
        ({"method": "no_such_method"}, "no method 'no_such_method'"),
        ({"method": "sleep_for", "kwargs": {"minutes": 1}}, "minutes"),
    ],
)
def test_collective_rpc_that_fails_is_a_400_in_the_engines_words(
    http: httpx.Client, echo: Served, call: dict[str, object], words: str
) -> None:
    """Clients repeat a call by themselves after a 5xx, whatever it has done already."""
    failed = http.post("/collective_rpc", json=call, headers={"X-Request-Id": "fails"})
    assert failed.status_code == 400
    error = failed.json()["error"]
    assert (error["param"], error["code"]) == ("method", "engine_call_failed")
    assert words in error["message"]
    wait_until(lambda: "request_id=fails " in echo.log, "its line is written")
    assert not any("exception=" in line for line in echo.log.splitlines() if "request_id=fails " in line)


def test_collective_rpc_that_takes_too_long_is_a_504(http: httpx.Client) -> None:
    late = http.post("/collective_rpc", json={"method": "sleep_for", "args": [0.3], "timeout": 0.01})
    assert late.status_code == 504
    for timeout in (0, -1):
        refused = http.post("/collective_rpc", json={"method": "echo", "timeout": timeout})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")


def test_requests_wait_while_the_engine_is_paused(http: httpx.Client, echo: Served) -> None:
    http.post("/pause")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        wait_until(lambda: http.get("/state").json()["num_in_flight"] == 1, "it is taken in")
        assert not waiting.done()
        http.post("/resume")
        assert waiting.result(10).json()["choices"][0]["text"] == "ab"


def test_admin_on_an_open_address_needs_a_key() -> None:
    with pytest.raises(AssertionError, match="needs --api-key"), serve("echo", "--admin", "--host", "0.0.0.0"):
        pass


def test_key_guards_everything_but_health_and_metrics() -> None:
    with (
        serve("echo", "--api-key", "secret-1", "--api-key", "secret-2") as served,
        httpx.Client(base_url=served.url) as http,
    ):
        for path in ("/health", "/ready", "/metrics", "/version", "/", "/openapi.json"):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/state"):
            assert http.get(path).status_code == 401, path
        for key in ("Bearer wrong", "Bearer secret-1x", "Bearer", "secret-1", "Basic secret-1", "Bearer s\u00e9cret"):
            refused = http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": key.encode()})
            assert refused.status_code == 401, key
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer secret-1", "bearer secret-2"):
            assert http.get("/v1/models", headers={"Authorization": key}).status_code == 200
        assert "secret" not in served.log
        assert "securitySchemes" in http.get("/openapi.json").json()["components"]


def test_key_may_come_from_the_environment() -> None:
    with serve("echo", env={"ENGINEWIRE_API_KEY": "from-env"}) as served:
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/v1/models", headers={"Authorization": "Bearer from-env"}).status_code == 200


def test_model_has_the_names_it_is_given() -> None:
    with serve("echo", "--served-model-name", "org/one", "--served-model-name", "two") as served:
        http = httpx.Client(base_url=served.url)
        with http:
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["org/one", "two"]
            assert http.get("/v1/models/org/one").json()["id"] == "org/one"
            assert http.post("/v1/completions", json={"model": "two", "prompt": "a"}).json()["model"] == "org/one"
            assert http.post("/v1/completions", json={"model": "echo", "prompt": "a"}).status_code == 404
            wait_until(lambda: 'model_name="org/one"' in http.get("/metrics").text, "the name is in the metrics")
