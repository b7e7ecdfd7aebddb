"""``OutputProcessor``: from an engine's messages to the requests they are about.

It decides and has no I/O, clock or lock; ``LLM`` and ``AsyncLLM`` drive it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from enginewire.errors import DecodeError, EngineClientError, EngineGenerateError, request_error_from_reason
from enginewire.frontend.inputs import PreparedRequest
from enginewire.frontend.requests import FINAL_ONLY, CompletionState, RequestState
from enginewire.frontend.stats import IterationStats, StatLogger, engine_times
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from enginewire.wire.stats import SchedulerStats


@dataclass(slots=True)
class Processed:
    """What one message of the engine brought.

    Attributes:
        ready: requests that have something for their reader; one may be in it more than once.
        to_abort: ids that the engine works on in vain.
        stats: the same in numbers, if somebody wants them.
    """

    ready: list[RequestState] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    stats: IterationStats | None = None


class OutputProcessor:
    """Every request in flight, by the ids that the engine knows.

    Attributes:
        scheduler_stats: the engine's latest, ``None`` before the first.
        stat_logger: is told what happens, if set.
    """

    def __init__(self) -> None:
        self._completions: dict[str, CompletionState] = {}
        self.scheduler_stats: SchedulerStats | None = None
        self.stat_logger: StatLogger | None = None

    @property
    def requests(self) -> list[RequestState]:
        """The requests in flight, oldest first."""
        return list(dict.fromkeys(completion.request for completion in self._completions.values()))

    def add(self, prepared: PreparedRequest, now: float) -> RequestState:
        """Start to follow a request. Call before it is sent: its first output may be faster than us."""
        request = RequestState(prepared, now)
        self._completions.update((completion.engine_id, completion) for completion in request.completions)
        return request

    def process(self, message: EngineCoreOutputs, now: float) -> Processed:
        """Take a message of the engine. Outputs for requests that are not followed (any more) are dropped.

        Args:
            now: monotonic seconds.
        """
        if message.scheduler_stats is not None:
            self.scheduler_stats = message.scheduler_stats
        stats = None if self.stat_logger is None else IterationStats(now, message.timestamp)
        processed = Processed(stats=stats)
        engine_index, completions = message.engine_index, self._completions
        for output in message.outputs:
            completion = completions.get(output.request_id)
            if completion is None:
                continue
            request = completion.request
            completion.engine_index = engine_index
            if stats is not None and (new := output.new_token_ids):
                stats.num_generation_tokens += len(new)
                if completion.last_token_ts:
                    stats.inter_token_latencies += [(now - completion.last_token_ts) / len(new)] * len(new)
                else:
                    _note_first_token(completion, output, stats, message.timestamp)
            try:
                completion.add(output, now)
                if output.prefill_stats is not None or output.kv_transfer_params or request.wants_prompt_logprobs:
                    request.note(output)
            except DecodeError as exc:  # arrays are looked at only now; this request is broken, the others are not
                error = EngineGenerateError(f"its outputs cannot be read: {exc}", request_id=request.request_id)
                processed.to_abort += self.fail(request, error)
                processed.ready.append(request)
                continue
            if completion.finish_reason is not None:
                self._finish(completion, output, processed)
            elif request.kind is not FINAL_ONLY and output.new_token_ids:
                processed.ready.append(request)
        if self.stat_logger is not None and stats is not None:
            self.stat_logger.record(message.engine_index, message.scheduler_stats, stats)
        return processed

    def abort(self, request: RequestState) -> list[str]:
        """End a request for its reader, with the tokens so far; return the ids to abort on the engine."""
        ids = self.discard(request)
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.finish_reason = FinishReason.ABORT
        request.num_running = 0
        return ids

    def fail(self, request: RequestState, error: EngineClientError) -> list[str]:
        """Fail a request for its reader; the first error sticks. Return the ids to abort on the engine."""
        if request.error is None:
            request.error = error
        return self.discard(request, FinishReason.ERROR)

    def discard(self, request: RequestState, reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """Stop to follow a request; return the ids that the engine may still be working on. Idempotent."""
        unfinished = [
            completion
            for completion in request.completions
            if self._completions.pop(completion.engine_id, None) is not None
        ]
        for completion in unfinished:
            self._report_unfinished(completion, reason)
        return [completion.engine_id for completion in unfinished]

    def _report_unfinished(self, completion: CompletionState, reason: FinishReason) -> None:
        if self.stat_logger is not None and completion.engine_index is not None:
            self.stat_logger.record_unfinished(completion.engine_index, reason)

    def _finish(self, completion: CompletionState, output: EngineCoreOutput, processed: Processed) -> None:
        del self._completions[completion.engine_id]
        request = completion.request
        if output.finish_reason is None:
            processed.to_abort.append(completion.engine_id)  # a stop string, of which the engine knows nothing
        if (error := _failure(completion)) is not None:
            self._report_unfinished(completion, FinishReason.ERROR)
            processed.to_abort += self.fail(request, error)
            processed.ready.append(request)
            return
        if processed.stats is not None:
            processed.stats.finished_requests.append(completion.finished_stats(processed.stats.timestamp))
        request.num_running -= 1
        if request.kind is not FINAL_ONLY or request.num_running == 0:
            processed.ready.append(request)


def _note_first_token(
    completion: CompletionState, output: EngineCoreOutput, stats: IterationStats, engine_ts: float
) -> None:
    request = completion.request
    stats.time_to_first_tokens.append(stats.timestamp - request.arrival_ts)
    stats.num_prompt_tokens += len(request.prompt_token_ids)
    completion.queued_time, completion.prefill_time = engine_times(output.events or (), engine_ts)


def _failure(completion: CompletionState) -> EngineClientError | None:
    """Return why a completion that ended did not end well."""
    request = completion.request
    if completion.finish_reason is FinishReason.ERROR:
        return request_error_from_reason(request.request_id, completion.stop_reason)
    if completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) < request.max_output_len:
        # A connection that drops loses messages and says nothing (protocol, defect 37).
        return EngineGenerateError(
            f"outputs were lost: it ended by length with {len(completion.token_ids)} tokens instead of "
            f"{request.max_output_len}",
            request_id=request.request_id,
        )
    return None
