"""``EventReceiver``: takes what arrives at an engine, in the input thread.

What is sound and needs the executor or the scheduler becomes an event for the busy loop; the rest is answered here and
now, whatever the loop is doing.
"""

from __future__ import annotations

from collections.abc import Callable

from enginewire.engine.core import EngineCore
from enginewire.engine.events import EventKind, Events, Output
from enginewire.engine.step import error_outputs
from enginewire.engine.utilities import SHUTTING_DOWN, UTILITIES, Answered, Utilities
from enginewire.errors import InvalidRequestError
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest, UtilityCall, UtilityOutput


class EventReceiver:
    """Implements the input thread's ``Receiver``.

    Args:
        core: checks requests, and answers utility calls that only read.
        events: of the loop.
        output: takes answers.
        is_ending: whether the loop takes nothing new any more.
    """

    def __init__(self, core: EngineCore, events: Events, output: Output, is_ending: Callable[[], bool]) -> None:
        self._core = core
        self._events = events
        self._send = output.put
        self._is_ending = is_ending
        self._utilities = Utilities(core, output)

    def receive_request(self, request: EngineCoreRequest) -> None:
        """Check a request and queue it; one that cannot be run is answered here and now."""
        try:
            self._events.put((EventKind.ADD, self._core.preprocess_add_request(request)))
        except Exception as exc:  # noqa: BLE001 - whatever it is, it concerns this request only
            self._send(request.client_index, error_outputs(request.request_id, exc))

    def receive_abort(self, request_ids: list[str]) -> None:
        """Queue an abort."""
        self._events.put((EventKind.ABORT, request_ids))

    def receive_utility(self, call: UtilityCall) -> None:
        """Answer a call that needs no executor, also in mid-step; queue the others."""
        if UTILITIES.get(call.method) is not Answered.AT_ONCE:
            self._events.put((EventKind.UTILITY, call))
        elif self._is_ending():
            self._utilities.refuse(call, SHUTTING_DOWN)
        else:
            self._utilities.invoke(call)()

    def receive_start_wave(self, wave: int, excluded: int | None) -> None:
        """Queue the coordinator's word."""
        self._events.put((EventKind.START_WAVE, (wave, excluded)))

    def frontend_lost(self, client_index: int) -> None:
        """Queue the end of a frontend."""
        self._events.put((EventKind.FRONTEND_LOST, client_index))
        self._send(client_index, EngineCoreOutputs())  # of nothing: lets go of what waits to be sent to it

    def refuse_request(self, request_id: str, client_index: int, why: InvalidRequestError) -> None:
        """Answer a request with an ERROR output."""
        self._send(client_index, error_outputs(request_id, why))

    def answer_utility(self, client_index: int, answer: UtilityOutput) -> None:
        """Answer a utility call."""
        self._send(client_index, EngineCoreOutputs(utility_output=answer))

    def thread_failed(self, exc: BaseException) -> None:
        """End the engine: one of its threads is gone."""
        self._events.put((EventKind.FAILED, exc))
