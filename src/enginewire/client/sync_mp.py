"""``SyncMPClient``: blocking calls to engines in other processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import zmq

from enginewire.client.base import ExecutorChoice
from enginewire.client.engines import HEAR_OUT_POLL_S, LAST_OUTPUTS_S, Link
from enginewire.client.inbox import Arrival, Inbox
from enginewire.client.mp import MPClient
from enginewire.client.utilities import Call, combined
from enginewire.config import EngineConfig
from enginewire.errors import EngineClientError, UtilityTimeoutError
from enginewire.transport.sockets import inproc_pair, receive_message
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest

BATCH: Final = 64
"""Messages handed over at once: the queue and the interpreter lock are paid per batch, and a batch is never waited
for."""

BURST_S: Final = 30e-6
"""A message that had to be waited for longer than this is handed over alone and at once: finding out that nothing
follows it would cost a tenth of the latency of a call. Sooner than that, more are likely to be there."""

LOOK_MS: Final = 250
"""How often engines are looked after: whether one is lost, or is back."""

JOIN_S: Final = 5.0

Batch = list[Arrival]
End = Callable[[], BaseException]

T = TypeVar("T")


class SyncMPClient(MPClient):
    """Sync face. Safe to use from several threads.

    A daemon thread receives; it holds no reference to the client. Outputs are decoded by whoever takes them.
    """

    def __init__(
        self, config: EngineConfig, executor_class: ExecutorChoice = None, log_stats: bool | None = None, **kwargs: Any
    ) -> None:
        self._queue: queue.SimpleQueue[Batch | End] = queue.SimpleQueue()
        self._batch: deque[Arrival] = deque()
        # Held by the consumer who waits for the next batch: the others wait for him, and take from what he got.
        self._turn = threading.Lock()
        # Held while a message is taken, if requests may move: what was delivered before a loss is known when that is.
        self._order = threading.Lock()
        self._end: End | None = None
        self._receiver: _Receiver | None = None
        super().__init__(config, executor_class, log_stats, **kwargs)
        try:
            self._start_receiver()
            self.start_engine_core_monitor()
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start_receiver(self) -> None:
        receiver = _Receiver(self)
        inbox, outgoing = self.inbox, self._queue

        def on_closed(make_error: End) -> None:
            inbox.calls.close(make_error)
            outgoing.put(make_error)

        self.resources.on_closed = on_closed
        self._receiver = receiver
        receiver.start()
        self.resources.stop_receiver = receiver.stop

    def _wake_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.wake()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._ensure_own_process()
        with self.resources.send_lock:
            self._send_add(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._ensure_own_process()
        with self.resources.send_lock:
            self._send_abort(request_ids)

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.inbox.failover is None:
                was_there, message = self._take_next()
            else:
                with self._order:
                    was_there, message = self._take_next()
            if message is not None:
                return message
            if not was_there:
                self._wait_for_batch(deadline, timeout)

    def _take_next(self) -> tuple[bool, EngineCoreOutputs | None]:
        """Take what is next, if anything is there; ``None`` if it is nothing for the caller."""
        try:
            item = self._batch.popleft()
        except IndexError:
            return False, None
        return True, self.inbox.take(item)

    def _wait_for_batch(self, deadline: float | None, timeout: float | None) -> None:
        self._ensure_own_process()
        if not self._turn.acquire(timeout=_seconds_to(deadline, forever=-1.0)):
            raise TimeoutError(f"no output within {timeout:g} s")
        try:
            if self._batch:
                return
            if self._end is None:
                item = self._queue.get(timeout=_seconds_to(deadline, forever=None))
                if not callable(item):
                    self._batch.extend(item)
                    return
                self._end = item
        except queue.Empty:
            raise TimeoutError(f"no output within {timeout:g} s") from None
        finally:
            self._turn.release()
        raise self._end()

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        self._ensure_own_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.resources.send_lock:
            calls: list[Call[concurrent.futures.Future[Any]]] = self._start_calls(
                method, args, concurrent.futures.Future, engine_index
            )
        try:
            return combined(calls, [_outcome(call, deadline, timeout) for call in calls])
        finally:
            self._forget_calls(calls)


def _outcome(call: Call[concurrent.futures.Future[Any]], deadline: float | None, timeout: float | None) -> object:
    """Wait for one engine's answer: a result, or the error that came instead."""
    try:
        return call.waiter.result(_seconds_to(deadline, forever=None))
    except EngineClientError as exc:
        return exc
    except concurrent.futures.TimeoutError as exc:
        if call.waiter.done():
            return call.waiter.result()  # it came at the last moment
        raise UtilityTimeoutError(
            f"{call.method} was not answered within {timeout:g} s", method=call.method, engine_index=call.engine_index
        ) from exc


def _seconds_to(deadline: float | None, *, forever: T) -> float | T:
    return forever if deadline is None else max(0.0, deadline - time.monotonic())


class _Receiver:
    """The thread that receives; it holds no reference to the client, and owns the output sockets.

    Utility answers are resolved here, the rest is handed over in batches.
    """

    def __init__(self, client: SyncMPClient) -> None:
        self._inbox = client.inbox
        self._engines = client.engines
        self._lookout = client.lookout
        self._send_lock = client.resources.send_lock
        self._outgoing = client._queue
        self._wake_reader, self._wake_writer = inproc_pair(client.resources.context, "wake")
        self._wake_lock = threading.Lock()  # a socket may be used by one thread at a time
        self._is_stopping = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="enginewire-receiver", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have it look after the engines at once."""
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # it has ended already
            self._wake_writer.send(b"", zmq.NOBLOCK)

    def stop(self) -> bool:
        """End it, and have it close its sockets; ``False``: it does not end."""
        self._is_stopping = True
        self.wake()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return False
        with self._wake_lock:  # somebody may be about to wake it, who must not find the socket being closed
            self._wake_writer.close(linger=0)
        return True

    def _run(self) -> None:
        try:
            self._receive()
            self._hear_out()
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            message = f"the receiver failed: {exc!r}"
            self._end(lambda: RuntimeError(message))
        finally:
            for link in self._inbox.links:
                link.output_socket.close(linger=0)
            self._wake_reader.close(linger=0)

    def _end(self, make_error: End) -> None:
        self._has_ended = True
        self._outgoing.put(make_error)
        self._inbox.calls.close(make_error)

    def _receive(self) -> None:
        links: tuple[Link, ...] = ()
        sources: dict[zmq.Socket[bytes], Link] = {}
        poller = zmq.Poller()
        next_look = time.monotonic() + LOOK_MS / 1000
        while not self._is_stopping:
            if links is not self._inbox.links:
                links = self._inbox.links
                sources = {link.output_socket: link for link in links}
                poller = zmq.Poller()
                for socket in (self._wake_reader, *sources, *(event for link in links for event in link.events)):
                    poller.register(socket, zmq.POLLIN)
                if self._lookout.coordination is not None:  # the socket itself is used by those who send, too
                    poller.register(self._lookout.coordination.descriptor, zmq.POLLIN)
            began = time.monotonic()
            ready = poller.poll(LOOK_MS)
            now = time.monotonic()
            is_due = now >= next_look
            is_drained = True
            for socket, _ in ready:
                is_due = is_due or socket not in sources
                if socket is self._wake_reader:
                    self._wake_reader.recv()
                    if self._is_stopping:
                        return
            for link in links if is_due else [sources[socket] for socket, _ in ready]:
                batch, is_all = _drain(link, self._inbox, BATCH if is_due or now - began < BURST_S else 1)
                is_drained = is_drained and is_all
                if batch:
                    self._outgoing.put(batch)
            # What an engine sent before it died or was lost comes first.
            if (is_due and is_drained) or self._inbox.marked:
                next_look = now + LOOK_MS / 1000
                self._look(now)

    def _hear_out(self) -> None:
        """Take what engines sent before they were stopped; those who wait are told afterwards that this is the end."""
        deadline = time.monotonic() + LAST_OUTPUTS_S
        while True:
            is_over = self._lookout.has_heard_out()  # asked first: then all is there to be taken
            for link in self._inbox.links:
                batch, is_all = _drain(link, self._inbox, BATCH)
                is_over = is_over and is_all
                self._outgoing.put(batch)
            if is_over or time.monotonic() > deadline:
                return
            time.sleep(HEAR_OUT_POLL_S)

    def _look(self, now: float) -> None:
        if self._has_ended:
            return
        with self._send_lock:
            news = self._lookout.look(now)
        if news:
            self._outgoing.put(news)
        if self._engines.death is not None:
            self._end(self._engines.death.exception)


def _drain(link: Link, inbox: Inbox, limit: int) -> tuple[Batch, bool]:
    """Take what is there, up to ``limit`` messages, without waiting; tell whether that is known to be all."""
    batch: Batch = []
    socket, sort = link.output_socket, inbox.sort
    try:
        for _ in range(limit):
            frames = receive_message(socket)
            if sort(link, frames):
                batch.append((link, frames))
    except zmq.Again:
        return batch, True
    return batch, False
