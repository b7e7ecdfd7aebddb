"""``Tally``: what a response has cost so far."""

from __future__ import annotations

from collections.abc import Sequence

from enginewire.frontend.outputs import CompletionOutput
from enginewire.frontend.requests import RequestState
from enginewire.server.generation import Job
from enginewire.server.http import Request
from enginewire.server.openai.responses import PromptTokensDetails, Usage


class Tally:
    """Counts a response's tokens: those that were taken of its prompts' requests.

    Attributes:
        engines: those that made them, by index.
    """

    def __init__(self, job: Job) -> None:
        self._wants_text = job.wants_text
        self._requests: list[RequestState] = []
        self._finish_reason: str | None = None
        self.engines: set[int | None] = set()

    def begin(self, request: RequestState) -> None:
        """Count a prompt, when its first output is there."""
        self._requests.append(request)

    def add(self, news: Sequence[CompletionOutput]) -> None:
        """Take note of where tokens come from, and why they end."""
        for completion in news:
            self.engines.add(completion.engine_index)
            self._finish_reason = completion.finish_reason or self._finish_reason

    def usage(self) -> Usage:
        """Return the counts so far."""
        num_prompt_tokens, num_completion_tokens = self._num_prompt_tokens, self._num_completion_tokens
        cached = [request.num_cached_tokens for request in self._requests if request.num_cached_tokens is not None]
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(cached)) if cached else None,
        )

    def note(self, request: Request) -> None:
        """Put it into the access log's line."""
        if not self._requests:
            return
        request.notes["prompt_tokens"] = self._num_prompt_tokens
        request.notes["engine"] = ",".join(sorted(map(str, self.engines)))
        if self._finish_reason is not None:
            request.notes["finish_reason"] = self._finish_reason
        request.notes["completion_tokens"] = self._num_completion_tokens

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self._requests)

    @property
    def _num_completion_tokens(self) -> int:
        if not self._wants_text:
            return 0
        return sum(completion.num_taken for request in self._requests for completion in request.completions)
