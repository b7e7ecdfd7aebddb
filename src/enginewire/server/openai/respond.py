"""From a job to a reply: what completions and chat completions have in common, as one body or as events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Final, Protocol, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from enginewire.errors import InvalidRequestError
from enginewire.frontend.outputs import RequestOutput
from enginewire.server.context import Context, Parameter
from enginewire.server.generation import Job
from enginewire.server.http import DONE, EventStream, Reply, Request, event, json_response
from enginewire.server.openai.requests import SamplingFields
from enginewire.server.openai.responses import PromptTokensDetails, Usage

Choice = TypeVar("Choice", bound=Struct)

RANK: Final = Parameter(
    name="X-data-parallel-rank",
    type=Annotated[int, Meta(ge=0)],
    summary="Index of the engine to run on; default: whichever has least to do.",
    place="header",
)


class Writer(Protocol[Choice]):
    """Writes outputs the way one endpoint does."""

    def response(self, outputs: Sequence[RequestOutput], usage: Usage) -> Struct:
        """Make the body of all there is; one output per prompt."""
        ...

    def opening(self, prompt_index: int, output: RequestOutput) -> list[Choice]:
        """Make what a stream has in front of a prompt's first token."""
        ...

    def news(self, prompt_index: int, output: RequestOutput) -> list[Choice]:
        """Make what a stream has of an output's new tokens."""
        ...

    def chunk(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Struct:
        """Make an event's body."""
        ...


async def respond(
    context: Context, request: Request, fields: SamplingFields, job: Job, writer: Writer[Choice]
) -> Reply:
    """Have a job done and return the reply: when it is finished, or, as a stream, when it has begun."""
    request.notes["completion"] = job.id
    job = replace(job, data_parallel_rank=_wanted_rank(request))
    if fields.stream:
        return await EventStream.begin(_events(context, request, fields, job, writer))
    outputs = await context.generation.complete(job)
    tally = _Tally(request)
    for prompt_index, output in enumerate(outputs):
        tally.add(prompt_index, output)
    return json_response(writer.response(outputs, tally.usage()))


async def _events(
    context: Context, request: Request, fields: SamplingFields, job: Job, writer: Writer[Choice]
) -> AsyncGenerator[bytes, None]:
    tally = _Tally(request)
    wants_usage = fields.wants_usage
    async with contextlib.aclosing(context.generation.stream(job)) as outputs:
        async for prompt_index, output in outputs:
            is_first = tally.add(prompt_index, output)
            choices = writer.opening(prompt_index, output) if is_first else []
            choices += writer.news(prompt_index, output)
            # OpenAI has the key in every event once it is asked for, and null until the last.
            usage = tally.usage() if fields.wants_continuous_usage else None if wants_usage else UNSET
            if choices:
                yield b"".join([event(writer.chunk([choice], usage)) for choice in choices])
    if wants_usage:
        yield event(writer.chunk([], tally.usage())) + DONE
    else:
        yield DONE


def _wanted_rank(request: Request) -> int | None:
    """Return which engine the client wants to have the job done by; the header is vLLM's."""
    given = request.headers.get(RANK.name.lower())
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()):
        raise InvalidRequestError(f"{RANK.name} must be an engine's index, got {given!r}", parameter=RANK.name)
    return int(given)


class _Tally:
    """Counts tokens as outputs come, and keeps the access log's numbers up to date: a stream may end at any time."""

    def __init__(self, request: Request) -> None:
        self._notes = request.notes
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._engines: set[int | None] = set()
        self._num_completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> bool:
        """Count an output's new tokens; return whether it is the prompt's first."""
        is_first = prompt_index not in self._prompts
        self._prompts[prompt_index] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self._num_completion_tokens += len(completion.token_ids)
            if completion.engine_index not in self._engines:
                self._engines.add(completion.engine_index)
                self._notes["engine"] = ",".join(sorted(map(str, self._engines)))
            if completion.finish_reason is not None:
                self._notes["finish_reason"] = completion.finish_reason
        if is_first:
            self._notes["prompt_tokens"] = self._num_prompt_tokens
        self._notes["completion_tokens"] = self._num_completion_tokens
        return is_first

    def usage(self) -> Usage:
        """Return the counts so far."""
        cached = [count for _, count in self._prompts.values() if count is not None]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(cached)) if cached else None,
        )

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(length for length, _ in self._prompts.values())
