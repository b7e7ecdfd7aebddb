"""``Scheduler``: which requests are in the executor, what it is told next, and what its outputs mean. Pure.

It never touches the executor: :meth:`Scheduler.schedule` says what the next step is to be, somebody runs it
(:func:`~enginewire.engine.step.run_step`, here or in another process), and :meth:`Scheduler.update` turns its result
into messages, one per client. In between, requests may be added and aborted, and an executor that takes inputs while it
steps may be told of them (``num_steps`` above 1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from enginewire.config import SchedulingPolicy
from enginewire.engine.admission import AdmissionQueue, Request
from enginewire.engine.executor import ExecutorStats
from enginewire.engine.step import StepInput, StepOutput, synthetic_outputs
from enginewire.engine.stop import Stop
from enginewire.errors import INTERNAL_PREFIX, DuplicateRequestIdError
from enginewire.wire.arrays import LogprobsLists, logprobs_lists_from_wire
from enginewire.wire.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

STATS_INTERVAL_S: Final = 0.05
"""How often statistics are reported while the same requests run. In every step they cost a small model 2 % of its
speed, and no gauge is read as often; when requests come or go they are reported at once."""


class PauseState(Enum):
    """What the scheduler lets happen. Adds are accepted in every state."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    """Running requests go on, waiting ones wait."""
    PAUSED_ALL = "paused_all"
    """Nothing runs."""


class Scheduler:
    """Admission, stop rules, statistics; see the module's docstring.

    Args:
        max_num_seqs: most requests in the executor at once.
        policy: order of those that wait.
        log_stats: report statistics and events.
        reports_load: keep what a coordinator wants to know (:meth:`load_change`), and list to clients what has ended.
    """

    def __init__(
        self, *, max_num_seqs: int, policy: SchedulingPolicy, log_stats: bool = True, reports_load: bool = False
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._log_stats = log_stats
        self._reports_load = reports_load
        self._needs_stats = log_stats or reports_load
        self._waiting = AdmissionQueue(policy)
        self._running: dict[str, Request] = {}
        self._aborts: list[str] = []
        """Ids the executor still holds and must forget before its next step."""
        self._report_due = False
        """Requests ended since the last statistics: nobody must be left with the busy picture."""
        self._reported = (0, 0)
        self._next_report = 0.0
        self._cache_was_reset = False
        self._synthetic: dict[int, list[EngineCoreOutput]] = {}
        self._finished: dict[int, list[str]] = {}
        """Ids that ended and whose clients have not been told in a list."""
        self._executor_stats = ExecutorStats()
        """The last ones."""
        self._load: tuple[int, int, float] = (0, 0, 0.0)
        """As the coordinator knows it."""
        self._next_delivery = 0.0
        self._last_input = 0
        """Its number."""
        self._seen_input = 0
        """Number of the last input that a result has taken in."""
        self._num_told = 0
        """Steps that the last input was for."""
        self._goes_on = False
        """The executor makes another of these, as its last result says."""
        self.pause_state = PauseState.UNPAUSED
        self.step_counter = 0
        self.num_steps = 1
        """How many steps an input is for. With more than one, the next input is made before the last of them ends."""
        self.delivery_interval_s = 0.0
        """How long tokens may be held whose readers wait for the last one anyway (decision 4)."""

    @property
    def num_running(self) -> int:
        """Requests in the executor."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""
        return len(self._waiting)

    @property
    def request_ids(self) -> list[str]:
        """Ids of live requests."""
        return [*self._running, *self._waiting]

    def request_ids_of(self, client_index: int) -> list[str]:
        """Return the ids of a client's live requests."""
        live = ((request_id, self.find(request_id)) for request_id in self.request_ids)
        return [request_id for request_id, request in live if request and request.client_index == client_index]

    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self._running or self._waiting)

    def find(self, request_id: str) -> Request | None:
        """Look a live request up."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Enqueue a request.

        Raises:
            DuplicateRequestIdError: one of this id is live; it goes on undisturbed.
        """
        if self.find(request.request_id) is not None:
            raise DuplicateRequestIdError(request.request_id)
        self._waiting.push(request)

    def abort(self, request_ids: Iterable[str], *, tell_clients: bool = False) -> None:
        """End requests; unknown ids are ignored.

        Args:
            tell_clients: make ABORT outputs. Not for a client's own abort: it has forgotten the request.
        """
        for request_id in request_ids:
            request = self._waiting.remove(request_id)
            if request is None:
                request = self._running.pop(request_id, None)
                if request is None:
                    continue
                self._aborts.append(request_id)
            self._report_due = self._needs_stats
            if self._reports_load and not tell_clients:  # what synthetic outputs end, they list themselves
                self._finished.setdefault(request.client_index, []).append(request_id)
            if tell_clients:
                output = EngineCoreOutput(request_id, request.held_token_ids, finish_reason=FinishReason.ABORT)
                self._synthetic.setdefault(request.client_index, []).append(output)

    def abort_all(self) -> None:
        """End every request and tell the clients."""
        self.abort(self.request_ids, tell_clients=True)

    def take_aborts(self) -> list[str]:
        """Hand over the ids the executor must forget, to tell it without a step."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def take_synthetic(self) -> dict[int, EngineCoreOutputs]:
        """Hand over the outputs that no step made, per client."""
        if not self._synthetic:  # asked in every step, and nearly always so
            return {}
        synthetic, self._synthetic = self._synthetic, {}
        return {client_index: synthetic_outputs(outputs) for client_index, outputs in synthetic.items()}

    def note_cache_reset(self) -> None:
        """The next statistics say that the prefix cache was reset."""
        self._cache_was_reset = True

    def has_work(self) -> bool:
        """Whether :meth:`schedule` has anything to say."""
        if self._running and self.pause_state is PauseState.UNPAUSED:
            return True
        return bool(self._aborts) or self._report_due or self.has_steps()

    def has_steps(self) -> bool:
        """Whether requests are there for a step to advance."""
        if self.pause_state is PauseState.UNPAUSED:
            return bool(self._running or self._waiting)
        return self.pause_state is PauseState.PAUSED_NEW and bool(self._running)

    def schedule(self) -> StepInput | None:
        """Decide the next step; ``None``: there is nothing to do or to add until something arrives."""
        adds: list[EngineCoreRequest] = []
        if self._waiting and self.pause_state is PauseState.UNPAUSED:
            now = time.monotonic()
            while self._waiting and len(self._running) < self._max_num_seqs:
                request = self._waiting.pop()
                request.scheduled_at = now
                request.input_number = self._last_input + 1
                self._running[request.request_id] = request
                adds.append(request.core_request)
        num_steps = self.num_steps if self._running and self.pause_state is not PauseState.PAUSED_ALL else 0
        if self.is_stepping and self.num_steps > 1:
            if not (adds or self._aborts or (num_steps and self._seen_input == self._last_input)):
                return None
        elif not (num_steps or self._aborts or self._report_due):
            return None
        return self._input(adds, num_steps, with_stats=self._needs_stats and self._is_report_due())

    def halt(self) -> StepInput | None:
        """Decide that the step in progress is the last one for now; ``None``: it will be."""
        return self._input([], 0) if self.is_stepping and self._num_told > 1 else None

    @property
    def is_stepping(self) -> bool:
        """Whether the executor has been told something that it has not finished, as far as its results say."""
        return self._seen_input < self._last_input or self._goes_on

    def _input(self, adds: list[EngineCoreRequest], num_steps: int, *, with_stats: bool = False) -> StepInput:
        self._last_input += 1
        self._num_told = num_steps
        hold_s = self.delivery_interval_s if self.num_steps > 1 else 0.0
        return StepInput(self.take_aborts(), adds, num_steps, with_stats, self._last_input, hold_s)

    def _is_report_due(self) -> bool:
        counts, now = (len(self._running), len(self._waiting)), time.monotonic()
        if not self._report_due and counts == self._reported and now < self._next_report:
            return False
        self._report_due, self._reported, self._next_report = False, counts, now + STATS_INTERVAL_S
        return True

    def update(self, result: StepOutput) -> dict[int, EngineCoreOutputs]:
        """Turn a step's result into messages, keyed by client index.

        Outputs of requests that were aborted meanwhile are dropped. The executor's output objects are used as they
        are: completed, cut where a stop rule says so, and passed on.
        """
        self.step_counter += result.num_steps
        self._seen_input, self._goes_on = min(result.number, self._last_input), result.goes_on
        by_client: dict[int, list[EngineCoreOutput]] = {}
        running = self._running
        holds = self._holds_outputs(result)
        for output in result.outputs:
            request = running.get(output.request_id)
            if request is None or request.input_number > result.number:  # aborted, and its id is used again
                continue
            if request.stop_rules is not None:
                stop = request.stop_rules.advance(output.new_token_ids)
                if stop is not None:
                    self._apply(stop, output)
            if output.finish_reason is not None:
                del running[output.request_id]
                if self._reports_load:
                    self._finished.setdefault(request.client_index, []).append(output.request_id)
                self._report_due = self._needs_stats
            elif not output.new_token_ids and output.pooling_output is None and output.kv_transfer_params is None:
                continue
            if request.is_new:
                self._complete_first(request, output)
            elif request.can_wait:
                if holds and output.finish_reason is None:
                    request.held_token_ids += output.new_token_ids
                    continue
                if request.held_token_ids:
                    output.new_token_ids = request.held_token_ids + output.new_token_ids
                    request.held_token_ids = []
            outputs = by_client.get(request.client_index)
            if outputs is None:
                by_client[request.client_index] = [output]
            else:
                outputs.append(output)
        is_lost = running and not result.has_unfinished and self._seen_input == self._last_input
        if is_lost and self.pause_state is not PauseState.PAUSED_ALL:
            self._fail_lost(by_client)
        messages = {client_index: EngineCoreOutputs(outputs=outputs) for client_index, outputs in by_client.items()}
        if self._finished:
            for client_index, request_ids in self._finished.items():
                messages.setdefault(client_index, EngineCoreOutputs()).finished_requests = request_ids
            self._finished = {}
        if result.stats is not None:
            self._executor_stats = result.stats
            if self._log_stats:
                receiver = next(iter(messages), 0)
                messages.setdefault(receiver, EngineCoreOutputs()).scheduler_stats = self._stats(result.stats)
        return messages

    def _holds_outputs(self, result: StepOutput) -> bool:
        """Whether a step's tokens may wait. They go with what makes a message anyway."""
        now = time.monotonic()
        if result.stats is None and now < self._next_delivery:
            return True
        self._next_delivery = now + self.delivery_interval_s
        return False

    def load_change(self) -> SchedulerStats | None:
        """Return what there is to do if that has changed since the last call; the cache's use comes along."""
        num_running, num_waiting = self._counts()
        usage = self._executor_stats.kv_cache_usage
        # Of a busy engine it changes all the time; of an idle one it is the last word.
        load = (num_running, num_waiting, -1.0 if num_running else usage)
        if load == self._load:
            return None
        self._load = load
        return SchedulerStats(num_running_reqs=num_running, num_waiting_reqs=num_waiting, kv_cache_usage=usage)

    def _apply(self, stop: Stop, output: EngineCoreOutput) -> None:
        """End a request where a stop rule says. An executor that ended it at the same token knows the reason best."""
        cut = stop.num_tokens < len(output.new_token_ids)
        if cut:
            output.new_token_ids = output.new_token_ids[: stop.num_tokens]
            if output.new_logprobs is not None:
                output.new_logprobs = _first_logprobs(output.new_logprobs, stop.num_tokens)
        if output.finish_reason is None:
            self._aborts.append(output.request_id)
        if output.finish_reason is None or cut or output.finish_reason == stop.reason:
            output.finish_reason, output.stop_reason = stop.reason, stop.stop_reason

    def _complete_first(self, request: Request, output: EngineCoreOutput) -> None:
        request.is_new = False
        if output.prefill_stats is None and output.finish_reason is not FinishReason.ERROR:
            num_prompt_tokens = len(request.core_request.prompt_token_ids or ())
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=num_prompt_tokens, num_computed_tokens=num_prompt_tokens
            )
        if self._log_stats:
            output.events = [
                EngineCoreEvent(EngineCoreEventType.QUEUED, request.queued_at),
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, request.scheduled_at),
                *(output.events or ()),
            ]

    def _fail_lost(self, by_client: dict[int, list[EngineCoreOutput]]) -> None:
        """Fail what the executor has forgotten without a word: its callers would wait for ever."""
        reason = f"{INTERNAL_PREFIX}the executor says that it has no requests left, but never finished this one"
        for request_id, request in self._running.items():
            logger.error("request_id=%s was lost by the executor", request_id)
            output = EngineCoreOutput(
                request_id, request.held_token_ids, finish_reason=FinishReason.ERROR, stop_reason=reason
            )
            by_client.setdefault(request.client_index, []).append(output)
            if self._reports_load:
                self._finished.setdefault(request.client_index, []).append(request_id)
        self._running.clear()
        self._report_due = self._needs_stats

    def _stats(self, executor: ExecutorStats) -> SchedulerStats:
        prefix_cache: PrefixCacheStats = executor.prefix_cache
        if self._cache_was_reset:
            prefix_cache.reset, self._cache_was_reset = True, False
        num_running, num_waiting = self._counts()
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            step_counter=self.step_counter,
            kv_cache_usage=executor.kv_cache_usage,
            prefix_cache_stats=prefix_cache,
        )

    def _counts(self) -> tuple[int, int]:
        """Return how many requests run and wait; those that the executor holds but cannot run wait, too."""
        preempted = min(self._executor_stats.num_preempted_reqs, len(self._running))
        return len(self._running) - preempted, len(self._waiting) + preempted


def _first_logprobs(logprobs: LogprobsLists | list[Any], count: int) -> LogprobsLists:
    """Cut a step's logprobs to its first tokens. From another process they come in wire form."""
    if isinstance(logprobs, list):
        logprobs = logprobs_lists_from_wire(logprobs)
    return LogprobsLists(
        logprobs.logprob_token_ids[:count], logprobs.logprobs[:count], logprobs.sampled_token_ranks[:count]
    )
