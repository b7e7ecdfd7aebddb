"""vLLM's own frontends, unmodified, in front of our engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from deployment import SETTLE_S, Deployment
from environments import HERE, Environment
from processes import VLLM_ENV, Runner, expect_ready, poll_until
from texts import sdk

from enginewire.testing import free_tcp_port

pytestmark = pytest.mark.core

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def api_only(port: int) -> list[str]:
    """Return the flags of a vLLM server whose engine is started elsewhere."""
    where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
    return ["--data-parallel-size-local", "0", *where, "--max-model-len", "1024"]


@pytest.fixture(scope="module")
def served(vllm: Environment, runner: Runner) -> Iterator[Deployment]:
    """vLLM's API server in front of our OpenVINO engine, which is not told the version."""
    port = free_tcp_port()
    with (
        runner.headless("smollm2-135m", port) as engine,
        runner.vllm_server(vllm, *api_only(port)) as (server, url),
    ):
        expect_ready(f"{url}/health", server, engine)
        yield Deployment(url, str(vllm.model), server, engine)


@pytest.fixture
def client(served: Deployment) -> Iterator[openai.OpenAI]:
    """The official client."""
    with sdk(served.url) as client:
        yield client


def test_chat_on_our_engine(served: Deployment, client: openai.OpenAI) -> None:
    """The plain case."""
    answer = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=32, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_stream_on_our_engine(served: Deployment, client: openai.OpenAI) -> None:
    """Streaming gives the plain text in pieces."""
    ask = {"model": served.model, "messages": CHAT, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    events = client.chat.completions.create(**ask, stream=True)
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1


def test_two_samples_on_our_engine(served: Deployment, client: openai.OpenAI) -> None:
    """n=2: vLLM fans it out into two requests."""
    choices = client.completions.create(
        model=served.model, prompt="My name is", n=2, max_tokens=16, temperature=1.0, seed=7
    ).choices
    assert [choice.index for choice in choices] == [0, 1]
    assert choices[0].text != choices[1].text


def test_logprobs_on_our_engine(served: Deployment, client: openai.OpenAI) -> None:
    """As many as OpenVINO has: the sampled token's."""
    choice = client.completions.create(
        model=served.model, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=0
    ).choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) == 4
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs or [])


def test_stop_string_on_our_engine(served: Deployment, client: openai.OpenAI) -> None:
    """vLLM's frontend finds it and aborts the request."""
    completion = client.completions.create(
        model=served.model, prompt="1, 2, 3, 4, 5,", max_tokens=500, temperature=0, stop=["9"]
    )
    assert completion.choices[0].finish_reason == "stop"
    served.expect_running(0)


def test_a_client_that_disconnects_from_vllm_frees_our_engine(served: Deployment) -> None:
    """vLLM's frontend sends ABORT, and our engine lets go."""
    with served.streaming(max_tokens=900):
        served.expect_running(1)
    served.expect_running(0)


def test_sleeping_and_the_prefix_cache_on_our_engine(served: Deployment) -> None:
    """is_sleeping, sleep level 0, wake_up and reset_prefix_cache, as vLLM's development endpoints call them."""
    assert served.get("/is_sleeping").json() == {"is_sleeping": False}
    served.post("/sleep?level=0")
    assert served.get("/is_sleeping").json() == {"is_sleeping": True}
    served.post("/wake_up")
    assert served.get("/is_sleeping").json() == {"is_sleeping": False}
    served.post("/reset_prefix_cache")


def test_the_reason_of_a_refused_request_does_not_disturb_vllm(served: Deployment, client: openai.OpenAI) -> None:
    """Our engine has no logit_bias. Its ERROR output has a text as stop_reason (client-layer section 11)."""
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=served.model, prompt="x", max_tokens=4, logit_bias={"5": 1})
    assert client.completions.create(model=served.model, prompt="x", max_tokens=4).choices[0].finish_reason == "length"
    served.get("/health")


def test_vllms_offline_class_on_our_engine(vllm: Environment, runner: Runner) -> None:
    """``LLM(data_parallel_size_local=0)``: generate, chat, n=2, is_sleeping, reset_prefix_cache, abort, a refusal."""
    results = offline_results(vllm, runner, "smollm2-135m")
    (capital,), (sum_,) = results["greedy"]
    assert "Paris" in capital[0]
    assert capital[1] == sum_[1] == "length"
    assert "Paris" in results["chat"][0][0][0]
    assert len(results["n"][0]) == 2
    assert results["n"][0][0] != results["n"][0][1]
    assert results["is_sleeping"] is False
    assert results["reset_prefix_cache"] is True
    assert results["after_abort"] == [[capital]]
    assert results["refused"] == [[["", "error"]]]
    assert results["after_refusal"] == [[capital]]


def test_vllms_offline_class_on_our_echo_engine(vllm: Environment, runner: Runner) -> None:
    """A model that no vLLM knows: it answers with the prompt's tokens."""
    results = offline_results(vllm, runner, "echo", "--wire-version", vllm.version)
    assert results["greedy"][0][0] == ["The capital of France isThe capital of France isThe capital", "length"]
    assert results["is_sleeping"] is False


def offline_results(vllm: Environment, runner: Runner, model: str, *args: str) -> dict[str, Any]:
    """Run vLLM's offline class in front of an engine of ours and return what came of its calls."""
    port = free_tcp_port()
    with runner.headless(model, port, *args):
        command = [vllm.python, HERE / "offline_vllm.py", vllm.model, str(port)]
        with runner.run(f"vllm-{vllm.version}-offline", command, VLLM_ENV) as offline:
            offline.expect("RESULTS ")
            poll_until(lambda: offline.process.poll() is not None, SETTLE_S, "its exit")
    line = next(line for line in offline.log.splitlines() if line.startswith("RESULTS "))
    return dict(json.loads(line.removeprefix("RESULTS ")))
