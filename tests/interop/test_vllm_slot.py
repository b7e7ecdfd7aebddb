"""``enginewire-frontend`` in the slot that vLLM has for another frontend: ``vllm serve`` is then served by us."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from deployment import SETTLE_S, Deployment
from environments import Environment
from processes import ENGINE_FLAGS, Runner, expect_ready, lives, poll_until
from texts import sdk

pytestmark = pytest.mark.core

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
FRONTEND = Path(sys.executable).with_name("enginewire-frontend")


@pytest.fixture(scope="module")
def served(vllm: Environment, runner: Runner) -> Iterator[Deployment]:
    """``vllm serve`` with two environment variables."""
    slot = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(FRONTEND)}
    with runner.vllm_server(vllm, *ENGINE_FLAGS, env=slot) as (server, url):
        expect_ready(f"{url}/ready", server)
        yield Deployment(url, str(vllm.model), server, server)


@pytest.fixture
def client(served: Deployment) -> Iterator[openai.OpenAI]:
    """The official client."""
    with sdk(served.url) as client:
        yield client


def test_chat_in_the_slot(served: Deployment, client: openai.OpenAI) -> None:
    """It is we who answer."""
    answer = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=32, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert served.get("/state").json()["num_requests_served"] >= 1  # vLLM has no such page


def test_stream_in_the_slot(served: Deployment, client: openai.OpenAI) -> None:
    """Streaming gives the plain text in pieces."""
    ask = {"model": served.model, "messages": CHAT, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    pieces = [
        event.choices[0].delta.content or ""
        for event in client.chat.completions.create(**ask, stream=True)
        if event.choices
    ]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1


def test_disconnect_in_the_slot(served: Deployment) -> None:
    """The engine lets go of what its client has left."""
    with served.streaming(max_tokens=1000):
        served.expect_running(1)
    served.expect_running(0)


def test_sigterm_to_vllm_ends_us(served: Deployment) -> None:
    """vLLM owns our life in this mode; nothing is left behind."""
    family = psutil.Process(served.server.process.pid).children(recursive=True)
    assert served.server.children("frontend_slot") or served.server.children("enginewire-frontend")
    served.server.process.terminate()
    poll_until(lambda: served.server.process.poll() is not None, SETTLE_S, "the launcher's end")
    poll_until(lambda: not any(map(lives, family)), SETTLE_S, "everybody's end")
