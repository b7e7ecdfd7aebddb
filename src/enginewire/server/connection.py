"""``HttpConnection``: uvicorn's protocol for one client, with a way to write that does not wait."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from enginewire.server.http import CONNECTION


class HttpConnection(HttpToolsProtocol):
    """Speaks HTTP with a client, and offers itself to applications as an ASGI extension.

    ASGI's ``send`` is a coroutine that takes a message, as it may have to wait and may be told anything. For the next
    few bytes of a stream that is most of the work.

    Attributes:
        is_writable: whether the client is there and reads.
        is_silent: whether :meth:`write_chunk` was not called since this was last set.
    """

    __slots__ = ("_line", "is_silent", "is_writable")

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # uvicorn's
        super().__init__(*args, **kwargs)
        self.is_writable = self.is_silent = True

    def write_chunk(self, data: bytes) -> None:
        """Write part of a response that has begun and has no ``Content-Length``, while :attr:`is_writable`."""
        self._line.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.is_silent = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin with a client."""
        super().connection_made(transport)
        self._line = transport

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: {"connection": self}}

    def pause_writing(self) -> None:
        """Take note that the client does not read."""
        self.is_writable = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """Take note that it reads again."""
        self.is_writable = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that it is gone."""
        self.is_writable = False
        if self.scope is not None:  # a circle through here would be left to the garbage collector, with all around it
            self.scope.pop("extensions", None)
        super().connection_lost(exc)
