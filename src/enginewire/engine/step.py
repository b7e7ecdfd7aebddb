"""A step: what the executor is told, what comes of it, and how it is carried out, in this process or another."""

from __future__ import annotations

import logging
import sys
from typing import Final

from msgspec import Struct, field

from enginewire.engine.executor import Executor, ExecutorStats
from enginewire.engine.spec import describe
from enginewire.errors import INTERNAL_PREFIX, INVALID_REQUEST_PREFIX, InvalidRequestError
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)

EVERYTHING: Final = sys.maxsize
"""Number of an input: whichever is the last."""


class StepInput(Struct, array_like=True):
    """What the executor is told for its next step; done in this order.

    Attributes:
        aborts: ids to forget. First: an id may be used again in ``adds``.
        adds: requests to take in.
        num_steps: how many steps to make, unless it is told more before their end; 0: only do the above.
        with_stats: whether to report statistics.
        number: inputs are counted from 1.
    """

    aborts: list[str]
    adds: list[EngineCoreRequest]
    num_steps: int
    with_stats: bool
    number: int = 0


class StepOutput(Struct, array_like=True):
    """What came of a step.

    Attributes:
        outputs: ERROR outputs for requests that were not taken in, then the step's own.
        has_unfinished: whether the executor has anything left to do.
        stats: if asked for.
        number: of the last input that was taken in before the step.
        goes_on: the next step is being made, without having been told anything.
    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    has_unfinished: bool = False
    stats: ExecutorStats | None = None
    number: int = EVERYTHING
    goes_on: bool = False


def run_step(executor: Executor, step_input: StepInput) -> StepOutput:
    """Carry out one step. A request that the executor does not take in fails alone; what ``step`` raises is raised."""
    failed = _take_in(executor, step_input)
    outputs = executor.step() if step_input.num_steps else []
    return StepOutput(
        failed + outputs if failed else outputs,
        executor.has_unfinished_requests(),
        executor.stats() if step_input.with_stats else None,
    )


class Steps:
    """Steps of an executor whose inputs may come at any time: each step takes in what has come before it.

    So the executor need not wait for an answer to each result: it is told to make more steps than one, and told again
    before it has made them.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._failed: list[EngineCoreOutput] = []
        self._num_left = 0
        self._with_stats = False
        self._number = 0
        self.is_due = False
        """Whether a step, or the answer to an input that asked for none, is to be made."""

    def take(self, step_input: StepInput) -> None:
        """Take in an input. The last one says how many steps to make."""
        self._failed += _take_in(self._executor, step_input)
        self._num_left = step_input.num_steps
        self._with_stats = self._with_stats or step_input.with_stats
        self._number = step_input.number
        self.is_due = True

    def make(self) -> StepOutput:
        """Make the step that is due. What the executor raises is raised."""
        outputs, self._failed = self._failed, []
        if self._num_left:
            self._num_left -= 1
            outputs += self._executor.step()
        has_unfinished = self._executor.has_unfinished_requests()
        stats = self._executor.stats() if self._with_stats else None
        self._with_stats = False
        self.is_due = has_unfinished and self._num_left > 0
        return StepOutput(outputs, has_unfinished, stats, self._number, goes_on=self.is_due)


def _take_in(executor: Executor, step_input: StepInput) -> list[EngineCoreOutput]:
    """Forget and take in requests; return ERROR outputs for those that were not taken in."""
    if step_input.aborts:
        executor.abort_requests(step_input.aborts)
    failed: list[EngineCoreOutput] = []
    for request in step_input.adds:
        try:
            executor.add_request(request)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it concerns this request only
            failed.append(error_output(request.request_id, exc))
    return failed


def error_output(request_id: str, exc: Exception) -> EngineCoreOutput:
    """Make the output that tells a client why its request failed; only what is not the request's fault is logged."""
    if isinstance(exc, InvalidRequestError):
        reason = INVALID_REQUEST_PREFIX + str(exc)
    else:
        logger.error("request_id=%s failed", request_id, exc_info=exc)
        reason = INTERNAL_PREFIX + describe(exc)
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)


def synthetic_outputs(outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
    """Wrap outputs that no step made (ABORT, ERROR): no statistics, and the ids listed as finished (protocol G)."""
    return EngineCoreOutputs(outputs=outputs, finished_requests=[output.request_id for output in outputs])


def error_outputs(request_id: str, exc: Exception) -> EngineCoreOutputs:
    """Wrap the output that tells a client why its request failed."""
    return synthetic_outputs([error_output(request_id, exc)])
