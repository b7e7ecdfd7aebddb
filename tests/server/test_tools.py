"""Tools, with a model whose template carries them. In process: no model here is made for tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from enginewire import AsyncLLM
from enginewire.server.app import build_app
from enginewire.server.settings import ServerSettings
from enginewire.text.tokenizer import ByteTokenizer

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


class ToolTokenizer(ByteTokenizer):
    """Its template offers tools, and answers with a call of them: what comes first is what is echoed."""

    CHAT_TEMPLATE = CALL + "{{ tools | tojson }}{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "max_tokens": len(CALL)}


def ask(**change: Any) -> str:
    """Ask in one process, without a socket between."""

    async def run() -> str:
        async with await AsyncLLM.create("echo", tokenizer=ToolTokenizer()) as llm:
            app = build_app(llm, ServerSettings(served_model_names=("echo",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                response = await client.post("/v1/chat/completions", json={**BODY, **change})
        assert response.status_code == 200, response.text
        return response.text

    return asyncio.run(run())


def test_call_that_ends_the_answer_becomes_a_tool_call() -> None:
    (choice,) = json.loads(ask(stop_token_ids=[ord("[")], max_tokens=500))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert "index" not in call


def test_streamed_call_comes_whole() -> None:
    events = ask(stop_token_ids=[ord("[")], max_tokens=500, stream=True).split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (call["index"], call["function"]["name"]) == (0, "f")
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(choice["delta"].get("content") for choice in choices)


def test_without_choice_of_tools_the_text_is_text() -> None:
    (choice,) = json.loads(ask(tool_choice="none"))["choices"]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
