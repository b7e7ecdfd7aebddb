"""Utility calls on the engine's side: which exist, how arguments meet parameters, and who is answered what.

The list is explicit: nothing else of the engine can be called from outside (protocol section F, defect 7).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import msgspec

from enginewire.engine.spec import describe_failure
from enginewire.wire.messages import EngineCoreOutputs, LoRARequest, UtilityCall, UtilityOutput, utility_output
from enginewire.wire.profile import adapter_from_wire

if TYPE_CHECKING:
    from enginewire.engine.core import EngineCore
    from enginewire.engine.events import Output

logger = logging.getLogger(__name__)

SHUTTING_DOWN: Final = "Server shutting down"


class Answered(Enum):
    """When a call is answered."""

    AT_ONCE = "at once"
    """Reads a little state or does nothing: no need to wait for a step to end."""
    BETWEEN_STEPS = "between steps"
    """Changes what a step works with, or needs the executor."""


UTILITIES: Final = {
    "get_supported_tasks": Answered.AT_ONCE,
    "is_sleeping": Answered.AT_ONCE,
    "is_scheduler_paused": Answered.AT_ONCE,
    "reset_mm_cache": Answered.AT_ONCE,
    "reset_encoder_cache": Answered.AT_ONCE,
    "get_kv_cache_group_metadata": Answered.AT_ONCE,
    "get_request_ids": Answered.BETWEEN_STEPS,  # behind the outputs of the step before
    "reset_prefix_cache": Answered.BETWEEN_STEPS,
    "sleep": Answered.BETWEEN_STEPS,
    "wake_up": Answered.BETWEEN_STEPS,
    "pause_scheduler": Answered.BETWEEN_STEPS,
    "resume_scheduler": Answered.BETWEEN_STEPS,
    "profile": Answered.BETWEEN_STEPS,
    "execute_dummy_batch": Answered.BETWEEN_STEPS,
    "add_lora": Answered.BETWEEN_STEPS,
    "remove_lora": Answered.BETWEEN_STEPS,
    "pin_lora": Answered.BETWEEN_STEPS,
    "list_loras": Answered.BETWEEN_STEPS,
    "save_sharded_state": Answered.BETWEEN_STEPS,
    "collective_rpc": Answered.BETWEEN_STEPS,
    "get_weight_version": Answered.AT_ONCE,
    "set_weight_version": Answered.AT_ONCE,
    "release_kv_cache_memory": Answered.AT_ONCE,
    "compute_weight_checksums": Answered.AT_ONCE,
}
"""Every method of :class:`~enginewire.engine.core.EngineCore` that a frontend may call."""


class Utilities:
    """Calls an engine's utilities, and answers who called."""

    def __init__(self, core: EngineCore, output: Output) -> None:
        self._core = core
        self._send = output.put

    def invoke(self, call: UtilityCall) -> Callable[[], None]:
        """Call a utility; return what answers it, now or when its future is done."""
        try:
            result = invoke_utility(self._core, call.method, call.args)
        except Exception as exc:  # noqa: BLE001 - it is the caller's to know
            return partial(self.refuse, call, failure_text(call.method, exc))
        if isinstance(result, Future):
            return partial(result.add_done_callback, partial(self._answer_later, call))
        return partial(self._answer, call, utility_output(call.call_id, result))

    def refuse(self, call: UtilityCall, text: str) -> None:
        """Answer a call with a failure."""
        logger.warning("utility method=%s call_id=%d: %s", call.method, call.call_id, text)
        self._answer(call, utility_output(call.call_id, failure_message=text))

    def _answer_later(self, call: UtilityCall, future: Future[Any]) -> None:
        exc = future.exception()
        if exc is None:
            self._answer(call, utility_output(call.call_id, future.result()))
        else:
            text = str(exc)
            self.refuse(call, text if text == SHUTTING_DOWN else failure_text(call.method, exc))

    def _answer(self, call: UtilityCall, answer: UtilityOutput) -> None:
        self._send(call.client_index, EngineCoreOutputs(utility_output=answer), call.method)


def invoke_utility(core: object, method: str, args: Sequence[Any]) -> Any:
    """Call a utility by name.

    Raises:
        AttributeError: there is none of this name; private and other methods do not count.
        Exception: whatever the method raises, or the arguments do not fit.
    """
    if method not in UTILITIES:
        # The reference's words: frontends and their logs know them.
        raise AttributeError(f"'EngineCoreProc' object has no attribute {method!r}")
    function = getattr(core, method)
    return function(*fit_arguments(function, args))


def fit_arguments(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Fit positional arguments off the wire to a method: structs are made from their wire form, types are checked.

    Raises:
        TypeError: too many or too few.
        ValueError: one of the wrong type (``msgspec.ValidationError``).
    """
    underlying = getattr(function, "__func__", function)
    signature, hints = _signature(underlying)
    if underlying is not function:
        args = [None, *args]  # self
    parameters = list(signature.bind(*args).arguments)  # refuses a wrong number
    fitted = [_convert(value, hints.get(name), name) for name, value in zip(parameters, args, strict=False)]
    return fitted if underlying is function else fitted[1:]


def failure_text(method: str, exc: BaseException) -> str:
    """Return the failure message of a utility call (protocol section F)."""
    text = str(exc) if isinstance(exc, AttributeError) and method not in UTILITIES else describe_failure(exc)
    return f"Call to {method} method failed: {text}"


def _convert(value: Any, hint: Any, name: str) -> Any:
    if hint is None or hint is Any:
        return value
    try:
        return adapter_from_wire(value) if hint is LoRARequest else msgspec.convert(value, hint)
    except msgspec.ValidationError as exc:
        raise ValueError(f"argument {name}: {exc}") from exc


@cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    return inspect.signature(function), get_type_hints(function)
