"""A step: what the executor is told, what comes of it, and how it is carried out, in this process or another."""

from __future__ import annotations

import logging

from msgspec import Struct, field

from enginewire.engine.executor import Executor, ExecutorStats
from enginewire.engine.spec import describe
from enginewire.errors import INTERNAL_PREFIX, INVALID_REQUEST_PREFIX, InvalidRequestError
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)


class StepInput(Struct, array_like=True):
    """What the executor is told for one step; done in this order.

    Attributes:
        aborts: ids to forget. First: an id may be used again in ``adds``.
        adds: requests to take in.
        step: whether to step at all, or only to do the above.
        with_stats: whether to report statistics.
    """

    aborts: list[str]
    adds: list[EngineCoreRequest]
    step: bool
    with_stats: bool


class StepOutput(Struct, array_like=True):
    """What came of a step.

    Attributes:
        outputs: ERROR outputs for requests that were not taken in, then the step's own.
        has_unfinished: whether the executor has anything left to do.
        stats: if asked for.
    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    has_unfinished: bool = False
    stats: ExecutorStats | None = None


def run_step(executor: Executor, step_input: StepInput) -> StepOutput:
    """Carry out one step. A request that the executor does not take in fails alone; what ``step`` raises is raised."""
    if step_input.aborts:
        executor.abort_requests(step_input.aborts)
    failed: list[EngineCoreOutput] = []
    for request in step_input.adds:
        try:
            executor.add_request(request)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it concerns this request only
            failed.append(error_output(request.request_id, exc))
    outputs = executor.step() if step_input.step else []
    return StepOutput(
        failed + outputs if failed else outputs,
        executor.has_unfinished_requests(),
        executor.stats() if step_input.with_stats else None,
    )


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
