"""``AsyncMPClient``: awaited calls to engines in other processes. What they send is read in ``async_receiver``."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from enginewire.client.async_receiver import (
    Arrivals,
    AsyncReceiver,
    ErrorMaker,
    OutputWaiter,
    has_running_loop,
)
from enginewire.client.base import ExecutorChoice
from enginewire.client.mp import MPClient
from enginewire.client.utilities import Call, combined
from enginewire.config import EngineConfig
from enginewire.errors import EngineClientError, UtilityTimeoutError
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest

YIELD_EVERY_S: Final = 0.0005
"""How long a consumer may find messages waiting without giving the loop a turn."""


class AsyncMPClient(MPClient):
    """Asyncio face, on asyncio or uvloop. All calls but ``shutdown`` belong to one event loop at a time.

    The receiver starts in the constructor when a loop is running, else at first use, and moves on to another loop once
    its own is closed.
    """

    def __init__(
        self, config: EngineConfig, executor_class: ExecutorChoice = None, log_stats: bool | None = None, **kwargs: Any
    ) -> None:
        self._receiver: AsyncReceiver | None = None
        self._last_turn = 0.0
        super().__init__(config, executor_class, log_stats, **kwargs)
        self._arrivals = Arrivals(self.inbox)
        try:
            me = weakref.ref(self)

            def on_closed(make_error: ErrorMaker) -> None:
                if (client := me()) is not None:
                    client._end_from_any_thread(make_error)

            self.resources.on_closed = on_closed
            self.start_engine_core_monitor()
            if has_running_loop():  # otherwise the receiver starts at first use
                self._ensure_receiver()
        except BaseException:
            self.shutdown(timeout=0)
            raise

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._ensure_receiver()
        self._send_add(request)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        if request_ids and not self.engine_dead and not self.resources.closing:
            self._ensure_receiver()
            self._send_abort(request_ids)

    async def call_utility_async(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        make_waiter = self._ensure_receiver().create_future
        calls: list[Call[asyncio.Future[Any]]] = self._start_calls(method, args, make_waiter, engine_index)
        if timeout is None:  # as nearly always; a limit, even none, costs a twentieth of a call
            return await self._answer(calls)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await self._answer(calls)
        except TimeoutError as exc:
            if not limit.expired():
                raise  # the caller's own time limit, or a failure that looks like one
            raise UtilityTimeoutError(f"{method} was not answered within {timeout:g} s", method=method) from exc

    async def _answer(self, calls: Sequence[Call[asyncio.Future[Any]]]) -> Any:
        try:
            if len(calls) == 1:  # as nearly always
                return await calls[0].waiter
            return combined(calls, [await _outcome(call) for call in calls])
        except BaseException:
            self._forget_calls(calls)  # those that were answered have been forgotten already
            raise

    async def get_output_async(self) -> EngineCoreOutputs:
        arrived, waiters = self._arrivals.messages, self._arrivals.waiters
        while True:
            # Which loop this is was asked less than YIELD_EVERY_S ago, if it is not now: in Python 3.11 that is a
            # system call, a fifteenth of what a small message costs.
            if not arrived:
                waiter = OutputWaiter(self._ensure_receiver())
                if self._arrivals.end is not None:
                    raise self._arrivals.end()
                waiters.append(waiter)
                try:
                    message = await waiter
                finally:
                    if waiter in waiters:  # it was cancelled
                        waiters.remove(waiter)
                self._last_turn = monotonic()
            elif monotonic() - self._last_turn > YIELD_EVERY_S:  # uvloop's own clock ticks once a millisecond
                self._ensure_receiver()
                await asyncio.sleep(0)
                self._last_turn = monotonic()
                continue
            else:
                message = self.inbox.take(arrived.popleft())
            if message is not None:
                return message

    async def __aexit__(self, *exc_info: object) -> None:
        # In a thread: requests that may finish still bring outputs, and the loop has others to serve meanwhile.
        await asyncio.to_thread(self.shutdown)

    # Moving between threads and loops.

    def _wake_receiver(self) -> None:
        if self._receiver is not None:  # otherwise nobody waits yet
            self._receiver.look_soon()

    def _end_from_any_thread(self, make_error: ErrorMaker) -> None:
        if self._receiver is None:  # then nobody can be waiting
            self._arrivals.finish(make_error)
        else:
            self._receiver.run(lambda: self._arrivals.finish(make_error))

    def _ensure_receiver(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, with the receiver on it.

        Raises:
            RuntimeError: the receiver is on another loop that is not closed; or this is a forked process.
        """
        loop = asyncio.get_running_loop()
        if self._receiver is None or self._receiver.loop is not loop:
            with self.resources.send_lock:  # loops of two threads may want it at once, and a third may be closing
                self._move_receiver(loop)
        return loop

    def _move_receiver(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ensure_alive()
        if self._receiver is not None:
            if not self._receiver.loop.is_closed():
                raise RuntimeError(
                    "this client is in use on another event loop: use it there, or make a second client, or close that "
                    "loop first"
                )
            self._arrivals.waiters.clear()  # they went with their loop, and so did the callers of utilities
            self.inbox.calls.forget_all()
        self._receiver = AsyncReceiver(loop, self, self._arrivals)
        self.resources.stop_receiver = self._receiver.stop
        self.ensure_alive()  # once more: a death is either seen here or finds the receiver


async def _outcome(call: Call[asyncio.Future[Any]]) -> object:
    """Wait for one engine's answer: a result, or the error that came instead."""
    try:
        return await call.waiter
    except EngineClientError as exc:
        return exc
