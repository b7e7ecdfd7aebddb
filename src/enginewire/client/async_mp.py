"""``AsyncMPClient``: awaited calls to engines in other processes.

The receiver is a reader on an output socket's file descriptor, not zmq.asyncio: a future and a poll per message cost
three quarters of a small message there. The descriptor is edge-triggered: it tells that something changed, once. So
the reader drains until nothing is left, or comes back by itself. See decision 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Final

import zmq

from enginewire.client.base import ExecutorChoice
from enginewire.client.inbox import Arrival, Frames
from enginewire.client.link import HEAR_OUT_POLL_S, LAST_OUTPUTS_S, RECONNECT_S, Link
from enginewire.client.mp import MPClient
from enginewire.client.utilities import Call, combined
from enginewire.config import EngineConfig
from enginewire.errors import EngineClientError, UtilityTimeoutError
from enginewire.transport.sockets import AT_ONCE, has_message, receive_frame, receive_message, rest_of_message
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest

MESSAGES_PER_WAKE_UP: Final = 64
"""After so many messages the loop gets a turn: about 0.1 ms, if they are small."""

WAKE_UP_S: Final = 0.0002
"""After so long it gets one too: a message of 100 kB takes as long as ten small ones, a utility's answer longer."""

YIELD_EVERY_S: Final = 0.0005
"""How long a consumer may find messages waiting without giving the loop a turn."""

SURE_S: Final = RECONNECT_S / 2
"""How long it goes without saying that connections are what they were."""

HAND_BACK_S: Final = 2.0
"""How long another thread waits for the loop to give its sockets back."""

ErrorMaker = Callable[[], BaseException]


class AsyncMPClient(MPClient):
    """Asyncio face, on asyncio or uvloop. All calls but ``shutdown`` belong to one event loop at a time.

    The receiver starts in the constructor when a loop is running, else at first use, and moves on to another loop once
    its own is closed.
    """

    def __init__(
        self, config: EngineConfig, executor_class: ExecutorChoice = None, log_stats: bool | None = None, **kwargs: Any
    ) -> None:
        self._receiver: _Receiver | None = None
        self._arrived: deque[Arrival] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._end: ErrorMaker | None = None
        self._last_turn = 0.0
        super().__init__(config, executor_class, log_stats, **kwargs)
        try:
            me = weakref.ref(self)

            def on_closed(make_error: ErrorMaker) -> None:
                if (client := me()) is not None:
                    client._end_from_any_thread(make_error)

            self.resources.on_closed = on_closed
            self.start_engine_core_monitor()
            if _has_running_loop():  # otherwise the receiver starts at first use
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
        arrived = self._arrived
        while True:
            # Which loop this is was asked less than YIELD_EVERY_S ago, if it is not now: in Python 3.11 that is a
            # system call, a fifteenth of what a small message costs.
            if not arrived:
                loop = self._ensure_receiver()
                if self._end is not None:
                    raise self._end()
                waiter = loop.create_future()
                self._waiters.append(waiter)
                try:
                    await waiter
                except BaseException:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    raise
                self._last_turn = monotonic()
            elif monotonic() - self._last_turn > YIELD_EVERY_S:  # uvloop's own clock ticks once a millisecond
                self._ensure_receiver()
                await asyncio.sleep(0)
                self._last_turn = monotonic()
            else:
                message = self.inbox.take(arrived.popleft())
                if message is not None:
                    return message

    async def __aexit__(self, *exc_info: object) -> None:
        # In a thread: requests that may finish still bring outputs, and the loop has others to serve meanwhile.
        await asyncio.to_thread(self.shutdown)

    # Called by the receiver, on its loop.

    def _deliver(self, messages: Sequence[Arrival]) -> None:
        self._arrived.extend(messages)
        _wake(self._waiters)

    def _finish(self, make_error: ErrorMaker) -> None:
        """End everybody who waits, and everybody who will, with an error. The first one stays."""
        self._end = self._end or make_error
        self.inbox.calls.close(self._end)
        _wake(self._waiters)

    # Moving between threads and loops.

    def _wake_receiver(self) -> None:
        if self._receiver is not None:  # otherwise nobody waits yet
            self._receiver.look_soon()

    def _end_from_any_thread(self, make_error: ErrorMaker) -> None:
        if self._receiver is None:  # then nobody can be waiting
            self._finish(make_error)
        else:
            self._receiver.run(lambda: self._finish(make_error))

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
            self._waiters.clear()  # they went with their loop, and so did the callers of utilities
            self.inbox.calls.forget_all()
        self._receiver = _Receiver(loop, self)
        self.resources.stop_receiver = self._receiver.stop
        self.ensure_alive()  # once more: a death is either seen here or finds the receiver


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    """Have all who wait look at what has arrived."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


async def _outcome(call: Call[asyncio.Future[Any]]) -> object:
    """Wait for one engine's answer: a result, or the error that came instead."""
    try:
        return await call.waiter
    except EngineClientError as exc:
        return exc


class _Receiver:
    """Reads the output sockets on an event loop. Holds no reference to the client; the loop holds this."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: AsyncMPClient) -> None:
        self.loop = loop
        self._resources = client.resources
        self._inbox = client.inbox
        self._engines = client.engines
        self._lookout = client.lookout
        self._client = weakref.ref(client)
        self._arrived = client._arrived
        self._waiters = client._waiters
        self._stopped = False
        self._links: tuple[Link, ...] = ()
        self._descriptors: dict[Link, list[int]] = {}
        self._unfinished: set[Link] = set()
        """Links on which there was more than is taken in one turn of the loop."""
        self.read_links()
        if self._lookout.coordination is not None:
            loop.add_reader(self._lookout.coordination.descriptor, self._look)
        self._timer: asyncio.Handle = loop.call_later(self._lookout.interval_s, self._look)

    def read_links(self) -> None:
        """Read the links that are to be read now, and no others."""
        if self._links is self._inbox.links:
            return
        self._links = self._inbox.links
        for link in self._descriptors.keys() - set(self._links):
            link.sure_until = 0.0  # a callback may be on its way
            for descriptor in self._descriptors.pop(link):
                self.loop.remove_reader(descriptor)
        for link in self._links:
            if link not in self._descriptors:
                self._descriptors[link] = [socket.fileno() for socket in (link.output_socket, *link.events)]
                output, *events = self._descriptors[link]
                self.loop.add_reader(output, self._on_readable, link)
                for descriptor in events:
                    self.loop.add_reader(descriptor, self._look)
                self.loop.call_soon(self._take_turn, link)  # the edge for what is there already may be past

    def _on_readable(self, link: Link) -> None:
        """Take what is there: nearly always one message, for the consumer.

        All in one function, without what :meth:`_take` considers besides: a message every millisecond finds a cold
        cache, and costs by the functions that it goes through.
        """
        if monotonic() > link.sure_until:
            self._take_turn(link)
            return
        try:
            socket = link.output_socket
            frame = receive_frame(socket, AT_ONCE, False)
            payload = frame.bytes
            if frame.more or payload[:3] not in link.heads:  # rarely
                self._sort(link, rest_of_message(socket, frame))
            else:
                self._arrived.append((link, (payload,)))
            # Asking costs less than half of an exception; and if one follows, more are likely to.
            if has_message(socket):
                self._take_turn(link)
                return
        except zmq.Again:  # the descriptor tells of the next one
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(exc)
        if self._arrived:
            _wake(self._waiters)

    def _take_turn(self, link: Link) -> None:
        """Take what is there, and come back for more after the loop's other work."""
        if link in self._unfinished:
            return
        if not self._take(link):
            self._unfinished.add(link)
            self.loop.call_soon(self._read_on, link)

    def _read_on(self, link: Link) -> None:
        self._unfinished.discard(link)
        self._take_turn(link)

    def _sort(self, link: Link, frames: Frames) -> None:
        if self._inbox.sort(link, frames):
            self._arrived.append((link, frames))
        elif self._inbox.marked:
            self.look_soon()

    def _take(self, link: Link) -> bool:
        """Take what is there, up to a limit; whether that was all."""
        if link not in self._descriptors:
            return True
        is_all = False
        socket, sort = link.output_socket, self._sort
        now = monotonic()
        if now > link.sure_until:
            if self._lookout.drops(link):
                self._timer.cancel()
                self._timer = self.loop.call_soon(self._look)
                return True
            link.sure_until = 0.0 if self._lookout.has_found else now + SURE_S
        try:
            limit = now + WAKE_UP_S
            for _ in range(MESSAGES_PER_WAKE_UP):
                sort(link, receive_message(socket))
                if monotonic() > limit:
                    break
        except zmq.Again:
            is_all = True
        except Exception as exc:  # noqa: BLE001 - as above
            is_all = True
            self._fail(exc)
        if self._arrived:
            _wake(self._waiters)
        return is_all

    def _fail(self, exc: Exception) -> None:
        message = f"the receiver failed: {exc!r}"
        self._close()
        if (client := self._client()) is not None:
            client._finish(lambda: RuntimeError(message))

    def look_soon(self) -> None:
        """Look after the engines in the loop's next turn; from any thread."""
        with contextlib.suppress(RuntimeError):  # a closed loop has no callers left
            self.loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._stopped:
            return
        for link in self._links:
            self._take_turn(link)
        if self._stopped:
            return
        self._timer.cancel()
        if self._unfinished:  # what an engine sent before it was lost comes first
            self._timer = self.loop.call_soon(self._look)
            return
        self._timer = self.loop.call_later(self._lookout.interval_s, self._look)
        if self._engines.death is None:
            news = self._lookout.look(monotonic())
            if news and (client := self._client()) is not None:
                client._deliver(news)
            self.read_links()
            if self._lookout.has_found:
                for link in self._links:
                    link.sure_until = 0.0
                self.look_soon()
                return
        if self._engines.death is not None and (client := self._client()) is not None:
            client._finish(self._engines.death.exception)

    def run(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop: now if this is its thread, else soon. A closed loop has no callers left."""
        if _is_running_here(self.loop):
            callback()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)

    def stop(self) -> bool:
        """Stop reading and close the socket, on its loop; ``False``: that loop is too busy and will do it later."""
        deadline = monotonic() + LAST_OUTPUTS_S
        if not _is_running_here(self.loop) and self.loop.is_running():
            closed = threading.Event()

            def close() -> None:
                if self._hear_out() or monotonic() > deadline:
                    self._close()
                    closed.set()
                else:
                    self.loop.call_later(HEAR_OUT_POLL_S, close)

            self.run(close)
            if not closed.wait(HAND_BACK_S) and self.loop.is_running():
                self.run(self._resources.release_sockets)
                return False
        while not self._hear_out() and monotonic() < deadline:
            sleep(HEAR_OUT_POLL_S)
        self._close()
        return True

    def _hear_out(self) -> bool:
        """Take what engines sent before they were stopped, as far as it is there; whether that is all there will be."""
        if self._stopped or self.loop.is_closed():
            return True
        is_over = self._lookout.has_heard_out()  # asked first: then all is there to be taken
        for link in self._links:
            is_over = self._take(link) and is_over
        return is_over

    def _close(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if not self.loop.is_closed():
            self._timer.cancel()
            if self._lookout.coordination is not None:
                self.loop.remove_reader(self._lookout.coordination.descriptor)
            for descriptors in self._descriptors.values():
                for descriptor in descriptors:
                    self.loop.remove_reader(descriptor)
        self._descriptors.clear()
        for link in self._inbox.links:
            link.sure_until = 0.0  # as above
            link.output_socket.close(linger=0)


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    return _has_running_loop() and asyncio.get_running_loop() is loop
