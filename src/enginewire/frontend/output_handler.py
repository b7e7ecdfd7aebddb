"""The output handler of ``AsyncLLM``: one task that receives for all requests and tells whoever reads them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from enginewire.client.base import EngineCoreClient
from enginewire.errors import ClientClosedError, EngineClientError, EngineDeadError, EngineGenerateError
from enginewire.frontend.processor import OutputProcessor
from enginewire.frontend.requests import RequestState

logger = logging.getLogger(__name__)

READERS_PER_TURN: Final = 64
"""After so many readers were told of news, each of whom may write to a socket, the loop gets a turn: about 1 ms."""


async def handle_outputs(client: EngineCoreClient, outputs: OutputProcessor) -> None:
    """Receive for all requests until nothing more will come, and tell them why."""
    herald = Herald()
    try:
        while True:
            message = await client.get_output_async()
            processed = outputs.process(message, time.monotonic())
            if processed.ready:
                herald.announce(processed.ready)
            if processed.to_abort:
                await client.abort_requests_async(processed.to_abort)
    except asyncio.CancelledError:
        raise  # the loop ends, and with it every reader
    except EngineDeadError as exc:
        death = exc.death
        _fail_all(outputs, lambda request: death.exception())
    except ClientClosedError as exc:
        text = str(exc)
        _fail_all(outputs, lambda request: ClientClosedError(text))
    except Exception as exc:
        logger.exception("the output handler failed")
        text = f"receiving outputs failed: {exc!r}"
        running = _fail_all(outputs, lambda request: EngineGenerateError(text, request_id=request.request_id))
        await client.abort_requests_async(running)


class Herald:
    """Tells readers that there is something to take, in the loop's next turns: of several messages they hear once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[RequestState, None] = {}

    def announce(self, requests: Sequence[RequestState]) -> None:
        """Tell the readers of these requests."""
        if not self._ready:
            self._loop.call_soon(self._wake)
        self._ready.update(dict.fromkeys(requests))

    def _wake(self) -> None:
        turn = [*itertools.islice(self._ready, READERS_PER_TURN)]
        for request in turn:
            del self._ready[request]
        if self._ready:
            self._loop.call_soon(self._wake)
        for request in turn:
            request.wake()


def _fail_all(outputs: OutputProcessor, make_error: Callable[[RequestState], EngineClientError]) -> list[str]:
    """Fail every request with an error of its own: a shared one would collect everybody's traceback."""
    running: list[str] = []
    for request in outputs.requests:
        running += outputs.fail(request, make_error(request))
        request.wake()
    return running
