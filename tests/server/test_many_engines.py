"""Several engines behind one server, as its clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from serving import Served, serve, wait_until

SLOW = ["--executor-option", "step_time_s=0.02"]

pytestmark = pytest.mark.timeout(240)


def per_engine(served: Served, name: str, **labels: str) -> list[float]:
    """Return a metric's value for each engine, the sum over labels that are not given."""
    found: Counter[int] = Counter()
    for text, value in re.findall(
        rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE
    ):
        given = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if labels.items() <= given.items():
            found[int(given["engine"])] += float(value)
    return [found[index] for index in sorted(found)]


def complete(served: Served, rank: int | None = None, **body: object) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return httpx.post(f"{served.url}/v1/completions", json={"prompt": "abc", **body}, headers=headers, timeout=60)


async def burst(served: Served, count: int, **body: object) -> list[httpx.Response]:
    """Send equal requests all at once."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
        wanted = {"prompt": "the same for all", "temperature": 0, **body}
        return await asyncio.gather(*(client.post("/v1/completions", json=wanted) for _ in range(count)))


@dataclass
class Sent:
    """What a test has sent, and what it got.

    Attributes:
        reasons: completions by finish reason.
        tokens: of completions that ran to their end.
        left: requests whose client went away.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    left: int = 0


async def send_mixed(served: Served, count: int, at_once: int, max_tokens: int) -> Sent:
    """Send requests of all kinds: plain, streamed, several completions, stop strings, clients that leave."""
    sent, turns = Sent(), asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body: dict[str, object] = {"prompt": f"request {number}, ", "max_tokens": 1 + number * 7 % max_tokens}
        kind = number % 5
        async with turns:
            if kind == 0:
                await plain(client, body)
            elif kind == 1:
                await plain(client, body | {"n": 3, "temperature": 1.0})
            elif kind == 2:
                await plain(client, body | {"prompt": "end here", "stop": ["here"], "max_tokens": max_tokens})
            elif kind == 3:
                await streamed(client, body | {"stream": True, "stream_options": {"include_usage": True}})
            else:
                await abandoned(client, body | {"stream": True, "max_tokens": 100_000, "ignore_eos": True})

    async def plain(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        sent.reasons.update(choice["finish_reason"] for choice in answer["choices"])
        sent.tokens += answer["usage"]["completion_tokens"]

    async def streamed(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        sent.reasons.update(
            choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]
        )
        sent.tokens += events[-1]["usage"]["completion_tokens"]

    async def abandoned(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        sent.left += 1

    limits = httpx.Limits(max_connections=at_once)
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as all_,
    ):
        for number in range(count):
            all_.create_task(one(client, number))
    return sent


def check_counters(served: Served, sent: Sent, num_engines: int) -> None:
    """See that what the engines count is what was sent, and that each had its part."""
    wait_until(lambda: served.num_live() == 0, "nothing is left on any engine")
    wait_until(lambda: sum(per_engine(served, "enginewire:engine_requests_in_flight")) == 0, "nothing is in flight")
    ended = {
        reason: per_engine(served, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert {reason: sum(counts) for reason, counts in ended.items()} == {
        "stop": sent.reasons["stop"],
        "length": sent.reasons["length"],
        "abort": sent.left,
        "error": 0,
    }
    assert sum(per_engine(served, "vllm:request_generation_tokens_sum")) == sent.tokens
    assert sum(per_engine(served, "enginewire:engine_deaths_total")) == 0
    each = [sum(counts) for counts in zip(*ended.values(), strict=True)]
    assert len(each) == num_engines
    assert min(each) > 0.5 * sum(each) / num_engines, each


@pytest.fixture(scope="module", params=[2, 4, 16])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server over so many engines."""
    with serve("echo", "--data-parallel-size", str(request.param), *SLOW) as served:
        served.num_engines = request.param  # type: ignore[attr-defined]
        yield served


@pytest.fixture
def num_engines(served: Served) -> int:
    return int(served.num_engines)  # type: ignore[attr-defined]


def test_a_burst_of_equal_requests_splits_evenly(served: Served, num_engines: int) -> None:
    """Issue 5, C-51."""
    before = per_engine(served, "vllm:request_success_total", finished_reason="length")
    responses = asyncio.run(burst(served, 20, max_tokens=20))
    assert [response.status_code for response in responses] == [200] * 20
    after = per_engine(served, "vllm:request_success_total", finished_reason="length")
    counts = [now - then for now, then in zip(after, before, strict=True)]
    assert len(counts) == num_engines
    assert sum(counts) == 20
    assert max(counts) - min(counts) <= 1, counts


def test_a_request_may_say_which_engine_runs_it(served: Served, num_engines: int) -> None:
    """The header is vLLM's."""
    last = num_engines - 1
    before = per_engine(served, "vllm:request_success_total")
    for _ in range(3):
        assert complete(served, rank=last, max_tokens=1).status_code == 200
    after = per_engine(served, "vllm:request_success_total")
    assert [now - then for now, then in zip(after, before, strict=True)] == [0.0] * last + [3.0]
    assert re.findall(r"path=/v1/completions .* engine=(\S+)", served.log)[-3:] == [str(last)] * 3
    unknown = complete(served, rank=num_engines, max_tokens=1)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (400, "invalid_request_error")
    headers = {"X-data-parallel-rank": "first"}
    garbled = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert (garbled.status_code, garbled.json()["error"]["param"]) == (400, "X-data-parallel-rank")


def test_an_abort_reaches_the_engine_concerned_and_no_other(served: Served, num_engines: int) -> None:
    """Issue 5, C-51."""
    before = per_engine(served, "vllm:request_success_total", finished_reason="abort")
    with contextlib.ExitStack() as streams:
        client = streams.enter_context(httpx.Client(base_url=served.url, timeout=30))
        body = {"prompt": "abc", "max_tokens": 100_000, "stream": True}
        opened = []
        for rank in range(num_engines):
            one = contextlib.ExitStack()
            headers = {"X-data-parallel-rank": str(rank)}
            response = one.enter_context(client.stream("POST", "/v1/completions", json=body, headers=headers))
            opened.append((streams.enter_context(one), response.iter_lines()))
        running = lambda: per_engine(served, "vllm:num_requests_running")  # noqa: E731
        wait_until(lambda: running() == [1.0] * num_engines, "each engine runs one")
        opened[1][0].close()
        wait_until(lambda: running() == [float(rank != 1) for rank in range(num_engines)], "engine 1 runs none")
        after = per_engine(served, "vllm:request_success_total", finished_reason="abort")
        assert [now - then for now, then in zip(after, before, strict=True)] == [
            float(rank == 1) for rank in range(num_engines)
        ]
        for rank in range(num_engines):
            if rank != 1:
                assert next(line for line in opened[rank][1] if line.startswith("data:"))
    wait_until(lambda: sum(running()) == 0, "all are gone")


def test_the_state_lists_every_engine(served: Served, num_engines: int) -> None:
    state = httpx.get(f"{served.url}/state").json()
    assert [(engine["index"], engine["health"]) for engine in state["engines"]] == [
        (index, "ready") for index in range(num_engines)
    ]
    assert per_engine(served, "vllm:cache_config_info") == [1.0] * num_engines


@pytest.mark.parametrize("num_engines", [2, pytest.param(4, marks=pytest.mark.slow), 16])
def test_a_thousand_mixed_requests_all_complete_and_are_counted(num_engines: int) -> None:
    """Issue 5."""
    with serve("echo", "--data-parallel-size", str(num_engines), "--executor-option", "step_time_s=0.002") as served:
        sent = asyncio.run(send_mixed(served, 1000, at_once=64, max_tokens=40))
        assert sum(sent.reasons.values()) == 200 + 3 * 200 + 200 + 200
        assert sent.left == 200
        check_counters(served, sent, num_engines)
        assert "level=error" not in served.log


def test_an_engine_that_dies_costs_what_it_ran_and_nothing_else() -> None:
    """C-55; issue 5. Before the first byte it is a status, in a stream the last event."""
    with serve("echo", "--data-parallel-size", "3", *SLOW) as served, contextlib.ExitStack() as streams:
        client = streams.enter_context(httpx.Client(base_url=served.url, timeout=30))
        body = {"prompt": "abc", "max_tokens": 400, "stream": True}
        lines = []
        for rank in range(3):
            headers = {"X-data-parallel-rank": str(rank)}
            response = streams.enter_context(client.stream("POST", "/v1/completions", json=body, headers=headers))
            lines.append(response.iter_lines())
        wait_until(lambda: served.num_running() == 3, "each engine runs one")
        served.engines()[1].kill()
        last = [line for line in lines[1] if line.startswith("data:")][-1]
        error = json.loads(last[6:])["error"]
        assert (error["code"], error["type"]) == ("engine_lost", "server_error")
        assert "SIGKILL" in error["message"]
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, "health says so", timeout_s=2)
        assert httpx.get(f"{served.url}/ready").status_code == 200
        for rank in (0, 2):
            assert [line for line in lines[rank] if line.startswith("data:")][-1] == "data: [DONE]"
        assert per_engine(served, "enginewire:engine_up") == [1, 0, 1]
        assert per_engine(served, "enginewire:engine_deaths_total") == [0, 1, 0]
        assert per_engine(served, "vllm:request_success_total", finished_reason="error") == [0, 1, 0]
        for _ in range(4):
            assert complete(served, max_tokens=2).status_code == 200
        gone = complete(served, rank=1, max_tokens=2)
        assert gone.status_code == 503
        assert "retry-after" in gone.headers
