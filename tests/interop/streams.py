"""Requests to vLLM's engines by ``AsyncLLM``, followed token by token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from processes import POLL_S

from enginewire import AsyncLLM
from support.followed import Followed

COUNT = "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
"""A prompt whose text shows a gap, and a token that came twice."""


class Stream(Followed):
    """A request that counts upwards, so that its text shows what is missing."""

    def __init__(self, llm: AsyncLLM, num_tokens: int, rank: int | None = None) -> None:
        super().__init__(llm, COUNT, num_tokens, rank)

    async def expect_whole(self) -> None:
        """Wait for its end; it has to have its full length, and count on without a gap."""
        assert await self.is_whole(), (self.error, self.finish_reason, len(self.token_ids))
        numbers = [int(number) for number in re.findall(r"\d+(?=,)", self.text)]
        assert numbers == list(range(14, 14 + len(numbers))), self.text
        assert len(numbers) > self.num_tokens // 8


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
