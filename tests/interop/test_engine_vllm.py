"""``--engine vllm --engine-python PATH``: vLLM started for the user, in its own environment, and its life owned."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import psutil
import pytest
from deployment import SETTLE_S, Deployment
from environments import Environment
from processes import VLLM_ENV, Runner, expect_ready, lives, poll_until
from texts import sdk

ENGINE_ARGS = "--enforce-eager --dtype bfloat16"


def engine_flags(vllm: Environment, engine_args: str = ENGINE_ARGS) -> list[str]:
    """Return the flags that start vLLM as the engine."""
    return [
        *("--engine", "vllm", "--engine-python", str(vllm.python), "--engine-args", engine_args),
        *("--max-model-len", "1024", "--max-num-seqs", "8"),
    ]


@pytest.fixture
def served(vllm: Environment, runner: Runner) -> Iterator[Deployment]:
    """Our server with vLLM as its engine."""
    with runner.serve(vllm.model, *engine_flags(vllm), env=VLLM_ENV) as (server, url):
        expect_ready(f"{url}/ready", server)
        yield Deployment(url, vllm.model.name, server, server)


@pytest.mark.core
def test_vllm_is_started_and_its_death_is_reported_with_the_end_of_its_log(served: Deployment) -> None:
    """It answers; after a SIGKILL of its engine process a running stream fails, and nothing is left of it."""
    with sdk(served.url) as client:
        answer = client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    family = psutil.Process(served.server.process.pid).children(recursive=True)
    (engine,) = served.server.children("EngineCore")
    with served.streaming(max_tokens=900) as lines:
        served.expect_running(1)
        engine.kill()
        rest = [line for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "engine 0" in error["message"]
    poll_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, SETTLE_S, "/health 503")
    poll_until(lambda: not any(map(lives, family)), SETTLE_S, "the end of all its processes")


def test_vllm_does_not_outlive_a_killed_server_even_while_it_starts(vllm: Environment, runner: Runner) -> None:
    """No orphan (C-62)."""
    with runner.serve(vllm.model, *engine_flags(vllm), env=VLLM_ENV) as (server, _):
        poll_until(lambda: server.children("EngineCore"), 120, "an engine process of vLLM")
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        poll_until(lambda: not any(map(lives, family)), SETTLE_S, "the end of all its processes")


def test_what_vllm_says_when_it_cannot_start_is_in_our_error(vllm: Environment, runner: Runner) -> None:
    """The launcher's exit status means nothing, the tail of its log does."""
    flags = engine_flags(vllm, "--enforce-eager --dtype bfloat17")
    with runner.serve(vllm.model, *flags, env=VLLM_ENV) as (server, _):
        assert server.process.wait(120) != 0
        assert "bfloat17" in server.tail
        assert "vLLM" in server.tail
