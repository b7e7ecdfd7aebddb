"""The parts of the server that need no process: bodies, errors, admission, logprobs, tool calls, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from enginewire.errors import (
    ClientClosedError,
    ConfigError,
    DuplicateRequestIdError,
    EngineDeadError,
    EngineDeath,
    EngineGenerateError,
    InvalidRequestError,
    ModelError,
    UtilityCallError,
    UtilityTimeoutError,
)
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.logprobs import Logprob
from enginewire.frontend.requests import RequestState
from enginewire.server import http
from enginewire.server.access_log import LogfmtFormatter, current_request_id, quoted
from enginewire.server.admission import Admission
from enginewire.server.conversation import render
from enginewire.server.errors import (
    BodyTooLargeError,
    ClientGoneError,
    OverloadedError,
    UnavailableError,
    http_error,
)
from enginewire.server.generation import Generation, Job
from enginewire.server.health import EngineMonitor
from enginewire.server.http import ASGIMessage, ResponseSender, client_present, read_body
from enginewire.server.openai.logprobs import chat_logprobs, completion_logprobs
from enginewire.server.openai.tool_calls import ToolCallReader
from enginewire.server.settings import ServerSettings, default_model_name, is_loopback
from enginewire.text.tokenizer import ByteTokenizer
from enginewire.wire.sampling import SamplingParams

DEATH = EngineDeath(0, "killed by signal 9 (SIGKILL)", -9, ("the prompt was: secret",))


@pytest.mark.parametrize(
    ("exc", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("no", parameter="n"), 400, "invalid_request_error", "n", None),
        (DuplicateRequestIdError("x"), 400, "invalid_request_error", "request_id", "duplicate_request_id"),
        (ModelError("no template"), 400, "invalid_request_error", None, "unsuitable_model"),
        (EngineGenerateError("broke"), 500, "server_error", None, "generation_failed"),
        (EngineDeadError(DEATH), 503, "server_error", None, "engine_dead"),
        (ClientClosedError("closed"), 503, "server_error", None, "shutting_down"),
        (UtilityCallError("no", method="sleep"), 500, "server_error", None, "engine_call_failed"),
        (UtilityTimeoutError("late", method="sleep"), 504, "server_error", None, "engine_timeout"),
        (OverloadedError(8), 429, "rate_limit_error", None, "queue_full"),
        (UnavailableError("later", "draining"), 503, "server_error", None, "draining"),
        (ZeroDivisionError("secret"), 500, "server_error", None, "internal_error"),
    ],
)
def test_every_exception_has_its_status(
    exc: Exception, status: int, kind: str, param: str | None, code: str | None
) -> None:
    made = http_error(exc)
    error = made.body.error
    assert (made.status, error.type, error.param, error.code) == (status, kind, param, code)
    assert "secret" not in error.message
    assert ("Retry-After" in made.headers) == (status in (429, 503))


# Bodies and connections.

Messages = list[dict[str, Any]]


def received(messages: Messages) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Make an ASGI ``receive`` that has these messages, and nothing after them."""
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        if not queue:
            await asyncio.Event().wait()
        return queue.pop(0)

    return receive


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def sent_nowhere(message: object) -> None:
    """An ASGI ``send``."""


def test_body_is_read_from_all_its_parts() -> None:
    read = read_body(received([body(b"ab", True), body(b"", True), body(b"c")]), {}, 3)
    assert asyncio.run(read) == b"abc"


def test_too_large_body_is_refused_after_it_was_sent_and_nothing_of_it_is_kept() -> None:
    for headers in ({}, {"content-length": "4"}):
        with pytest.raises(BodyTooLargeError):
            asyncio.run(read_body(received([body(b"ab", True), body(b"cd")]), headers, 3))


def test_endless_body_is_cut_off() -> None:
    async def endless() -> dict[str, Any]:
        return body(b"x" * 100, True)

    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_body(endless, {}, 1000))


def test_client_that_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(ClientGoneError):
        asyncio.run(read_body(received([body(b"ab", True), {"type": "http.disconnect"}]), {}, 100))


def test_client_that_leaves_cancels_the_work() -> None:
    async def run() -> list[str]:
        seen = []
        try:
            async with client_present(received([{"type": "http.disconnect"}]), ResponseSender(sent_nowhere, {})):
                try:
                    await asyncio.Event().wait()
                finally:
                    seen.append("cleaned up")
        except ClientGoneError:
            seen.append("gone")
        await asyncio.sleep(0)  # a cancellation that was left over would come now
        return seen

    assert asyncio.run(run()) == ["cleaned up", "gone"]


def test_cancellation_by_somebody_else_stays_one() -> None:
    async def run() -> None:
        async with client_present(received([]), ResponseSender(sent_nowhere, {})):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_disconnect_after_the_response_is_none() -> None:
    """ASGI servers report a completed response as one."""

    async def run() -> None:
        sender = ResponseSender(sent_nowhere, {})
        async with client_present(received([{"type": "http.disconnect"}]), sender):
            await sender.finish()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


# Streams.


async def silent_after(first: bytes, rest: asyncio.Future[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield events: the second when the test says so."""
    yield first
    yield await rest


def test_a_stream_that_is_silent_for_long_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies cut connections that look dead."""
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.01)
    written: list[bytes] = []

    async def run() -> None:
        rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def send(message: ASGIMessage) -> None:
            written.append(message.get("body", b""))
            if written.count(http.KEEP_ALIVE) == 2 and not rest.done():
                rest.set_result(http.DONE)

        stream = await http.EventStream.begin(silent_after(b"data: 1\n\n", rest))
        async with asyncio.timeout(30):
            await stream.send(ResponseSender(send, {}))

    asyncio.run(run())
    assert written[:4] == [b"", b"data: 1\n\n", http.KEEP_ALIVE, http.KEEP_ALIVE]
    assert written[-1] == http.DONE


def test_a_stream_that_its_client_does_not_read_gets_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not silent, it is held up; a comment would wait with the rest, and could come after the end."""
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.001)
    written: list[bytes] = []

    async def run() -> None:
        rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        rest.set_result(http.DONE)

        async def send(message: ASGIMessage) -> None:
            written.append(message.get("body", b""))
            if message.get("body") == b"data: 1\n\n":
                await asyncio.sleep(0.05)

        await (await http.EventStream.begin(silent_after(b"data: 1\n\n", rest))).send(ResponseSender(send, {}))

    asyncio.run(run())
    assert written == [b"", b"data: 1\n\n", http.DONE]


class Line:
    """A connection on which parts are written without waiting."""

    is_writable = True
    is_silent = True

    def write_chunk(self, data: bytes) -> None:
        self.is_silent = False


def test_a_stream_whose_parts_are_written_past_its_task_is_not_silent() -> None:
    async def run() -> None:
        line = Line()
        sender = ResponseSender(sent_nowhere, {}, line)
        assert not sender.was_silent(), "it has not begun"
        await sender.start(200, {})
        await sender.write(b"data: 1")
        assert not sender.was_silent()
        assert sender.was_silent()
        line.write_chunk(b"data: 2")
        assert not sender.was_silent()
        assert sender.was_silent()

    asyncio.run(run())


def test_who_makes_a_stream_is_told_where_to_write_once_it_has_begun() -> None:
    async def run() -> None:
        told: list[tuple[object, bool]] = []
        line = Line()
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        done.set_result(http.DONE)
        sender = ResponseSender(sent_nowhere, {}, line)
        stream = await http.EventStream.begin(
            silent_after(b"data: 1\n\n", done), lambda connection: told.append((connection, sender.status == 200))
        )
        assert told == []
        await stream.send(sender)
        assert told == [(line, True)]

    asyncio.run(run())


def test_a_stream_that_fails_or_is_cancelled_ends_what_makes_it() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[bytes] = loop.create_future()
        failed.set_exception(OverloadedError(3))
        with pytest.raises(OverloadedError):
            await (await http.EventStream.begin(silent_after(b"1", failed))).send(ResponseSender(sent_nowhere, {}))
        never: asyncio.Future[bytes] = loop.create_future()
        stream = await http.EventStream.begin(silent_after(b"1", never))
        sending = asyncio.create_task(stream.send(ResponseSender(sent_nowhere, {})))
        for _ in range(5):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert never.cancelled(), "nobody waits for it any longer"

    asyncio.run(run())


# Admission.


def test_places_are_counted_and_given_back() -> None:
    admission = Admission(3)
    with admission.places(2):
        assert (admission.num_in_flight, admission.busy_since is not None) == (2, True)
        with pytest.raises(OverloadedError), admission.places(2):
            pass
        with admission.places(1):
            assert admission.num_in_flight == 3
    assert (admission.num_in_flight, admission.busy_since) == (0, None)
    with pytest.raises(InvalidRequestError), admission.places(4):
        pass
    admission.check(3)
    with pytest.raises(InvalidRequestError):
        admission.check(4)
    with pytest.raises(ZeroDivisionError), admission.places(1):
        raise ZeroDivisionError
    assert admission.num_in_flight == 0


def test_closed_admission_takes_nothing_in_and_becomes_idle() -> None:
    async def run() -> None:
        admission = Admission(3)
        with admission.places(1):
            admission.close(UnavailableError("leaving", "draining"))
            assert admission.is_closed
            waiting = asyncio.ensure_future(admission.wait_idle())
            await asyncio.sleep(0)
            assert not waiting.done()
            with pytest.raises(UnavailableError), admission.places(1):
                pass
        await asyncio.wait_for(waiting, 1)

    asyncio.run(run())


# Logprobs.


def test_what_json_has_no_number_for_becomes_a_floor() -> None:
    rows = [{1: Logprob(-math.inf, 1, "a"), 2: Logprob(math.nan, 2, "b")}]
    made = completion_logprobs(rows, 1)
    assert made.token_logprobs == [-9999.0]
    assert made.top_logprobs == [{"a": -9999.0, "b": -9999.0}]
    assert b"null" not in msgspec.json.encode(made)


def test_offsets_of_logprobs_follow_the_texts() -> None:
    rows = [None, {5: Logprob(-1.0, 1, "xyz")}, {6: Logprob(-2.0, 1, "")}, {7: Logprob(-3.0, 1, "w")}]
    made = completion_logprobs(rows, 0, 10, "ab")
    assert made.text_offset == [10, 12, 15, 15]
    assert made.tokens == ["ab", "xyz", "", "w"]
    assert made.top_logprobs == [None, {"xyz": -1.0}, {"": -2.0}, {"w": -3.0}]


def test_chosen_token_is_among_the_top_only_if_it_ranks_there() -> None:
    tokenizer = ByteTokenizer()
    row = {120: Logprob(-5.0, 9, "x"), 97: Logprob(-0.1, 1, "a"), 98: Logprob(-0.2, 2, "b")}
    (entry,) = chat_logprobs([row], 2, tokenizer).content
    assert (entry.token, entry.bytes) == ("x", [120])
    assert [top.token for top in entry.top_logprobs] == ["a", "b"]
    row = {98: Logprob(-0.2, 2, "b"), 97: Logprob(-0.1, 1, "a")}
    (entry,) = chat_logprobs([row], 2, tokenizer).content
    assert [top.token for top in entry.top_logprobs] == ["a", "b"]


# Tool calls.

CALLS = (
    'Let me see. <tool_call>\n{"name": "f", "arguments": {"x": [1, "<"]}}\n</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_tool_calls_are_found_wherever_the_text_is_cut(size: int) -> None:
    reader = ToolCallReader("id", 0)
    text, calls = "", []
    for start in range(0, len(CALLS), size):
        new_text, new_calls = reader.read(CALLS[start : start + size], is_finished=False)
        text, calls = text + new_text, calls + new_calls
    new_text, new_calls = reader.read("", is_finished=True)
    assert (text + new_text, new_calls) == ("Let me see. ", [])
    assert [(call.function.name, call.function.arguments) for call in calls] == [("f", '{"x":[1,"<"]}'), ("g", "{}")]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize(
    "text", ["a < b and <tool", "<tool_call>no JSON</tool_call>!", "<tool_call>{", "<tool_call>[1]</tool_call>", ""]
)
def test_what_is_no_call_stays_text(text: str) -> None:
    reader = ToolCallReader("id", 0)
    shown = "".join(reader.read(character, is_finished=False)[0] for character in text)
    rest, calls = reader.read("", is_finished=True)
    assert (shown + rest, calls) == (text, [])


def test_call_that_is_nested_too_deeply_stays_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"
    assert ToolCallReader("id", 0).read(text, is_finished=True) == (text, [])


def test_call_that_ends_with_the_text_needs_no_end_mark() -> None:
    text, calls = ToolCallReader("id", 0).read('<tool_call>{"name": "f", "arguments": {}}', is_finished=True)
    assert (text, [call.function.name for call in calls]) == ("", ["f"])


class ToolTokenizer(ByteTokenizer):
    CHAT_TEMPLATE = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x }}"
        "{% endfor %}{% endfor %}"
    )


def test_templates_get_the_arguments_of_earlier_calls_as_maps() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 42}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render(ToolTokenizer(), messages) == "assistant<tool_call>42"
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    with pytest.raises(InvalidRequestError, match="must be JSON"):
        render(ToolTokenizer(), [{"role": "assistant", "tool_calls": [broken]}])


def test_template_without_tools_refuses_them() -> None:
    with pytest.raises(InvalidRequestError, match="does not know tools"):
        render(ByteTokenizer(), [{"role": "user", "content": "a"}], tools=[{"type": "function"}])


# Generation.


class AcceptingLLM:
    """A frontend that takes requests in and does nothing with them."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    @contextlib.asynccontextmanager
    async def submitted(self, *args: object, **kwargs: object) -> AsyncIterator[RequestState]:
        yield RequestState.__new__(RequestState)  # nobody looks into it

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def test_what_runs_is_aborted_also_if_another_of_its_id_has_ended() -> None:
    """Ids are the clients' choice, by ``request_id`` or a header, and proxies repeat theirs."""

    async def run() -> list[str]:
        llm = AcceptingLLM()
        generation = Generation(cast(AsyncLLM, llm), Admission(2), cast(EngineMonitor, None))
        job = Job("mine", ["a prompt"], SamplingParams())
        async with generation.running(job):
            async with generation.running(replace(job)):
                pass
            await generation.abort_all()
        await generation.abort_all()
        return llm.aborted

    assert asyncio.run(run()) == ["mine"]


# Settings and log lines.


@pytest.mark.parametrize(
    "change",
    [
        {"served_model_names": ()},
        {"api_keys": ("",)},
        {"api_keys": ("é",)},
        {"host": ""},
        {"port": 70000},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"shutdown_timeout_s": math.nan},
        {"admin": True, "host": "0.0.0.0"},
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"served_model_names": ("m",), **change})


def test_keys_are_not_in_the_repr() -> None:
    assert "secret" not in repr(ServerSettings(served_model_names=("m",), api_keys=("secret",)))


def test_names_of_hosts_and_models() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "::", "example.org")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert default_model_name("echo") == "echo"
    assert default_model_name("/models/My.Model.Q4.gguf") == "My.Model.Q4"
    assert default_model_name("/models/folder/") == "folder"


def test_log_lines_are_one_line_of_fields_whatever_is_in_them() -> None:
    record = logging.LogRecord("enginewire.x", logging.WARNING, "", 0, 'a\n"b" %s', ("=",), None)
    token = current_request_id.set("r-1")
    line = LogfmtFormatter().format(record)
    current_request_id.reset(token)
    assert line.split(" ", 1)[1] == 'level=warning logger=enginewire.x request_id=r-1 msg="a\\n\\"b\\" ="'
    assert quoted("plain/path") == "plain/path"
    assert quoted("two words\n") == '"two words\\n"'
