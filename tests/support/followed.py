"""Requests by ``AsyncLLM`` that are followed token by token."""

from __future__ import annotations

import asyncio

from enginewire import AsyncLLM, RequestOutput, SamplingParams
from enginewire.errors import EngineClientError, RequestLostError


class Followed:
    """A greedy request that is followed to its end.

    Attributes:
        token_ids: that the user was told.
        text: of them.
        error: how it failed.
        began: set with the first token.
    """

    def __init__(self, llm: AsyncLLM, prompt: str, num_tokens: int, rank: int | None = None) -> None:
        self.prompt = prompt
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
            async for output in llm.generate(self.prompt, params, data_parallel_rank=self.rank):
                self.check(output)
                (completion,) = output.outputs
                self.token_ids, self.text = list(completion.token_ids), completion.text
                self.finish_reason = completion.finish_reason
                self.began.set()
        except EngineClientError as exc:
            self.error = exc

    def check(self, output: RequestOutput) -> None:
        """Look at an output before it is taken in."""
        (completion,) = output.outputs
        assert completion.token_ids[: len(self.token_ids)] == self.token_ids, "what was told stays"

    async def is_whole(self) -> bool:
        """Whether it ended as if nothing had happened."""
        await self.task
        return (self.error, self.finish_reason, len(self.token_ids)) == (None, "length", self.num_tokens)

    async def cause(self) -> str:
        """Return what it failed of, which has to be the engine's loss; it must not have ended in another way before."""
        await self.task
        assert isinstance(self.error, RequestLostError), (self.error, self.finish_reason, len(self.token_ids))
        assert self.finish_reason is None
        return str(self.error)
