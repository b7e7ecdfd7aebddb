"""Utility calls in flight: one registry for both faces (C-30 to C-32)."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from enginewire.errors import DecodeError, UtilityCallError
from enginewire.wire.messages import UtilityOutput, utility_result

logger = logging.getLogger(__name__)


class Waiter(Protocol):
    """What a caller waits on: a ``concurrent.futures.Future`` or an ``asyncio.Future``."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


W = TypeVar("W", bound=Waiter)


class UtilityCalls:
    """Files a future per call and resolves it when the answer arrives.

    The lock guards one invariant: a waiter is in the map only while the registry is open, so that whoever closes it
    fails every waiter there will ever be.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        # Reentrant: the garbage collector may shut another part of the client down in the middle of a call.
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, Waiter]] = {}
        self._closed: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, method: str, waiter: Waiter) -> int:
        """File ``waiter`` and return its call id. Before sending: the answer may be faster than the sender.

        Raises:
            EngineDeadError, ClientClosedError: the registry is closed; nothing was filed.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            call_id = next(self._ids)
            self._pending[call_id] = (method, waiter)
        return call_id

    def forget(self, call_id: int) -> None:
        """Undo :meth:`start`: failed to send, timed out, cancelled, or simply done. Idempotent."""
        with self._lock:
            self._pending.pop(call_id, None)

    def finish(self, output: UtilityOutput) -> None:
        """Resolve the call that ``output`` answers. An answer nobody waits for is dropped (C-31)."""
        with self._lock:
            method, waiter = self._pending.pop(output.call_id, ("", None))
        if waiter is None:
            logger.warning("dropped a utility answer for no waiting call: call_id=%s", output.call_id)
        elif output.failure_message is not None:
            fail(waiter, UtilityCallError(output.failure_message, method=method))
        else:
            try:
                resolve(waiter, utility_result(output, allow_pickle=self._allow_pickle))
            except DecodeError as exc:
                fail(waiter, UtilityCallError(f"the result of {method} cannot be decoded: {exc}", method=method))

    def fail_pending(self, make_exception: Callable[[], BaseException]) -> None:
        """Fail the calls in flight, each with an exception of its own; new ones are welcome."""
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        for _, waiter in pending:
            fail(waiter, make_exception())

    def forget_all(self) -> None:
        """Drop the calls in flight without a word: their callers are gone."""
        with self._lock:
            self._pending.clear()

    def close(self, make_exception: Callable[[], BaseException]) -> None:
        """Fail the calls in flight and every later one. The first cause stays."""
        with self._lock:
            self._closed = self._closed or make_exception
        self.fail_pending(self._closed)


def resolve(waiter: Waiter, result: object) -> None:
    """Set a result unless the waiter was cancelled or timed out meanwhile."""
    _settle(waiter, lambda: waiter.set_result(result))


def fail(waiter: Waiter, exception: BaseException) -> None:
    """Set an exception unless the waiter was cancelled or timed out meanwhile."""
    _settle(waiter, lambda: waiter.set_exception(exception))


def _settle(waiter: Waiter, settle: Callable[[], None]) -> None:
    if waiter.done():
        return
    try:
        settle()
    except concurrent.futures.InvalidStateError:
        # A thread may cancel its future between the check and here; asyncio futures belong to one thread.
        logger.debug("a utility call was cancelled while its answer arrived")
