"""What the engines here lack and others have: it reaches an engine that announces it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from enginewire import AsyncLLM
from enginewire.executors import EchoExecutor
from enginewire.server.app import build_app
from enginewire.server.settings import ServerSettings
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest


class Steered(EchoExecutor):
    """Gives the token that is wanted most: by its bias, or the first one that is allowed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.capabilities = msgspec.structs.replace(self.capabilities, logit_bias=True, allowed_token_ids=True)
        self._wanted: dict[str, int] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in a request, and remember its token."""
        super().add_request(request)
        params = request.sampling_params
        assert params is not None
        biases = params.logit_bias or dict.fromkeys(params.allowed_token_ids or [], 0.0)
        assert all(abs(bias) <= 100 for bias in biases.values())
        self._wanted[request.request_id] = max(biases, key=lambda token_id: biases[token_id])

    def step(self) -> list[EngineCoreOutput]:
        """Make the token of each."""
        outputs = super().step()
        for output in outputs:
            output.new_token_ids = [self._wanted[output.request_id]]
        return outputs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logit_bias": {"88": 1, "89": 2.5, "90": -100}}, "YYY"),
        ({"logit_bias": {"88": 99, "89": 1e6}}, "YYY"),
        ({"allowed_token_ids": [90, 88]}, "ZZZ"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_offers_reaches_it(change: dict[str, Any], text: str, stream: bool) -> None:
    """OpenAI's bounds of a bias are -100 and 100; what is beyond them is cut."""

    async def run() -> httpx.Response:
        async with await AsyncLLM.create("echo", engine=Steered) as llm:
            transport = httpx.ASGITransport(build_app(llm, ServerSettings(served_model_names=("echo",))))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                body = {"prompt": "a", "max_tokens": 3, "stream": stream, **change}
                return await client.post("/v1/completions", json=body)

    response = asyncio.run(run())
    assert response.status_code == 200, response.text
    bodies = [part.removeprefix("data: ") for part in response.text.split("\n\n")] if stream else [response.text]
    choices = [json.loads(body)["choices"][0] for body in bodies if body.startswith("{")]
    assert "".join(choice["text"] for choice in choices) == text
