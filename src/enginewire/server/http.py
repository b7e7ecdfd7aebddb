"""Requests and responses over ASGI: as much of HTTP as the endpoints need, and nothing of what they do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from enginewire.server.errors import BodyTooLargeError, ClientGoneError

ASGIMessage: TypeAlias = MutableMapping[str, Any]  # as the ASGI specification leaves it
Receive: TypeAlias = Callable[[], Awaitable[ASGIMessage]]
Send: TypeAlias = Callable[[ASGIMessage], Awaitable[None]]
Scope: TypeAlias = MutableMapping[str, Any]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON: Final = "application/json"
SSE: Final = "text/event-stream; charset=utf-8"

CONNECTION: Final = "enginewire.connection"
"""The ASGI extension that our server has, for streams; see :class:`Connection`. With others they work without it."""

DISCARDED_BODIES: Final = 8
"""How many times the limit of a too large body is read and thrown away. A client that still sends does not listen: cut
off, it would see a broken pipe instead of our answer."""

encode: Final = msgspec.json.Encoder().encode


class Request:
    """An HTTP request whose body has been read.

    Attributes:
        id: the client's ``X-Request-Id``, or one of ours.
        path: percent-decoded, without the query.
        query: its parameters; one that is given several times has its values joined by commas.
        tail: what the path has behind a route that ends with a parameter.
        body: empty until the application has read it.
        notes: further fields for the access log.
    """

    __slots__ = ("body", "headers", "id", "method", "notes", "path", "query", "scope", "tail")

    def __init__(self, scope: Scope, request_id: str) -> None:
        self.scope = scope
        self.id = request_id
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: dict[str, str] = {}
        for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            self.query[name] = f"{self.query[name]},{value}" if name in self.query else value
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.tail = ""
        self.body = b""
        self.notes: dict[str, object] = {}

    @property
    def client(self) -> str:
        """The peer's address, ``-`` where there is none (a Unix socket)."""
        peer = self.scope.get("client")
        return f"{peer[0]}:{peer[1]}" if peer else "-"


class Connection(Protocol):
    """What is known of the way to the client where the ASGI server says so.

    Attributes:
        is_writable: whether the client is there and reads.
        is_silent: whether ``write_chunk`` was not called since this was last set.
    """

    is_writable: bool
    is_silent: bool

    def write_chunk(self, data: bytes) -> None:
        """Write part of a response that has begun and has no ``Content-Length``, while ``is_writable``."""


class ResponseSender:
    """Sends one response, and remembers how far it got.

    Args:
        send: ASGI's.
        headers: those that every response has.
        connection: the client's, if the server offers it.

    Attributes:
        connection: a shorter way for parts that need not wait; ``None``: there is none.
        status: the status that was sent, ``None`` before.
        is_complete: whether all of it was sent.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], connection: Connection | None = None) -> None:
        self._send = send
        self._headers = headers
        self.connection = connection
        self.status: int | None = None
        self.is_complete = False
        self._is_silent = False
        self._is_waiting = True

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers, with those that every response has."""
        encoded = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {**headers, **self._headers}.items()
        ]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        """Send part of the body. Waits while the client does not read, which is what bounds our memory."""
        self._is_waiting = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_waiting = self._is_silent = False

    def was_silent(self) -> bool:
        """Whether nothing was written since the last call. What the client does not read, and holds up the rest, is."""
        was_silent, self._is_silent = self._is_silent, True
        if self.connection is not None:
            was_silent, self.connection.is_silent = was_silent and self.connection.is_silent, True
        return was_silent and not self._is_waiting

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part."""
        self.is_complete = True  # first: servers report a completed response as a disconnect
        await self._send({"type": "http.response.body", "body": data})


class Reply(Protocol):
    """What a handler returns."""

    async def send(self, sender: ResponseSender) -> None:
        """Send it, or as much as there is before an exception."""


class Response:
    """A response whose body is there."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        self.body = body
        self.headers = dict(headers or {})
        self.status = status

    async def send(self, sender: ResponseSender) -> None:
        """Send it."""
        await sender.start(self.status, {**self.headers, "Content-Length": str(len(self.body))})
        await sender.finish(self.body)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response of strict JSON: there is no way to write NaN or Infinity with msgspec."""
    return Response(encode(value), {"Content-Type": JSON, **(headers or {})}, status)


def event(value: object) -> bytes:
    """Frame one server-sent event. JSON has no line breaks of its own, so it is one ``data`` line."""
    return b"data: " + encode(value) + b"\n\n"


DONE: Final = b"data: [DONE]\n\n"

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment, which clients skip."""

KEEP_ALIVE_S: Final = 15.0
"""A stream that is silent for so long, or up to twice that, gets a comment. Proxies cut connections that look dead,
many after 60 s, and an engine may be paused, or a request wait for another engine."""


class EventStream:
    """Server-sent events whose first part is there; make one with :meth:`begin`. The last part ends with ``DONE``."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], on_begun: Callable[[Connection], None] | None
    ) -> None:
        self._first = first
        self._rest = rest
        self._on_begun = on_begun

    @classmethod
    async def begin(
        cls, events: AsyncGenerator[bytes, None], on_begun: Callable[[Connection], None] | None = None
    ) -> EventStream:
        """Wait for the first part: what fails until then becomes a status and not an event.

        Args:
            events: is resumed for the next part when the last one has been sent.
            on_begun: is told when further ones may be written to the connection, by whoever makes ``events`` and while
                that is waited for, but for the last; not called where there is no such connection.
        """
        return cls(await anext(events), events, on_begun)

    async def send(self, sender: ResponseSender) -> None:
        """Send the events as they come."""
        # In a task of its own: with every token a task is resumed through all the coroutines that it is in, and that
        # would be ten here.
        sending = asyncio.create_task(self._send(sender), name="enginewire-stream")
        try:
            while not (await asyncio.wait({sending}, timeout=KEEP_ALIVE_S))[0]:
                if sender.was_silent():
                    await sender.write(KEEP_ALIVE)
        except BaseException:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            raise
        sending.result()

    async def _send(self, sender: ResponseSender) -> None:
        async with contextlib.aclosing(self._rest) as rest:
            # X-Accel-Buffering: nginx would collect the events otherwise.
            await sender.start(200, {"Content-Type": SSE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            if self._on_begun is not None and sender.connection is not None:
                self._on_begun(sender.connection)
            events = self._first
            while not events.endswith(DONE):
                await sender.write(events)
                events = await anext(rest)
        await sender.finish(events)


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """Read a request's body.

    Raises:
        BodyTooLargeError: it is larger than ``max_bytes``.
        ClientGoneError: the client left before it had sent all of it.
    """
    parts: list[bytes] = []
    size = 0
    announced = headers.get("content-length", "0")
    is_too_large = announced.isdecimal() and int(announced) > max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part: bytes = message.get("body", b"")
        size += len(part)
        is_too_large = is_too_large or size > max_bytes
        if is_too_large:
            parts.clear()
        else:
            parts.append(part)
        if not message.get("more_body", False) or size > DISCARDED_BODIES * max_bytes:
            break
    if is_too_large:
        raise BodyTooLargeError(max_bytes)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def client_present(receive: Receive, sender: ResponseSender) -> AsyncIterator[None]:
    """Cancel what is done inside as soon as the client closes its connection. The body has been read.

    Raises:
        ClientGoneError: it did.
    """
    worker = asyncio.current_task()
    assert worker is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not sender.is_complete:
            is_gone = True
            worker.cancel()

    watcher = asyncio.create_task(watch(), name="enginewire-client-watch")
    try:
        yield
    except asyncio.CancelledError:
        # Somebody else may have cancelled us too, and that is theirs to hear about.
        if is_gone and worker.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
