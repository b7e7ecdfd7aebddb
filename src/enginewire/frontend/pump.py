"""Driving a blocking client from several threads without a thread of one's own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from enginewire.client.base import EngineCoreClient
from enginewire.client.inproc import InprocClient
from enginewire.errors import ClientClosedError, EngineClientError
from enginewire.frontend.inputs import PreparedRequest
from enginewire.frontend.outputs import RequestOutput
from enginewire.frontend.processor import OutputProcessor
from enginewire.frontend.requests import RequestState
from enginewire.frontend.turns import Turns
from enginewire.wire.messages import EngineCoreOutputs
from enginewire.wire.stats import SchedulerStats

IDLE_WAIT_S: Final = 0.005
"""Pause between looks at an engine in this process that has requests and does nothing: it was put to sleep. Bounds how
late a ``wake_up`` from another thread is noticed."""

REDRAW_S: Final = 0.1
"""How often a waiting thread looks up to draw its progress."""


class Pump:
    """Sends requests and receives outputs for all threads that wait for some.

    Whoever waits first receives for everybody (the leader); the others wait for their results, or to be the next
    leader. A leader leaves with its own requests done, or with an error, which the next one meets by itself.

    Args:
        client: a blocking one.
    """

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client
        self._outputs = OutputProcessor()
        # Guards _outputs, its requests and the next two; notified when any of them changes.
        self._changed = threading.Condition()
        self._leader: int | None = None
        self._num_waiting = 0  # threads that are not the leader and could be
        # An engine in this process does one thing at a time; other clients are safe to use from several threads.
        self._turns = Turns() if isinstance(client, InprocClient) else None
        self._left_behind: list[str] = []

    @property
    def scheduler_stats(self) -> SchedulerStats | None:
        """The engine's latest statistics."""
        return self._outputs.scheduler_stats

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the client may be called."""
        return contextlib.nullcontext() if self._turns is None else self._turns.call()

    @contextlib.contextmanager
    def submitted(
        self, prepared: Sequence[PreparedRequest], *, keep_errors: bool = False
    ) -> Iterator[list[RequestState]]:
        """Send requests; abort those that have not ended when the block is left, however it is left.

        Args:
            keep_errors: a request that cannot be sent, as no engine takes any, has failed; the others are sent.
        """
        requests: list[RequestState] = []
        try:
            for one in prepared:
                with self._changed:
                    requests.append(self._outputs.add(one, time.monotonic()))
                try:
                    for core_request in one.requests:
                        with self.turn():
                            self._client.add_request(core_request)
                except EngineClientError as exc:
                    if not keep_errors:
                        raise
                    self.fail(requests[-1:], exc)
            yield requests
        finally:
            with self._changed:
                unfinished = [engine_id for request in requests for engine_id in self._outputs.discard(request)]
            self._abort(unfinished)

    def fail(self, requests: Sequence[RequestState], error: EngineClientError) -> None:
        """Fail those of these requests that have not ended."""
        with self._changed:
            unfinished = [request for request in requests if not request.finished]
            engine_ids = [engine_id for request in unfinished for engine_id in self._outputs.fail(request, error)]
        self._abort(engine_ids)

    def take(self, request: RequestState) -> RequestOutput | None:
        """Return what is new of a request; see ``RequestState.take``."""
        with self._changed:
            return request.take()

    def receive_until(self, is_done: Callable[[], bool], on_change: Callable[[], None] | None = None) -> None:
        """Wait for ``is_done()``, receiving for all threads while nobody else does.

        Args:
            is_done: asked after every message.
            on_change: called after every message and every 0.1 s, to draw progress.

        Raises:
            EngineDeadError, ClientClosedError: nothing will come.
        """
        me = threading.get_ident()
        while True:
            try:
                if not self._wait_to_lead(me, is_done, on_change):
                    return
                self._lead(me, is_done, on_change)
            finally:
                if self._leader == me:
                    with self._changed:
                        self._leader = None
                        self._changed.notify_all()

    def _wait_to_lead(self, me: int, is_done: Callable[[], bool], on_change: Callable[[], None] | None) -> bool:
        """Become the leader (``True``), or see the leader finish what this thread waits for (``False``)."""
        with self._changed:
            self._num_waiting += 1
            try:
                while not is_done():
                    if self._leader is None and not self._should_leave_it_to_others(me, self._num_waiting - 1):
                        self._leader = me
                        return True
                    self._changed.wait(None if on_change is None else REDRAW_S)
                    if on_change is not None:
                        on_change()
                return False
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()

    def _lead(self, me: int, is_done: Callable[[], bool], on_change: Callable[[], None] | None) -> None:
        num_empty = 0
        while not is_done() and not self._should_leave_it_to_others(me, self._num_waiting):
            message = self._receive()
            with self._changed:
                processed = self._outputs.process(message, time.monotonic())
                if processed.ready:
                    self._changed.notify_all()
            left_behind, self._left_behind = self._left_behind, []
            self._abort(processed.to_abort + left_behind)
            if on_change is not None:
                on_change()
            # Engines in other processes send single messages without outputs, which bring statistics.
            num_empty = 0 if message.outputs else num_empty + 1
            if num_empty > 1:
                with self._changed:
                    self._changed.wait(IDLE_WAIT_S)

    def _should_leave_it_to_others(self, me: int, num_others: int) -> bool:
        """Whether this is the main thread and somebody else could lead.

        Only the main thread meets KeyboardInterrupt, with which a message that it has in hand is lost. That does not
        matter if all requests are its own.
        """
        return num_others > 0 and me == threading.main_thread().ident

    def _receive(self) -> EngineCoreOutputs:
        if self._turns is None:
            return self._client.get_output()
        with self._turns.step():
            return self._client.get_output()

    def _abort(self, engine_ids: list[str]) -> None:
        if self._turns is not None and self._turns.are_mine:
            # The garbage collector ended a stream() in the middle of a step; the leader aborts it afterwards.
            self._left_behind += engine_ids
        elif engine_ids:
            with contextlib.suppress(ClientClosedError), self.turn():
                self._client.abort_requests(engine_ids)
