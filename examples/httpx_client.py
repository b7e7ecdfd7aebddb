"""The server without a client library: httpx, for what OpenAI's client has no words for.

enginewire serve
python examples/httpx_client.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream up to ``[DONE]``; an error ends it early and is raised."""
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        yield event


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with httpx.Client(base_url=url, timeout=60) as client:
    print("ready:", client.get("/ready").is_success)

    tokens = client.post("/tokenize", json={"prompt": "The sky is"}).raise_for_status().json()["tokens"]
    print("tokens:", tokens)

    # Token ids in, token ids out, and sampling that only vLLM's extensions have.
    body = {"prompt": tokens, "max_tokens": 16, "top_k": 20, "return_token_ids": True, "stream": True}
    text = ""
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "example-1"}) as response:
        response.raise_for_status()
        print("request id:", response.headers["X-Request-Id"])
        for event in events(response):
            text += event["choices"][0]["text"]
            if len(text) > 20:
                break  # leaving the block closes the connection, and the engine stops
    print("text:", repr(text))

    refused = client.post("/v1/completions", json={"prompt": "x", "temperature": 9})
    print("error:", refused.status_code, refused.json()["error"]["message"])
