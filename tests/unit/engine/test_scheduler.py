"""The scheduler: facts in, decisions out, no executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginewire.config import SchedulingPolicy
from enginewire.engine.admission import AdmissionQueue, Request
from enginewire.engine.executor import ExecutorStats
from enginewire.engine.scheduler import STATS_INTERVAL_S, PauseState, Scheduler
from enginewire.engine.step import StepOutput
from enginewire.errors import DuplicateRequestIdError
from enginewire.wire.arrays import LogprobsLists
from enginewire.wire.messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
)
from enginewire.wire.sampling import RequestOutputKind, SamplingParams

MAX_MODEL_LEN = 100


def scheduler(max_num_seqs: int = 8, policy: SchedulingPolicy = "fcfs", log_stats: bool = False) -> Scheduler:
    return Scheduler(max_num_seqs=max_num_seqs, policy=policy, log_stats=log_stats)


def request(
    request_id: str, *, client_index: int = 0, priority: int = 0, arrival_time: float = 0.0, **params: Any
) -> Request:
    params.setdefault("max_tokens", 20)
    core = EngineCoreRequest(
        request_id,
        [1, 2, 3],
        sampling_params=SamplingParams(**params),
        client_index=client_index,
        priority=priority,
        arrival_time=arrival_time,
    )
    return Request(core, MAX_MODEL_LEN)


def started(scheduler: Scheduler, *requests: Request) -> None:
    """Add requests and let them into the executor."""
    for each in requests:
        scheduler.add(each)
    scheduler.schedule()


def result(*outputs: EngineCoreOutput, has_unfinished: bool = True, stats: ExecutorStats | None = None) -> StepOutput:
    return StepOutput(list(outputs), has_unfinished, stats)


def added(scheduler: Scheduler) -> list[str]:
    step_input = scheduler.schedule()
    return [] if step_input is None else [each.request_id for each in step_input.adds]


def test_requests_are_let_in_by_arrival_up_to_the_limit() -> None:
    s = scheduler(max_num_seqs=2)
    for request_id in "abc":
        s.add(request(request_id, priority=-ord(request_id)))
    assert added(s) == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    assert added(s) == []
    s.update(result(EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP)))
    assert added(s) == ["c"]


def test_by_priority_the_lower_goes_first_then_the_earlier() -> None:
    s = scheduler(max_num_seqs=1, policy="priority")
    s.add(request("late", priority=1, arrival_time=1.0))
    s.add(request("early", priority=1, arrival_time=0.5))
    s.add(request("urgent", priority=-5, arrival_time=9.0))
    s.add(request("tie", priority=1, arrival_time=0.5))
    order = []
    for _ in range(4):
        (request_id,) = added(s)
        order.append(request_id)
        s.abort([request_id])
    assert order == ["urgent", "early", "tie", "late"]


def test_an_idle_scheduler_has_nothing_to_say() -> None:
    s = scheduler()
    assert not s.has_work()
    assert s.schedule() is None


def test_a_live_id_is_refused_whether_it_runs_or_waits() -> None:
    """Defect 4."""
    s = scheduler(max_num_seqs=1)
    started(s, request("runs"))
    s.add(request("waits"))
    for request_id in ("runs", "waits"):
        with pytest.raises(DuplicateRequestIdError):
            s.add(request(request_id))
    assert (s.num_running, s.num_waiting) == (1, 1)


def test_outputs_go_to_the_client_that_asked() -> None:
    """C-52."""
    s = scheduler()
    started(s, request("a", client_index=1), request("b"), request("c", client_index=1))
    messages = s.update(result(*(EngineCoreOutput(i, [7]) for i in "abc")))
    assert {client: [o.request_id for o in message.outputs] for client, message in messages.items()} == {
        1: ["a", "c"],
        0: ["b"],
    }


def test_a_stop_rule_ends_a_request_and_the_executor_forgets_it_before_its_next_step() -> None:
    """C-60, section 11: stop rules live once."""
    s = scheduler()
    started(s, request("a", max_tokens=1), request("b"))
    messages = s.update(result(EngineCoreOutput("a", [5]), EngineCoreOutput("b", [5])))
    assert [o.finish_reason for o in messages[0].outputs] == [FinishReason.LENGTH, None]
    step_input = s.schedule()
    assert step_input is not None
    assert (step_input.aborts, step_input.num_steps) == (["a"], 1)


def test_tokens_and_logprobs_beyond_the_stop_are_cut() -> None:
    s = scheduler()
    started(s, request("a", stop_token_ids=[9]))
    logprobs = LogprobsLists(np.arange(8).reshape(4, 2), np.zeros((4, 2), np.float32), np.arange(4))
    output = EngineCoreOutput("a", [5, 9, 6, 7], new_logprobs=logprobs)
    s.update(result(output))
    assert output.new_token_ids == [5, 9]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 9)
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0, 1], [2, 3]]
    assert len(output.new_logprobs.logprobs) == len(output.new_logprobs.sampled_token_ranks) == 2


def test_an_executor_that_ends_a_request_itself_is_not_told_to_forget_it() -> None:
    s = scheduler()
    started(s, request("a"), request("b"))
    s.update(result(EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP), EngineCoreOutput("b", [5])))
    step_input = s.schedule()
    assert step_input is not None
    assert step_input.aborts == []
    assert s.num_running == 1


@pytest.mark.parametrize(
    ("token_ids", "executor_says", "reason", "stop_reason"),
    [
        ([9], FinishReason.STOP, FinishReason.STOP, 9),  # the rule knows which stop token it was
        ([9], FinishReason.LENGTH, FinishReason.LENGTH, None),  # the executor knows best at its own last token
        ([9, 5], FinishReason.LENGTH, FinishReason.STOP, 9),  # but the rule ended it earlier
    ],
)
def test_a_rule_and_an_executor_that_both_end_a_request_agree(
    token_ids: list[int], executor_says: FinishReason, reason: FinishReason, stop_reason: int | None
) -> None:
    s = scheduler()
    started(s, request("a", stop_token_ids=[9]), request("b"))
    output = EngineCoreOutput("a", token_ids, finish_reason=executor_says)
    s.update(result(output))
    assert (output.finish_reason, output.stop_reason, output.new_token_ids) == (reason, stop_reason, [9])
    step_input = s.schedule()
    assert step_input is not None
    assert step_input.aborts == []


def test_outputs_of_aborted_requests_are_dropped() -> None:
    """Protocol G: no output for an aborted request, not even the tokens of the step during which it was aborted."""
    s = scheduler()
    started(s, request("a"), request("b"))
    s.abort(["a", "unknown"])
    s.abort(["a"])
    messages = s.update(result(EngineCoreOutput("a", [5]), EngineCoreOutput("b", [6])))
    assert [o.request_id for o in messages[0].outputs] == ["b"]
    assert s.take_synthetic() == {}
    assert s.take_aborts() == ["a"]


def test_an_id_may_be_used_again_after_an_abort_and_gets_no_old_tokens() -> None:
    s = scheduler()
    started(s, request("a"))
    s.abort(["a"])
    s.add(request("a"))
    assert s.update(result(EngineCoreOutput("a", [5]))) == {}
    step_input = s.schedule()
    assert step_input is not None
    assert step_input.aborts == ["a"]
    assert [each.request_id for each in step_input.adds] == ["a"]


def test_a_waiting_request_is_aborted_without_telling_the_executor() -> None:
    s = scheduler(max_num_seqs=1)
    started(s, request("a"))
    s.add(request("b"))
    s.abort(["b"])
    assert s.take_aborts() == []
    assert s.num_waiting == 0


def test_ending_all_tells_their_clients() -> None:
    s = scheduler(max_num_seqs=1)
    started(s, request("a"))
    s.add(request("b", client_index=1))
    s.abort_all()
    synthetic = s.take_synthetic()
    for client_index, request_id in ((0, "a"), (1, "b")):
        message = synthetic[client_index]
        assert message.finished_requests == [request_id]
        assert message.scheduler_stats is None
        (output,) = message.outputs
        assert (output.request_id, output.new_token_ids, output.finish_reason) == (request_id, [], FinishReason.ABORT)
    assert s.take_synthetic() == {}
    assert not s.has_requests()


@pytest.mark.parametrize(
    ("state", "adds", "steps"),
    [(PauseState.UNPAUSED, ["b"], True), (PauseState.PAUSED_NEW, [], True), (PauseState.PAUSED_ALL, [], None)],
)
def test_pause_states(state: PauseState, adds: list[str], steps: bool | None) -> None:
    """C-61, protocol H."""
    s = scheduler()
    started(s, request("a"))
    s.add(request("b"))
    s.pause_state = state
    assert s.has_work() is bool(steps)
    step_input = s.schedule()
    if steps is None:
        assert step_input is None
    else:
        assert step_input is not None
        assert [each.request_id for each in step_input.adds] == adds
        assert step_input.num_steps


def test_a_pause_still_lets_the_executor_forget() -> None:
    s = scheduler()
    started(s, request("a"), request("b"))
    s.pause_state = PauseState.PAUSED_ALL
    s.abort(["a"])
    step_input = s.schedule()
    assert step_input is not None
    assert (step_input.aborts, step_input.num_steps) == (["a"], 0)


def test_an_output_that_says_nothing_is_not_sent() -> None:
    s = scheduler()
    started(s, request("a"))
    assert s.update(result(EngineCoreOutput("a", []))) == {}


def test_the_first_output_tells_the_milestones_and_the_prefill() -> None:
    """Protocol D.6: events and prefill_stats come with the first output; events with statistics only."""
    s = scheduler(log_stats=True)
    started(s, request("a"))
    first, second = EngineCoreOutput("a", [5]), EngineCoreOutput("a", [6])
    s.update(result(first))
    s.update(result(second))
    assert first.events is not None
    assert [event.type for event in first.events] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    assert first.events[0].timestamp <= first.events[1].timestamp
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    assert (second.events, second.prefill_stats) == (None, None)


def test_without_statistics_there_are_no_events_but_the_prefill() -> None:
    s = scheduler(log_stats=False)
    started(s, request("a"))
    own = PrefillStats(num_prompt_tokens=3, num_computed_tokens=1, num_cached_tokens=2, num_local_cached_tokens=2)
    output = EngineCoreOutput("a", [5], prefill_stats=own)
    messages = s.update(result(output))
    assert output.events is None
    assert output.prefill_stats is own
    assert messages[0].scheduler_stats is None


def test_statistics_go_to_one_client_per_step() -> None:
    """Protocol D.5."""
    s = scheduler(max_num_seqs=2, log_stats=True)
    started(s, request("a", client_index=1), request("b"))
    s.add(request("c"))
    stats = ExecutorStats(kv_cache_usage=0.25, num_preempted_reqs=1, prefix_cache=PrefixCacheStats(queries=3, hits=2))
    s.note_cache_reset()
    messages = s.update(result(EngineCoreOutput("a", [5]), EngineCoreOutput("b", [5]), stats=stats))
    sent = messages[1].scheduler_stats
    assert sent is not None
    assert messages[0].scheduler_stats is None
    assert (sent.num_running_reqs, sent.num_waiting_reqs, sent.step_counter) == (1, 2, 1)
    assert sent.kv_cache_usage == 0.25
    assert sent.prefix_cache_stats == PrefixCacheStats(reset=True, queries=3, hits=2)
    quiet = s.update(result(stats=ExecutorStats()))
    assert list(quiet) == [0]
    assert quiet[0].outputs == []
    assert quiet[0].scheduler_stats is not None
    assert not quiet[0].scheduler_stats.prefix_cache_stats.reset


@pytest.mark.parametrize("how", ["rule", "executor", "abort"])
def test_after_the_last_request_statistics_are_sent_once_more(how: str) -> None:
    """Protocol D.5: one more message with empty outputs and fresh statistics."""
    s = scheduler(log_stats=True)
    started(s, request("a", max_tokens=1 if how == "rule" else 9))
    if how == "abort":
        s.abort(["a"])
    else:
        output = EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP if how == "executor" else None)
        s.update(result(output, stats=ExecutorStats()))
    step_input = s.schedule()
    assert step_input is not None
    assert (step_input.num_steps, step_input.with_stats) == (0, True)
    messages = s.update(result(has_unfinished=False, stats=ExecutorStats()))
    assert messages[0].outputs == []
    assert messages[0].scheduler_stats is not None
    assert messages[0].scheduler_stats.num_running_reqs == 0
    assert s.schedule() is None


def test_statistics_are_asked_for_when_requests_come_or_go_and_else_at_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Protocol D.5: at most once per step. A small model pays for each."""
    clock = [100.0]
    monkeypatch.setattr("enginewire.engine.scheduler.time.monotonic", lambda: clock[0])
    busy = scheduler(log_stats=True)

    def wants_stats() -> bool:
        step_input = busy.schedule()
        assert step_input is not None
        busy.update(result())
        return step_input.with_stats

    busy.add(request("a"))
    assert wants_stats()
    assert not wants_stats()
    clock[0] += STATS_INTERVAL_S
    assert wants_stats()
    assert not wants_stats()
    busy.add(request("b"))
    assert wants_stats()
    busy.abort(["b"])
    assert wants_stats()
    assert not wants_stats()


def test_a_request_that_the_executor_forgot_fails_instead_of_hanging() -> None:
    s = scheduler()
    started(s, request("a", client_index=1), request("b"))
    messages = s.update(result(EngineCoreOutput("b", [5], finish_reason=FinishReason.STOP), has_unfinished=False))
    (lost,) = messages[1].outputs
    assert lost.finish_reason is FinishReason.ERROR
    assert str(lost.stop_reason).startswith("internal: the executor")
    assert not s.has_requests()


def test_prompt_and_max_tokens_beyond_the_context_are_capped() -> None:
    """Section 11."""
    s = scheduler()
    core = EngineCoreRequest("a", list(range(98)), sampling_params=SamplingParams(max_tokens=50))
    started(s, Request(core, 100))
    assert s.update(result(EngineCoreOutput("a", [1])))[0].outputs[0].finish_reason is None
    assert s.update(result(EngineCoreOutput("a", [1])))[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_the_queue_lets_go_of_what_was_removed() -> None:
    """A paused engine whose clients add and abort must not collect their prompts."""
    queue = AdmissionQueue("priority")
    queue.push(request("stays", priority=-1))
    for number in range(1000):
        queue.push(request(str(number)))
        queue.remove(str(number))
    assert len(queue) == 1
    assert len(queue._heap) < 100
    assert queue.pop().request_id == "stays"
    with pytest.raises(IndexError):
        queue.pop()


# Tokens whose readers wait for the last one.


def holding(*requests: Request, interval_s: float = 3600.0) -> Scheduler:
    """A scheduler that has sent the first token, 5, of these requests."""
    s = scheduler()
    s.delivery_interval_s = interval_s
    started(s, *requests)
    messages = s.update(result(*(EngineCoreOutput(each.request_id, [5]) for each in requests)))
    assert [output.new_token_ids for output in messages[0].outputs] == [[5]] * len(requests)
    return s


def waits(request_id: str, **params: Any) -> Request:
    """A request whose reader wants one final output."""
    return request(request_id, output_kind=RequestOutputKind.FINAL_ONLY, **params)


def sent(s: Scheduler, *outputs: EngineCoreOutput, stats: ExecutorStats | None = None) -> list[tuple[str, list[int]]]:
    messages = s.update(result(*outputs, stats=stats))
    return [(output.request_id, output.new_token_ids) for output in messages[0].outputs] if messages else []


def test_tokens_that_nobody_reads_yet_go_with_the_last_one() -> None:
    """Decision 4."""
    s = holding(waits("a", max_tokens=4), request("stream"))
    assert sent(s, EngineCoreOutput("a", [6]), EngineCoreOutput("stream", [6])) == [("stream", [6])]
    assert sent(s, EngineCoreOutput("a", [7])) == []
    assert sent(s, EngineCoreOutput("a", [8])) == [("a", [6, 7, 8])]


def test_tokens_that_nobody_reads_yet_go_with_statistics_and_when_it_is_time() -> None:
    """Decision 4."""
    s = holding(waits("a"))
    assert sent(s, EngineCoreOutput("a", [6])) == []
    assert sent(s, EngineCoreOutput("a", [7]), stats=ExecutorStats()) == [("a", [6, 7])]
    s = holding(waits("a"), interval_s=0.0)
    assert sent(s, EngineCoreOutput("a", [6])) == [("a", [6])]


def test_tokens_that_nobody_reads_yet_are_not_lost_when_their_request_ends_early() -> None:
    """Pause mode abort: what there is of the text is its reader's."""
    s = holding(waits("a"))
    sent(s, EngineCoreOutput("a", [6]))
    s.abort_all()
    (output,) = s.take_synthetic()[0].outputs
    assert (output.new_token_ids, output.finish_reason) == ([6], FinishReason.ABORT)


def test_a_stop_rule_cuts_the_step_and_not_what_was_held() -> None:
    s = holding(waits("a", max_tokens=4))
    sent(s, EngineCoreOutput("a", [6]))
    assert sent(s, EngineCoreOutput("a", [7, 8, 9])) == [("a", [6, 7, 8])]


@pytest.mark.parametrize("wish", [{"stop": "x"}, {"logprobs": 1}, {"output_kind": RequestOutputKind.DELTA}])
def test_tokens_are_not_held_from_a_frontend_that_looks_at_them(wish: dict[str, Any]) -> None:
    """Stop strings are found by the frontend, and the sooner the better."""
    s = holding(request("a", **({"output_kind": RequestOutputKind.FINAL_ONLY} | wish)))
    assert sent(s, EngineCoreOutput("a", [6])) == [("a", [6])]
