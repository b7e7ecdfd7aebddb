"""More than there is room for, and readers that do not keep up."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import psutil
import pytest
from serving import Served, serve, wait_until
from test_disconnect import LONG, sent_request


def test_full_queue_is_refused_early_and_free_again_later(slow_echo: Served) -> None:
    """Four run, four wait; the ninth is told at once."""
    body = {"prompt": "abc", "max_tokens": LONG, "n": 8}
    with sent_request(slow_echo, "/v1/completions", body):
        wait_until(lambda: slow_echo.num_live() == 8, "all are taken in")
        start = time.monotonic()
        refused = httpx.post(f"{slow_echo.url}/v1/completions", json={"prompt": "a"})
        assert time.monotonic() - start < 1
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client = openai.OpenAI(base_url=f"{slow_echo.url}/v1", api_key="none", max_retries=0)
            with client:
                client.completions.create(model="echo", prompt="a", stream=True)
        assert httpx.get(f"{slow_echo.url}/ready").status_code == 200
    wait_until(lambda: slow_echo.num_live() == 0, "they are gone")
    assert httpx.post(f"{slow_echo.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_what_could_never_fit_is_a_400(slow_echo: Served) -> None:
    refused = httpx.post(f"{slow_echo.url}/v1/completions", json={"prompt": ["a"] * 3, "n": 3})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"


@pytest.mark.parametrize("several", ["completions", "prompts"])
def test_slow_reader_costs_little_memory_and_slows_nobody(several: str) -> None:
    """A client does not read what it asked for, 96,000 tokens; others are served meanwhile as fast as before.

    A prompt's only completion takes a shorter way to the connection than several do.
    """
    n, num_tokens = 32, 3000
    step = ["--executor-option", "step_time_s=0.002"]
    with serve("echo", *step) as served, httpx.Client(base_url=served.url, timeout=60) as http:

        def seconds() -> float:
            start = time.monotonic()
            assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 100}).status_code == 200
            return time.monotonic() - start

        seconds()
        alone = min(seconds() for _ in range(3))
        process = psutil.Process(served.process.pid)
        before = process.memory_info().rss
        prompt = "abc" * 10
        body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True}
        body |= {"prompt": prompt, "n": n} if several == "completions" else {"prompt": [prompt] * n}
        with sent_request(served, "/v1/completions", body) as connection:
            wait_until(lambda: served.metric("vllm:generation_tokens_total") > n * num_tokens / 2, "half is there", 60)
            assert min(seconds() for _ in range(3)) < 3 * alone + 0.5
            wait_until(lambda: served.num_live() == 0, "the engine has finished", 60)
            grown = process.memory_info().rss - before
            # What was not read is there, in fewer events: the texts are complete.
            received = b""
            while b"[DONE]" not in received[-100:]:
                received += connection.recv(1 << 20)
        texts = [""] * n
        num_events = 0
        for line in received.split(b"\n"):
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                num_events += 1
        assert texts == [(prompt * num_tokens)[:num_tokens]] * n
        assert num_events < 0.7 * n * num_tokens
        assert grown < 20e6  # the events would be as much
