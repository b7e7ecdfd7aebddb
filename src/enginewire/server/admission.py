"""How many completions are taken in at once. What is too much is refused at once, and not after a wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from enginewire.errors import InvalidRequestError
from enginewire.server.errors import OverloadedError, UnavailableError


class Admission:
    """Counts the completions in flight, and refuses more than there is room for.

    The queue itself is the engine's: it knows priorities. Here is only its bound.

    Args:
        limit: completions that may be running or waiting.

    Attributes:
        num_in_flight: completions that are running or waiting.
        busy_since: monotonic seconds since when there have been some without a break, ``None`` if there are none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed: UnavailableError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_in_flight = 0
        self.busy_since: float | None = None

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Take ``count`` places and give them back at the end.

        Raises:
            InvalidRequestError: there will never be so many.
            OverloadedError: there are not so many now.
            UnavailableError: nothing is taken in any more.
        """
        if self._closed is not None:
            raise UnavailableError(str(self._closed), self._closed.code)
        self.check(count)
        if self.num_in_flight + count > self._limit:
            raise OverloadedError(self.num_in_flight)
        self._change(count)
        try:
            yield
        finally:
            self._change(-count)

    def check(self, count: int) -> None:
        """Refuse what there will never be room for.

        Raises:
            InvalidRequestError: it is so many.
        """
        if count > self._limit:
            raise InvalidRequestError(
                f"{count} completions are asked for at once (prompts times n); this server takes at most {self._limit}",
                parameter="n",
            )

    def resize(self, limit: int) -> None:
        """Have another limit from now on. What is in flight stays."""
        self._limit = limit

    def close(self, reason: UnavailableError) -> None:
        """Take nothing in any more."""
        self._closed = reason

    @property
    def is_closed(self) -> bool:
        """Whether nothing is taken in any more."""
        return self._closed is not None

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    def _change(self, count: int) -> None:
        self.num_in_flight += count
        if not self.num_in_flight:
            self.busy_since = None
            self._idle.set()
        elif self.busy_since is None:
            self.busy_since = time.monotonic()
            self._idle.clear()
