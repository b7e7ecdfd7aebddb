"""Requests to vLLM's engines by ``AsyncLLM``, followed token by token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from processes import POLL_S

from enginewire import AsyncLLM, SamplingParams
from enginewire.errors import EngineClientError, RequestLostError

COUNT = "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
"""A prompt whose text shows a gap, and a token that came twice."""


class Stream:
    """A greedy request that is followed to its end.

    Attributes:
        token_ids: that the user was told.
        text: of them.
        error: how it failed.
        began: set with the first token.
    """

    def __init__(self, llm: AsyncLLM, num_tokens: int, rank: int | None = None) -> None:
        self.rank = rank
        self.num_tokens = num_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.error: EngineClientError | None = None
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._follow(llm))

    async def _follow(self, llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True)
        try:
            async for output in llm.generate(COUNT, params, data_parallel_rank=self.rank):
                (completion,) = output.outputs
                assert completion.token_ids[: len(self.token_ids)] == self.token_ids, "what was told stays"
                self.token_ids, self.text = list(completion.token_ids), completion.text
                self.finish_reason = completion.finish_reason
                self.began.set()
        except EngineClientError as exc:
            self.error = exc

    async def expect_whole(self) -> None:
        """Wait for its end; it has to have its full length, and count on without a gap."""
        await self.task
        assert (self.error, self.finish_reason, len(self.token_ids)) == (None, "length", self.num_tokens)
        numbers = [int(number) for number in re.findall(r"\d+(?=,)", self.text)]
        assert numbers == list(range(14, 14 + len(numbers))), self.text
        assert len(numbers) > self.num_tokens // 8

    async def expect_loss(self) -> str:
        """Wait for its end, which has to be a failure for its engine's loss; return the cause."""
        await self.task
        assert isinstance(self.error, RequestLostError), (self.error, self.finish_reason, len(self.token_ids))
        assert self.finish_reason is None
        return str(self.error)


async def until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for what takes seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                await asyncio.sleep(POLL_S)
    except TimeoutError as exc:
        raise TimeoutError(f"not within {timeout_s:g} s: {what}") from exc


def states(llm: AsyncLLM) -> list[str]:
    """Return how each engine is."""
    return [status.state for status in llm.engine_statuses()]
