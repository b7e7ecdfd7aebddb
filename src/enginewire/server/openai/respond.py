"""From a job to a reply: what completions and chat completions have in common, as one body or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Final, Generic, Protocol, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from enginewire.errors import InvalidRequestError
from enginewire.frontend.outputs import CompletionOutput, RequestOutput
from enginewire.server.context import Context, Parameter
from enginewire.server.generation import Job
from enginewire.server.http import DONE, EventStream, Reply, Request, encode, event, json_response
from enginewire.server.openai.requests import SamplingFields
from enginewire.server.openai.responses import PromptTokensDetails, Usage

Choice = TypeVar("Choice", bound=Struct)

RANK: Final = Parameter(
    name="X-data-parallel-rank",
    type=Annotated[int, Meta(ge=0)],
    summary="Index of the engine to run on; default: whichever has least to do.",
    place="header",
)


MARK: Final = "\0"
"""Stands for a text in an event; nothing else in one has it."""


class Writer(Protocol[Choice]):
    """Writes outputs the way one endpoint does.

    Attributes:
        shows_text_alone: whether new text is all that a running completion's events have, but for logprobs.
    """

    shows_text_alone: bool

    def response(self, outputs: Sequence[RequestOutput], usage: Usage) -> Struct:
        """Make the body of all there is; one output per prompt."""
        ...

    def opening(self, prompt_index: int, output: RequestOutput) -> list[Choice]:
        """Make what a stream has in front of a prompt's first token."""
        ...

    def text(self, index: int, text: str) -> Choice:
        """Make what a stream has of new text of the choice with this index."""
        ...

    def news(self, prompt_index: int, completion: CompletionOutput) -> list[Choice]:
        """Make what a stream has of a completion's new tokens."""
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
    outputs: dict[int, RequestOutput] = {}
    tally = _Tally(request)
    async with context.generation.running(job) as reader:
        while not reader.is_done:
            prompt_index, news = await reader.next()
            news = job.shown(news)
            outputs[prompt_index] = reader.requests[prompt_index].output_of(news)
            tally.begin(prompt_index, outputs[prompt_index])
            tally.add(news)
    return json_response(writer.response([output for _, output in sorted(outputs.items())], tally.usage()))


async def _events(
    context: Context, request: Request, fields: SamplingFields, job: Job, writer: Writer[Choice]
) -> AsyncGenerator[bytes, None]:
    tally = _Tally(request)
    events = _Events(fields, job, writer, tally)
    begun: set[int] = set()
    async with context.generation.running(job) as reader:
        while True:
            prompt_index, news = await reader.next()
            news = job.shown(news)
            tally.add(news)
            if prompt_index not in begun:
                begun.add(prompt_index)
                output = reader.requests[prompt_index].output_of(news)
                tally.begin(prompt_index, output)
                events.open(prompt_index, output)
            events.add(prompt_index, news)
            if reader.is_done:
                break
            if part := events.take():
                yield part
    events.end()
    yield events.take()


class _Events(Generic[Choice]):
    """Collects the events of a stream until they are sent.

    Most have new text and nothing else. Such an event is encoded once for each choice, and cut where the text goes.
    """

    def __init__(self, fields: SamplingFields, job: Job, writer: Writer[Choice], tally: _Tally) -> None:
        self._writer = writer
        self._tally = tally
        self._n = job.params.n
        self._wants_usage = fields.wants_usage
        self._wants_continuous_usage = fields.wants_continuous_usage
        self._shows_text_alone = writer.shows_text_alone and not fields.wants_continuous_usage
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        self._events: list[bytes] = []

    def open(self, prompt_index: int, output: RequestOutput) -> None:
        """Add what comes in front of a prompt's first token."""
        self._add(self._writer.opening(prompt_index, output))

    def add(self, prompt_index: int, news: Sequence[CompletionOutput]) -> None:
        """Add new tokens."""
        for completion in news:
            if not self._shows_text_alone or completion.finish_reason is not None or completion.logprobs:
                self._add(self._writer.news(prompt_index, completion))
            elif completion.text:
                self._add_text(prompt_index * self._n + completion.index, completion.text)

    def end(self) -> None:
        """Add what comes behind everything."""
        if self._wants_usage:
            self._events.append(event(self._writer.chunk([], self._tally.usage())))
        self._events.append(DONE)

    def take(self) -> bytes:
        """Return what there is, and have nothing then."""
        events = self._events
        part = events[0] if len(events) == 1 else b"".join(events)
        events.clear()
        return part

    def _add(self, choices: Sequence[Choice]) -> None:
        self._events += [event(self._writer.chunk([choice], self._usage())) for choice in choices]

    def _add_text(self, index: int, text: str) -> None:
        around = self._around_text.get(index)
        if around is None:
            chunk = self._writer.chunk([self._writer.text(index, MARK)], self._usage())
            before, _, after = event(chunk).partition(encode(MARK))
            around = self._around_text[index] = before, after
        self._events.append(around[0] + encode(text) + around[1])

    def _usage(self) -> Usage | UnsetType | None:
        if self._wants_continuous_usage:
            return self._tally.usage()
        # OpenAI has the key in every event once it is asked for, and null until the last.
        return None if self._wants_usage else UNSET


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

    def begin(self, prompt_index: int, output: RequestOutput) -> None:
        """Count a prompt, when its first output comes."""
        self._prompts[prompt_index] = len(output.prompt_token_ids), output.num_cached_tokens
        self._notes["prompt_tokens"] = self._num_prompt_tokens

    def add(self, news: Sequence[CompletionOutput]) -> None:
        """Count new tokens."""
        for completion in news:
            self._num_completion_tokens += len(completion.token_ids)
            if completion.engine_index not in self._engines:
                self._engines.add(completion.engine_index)
                self._notes["engine"] = ",".join(sorted(map(str, self._engines)))
            if completion.finish_reason is not None:
                self._notes["finish_reason"] = completion.finish_reason
        self._notes["completion_tokens"] = self._num_completion_tokens

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
