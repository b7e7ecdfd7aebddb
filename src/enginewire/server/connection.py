"""``HttpConnection``: uvicorn's protocol for one client, with a way to write that does not wait."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from enginewire.server.http import CONNECTION


class HttpConnection(HttpToolsProtocol):
    """Speaks HTTP with a client, and offers itself to applications as an ASGI extension.

    ASGI's ``send`` is a coroutine that takes a message, as it may have to wait and may be told anything. For the next
    few bytes of a stream that is most of the work.

    Attributes:
        is_writable: whether the client is there and reads.
        num_chunks: what :meth:`write_chunk` has written so far.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # uvicorn's
        super().__init__(*args, **kwargs)
        self.is_writable = True
        self.num_chunks = 0

    def write_chunk(self, data: bytes) -> None:
        """Write part of a response that has begun and has no ``Content-Length``, while :attr:`is_writable`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.num_chunks += 1

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
        super().connection_lost(exc)
