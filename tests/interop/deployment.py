"""A server and an engine that talk over vLLM's wire, whoever made which, as an HTTP client sees them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from processes import Running, poll_until

SETTLE_S = 30.0
"""How long a state that should come may take on a busy machine."""


@dataclass
class Deployment:
    """A server in front of an engine.

    Attributes:
        url: the server's.
        model: the model's name in requests.
        server, engine: the processes.
    """

    url: str
    model: str
    server: Running
    engine: Running

    def metric(self, name: str) -> float:
        """Return a metric's value, the sum over its labels."""
        text = self.get("/metrics").text
        assert f"# TYPE {name} " in text, f"there is no metric {name}"
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    def num_running(self) -> float:
        """Return how many requests the engine says it runs."""
        return self.metric("vllm:num_requests_running")

    def expect_running(self, count: int, timeout_s: float = SETTLE_S) -> None:
        """Wait until the engine says that it runs so many requests."""
        poll_until(lambda: self.num_running() == count, timeout_s, f"{count} running requests")

    def post(self, path: str, body: object = None) -> httpx.Response:
        """POST and expect a 200."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60).raise_for_status()

    def get(self, path: str) -> httpx.Response:
        """GET and expect a 200."""
        return httpx.get(f"{self.url}{path}", timeout=60).raise_for_status()

    @contextlib.contextmanager
    def streaming(self, max_tokens: int) -> Iterator[Iterator[str]]:
        """Start a long completion and yield the lines of its stream, once the first has come."""
        body = {"model": self.model, "prompt": "1, 2, 3,", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {"), response.status_code
            yield lines
