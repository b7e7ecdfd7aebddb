"""A step: what the executor is told, what comes of it, and how it is carried out, in this process or another."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

from msgspec import Struct, field

from enginewire.engine.admission import Request
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
        hold_s: how long what nobody waits for may be held; the steps that bring it are not among the ``num_steps``.
    """

    aborts: list[str]
    adds: list[EngineCoreRequest]
    num_steps: int
    with_stats: bool
    number: int = 0
    hold_s: float = 0.0


class StepOutput(Struct, array_like=True):
    """What came of a step, and of those before it of which nothing was told.

    Attributes:
        outputs: ERROR outputs for requests that were not taken in, and at most one of each other request.
        has_unfinished: whether the executor has anything left to do.
        stats: if asked for.
        number: of the last input that was taken in before the step.
        goes_on: the next step is being made, without having been told anything.
        num_steps: of how many steps this is.
    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    has_unfinished: bool = False
    stats: ExecutorStats | None = None
    number: int = EVERYTHING
    goes_on: bool = False
    num_steps: int = 1


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
    before it has made them. Nor does it tell of every step: whoever is told takes the processor from the next one, so
    tokens that nobody waits for are held for a while (decision 4).
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._outputs: dict[str, EngineCoreOutput] = {}
        """By request, what no result has told yet."""
        self._patient: dict[str, Request] = {}
        """Requests whose tokens may be held."""
        self._num_left = 0
        self._num_made = 0
        """Steps since the last result."""
        self._hold_s = 0.0
        self._next_result = 0.0
        """When what is held has been held for long enough."""
        self._is_awaited = False
        """The next result is: it says that an input was taken in."""
        self._with_stats = False
        self._number = 0
        self.is_due = False
        """Whether a step, or the answer to an input that asked for none, is to be made."""

    def take(self, step_input: StepInput) -> None:
        """Take in an input. The last one says how many steps to make."""
        for request_id in step_input.aborts:
            self._patient.pop(request_id, None)
            self._outputs.pop(request_id, None)
        for added in step_input.adds:
            request = Request(added, self._executor.capacity.max_model_len)
            if request.can_wait:
                self._patient[added.request_id] = request
        self._keep(_take_in(self._executor, step_input))
        if step_input.aborts or step_input.adds or not step_input.num_steps:
            self._is_awaited = True
        self._num_left, self._hold_s = step_input.num_steps, step_input.hold_s
        self._with_stats = self._with_stats or step_input.with_stats
        self._number = step_input.number
        self.is_due = True

    def make(self) -> StepOutput | None:
        """Make the step that is due; ``None``: what came of it is held. What the executor raises is raised."""
        can_wait = not self._is_awaited
        if self._num_left:
            self._num_made += 1
            can_wait = self._keep(self._executor.step()) and can_wait
        has_unfinished, now = self._executor.has_unfinished_requests(), time.monotonic()
        if can_wait and has_unfinished and now < self._next_result:
            return None
        self._next_result, self._is_awaited = now + self._hold_s, False
        outputs, self._outputs = list(self._outputs.values()), {}
        num_made, self._num_made = self._num_made, 0
        stats = self._executor.stats() if self._with_stats else None
        self._with_stats = False
        self._num_left = max(0, self._num_left - 1)
        self.is_due = has_unfinished and self._num_left > 0
        return StepOutput(outputs, has_unfinished, stats, self._number, self.is_due, num_made)

    def _keep(self, outputs: list[EngineCoreOutput]) -> bool:
        """Put outputs to those that no result has told yet; return whether nobody waits for any of them.

        Somebody does for a first token, for a last one, and where tokens are looked at as they come.
        """
        can_wait, kept, patient = True, self._outputs, self._patient
        for output in outputs:
            request_id, token_ids = output.request_id, output.new_token_ids
            request = patient.get(request_id)
            held = kept.get(request_id)
            if request is None or request.stop_rules is None:
                can_wait = False
            elif request.stop_rules.advance(token_ids) is not None or output.finish_reason is not None:
                del patient[request_id]
                can_wait = False
            elif request.is_new:
                request.is_new = can_wait = False
            elif held is not None:
                held.new_token_ids += token_ids
                continue
            if held is not None:
                output.new_token_ids = held.new_token_ids + token_ids
            kept[request_id] = output
        return can_wait


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
