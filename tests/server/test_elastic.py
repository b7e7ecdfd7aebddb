"""Engines that are added, taken out, and killed while a server streams; and that everybody who looks is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from chromium import HEALTH, Browser
from serving import START_S, Served, serve, wait_until
from test_many_engines import per_engine

from enginewire.testing import free_tcp_port

pytestmark = pytest.mark.timeout(240)

STEP = ["--executor-option", "step_time_s=0.01"]


class Load:
    """Clients that stream one completion after another, and compare each with what an undisturbed engine would say.

    Args:
        served: the server.
        at_once: how many clients.
        num_tokens: of each completion.

    Attributes:
        num_done: completions so far.
        failures: what went wrong, in words.
    """

    def __init__(self, served: Served, at_once: int, num_tokens: int = 60) -> None:
        self.num_done = 0
        self.failures: list[str] = []
        self._served = served
        self._at_once = at_once
        self._num_tokens = num_tokens
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        self._thread.join()

    def go_on(self, count: int) -> None:
        """Wait until so many more are done."""
        goal = self.num_done + count
        wait_until(lambda: self.num_done >= goal or self.failures, f"{count} more are done", START_S)
        assert self.failures == []

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._at_once)
        async with httpx.AsyncClient(base_url=self._served.url, timeout=START_S, limits=limits) as client:
            await asyncio.gather(*(self._stream_on(client, number) for number in range(self._at_once)))

    async def _stream_on(self, client: httpx.AsyncClient, number: int) -> None:
        prompt = f"this is stream number {number}; "
        expected = (prompt * self._num_tokens)[: self._num_tokens]
        body = {"prompt": prompt, "max_tokens": self._num_tokens, "temperature": 0, "stream": True}
        while not self._is_over:
            try:
                text = await self._text(client, body)
            except Exception as exc:
                text = repr(exc)
            if text != expected:
                self.failures.append(f"stream {number}: {text!r}")
                return
            self.num_done += 1

    async def _text(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["text"] for choice in choices)


def scale(served: Served, size: object, **more: object) -> httpx.Response:
    body = {"new_data_parallel_size": size, **more}
    return httpx.post(f"{served.url}/scale_elastic_ep", json=body, timeout=START_S)


def healths(served: Served) -> list[str]:
    return [engine["health"] for engine in httpx.get(f"{served.url}/state").json()["engines"]]


def top(served: Served) -> str:
    """Return what ``enginewire top`` shows now."""
    command = [sys.executable, "-m", "enginewire", "top", served.url, "--once"]
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True, env=env).stdout


def total(served: Served, name: str) -> float:
    return sum(per_engine(served, name))


@contextlib.contextmanager
def stream_on_engine(served: Served, rank: int) -> Iterator[None]:
    """Have an engine run a completion until the block ends."""
    headers, body = {"X-data-parallel-rank": str(rank)}, {"prompt": "abc", "max_tokens": 100_000, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=START_S) as response:
        lines = response.iter_lines()  # kept: the response ends with it
        next(lines)
        yield


def test_two_engines_become_four_and_one_under_load_and_everybody_is_told(
    open_page: Callable[[str], Browser],
) -> None:
    """Issue 6: 0 failed, and the page, metrics and top tell the story."""
    with serve("echo", "--admin", "-dp", "2", *STEP) as served, Load(served, 16) as load:
        page = open_page(served.url)
        load.go_on(32)
        assert page.evaluate(HEALTH) == "2 engines ready"
        grown = scale(served, 4)
        assert (grown.status_code, grown.json()) == (200, {"message": "Scaled to 4 data parallel engines"})
        assert per_engine(served, "enginewire:engine_up") == [1] * 4
        wait_until(lambda: min(per_engine(served, "vllm:request_success_total")) > 0, "each has its share", START_S)
        assert "4 engines: 4 ready" in top(served)
        page.wait_for(HEALTH, lambda health: health == "4 engines ready")

        with ThreadPoolExecutor(1) as pool:
            with stream_on_engine(served, 3):
                shrinking = pool.submit(scale, served, 1)
                wait_until(lambda: healths(served) == ["ready", *["leaving"] * 3], "three leave", START_S)
                assert "leaving" in top(served)
                page.wait_for(HEALTH, lambda health: health == "1 of 4 ready, 3 leaving")
                again = scale(served, 2)
                assert (again.status_code, again.json()["error"]["code"]) == (409, "scaling")
                is_scaling = httpx.post(f"{served.url}/is_scaling_elastic_ep").json()
                assert is_scaling == {"is_scaling_elastic_ep": True}
                assert httpx.get(f"{served.url}/health").status_code == 200
                assert httpx.get(f"{served.url}/ready").status_code == 200
                before = total(served, "vllm:generation_tokens_total")
            assert shrinking.result(START_S).status_code == 200
        assert per_engine(served, "enginewire:engine_up") == [1]
        assert len(per_engine(served, "vllm:generation_tokens_total")) == 4, "what they counted stays"
        assert total(served, "vllm:generation_tokens_total") >= before
        assert healths(served) == ["ready"]
        shown = top(served)
        assert "1 engine: 1 ready" in shown
        assert "deaths 0 · restarts 0 · resumed 0 · lost 0" in shown
        page.wait_for(HEALTH, lambda health: health == "ready")
        load.go_on(32)
        assert page.complaints() == []
        assert "level=error" not in served.log
    assert load.failures == []


def test_what_is_not_done_in_time_goes_on_elsewhere_and_counts_go_on_when_the_rank_is_back() -> None:
    """C-54."""
    with serve("echo", "--admin", "-dp", "2", "--failover", "exact", *STEP) as served, Load(served, 8, 200) as load:
        wait_until(lambda: min(per_engine(served, "vllm:num_requests_running")) >= 2, "both are busy")
        assert scale(served, 1, drain_timeout=0).status_code == 200
        resumed = per_engine(served, "enginewire:requests_resumed_total")
        assert resumed[0] == 0
        assert resumed[1] > 0
        assert total(served, "enginewire:requests_lost_total") == 0
        assert f"resumed {resumed[1]:.0f} · lost 0" in top(served)
        load.go_on(8)
        assert scale(served, 2).status_code == 200
        assert per_engine(served, "enginewire:requests_resumed_total") == resumed
        load.go_on(8)
    assert load.failures == []


def test_a_killed_engine_costs_no_request_and_everybody_is_told(open_page: Callable[[str], Browser]) -> None:
    """Issue 6: kill -9 of one of four engines under 64 greedy streams; it is back and has load again."""
    flags = ["-dp", "4", "--failover", "resume", "--restart-engine", "2", "--exit-on-engine-death"]
    with serve("echo", *flags, *STEP) as served, Load(served, 64, 150) as load:
        page = open_page(served.url)
        wait_until(lambda: min(per_engine(served, "vllm:num_requests_running")) >= 8, "all are busy", START_S)
        served.engines()[1].kill()
        wait_until(lambda: total(served, "enginewire:engine_deaths_total") == 1, "it is noticed")
        assert httpx.get(f"{served.url}/health").status_code == 200, "it comes back"
        wait_until(lambda: healths(served) == ["ready"] * 4, "it is back", START_S)
        wait_until(lambda: per_engine(served, "vllm:num_requests_running")[1] > 0, "it has load again", START_S)
        load.go_on(64)
        assert per_engine(served, "enginewire:engine_deaths_total") == [0, 1, 0, 0]
        assert per_engine(served, "enginewire:engine_restarts_total") == [0, 1, 0, 0]
        resumed = total(served, "enginewire:requests_resumed_total")
        assert resumed > 0
        assert total(served, "enginewire:requests_lost_total") == 0
        shown = top(served)
        assert f"deaths 1 · restarts 1 · resumed {resumed:.0f} · lost 0" in shown
        assert "killed by signal 9 (SIGKILL)" in shown
        deaths = "document.querySelector('#engines').innerText"
        page.wait_for(deaths, lambda text: "Last death: killed by signal 9 (SIGKILL), restarted once" in text)
        losses = f"1 death · 1 restart · {resumed:.0f} requests resumed"
        assert page.evaluate("document.querySelector('#losses').innerText") == losses
        assert page.complaints() == []
    assert load.failures == []


def test_without_failover_what_a_killed_engine_ran_is_counted_as_lost() -> None:
    with serve("echo", "-dp", "2", "--restart-engine", "1", *STEP) as served:
        with stream_on_engine(served, 1):
            served.engines()[1].kill()
            wait_until(lambda: per_engine(served, "enginewire:requests_lost_total") == [0, 1], "it is counted")
        wait_until(lambda: healths(served) == ["ready"] * 2, "it is back", START_S)


def test_an_engine_that_cannot_be_added_leaves_the_others_as_they_were() -> None:
    """Its end is no death of the server's engines, with --exit-on-engine-death neither."""
    here = str(Path(__file__).parent)
    flags = ["--admin", "-dp", "2", "--engine", "picky:PickyExecutor", "--exit-on-engine-death", *STEP]
    with serve("echo", *flags, env={"PYTHONPATH": here + ":" + ":".join(sys.path)}) as served, Load(served, 4) as load:
        load.go_on(4)
        failed = scale(served, 3)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "scaling_failed")
        assert "three are a crowd" in failed.json()["error"]["message"]
        assert healths(served) == ["ready"] * 2
        assert httpx.get(f"{served.url}/health").status_code == 200
        load.go_on(8)
    assert load.failures == []
    assert served.process.returncode == 0


def test_more_engines_take_more_requests_at_once() -> None:
    """The bound on requests follows the number of engines."""
    flags = ["--admin", "-dp", "2", "--max-num-seqs", "1", "--max-queue", "0", *STEP]
    with serve("echo", *flags) as served:
        for size, status in ((2, 400), (3, 200), (2, 400)):
            assert scale(served, size).status_code == 200
            answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "abc", "n": 3, "max_tokens": 2})
            assert answer.status_code == status, answer.text


def test_a_client_that_leaves_calls_it_off() -> None:
    with serve("echo", "--admin", "-dp", "2", *STEP) as served, stream_on_engine(served, 1):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/scale_elastic_ep", json={"new_data_parallel_size": 1}, timeout=1)
        wait_until(lambda: healths(served) == ["ready"] * 2, "it is as before")
        assert not httpx.get(f"{served.url}/state").json()["is_scaling"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ({"new_data_parallel_size": "two"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2.5}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 65_537}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 258}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2, "drain_timout": 1}, None),
        ({"new_data_parallel_size": True}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2, "drain_timeout": -1}, "drain_timeout"),
    ],
)
def test_what_is_no_number_of_engines_is_refused(http: httpx.Client, body: dict[str, object], param: str) -> None:
    refused = http.post("/scale_elastic_ep", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_server_of_one_engine_grows() -> None:
    """What a user tries first: neither flag nor second engine is needed for it."""
    with serve("echo", "--admin", *STEP) as served, Load(served, 4) as load:
        load.go_on(4)
        assert scale(served, 2).status_code == 200
        load.go_on(20)
        assert healths(served) == ["ready"] * 2
        assert scale(served, 1).status_code == 200
        load.go_on(4)


def test_a_server_that_was_made_for_one_engine_stays_with_it_and_says_so() -> None:
    with serve("echo", "--admin", "--set", "enable_elastic_ep=false") as served:
        refused = scale(served, 2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cannot_scale")
        assert "enable_elastic_ep" in refused.json()["error"]["message"]


LOCK_STEP = "--engine enginewire.executors.lock_step:LockStepEchoExecutor --set data_parallel_lock_step=true"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("-dp 2 --api-server-count 2", "several server processes"),
        ("-dp 2 -dpn 0 -dpp PORT", "somebody else spreads the load"),
        ("-dp 2 -dpr 1 -dpp PORT", "somebody else spreads the load"),
        (f"-dp 2 {LOCK_STEP}", "lock-step"),
    ],
)
def test_engines_whose_number_is_not_this_servers_to_change_say_why(flags: str, reason: str) -> None:
    with serve("echo", "--admin", *flags.replace("PORT", str(free_tcp_port())).split()) as served:
        refused = scale(served, 4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cannot_scale")
        assert reason in refused.json()["error"]["message"]


def test_a_server_that_is_told_to_stop_while_it_grows_leaves_nothing_behind() -> None:
    flags = ["--admin", "-dp", "2", *STEP]
    with serve("echo", *flags) as served, ThreadPoolExecutor(1) as pool:
        growing = pool.submit(scale, served, 6)
        wait_until(lambda: len(served.engines()) > 2, "there is a newcomer")
        engines = served.engines()
        served.process.terminate()
        assert served.process.wait(START_S) == 0
        with contextlib.suppress(httpx.TransportError):  # closed, where it did not come to an answer
            assert growing.result(START_S).status_code in (200, 503)
        wait_until(lambda: not any(engine.is_running() for engine in engines), "no engine is left")


def test_several_server_processes_fail_over_each_its_own_requests() -> None:
    flags = ["-dp", "3", "--api-server-count", "2", "--failover", "resume", *STEP]
    with serve("echo", *flags) as served, Load(served, 24, 150) as load:
        wait_until(lambda: min(per_engine(served, "vllm:num_requests_running")) >= 3, "all are busy", START_S)
        served.engines()[1].kill()
        wait_until(lambda: total(served, "enginewire:engine_deaths_total") == 1, "it is noticed")
        load.go_on(48)
        assert per_engine(served, "enginewire:requests_resumed_total")[1] > 0
        assert total(served, "enginewire:requests_lost_total") == 0
    assert load.failures == []
