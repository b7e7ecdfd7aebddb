"""Taking requests' outputs on an event loop, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from enginewire.frontend.outputs import CompletionOutput
from enginewire.frontend.requests import RequestState


class Reader:
    """Takes the outputs of one or several requests in flight. What comes while nobody takes is merged.

    A token costs one future and no task or generator of its own, or not even that: this is between the engine and every
    stream.

    Args:
        requests: their ``wake`` belongs to the reader from now on.

    Attributes:
        shortcut: if set, is called with the position of a request that has news while somebody waits for them in
            :meth:`next`. ``True``: it has taken what there was, and the wait goes on.
    """

    __slots__ = ("_loop", "_num_running", "_ready", "_waiter", "requests", "shortcut")

    def __init__(self, requests: Sequence[RequestState]) -> None:
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._num_running = len(requests)
        self._ready = dict.fromkeys(range(len(requests)))  # an ordered set; something may have come before us
        self._waiter: asyncio.Future[None] | None = None
        self.shortcut: Callable[[int], bool] | None = None
        for position, request in enumerate(requests):
            request.wake = partial(self._wake, position)

    @property
    def is_done(self) -> bool:
        """Whether all requests' last outputs have been taken."""
        return self._num_running == 0

    async def next(self) -> tuple[int, list[CompletionOutput]]:
        """Wait for news, and return them with their request's position. Not to be called when all is done.

        Raises:
            EngineClientError: that request failed.
        """
        ready = self._ready
        while True:
            while ready:
                position = next(iter(ready))
                del ready[position]
                request = self.requests[position]
                if news := request.take_news():
                    self._num_running -= request.finished
                    return position, news
            self._waiter = self._loop.create_future()
            await self._waiter

    def _wake(self, position: int) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._ready[position] = None
            return
        try:
            if self.shortcut is not None and self.shortcut(position):
                return
        except Exception as exc:  # noqa: BLE001 - the reader's, and not that of whoever brings news to all
            waiter.set_exception(exc)
            return
        self._ready[position] = None
        waiter.set_result(None)
