"""From a job to a reply: what completions and chat completions have in common, as one body or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Final

from msgspec import Meta

from enginewire.errors import InvalidRequestError
from enginewire.frontend.outputs import RequestOutput
from enginewire.server.context import Context, Parameter
from enginewire.server.generation import Job
from enginewire.server.http import EventStream, Reply, Request, json_response
from enginewire.server.openai.events import Choice, StreamEvents, Writer
from enginewire.server.openai.requests import SamplingFields
from enginewire.server.openai.usage import Tally

RANK: Final = Parameter(
    name="X-data-parallel-rank",
    type=Annotated[int, Meta(ge=0)],
    summary="Index of the engine to run on; default: whichever has least to do.",
    place="header",
)


async def respond(
    context: Context, request: Request, fields: SamplingFields, job: Job, writer: Writer[Choice]
) -> Reply:
    """Have a job done and return the reply: when it is finished, or, as a stream, when it has begun."""
    request.notes["completion"] = job.id
    job = replace(job, data_parallel_rank=_wanted_rank(request))
    tally = Tally(job)
    if fields.stream:
        events = StreamEvents(fields, job, writer, tally)
        return await EventStream.begin(_parts(context, request, job, events, tally), events.begin_to_write)
    outputs: dict[int, RequestOutput] = {}
    try:
        async with context.generation.running(job) as reader:
            while not reader.is_done:
                prompt_index, news = await reader.next()
                tally.add(news)
                state = reader.requests[prompt_index]
                if prompt_index not in outputs:
                    tally.begin(state)
                outputs[prompt_index] = state.output_of(job.shown(news))
    finally:
        tally.note(request)
    return json_response(writer.response([output for _, output in sorted(outputs.items())], tally.usage()))


async def _parts(
    context: Context, request: Request, job: Job, events: StreamEvents[Choice], tally: Tally
) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    try:
        async with context.generation.running(job) as reader:
            events.shorten(reader)
            while True:
                prompt_index, news = await reader.next()
                tally.add(news)
                news = job.shown(news)
                if prompt_index not in begun:
                    begun.add(prompt_index)
                    state = reader.requests[prompt_index]
                    tally.begin(state)
                    events.open(prompt_index, state.output_of(news))
                events.add(prompt_index, news)
                if reader.is_done:
                    break
                if part := events.take():
                    yield part
        events.end()
        yield events.take()
    finally:
        tally.note(request)


def _wanted_rank(request: Request) -> int | None:
    """Return which engine the client wants to have the job done by; the header is vLLM's."""
    given = request.headers.get(RANK.name.lower())
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()):
        raise InvalidRequestError(f"{RANK.name} must be an engine's index, got {given!r}", parameter=RANK.name)
    return int(given)
