"""``SyncMPClient``: blocking calls to an engine in another process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import zmq

from enginewire.client.base import ExecutorChoice
from enginewire.client.inbox import Frames, Inbox
from enginewire.client.mp import MPClient
from enginewire.config import EngineConfig
from enginewire.errors import EngineDeath, UtilityTimeoutError
from enginewire.transport.sockets import inproc_pair, receive_message
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest

BATCH: Final = 64
"""Messages handed over at once: the queue and the interpreter lock are paid per batch, and a batch is never waited
for."""

BURST_S: Final = 30e-6
"""A message that had to be waited for longer than this is handed over alone and at once: finding out that nothing
follows it would cost a tenth of the latency of a call. Sooner than that, more are likely to be there."""

PEER_CHECK_MS: Final = 1000
"""How often remote engines are looked after: whether one is lost, or was restarted."""

JOIN_S: Final = 5.0

Batch = list["Frames | EngineCoreOutputs"]
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
        self._batch: deque[Frames | EngineCoreOutputs] = deque()
        # Held by the consumer who waits for the next batch: the others wait for him, and take from what he got.
        self._turn = threading.Lock()
        self._end: End | None = None
        super().__init__(config, executor_class, log_stats, **kwargs)
        try:
            self._start_receiver()
            self.start_engine_core_monitor()
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start_receiver(self) -> None:
        resources = self.resources
        output_socket = resources.output_socket
        assert output_socket is not None
        wake_receiver, wake_sender = inproc_pair(resources.context, "wake")
        me = weakref.ref(self)

        def check_peers() -> Batch:
            client = me()
            if client is None:
                return []
            with client.resources.send_lock:
                return client._look_after_peers()

        # From here on the output socket belongs to the thread, which closes it.
        thread = threading.Thread(
            target=_receive,
            args=(output_socket, wake_receiver, self.inbox, self._queue, check_peers),
            name="enginewire-receiver",
            daemon=True,
        )
        inbox, outgoing = self.inbox, self._queue

        def stop() -> bool:
            with contextlib.suppress(zmq.Again):  # it has ended already, of an error
                wake_sender.send(b"", zmq.NOBLOCK)
            thread.join(JOIN_S)
            return not thread.is_alive()

        def on_closed(make_error: End) -> None:
            inbox.calls.close(make_error)
            outgoing.put(make_error)

        resources.on_closed = on_closed
        thread.start()
        resources.stop_receiver = stop

    def _on_death(self, death: EngineDeath) -> None:
        if self.inbox.engine_died(death):
            self.inbox.calls.close(death.exception)
            self._queue.put(death.exception)

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
            try:
                item = self._batch.popleft()
            except IndexError:
                self._wait_for_batch(deadline, timeout)
                continue
            message = self.inbox.take(item)
            if message is not None:
                return message

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

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.ensure_alive()
        call_id = self.inbox.calls.start(method, waiter)
        try:
            with self.resources.send_lock:
                self._send_utility(call_id, method, args)
            return waiter.result(timeout)
        except concurrent.futures.TimeoutError as exc:
            if waiter.done():
                return waiter.result()  # it came at the last moment
            raise UtilityTimeoutError(f"{method} was not answered within {timeout:g} s", method=method) from exc
        finally:
            self.inbox.calls.forget(call_id)


def _seconds_to(deadline: float | None, *, forever: T) -> float | T:
    return forever if deadline is None else max(0.0, deadline - time.monotonic())


def _receive(
    output_socket: zmq.Socket[bytes],
    wake_receiver: zmq.Socket[bytes],
    inbox: Inbox,
    outgoing: queue.SimpleQueue[Batch | End],
    check_peers: Callable[[], Batch],
) -> None:
    """Receive until woken: utility answers are resolved here, the rest is handed over in batches."""
    poller = zmq.Poller()
    poller.register(output_socket, zmq.POLLIN)
    poller.register(wake_receiver, zmq.POLLIN)
    next_check = time.monotonic() + PEER_CHECK_MS / 1000
    try:
        while True:
            began = time.monotonic()
            ready = poller.poll(PEER_CHECK_MS)
            if any(socket is wake_receiver for socket, _ in ready):
                return
            now = time.monotonic()
            is_due = now >= next_check
            batch, is_drained = _drain(output_socket, inbox, BATCH if is_due or now - began < BURST_S else 1)
            if batch:
                outgoing.put(batch)
            # What an engine sent before it died or was lost comes first.
            inbox.report_marker()
            if is_due and is_drained:
                next_check = now + PEER_CHECK_MS / 1000
                if failures := check_peers():
                    outgoing.put(failures)
    except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
        message = f"the receiver failed: {exc!r}"
        outgoing.put(lambda: RuntimeError(message))
        inbox.calls.close(lambda: RuntimeError(message))
    finally:
        output_socket.close(linger=0)
        wake_receiver.close(linger=0)


def _drain(output_socket: zmq.Socket[bytes], inbox: Inbox, limit: int) -> tuple[Batch, bool]:
    """Take what is there, up to ``limit`` messages, without waiting; tell whether that is known to be all."""
    batch: Batch = []
    try:
        for _ in range(limit):
            frames = receive_message(output_socket)
            if inbox.sort(frames):
                batch.append(frames)
    except zmq.Again:
        return batch, True
    return batch, False
