"""The receiver of ``AsyncMPClient``: readers on an event loop, and whoever waits for outputs.

It reads the output sockets' file descriptors, not through zmq.asyncio: a future and a poll per message cost three
quarters of a small message there. A descriptor is edge-triggered: it tells that something changed, once. So the
receiver drains until nothing is left, or comes back by itself. See decision 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

import zmq

from enginewire.client.inbox import Arrival, Frames, Inbox
from enginewire.client.link import HEAR_OUT_POLL_S, LAST_OUTPUTS_S, RECONNECT_S, Link
from enginewire.transport.sockets import AT_ONCE, has_message, receive_frame, receive_message, rest_of_message
from enginewire.wire.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from enginewire.client.mp import MPClient

MESSAGES_PER_WAKE_UP: Final = 64
"""After so many messages the loop gets a turn: about 0.1 ms, if they are small."""

WAKE_UP_S: Final = 0.0002
"""After so long it gets one too: a message of 100 kB takes as long as ten small ones, a utility's answer longer."""

SURE_S: Final = RECONNECT_S / 2
"""How long it goes without saying that connections are what they were."""

HAND_BACK_S: Final = 2.0
"""How long another thread waits for the loop to give its sockets back."""

ErrorMaker = Callable[[], BaseException]


class OutputWaiter:
    """What the task of a consumer awaits, like a future, when no output is there.

    A future's task goes on in the loop's next turn, which costs as much as receiving a small message. This one's may go
    on within the callback that has received: then, too, no cancellation can come between a message and its consumer.
    Source: what asyncio calls a "Future-like object", in the documentation of ``asyncio.isfuture``.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_error", "_loop", "_message", "_resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._resume: Callable[[OutputWaiter], object] | None = None
        self._context: contextvars.Context | None = None
        self._message: EngineCoreOutputs | None = None
        self._error: asyncio.CancelledError | None = None

    def hand_over(self, message: EngineCoreOutputs) -> bool:
        """Have the task go on with a message, up to where it waits next; ``False``: it does not wait here any more."""
        resume, context = self._resume, self._context
        if resume is None or context is None:
            return False
        self._resume = None
        self._message = message
        context.run(resume, self)
        return True

    def wake(self) -> None:
        """Have the task go on in the loop's next turn, and look for itself."""
        if self._resume is not None:
            self._loop.call_soon(self._resume, self, context=self._context)
            self._resume = None

    # What a task asks of a future.

    def __await__(self) -> Generator[OutputWaiter, None, EngineCoreOutputs | None]:
        self._asyncio_future_blocking = True
        yield self
        return self._message

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, resume: Callable[[OutputWaiter], object], *, context: contextvars.Context) -> None:
        self._resume, self._context = resume, context

    def cancel(self, msg: Any = None) -> bool:
        if self._resume is None:
            return False
        self._error = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self.wake()
        return True

    def result(self) -> None:
        if self._error is not None:
            raise self._error


class Arrivals:
    """What has arrived for consumers, and consumers who wait for it. A client has one, whatever loop it is on.

    Attributes:
        messages: in order.
        waiters: in order; there are none while there are messages.
        end: makes the error that everybody gets once ``messages`` is empty; ``None``: there is more to come.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.messages: deque[Arrival] = deque()
        self.waiters: deque[OutputWaiter] = deque()
        self.end: ErrorMaker | None = None
        self._inbox = inbox

    def add(self, messages: Iterable[Arrival]) -> None:
        """Take messages of our own."""
        self.messages.extend(messages)
        self.wake()

    def finish(self, make_error: ErrorMaker) -> None:
        """End everybody who waits, and everybody who will, with an error. The first one stays."""
        self.end = self.end or make_error
        self._inbox.calls.close(self.end)
        self.wake()

    def wake(self) -> None:
        """Have all who wait look at what has arrived."""
        for waiter in self.waiters:
            waiter.wake()
        self.waiters.clear()

    def hand_over(self, message: EngineCoreOutputs) -> None:
        """Give a message to whoever has waited longest; with it that task goes on, here and now."""
        while self.waiters:
            if self.waiters.popleft().hand_over(message):
                return
        self.messages.append(message)


class AsyncReceiver:
    """Reads the output sockets on an event loop. Holds no reference to the client; the loop holds this.

    Args:
        loop: that runs here.
        client: whose sockets these are.
        arrivals: where its outputs go.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client: MPClient, arrivals: Arrivals) -> None:
        self.loop = loop
        self._resources = client.resources
        self._inbox = client.inbox
        self._engines = client.engines
        self._lookout = client.lookout
        self._arrivals = arrivals
        self._arrived = arrivals.messages
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
        """Take what is there: nearly always one message, for a consumer who waits.

        Without what :meth:`_take` considers besides: a message every millisecond finds a cold cache, and costs by the
        functions that it goes through.
        """
        if monotonic() > link.sure_until:
            self._take_turn(link)
            return
        message = None
        try:
            socket = link.output_socket
            frame = receive_frame(socket, AT_ONCE, False)
            if self._arrivals.waiters and not frame.more:
                message = self._inbox.take_single(link, frame.bytes)
            if message is None:
                self._sort(link, rest_of_message(socket, frame))
            # Asking costs less than half of an exception; and if one follows, more are likely to.
            if has_message(socket):
                if message is not None:
                    self._arrived.append(message)
                self._take_turn(link)
                return
        except zmq.Again:  # the descriptor tells of the next one
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(exc)
            return
        if message is not None:
            self._arrivals.hand_over(message)
        elif self._arrived:
            self._arrivals.wake()

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
            self._arrivals.wake()
        return is_all

    def _fail(self, exc: Exception) -> None:
        message = f"the receiver failed: {exc!r}"
        self._close()
        self._arrivals.finish(lambda: RuntimeError(message))

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
            if news := self._lookout.look(monotonic()):
                self._arrivals.add(news)
            self.read_links()
            if self._lookout.has_found:
                for link in self._links:
                    link.sure_until = 0.0
                self.look_soon()
                return
        if self._engines.death is not None:
            self._arrivals.finish(self._engines.death.exception)

    def run(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop: now if this is its thread, else soon. A closed loop has no callers left."""
        if is_running_here(self.loop):
            callback()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)

    def stop(self) -> bool:
        """Stop reading and close the socket, on its loop; ``False``: that loop is too busy and will do it later."""
        deadline = monotonic() + LAST_OUTPUTS_S
        if not is_running_here(self.loop) and self.loop.is_running():
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


def has_running_loop() -> bool:
    """Whether this thread runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether it runs this one."""
    return has_running_loop() and asyncio.get_running_loop() is loop
