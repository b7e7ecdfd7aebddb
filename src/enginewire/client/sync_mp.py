"""``SyncMPClient``: blocking calls to engines in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from enginewire.client.base import ExecutorChoice
from enginewire.client.mp import MPClient
from enginewire.client.sync_receiver import SyncReceiver
from enginewire.client.utilities import Call, combined
from enginewire.config import EngineConfig
from enginewire.errors import EngineClientError, UtilityTimeoutError
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest


class Answer:
    """What a utility's caller waits for.

    Less than a ``concurrent.futures.Future``, which costs a fifth of a call: nobody waits on this itself, as whoever
    waits receives.
    """

    # The class's, until they are set: that makes an instance in less than half the time.
    _is_done = False
    _result: Any = None
    _exception: BaseException | None = None

    def done(self) -> bool:
        """Whether it is there."""
        return self._is_done

    def set_result(self, result: Any) -> None:
        """Let it be a result."""
        self._result = result
        self._is_done = True

    def set_exception(self, exception: BaseException) -> None:
        """Let it be an error."""
        self._exception = exception
        self._is_done = True

    def result(self) -> Any:
        """Return the result or raise the error, once it is done."""
        if self._exception is not None:
            raise self._exception
        return self._result


class SyncMPClient(MPClient):
    """Sync face. Safe to use from several threads.

    Whoever waits receives; a daemon thread sees to the rest. Outputs are decoded by whoever takes them.
    """

    def __init__(
        self, config: EngineConfig, executor_class: ExecutorChoice = None, log_stats: bool | None = None, **kwargs: Any
    ) -> None:
        # Held while a message is taken, if requests may move.
        self._order = threading.Lock()
        self._receiver: SyncReceiver | None = None
        super().__init__(config, executor_class, log_stats, **kwargs)
        try:
            self._start_receiver()
            self.start_engine_core_monitor()
        except BaseException:
            self.shutdown(timeout=0)
            raise

    def _start_receiver(self) -> None:
        self._receiver = receiver = SyncReceiver(self)
        self.resources.on_closed = receiver.finish
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
        receiver, inbox = self._receiver, self.inbox
        assert receiver is not None, "it is there when the constructor returns"
        if inbox.failover is not None or timeout is not None:
            return self._get_by(receiver, timeout)
        arrived = receiver.arrived
        while True:
            if arrived:
                try:
                    item = arrived.popleft()
                except IndexError:  # another consumer was faster
                    continue
                message = inbox.take(item)
            else:
                message = None if self._is_copy else receiver.receive()
                if message is None and not arrived:
                    self._wait_for_arrival(receiver, None, None)
            if message is not None:
                return message

    def _get_by(self, receiver: SyncReceiver, timeout: float | None) -> EngineCoreOutputs:
        """Do the same under a time limit, and where requests may move.

        One message at a time is taken then: what was delivered before a loss is known when that is taken.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not receiver.arrived:
                self._wait_for_arrival(receiver, deadline, timeout)
            with self._order:
                message = self.inbox.take(receiver.arrived.popleft()) if receiver.arrived else None
            if message is not None:
                return message

    def _wait_for_arrival(self, receiver: SyncReceiver, deadline: float | None, timeout: float | None) -> None:
        self._ensure_own_process()
        if not receiver.wait(receiver.has_arrived, deadline):
            raise TimeoutError(f"no output within {timeout:g} s")
        if receiver.end is not None and not receiver.arrived:
            raise receiver.end()

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        self._ensure_own_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.resources.send_lock:
            calls = self._start_calls(method, args, Answer, engine_index)
        try:
            if len(calls) == 1:  # as nearly always
                return self._answer_to(calls[0], deadline, timeout)
            return combined(calls, [self._outcome(call, deadline, timeout) for call in calls])
        except BaseException:
            self._forget_calls(calls)  # those that were answered have been forgotten already
            raise

    def _outcome(self, call: Call[Answer], deadline: float | None, timeout: float | None) -> object:
        """Wait for one engine's answer: a result, or the error that came instead."""
        try:
            return self._answer_to(call, deadline, timeout)
        except UtilityTimeoutError:
            raise
        except EngineClientError as exc:
            return exc

    def _answer_to(self, call: Call[Answer], deadline: float | None, timeout: float | None) -> Any:
        assert self._receiver is not None, "as above"
        is_answered = call.waiter.done
        if not (self._receiver.wait(is_answered, deadline) or is_answered()):  # it may have come at the last moment
            raise UtilityTimeoutError(
                f"{call.method} was not answered within {timeout:g} s",
                method=call.method,
                engine_index=call.engine_index,
            )
        return call.waiter.result()
