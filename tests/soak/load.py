"""Mixed load on echo engines through ``AsyncLLM``: every request is told beforehand what it has to get."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from story import Story

from enginewire import (
    AsyncLLM,
    CompletionOutput,
    EngineUnavailableError,
    RequestLostError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

HANG_S: Final = 150.0
"""A request that is not done by then hangs: more than ``failover_timeout_s`` and all its steps on a busy machine."""

SIGNS: Final = (
    "killed by signal 9",
    "failing at step",
    "it was taken out",
    "the connection to it was lost",
    "its connection is gone",
)
"""Causes of what engines suffer here."""

End = Literal["finish", "abort", "leave", "cancel"]

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz .,"


@dataclass
class Plan:
    """A request, what becomes of it, and what it has to get.

    Attributes:
        end: how its user ends it.
        after: at how many tokens, if not ``finish``.
        echo: what the engine makes of the prompt, whatever may end it earlier.
        text: of each completion, without a stop string.
        num_tokens: of each completion.
    """

    request_id: str
    prompt: str
    params: SamplingParams
    end: End
    after: int
    echo: str
    text: str
    num_tokens: int
    stop: str | None

    @classmethod
    def draw(cls, request_id: str, rng: random.Random) -> Plan:
        """Draw a request. A third ends early; one in ten may not be resumed."""
        prompt = f"{request_id}: " + "".join(rng.choices(LETTERS, k=rng.choice([4, 20, 100, 1000])))
        length = rng.choice([1, 7, 40, 150, 400])
        echo = (prompt * (length // len(prompt) + 1))[:length]
        more: dict[str, Any] = rng.choice(
            [{}, {}, {"logprobs": 2}, {"logprobs": 0, "prompt_logprobs": 1}, {"temperature": 0.8, "top_p": 0.9}]
        )
        if rng.random() < 0.1:
            more = {"temperature": 1.0, "seed": rng.randrange(1000)}
        text, num_tokens, stop = echo, length, None
        if rng.random() < 0.2:
            at = rng.randrange(length)
            stop = echo[at : at + 3]
            text = echo[: echo.index(stop)]
            num_tokens = len(text) + len(stop)
        params = SamplingParams(
            **{"temperature": 0, **more},
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=length,
            ignore_eos=True,
            stop=[] if stop is None else [stop],
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        end: End = rng.choice(["finish", "finish", "finish", "finish", "abort", "leave", "cancel"])
        return cls(request_id, prompt, params, end, rng.randint(0, length), echo, text, num_tokens, stop)

    @property
    def is_seeded(self) -> bool:
        """Whether it may be lost: its random numbers cannot go on elsewhere."""
        return self.params.seed is not None


@dataclass
class Got:
    """What came of one completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    last: CompletionOutput | None = None

    def take(self, output: CompletionOutput, kind: RequestOutputKind) -> None:
        """Take what an output says."""
        was_finished = self.last is not None and self.last.finished
        self.last = output
        if kind is RequestOutputKind.DELTA:
            assert not was_finished, "nothing comes after the end"
            self.text += output.text
            self.token_ids += output.token_ids
            self.logprobs += output.logprobs or []
        else:
            assert output.text.startswith(self.text), "what was told stays"
            assert not was_finished or output.token_ids == self.token_ids, "nothing comes after the end"
            self.text, self.token_ids, self.logprobs = output.text, output.token_ids, output.logprobs or []


class Load:
    """So many users, each with one request at a time.

    Attributes:
        errors: what should not have been.
    """

    def __init__(self, llm: AsyncLLM, story: Story, num_users: int) -> None:
        self._llm = llm
        self._story = story
        self._num_users = num_users
        self._is_over = False
        self.errors: list[str] = []

    async def run(self) -> None:
        """Keep it up until :meth:`finish`, or until something is wrong."""
        async with asyncio.TaskGroup() as group:
            for user in range(self._num_users):
                group.create_task(self._use(user))

    def finish(self) -> None:
        """Begin nothing more."""
        self._is_over = True

    async def _use(self, user: int) -> None:
        rng = self._story.rng(f"user {user}")
        number = 0
        while not self._is_over and not self.errors:
            plan = Plan.draw(f"{user}.{number}", rng)
            number += 1
            try:
                async with asyncio.timeout(HANG_S) as limit:
                    await self._account(plan)
            except TimeoutError:
                if not limit.expired():
                    raise
                self._wrong(plan, "hangs")

    async def _account(self, plan: Plan) -> None:
        """Carry a plan out, and note what came of it."""
        got = [Got() for _ in range(plan.params.n)]
        try:
            end = await self._carry_out(plan, got)
            if end == "finish":
                check_whole(plan, got)
            else:
                check_beginning(plan, got)
            self._story.tell(f"request: {end}", plan.request_id)
        except AssertionError as exc:
            self._wrong(plan, f"{exc} {got}")
        except EngineUnavailableError as exc:
            self._story.tell("request: unavailable", f"{plan.request_id}: {exc}")
            await asyncio.sleep(0.5)
        except RequestLostError as exc:
            if (excuse := excuse_of(plan, str(exc))) is None:
                self._wrong(plan, f"failed without need: {exc}")
            else:
                self._story.tell(f"request: lost, {excuse}", f"{plan.request_id}: {exc}")
        except Exception as exc:
            self._wrong(plan, f"failed: {exc!r}")

    async def _carry_out(self, plan: Plan, got: list[Got]) -> End:
        outputs = self._llm.generate(plan.prompt, plan.params, plan.request_id)
        if plan.end == "cancel":
            task = asyncio.ensure_future(self._read(plan, got, outputs))
            await asyncio.wait([task], timeout=plan.after * 0.002)
            if not task.cancel():
                return task.result()
            with contextlib.suppress(asyncio.CancelledError):
                return await task  # it may have ended meanwhile
            return "cancel"
        async with contextlib.aclosing(outputs):
            return await self._read(plan, got, outputs)

    async def _read(self, plan: Plan, got: list[Got], outputs: AsyncGenerator[RequestOutput, None]) -> End:
        last: RequestOutput | None = None
        is_aborted = False
        async for last in outputs:
            for output in last.outputs:
                got[output.index].take(output, plan.params.output_kind)
            if plan.end == "leave" and len(got[0].token_ids) >= plan.after:
                return "leave"
            if plan.end == "abort" and not is_aborted and len(got[0].token_ids) >= plan.after:
                is_aborted = True
                await self._llm.abort(plan.request_id)
        assert last is not None, "there is an end"
        assert last.finished
        assert last.metrics.num_generation_tokens == sum(len(one.token_ids) for one in got)
        reasons = {one.last.finish_reason for one in got if one.last is not None}
        return "abort" if is_aborted and "abort" in reasons else "finish"

    def _wrong(self, plan: Plan, what: str) -> None:
        what = f"{plan.request_id}: {what}; {plan}"
        self._story.tell("WRONG", what)
        self.errors.append(what)


def check_whole(plan: Plan, got: list[Got]) -> None:
    """Check that every completion is complete."""
    reason, stop_reason = ("length", None) if plan.stop is None else ("stop", plan.stop)
    for one in got:
        assert one.last is not None
        assert (one.last.finish_reason, one.last.stop_reason) == (reason, stop_reason)
        assert one.text == plan.text, "the text is the echo"
        check_tokens(plan, one)
        assert len(one.token_ids) == plan.num_tokens


def check_beginning(plan: Plan, got: list[Got]) -> None:
    """Check that what came before the user ended it is the beginning."""
    for one in got:
        assert plan.echo.startswith(one.text), "the text is the echo"
        check_tokens(plan, one)


def check_tokens(plan: Plan, one: Got) -> None:
    """Check tokens against the prompt, one by one, and what came along with each."""
    prompt = plan.prompt.encode()
    assert one.token_ids == [prompt[i % len(prompt)] for i in range(len(one.token_ids))], "the tokens are the echo"
    if plan.params.logprobs is None:
        assert one.logprobs == []
        return
    assert [next(iter(row)) for row in one.logprobs] == one.token_ids, "a row of logprobs for every token"
    if one.last is not None and one.last.cumulative_logprob is not None:
        assert math.isclose(one.last.cumulative_logprob, -math.log(2) * len(one.token_ids), rel_tol=1e-4)


def excuse_of(plan: Plan, cause: str) -> str | None:
    """Return why a request may fail like this; ``None``: it may not."""
    if not any(sign in cause for sign in SIGNS):
        return None
    if plan.is_seeded and cause.endswith("seed: the random numbers begin anew"):
        return "seeded"
    if cause.endswith("it ran on 3 engines when they ended, and may be why"):
        return "three deaths"
    return None
