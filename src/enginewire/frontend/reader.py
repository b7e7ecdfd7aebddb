"""Taking requests' outputs on an event loop, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from enginewire.frontend.outputs import CompletionOutput
from enginewire.frontend.requests import RequestState


class Reader:
    """Takes the outputs of one or several requests in flight. What comes while nobody takes is merged.

    A token costs one future and no task or generator of its own, or not even that: this is between the engine and every
    stream.

    Args:
        requests: their ``listener`` is the reader from now on.

    Attributes:
        shortcut: if set, is called with a request that has news while somebody waits for them in :meth:`next`.
            ``True``: it has taken what there was, and the wait goes on.
    """

    __slots__ = ("_loop", "_num_running", "_ready", "_waiter", "requests", "shortcut")

    def __init__(self, requests: Sequence[RequestState]) -> None:
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._num_running = len(requests)
        self._ready = dict.fromkeys(requests)  # an ordered set; something may have come before us
        self._waiter: asyncio.Future[None] | None = None
        self.shortcut: Callable[[RequestState], bool] | None = None
        for position, request in enumerate(requests):
            request.listener, request.position = self, position

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
                request = next(iter(ready))
                del ready[request]
                if news := request.take_news():
                    self._num_running -= request.finished
                    return request.position, news
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None

    def hear(self, request: RequestState) -> None:
        """Take note that a request has something to take."""
        waiter = self._waiter
        if waiter is not None and self.shortcut is not None:
            try:
                if self.shortcut(request):
                    return
            except Exception as exc:  # noqa: BLE001 - the reader's, and not that of whoever brings news to all
                self._waiter = None
                if not waiter.done():
                    waiter.set_exception(exc)
                return
        self._ready[request] = None
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
