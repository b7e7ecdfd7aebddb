"""The events of a stream: what is written of a request's news."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from enginewire.frontend.outputs import CompletionOutput, RequestOutput
from enginewire.frontend.reader import Reader
from enginewire.frontend.requests import RequestState
from enginewire.server.generation import Job
from enginewire.server.http import DONE, Connection, encode, event
from enginewire.server.openai.requests import SamplingFields
from enginewire.server.openai.responses import Usage
from enginewire.server.openai.usage import Tally

Choice = TypeVar("Choice", bound=Struct)

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


class StreamEvents(Generic[Choice]):
    """Collects the events of a stream until they are sent.

    Most have new text and nothing else. Such an event is encoded once for each choice, and cut where the text goes.
    Where the server can, it is written at once from then on, and the task that takes the others sleeps on.
    """

    __slots__ = (
        "_around_text",
        "_connection",
        "_events",
        "_n",
        "_shows_text_alone",
        "_tally",
        "_wants_continuous_usage",
        "_wants_usage",
        "_writer",
    )

    def __init__(self, fields: SamplingFields, job: Job, writer: Writer[Choice], tally: Tally) -> None:
        self._writer = writer
        self._tally = tally
        self._n = job.params.n
        self._wants_usage = fields.wants_usage
        self._wants_continuous_usage = fields.wants_continuous_usage
        self._shows_text_alone = writer.shows_text_alone and job.wants_text and not fields.wants_continuous_usage
        self._around_text: list[tuple[bytes, bytes, int | None] | None] = [None] * (len(job.prompts) * self._n)
        """By choice, with the engine whose text it is."""
        self._events: list[bytes] = []
        self._connection: Connection | None = None

    def shorten(self, reader: Reader) -> None:
        """Take from a reader, before others do, what can be written at once."""
        if self._shows_text_alone and self._n == 1:
            reader.shortcut = self._write_text

    def begin_to_write(self, connection: Connection) -> None:
        """Write there what can be written at once: what was taken before has been."""
        self._connection = connection

    def open(self, prompt_index: int, output: RequestOutput) -> None:
        """Add what comes in front of a prompt's first token."""
        self._add(self._writer.opening(prompt_index, output))

    def add(self, prompt_index: int, news: Sequence[CompletionOutput]) -> None:
        """Add new tokens."""
        for completion in news:
            if not self._shows_text_alone or completion.finish_reason is not None or completion.logprobs:
                self._add(self._writer.news(prompt_index, completion))
            elif completion.text:
                self._add_text(prompt_index * self._n + completion.index, completion)

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

    def _write_text(self, request: RequestState) -> bool:
        """Write a prompt's new text, unless there is more to it or the client has to be waited for."""
        connection, around = self._connection, self._around_text[request.position]
        if connection is None or not connection.is_writable or around is None or request.error is not None:
            return False
        (completion,) = request.completions
        before, after, engine_index = around
        if completion.engine_index != engine_index or (text := completion.take_text()) is None:
            return False
        if text:  # a part of a character has none yet
            connection.write_chunk(b"%b%b%b" % (before, encode(text), after))
        return True

    def _add(self, choices: Sequence[Choice]) -> None:
        self._events += [event(self._writer.chunk([choice], self._usage())) for choice in choices]

    def _add_text(self, index: int, completion: CompletionOutput) -> None:
        around = self._around_text[index]
        if around is None or around[2] != completion.engine_index:
            chunk = self._writer.chunk([self._writer.text(index, MARK)], self._usage())
            before, _, after = event(chunk).partition(encode(MARK))
            around = self._around_text[index] = before, after, completion.engine_index
        self._events.append(around[0] + encode(completion.text) + around[1])

    def _usage(self) -> Usage | UnsetType | None:
        if self._wants_continuous_usage:
            return self._tally.usage()
        # OpenAI has the key in every event once it is asked for, and null until the last.
        return None if self._wants_usage else UNSET
