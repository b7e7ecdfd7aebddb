"""Utility calls in flight: one registry for both faces (C-30 to C-32). What several engines' answers mean (C-33)."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeGuard, TypeVar

from msgspec import Struct

from enginewire.errors import DecodeError, UtilityCallError
from enginewire.wire.messages import UtilityOutput, utility_result

logger = logging.getLogger(__name__)


class Waiter(Protocol):
    """What a caller waits for: an ``asyncio.Future``, a ``concurrent.futures.Future``, or the sync face's own kind."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


W = TypeVar("W", bound=Waiter)


class Call(Struct, Generic[W]):
    """One utility call to one engine."""

    call_id: int
    method: str
    engine_index: int
    waiter: W


class UtilityCalls:
    """Files a future per call and resolves it when the answer arrives.

    Call ids begin at random, so that the answers to a frontend that was here before fit nobody.

    Used by several threads without a lock: a call is taken out of the map in one step, so that one of those who want to
    end it does, and it is filed before it is asked whether the registry is closed, so that either whoever closes it
    finds the call, or the caller sees that it is closed.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._ids = itertools.count(int.from_bytes(os.urandom(7), "big"))
        self._pending: dict[int, Call[Any]] = {}
        self._closed: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, method: str, waiter: W, engine_index: int = 0) -> Call[W]:
        """File ``waiter`` under a new call id. Before sending: the answer may be faster than the sender.

        Raises:
            EngineDeadError, ClientClosedError: the registry is closed; nothing was filed.
        """
        call = Call(next(self._ids), method, engine_index, waiter)
        self._pending[call.call_id] = call
        if self._closed is not None:
            self.forget(call.call_id)
            raise self._closed()
        return call

    def forget(self, call_id: int) -> None:
        """Undo :meth:`start`: failed to send, timed out, cancelled, or simply done. Idempotent."""
        self._pending.pop(call_id, None)

    def finish(self, output: UtilityOutput, engine_index: int = 0) -> None:
        """Resolve the call that ``output`` answers. An answer nobody waits for is dropped (C-31)."""
        call = self._pending.get(output.call_id)
        if call is None or call.engine_index != engine_index or self._pending.pop(output.call_id, None) is None:
            logger.warning("dropped a utility answer for no waiting call: call_id=%s", output.call_id)
        elif output.failure_message is not None:
            fail(call.waiter, _error(call, output.failure_message))
        else:
            try:
                resolve(call.waiter, utility_result(output, allow_pickle=self._allow_pickle))
            except DecodeError as exc:
                fail(call.waiter, _error(call, f"the result of {call.method} cannot be decoded: {exc}"))

    def are_for(self, engine_index: int) -> bool:
        """Whether calls to an engine are in flight."""
        return any(call.engine_index == engine_index for call in list(self._pending.values()))

    def engine_lost(self, engine_index: int, cause: str) -> None:
        """Fail the calls in flight to one engine; new ones are welcome."""
        self._fail_pending(lambda call: _error(call, cause), engine_index)

    def _fail_pending(
        self, make_exception: Callable[[Call[Any]], BaseException], engine_index: int | None = None
    ) -> None:
        for call in list(self._pending.values()):
            if engine_index in (None, call.engine_index) and self._pending.pop(call.call_id, None) is not None:
                fail(call.waiter, make_exception(call))

    def forget_all(self) -> None:
        """Drop the calls in flight without a word: their callers are gone."""
        self._pending.clear()

    def close(self, make_exception: Callable[[], BaseException]) -> None:
        """Fail the calls in flight and every later one. The first cause stays."""
        closed = self._closed = self._closed or make_exception
        self._fail_pending(lambda _: closed())


MUST_AGREE: Final = ("is_sleeping", "is_scheduler_paused", "get_weight_version")
ALL_MUST_SUCCEED: Final = ("reset_prefix_cache", "wake_up")
"""Utilities whose result is true only if it is for every engine. Source of both: protocol M.3."""
PER_WORKER: Final = ("collective_rpc",)
"""Utilities that return a list with one result per worker: one engine's after another's, by rank. The reference returns
the first engine's alone (defect 24)."""


def combined(calls: Sequence[Call[Any]], outcomes: Sequence[object]) -> Any:
    """Make one result of what several engines answered: the first one's, unless all of them count.

    Args:
        outcomes: in the order of ``calls``; an exception where the call failed.

    Raises:
        UtilityCallError: an engine failed it, or they disagree. Further failures are in its notes.

    Source: C-33; protocol M.3, defect 24.
    """
    if len(calls) == 1 and not _is_failure(outcomes[0]):  # as nearly always
        return outcomes[0]
    failures = [(call, outcome) for call, outcome in zip(calls, outcomes, strict=True) if _is_failure(outcome)]
    if failures:
        call, error = failures[0]
        if len(calls) > 1 and type(error) is UtilityCallError:
            error = UtilityCallError(
                f"engine {call.engine_index}: {error}", method=call.method, engine_index=call.engine_index
            )
        for other, cause in failures[1:]:
            error.add_note(f"engine {other.engine_index} failed too: {cause}")
        raise error
    method = calls[0].method
    if method in MUST_AGREE and any(outcome != outcomes[0] for outcome in outcomes):
        said = ", ".join(f"{call.engine_index}: {outcome}" for call, outcome in zip(calls, outcomes, strict=True))
        raise UtilityCallError(f"the engines disagree on {method} ({said})", method=method)
    if method in ALL_MUST_SUCCEED:
        return next((outcome for outcome in outcomes if outcome is False), outcomes[0])
    if method in PER_WORKER and len(outcomes) > 1:
        return [result for outcome in outcomes for result in (outcome if isinstance(outcome, list) else [outcome])]
    return outcomes[0]


def _is_failure(outcome: object) -> TypeGuard[BaseException]:
    return isinstance(outcome, BaseException)


def _error(call: Call[Any], message: str) -> UtilityCallError:
    return UtilityCallError(message, method=call.method, engine_index=call.engine_index)


def resolve(waiter: Waiter, result: object) -> None:
    """Set a result unless the waiter was cancelled or timed out meanwhile."""
    if waiter.done():
        return
    try:
        waiter.set_result(result)
    except concurrent.futures.InvalidStateError:
        _log_cancelled()


def fail(waiter: Waiter, exception: BaseException) -> None:
    """Set an exception unless the waiter was cancelled or timed out meanwhile."""
    if waiter.done():
        return
    try:
        waiter.set_exception(exception)
    except concurrent.futures.InvalidStateError:
        _log_cancelled()


def _log_cancelled() -> None:
    # A thread may cancel its future between the check and the setting; asyncio futures belong to one thread.
    logger.debug("a utility call was cancelled while its answer arrived")
