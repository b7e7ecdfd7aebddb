"""The busy loop, without sockets: events in, messages out."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.engine.busy_loop import BusyLoop, Phase
from enginewire.engine.core import EngineCore
from enginewire.engine.events import EventKind, Events
from enginewire.engine.executor import Executor
from enginewire.engine.receiver import EventReceiver
from enginewire.engine.step import StepInput, StepOutput, Steps
from enginewire.executors import EchoExecutor
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from enginewire.wire.sampling import SamplingParams


class Hooked(EchoExecutor):
    """Calls a function during its steps: where another thread's event could arrive."""

    in_step: Callable[[int], None] = staticmethod(lambda number: None)

    def step(self) -> list[EngineCoreOutput]:
        outputs = super().step()
        self.in_step(self._num_steps)
        return outputs


class FakeChild:
    """Stands for an executor in another process: its steps end when the test says so."""

    def __init__(self, executor: Executor) -> None:
        self.waiting: list[StepInput] = []
        """What it was told during a step."""
        self.steps = Steps(executor)

    def start_step(self, step_input: StepInput) -> None:
        if self.steps.is_due:
            self.waiting.append(step_input)
        else:
            self.steps.take(step_input)

    def result(self) -> StepOutput:
        """End the step, and those after it that are not told of, and begin the next one if there is one."""
        assert self.steps.is_due
        while True:
            result = self.steps.make()
            while self.waiting:
                self.steps.take(self.waiting.pop(0))
            if result is not None:
                return result


class Harness:
    """A loop with everything it sends in ``log``: ``(client, request_id or call_id, what)``. Its own output thread."""

    def __init__(self, *, with_child: bool = False, **settings: Any) -> None:
        config = EngineConfig.create("echo", log_stats=False, **settings)
        self.core = EngineCore(config, Hooked, log_stats=False)
        self.events: Events = queue.SimpleQueue()
        self.log: list[tuple[int, Any, Any]] = []
        self.num_catch_ups = 0
        self.child = FakeChild(self.core.executor) if with_child else None
        child: Any = self.child
        self.loop = BusyLoop(self.core, self.events, self, child)
        self.receiver = EventReceiver(self.core, self.events, self, lambda: self.loop.is_ending)

    def put(self, client_index: int, message: EngineCoreOutputs, method: str = "") -> None:
        if message.utility_output is not None:
            answer: UtilityOutput = message.utility_output
            self.log.append((client_index, answer.call_id, answer.failure_message or answer.result[1]))
        for output in message.outputs:
            what = output.new_token_ids if output.finish_reason is None else output.finish_reason
            self.log.append((client_index, output.request_id, what))

    def catch_up(self) -> None:
        """Count; nothing is ever queued here."""
        self.num_catch_ups += 1

    def in_step(self, number: int, *actions: Callable[[], None]) -> None:
        """Do something during a step."""
        executor = self.core.executor
        assert isinstance(executor, Hooked)

        def hook(now: int) -> None:
            for action in actions if now == number else ():
                action()

        executor.in_step = hook

    def add(self, request_id: str, client_index: int = 0, **params: Any) -> None:
        params.setdefault("max_tokens", 3)
        self.receiver.receive_request(
            EngineCoreRequest(
                request_id, [1, 2, 3], sampling_params=SamplingParams(**params), client_index=client_index
            )
        )

    def abort(self, *request_ids: str) -> None:
        self.receiver.receive_abort(list(request_ids))

    def call(self, call_id: int, method: str, *args: Any) -> None:
        self.receiver.receive_utility(UtilityCall(0, call_id, method, list(args)))

    def finish_step(self) -> None:
        """End a step of the child."""
        assert self.child is not None
        self.events.put((EventKind.STEP_DONE, self.child.result()))

    def stop(self) -> None:
        self.events.put((EventKind.STOP, None))

    def turn(self) -> None:
        """One turn of the loop, which must not block."""
        assert self.core.scheduler.has_work() or not self.events.empty(), "this turn would wait for ever"
        self.loop._handle_events()
        self.loop._advance()

    def run(self) -> None:
        """Run to the end; somebody has to have told it to stop."""
        self.loop.run()
        self.loop.refuse_the_rest()


def test_requests_run_to_their_end_and_then_the_loop_waits() -> None:
    h = Harness()
    h.add("a", max_tokens=2)
    h.in_step(2, h.stop)
    h.run()
    assert h.log == [(0, "a", [1]), (0, "a", FinishReason.LENGTH)]


@pytest.mark.parametrize("with_child", [False, True])
def test_no_step_begins_before_the_output_thread_has_caught_up(with_child: bool) -> None:
    """Decision 27."""
    h = Harness(with_child=with_child)
    h.add("a")
    for number in (1, 2):
        h.turn()
        assert h.num_catch_ups == number
        if h.child is not None:
            h.finish_step()
    assert len(h.log) == (1 if with_child else 2)


def test_an_abort_during_a_step_drops_that_steps_tokens() -> None:
    """C-60, protocol G: aborts are noticed in mid-queue."""
    h = Harness()
    h.add("a")
    h.add("b")
    h.in_step(2, lambda: h.abort("a"))
    h.turn()
    h.turn()
    assert h.log == [(0, "a", [1]), (0, "b", [1]), (0, "b", [2])]


def test_an_abort_before_an_add_of_its_id_does_not_end_the_new_one() -> None:
    """One abort in two queues, as the reference has it, could be applied twice."""
    h = Harness()
    h.add("a")
    h.turn()
    h.in_step(2, lambda: h.abort("a"), lambda: h.add("a"))
    h.turn()
    h.turn()
    h.turn()
    assert h.log == [(0, "a", [1]), (0, "a", [1]), (0, "a", [2])]


def test_an_add_and_its_abort_during_one_step_leave_nothing() -> None:
    h = Harness()
    h.add("a", max_tokens=9)
    h.in_step(1, lambda: h.add("b"), lambda: h.abort("b"))
    h.turn()
    h.turn()
    assert {entry[1] for entry in h.log} == {"a"}
    assert h.core.scheduler.find("b") is None


def test_a_frontend_that_vanishes_during_a_step_takes_its_requests_along_and_no_others() -> None:
    """C-62: those that it added during the step as well; what a successor adds is not among them."""
    h = Harness()
    h.add("a", client_index=1, max_tokens=9)
    h.add("b", max_tokens=9)
    h.in_step(
        2,
        lambda: h.add("c", client_index=1),
        lambda: h.receiver.frontend_lost(1),
        lambda: h.add("d", client_index=1),
    )
    for _ in range(3):
        h.turn()
    aborted = FinishReason.ABORT
    assert [entry for entry in h.log if entry[0] == 0] == [(0, "b", [1]), (0, "b", [2]), (0, "b", [3])]
    assert [entry for entry in h.log if entry[0] == 1] == [
        (1, "a", [1]), (1, "a", aborted), (1, "c", aborted), (1, "d", [1]),
    ]  # fmt: skip


def test_a_frontend_that_vanishes_while_its_requests_wait_for_a_step_elsewhere_takes_them_along() -> None:
    h = Harness(with_child=True)
    h.add("b", max_tokens=9)
    h.turn()
    h.call(1, "list_loras")  # waits for the step, and what follows for it
    h.add("c", client_index=1)
    h.receiver.frontend_lost(1)
    h.turn()
    h.finish_step()
    h.finish_step()  # says that no other follows
    h.turn()
    assert h.core.scheduler.request_ids == ["b"]
    assert h.log == [(0, "b", [1]), (0, 1, set()), (1, "c", FinishReason.ABORT)]


def test_a_request_that_cannot_run_is_answered_at_once() -> None:
    """Defect 8; C-60."""
    h = Harness()
    h.receiver.receive_request(EngineCoreRequest("a", [], sampling_params=SamplingParams(), client_index=2))
    assert h.log == [(2, "a", FinishReason.ERROR)]


def test_a_second_live_id_is_dropped_and_only_another_client_is_told() -> None:
    """Defect 4."""
    h = Harness()
    h.add("a", max_tokens=9)
    h.turn()
    h.add("a")
    h.add("a", client_index=1)
    h.turn()
    assert h.log == [(0, "a", [1]), (1, "a", FinishReason.ERROR), (0, "a", [2])]


def test_utilities_that_need_no_executor_are_answered_in_mid_step() -> None:
    """Section 11: two kinds of utility calls."""
    h = Harness()
    h.add("a")
    h.in_step(1, lambda: h.call(1, "is_sleeping"), lambda: h.call(2, "list_loras"))
    h.turn()
    h.turn()
    assert h.log[:3] == [(0, 1, False), (0, "a", [1]), (0, 2, set())]


def test_the_abort_outputs_of_a_pause_come_before_its_answer() -> None:
    """Protocol H."""
    h = Harness()
    h.add("a")
    h.turn()
    h.call(1, "pause_scheduler", "abort", True)
    h.turn()
    assert h.log == [(0, "a", [1]), (0, "a", FinishReason.ABORT), (0, 1, None)]


def test_a_deferred_answer_comes_when_its_pause_is_complete() -> None:
    """Protocol H, mode wait: all remaining tokens, then the answer; queued requests start after resume."""
    h = Harness()
    h.add("a", max_tokens=3)
    h.turn()
    h.call(1, "pause_scheduler", "wait", True)
    h.add("b")
    h.turn()
    h.turn()
    assert h.log[1:] == [(0, "a", [2]), (0, "a", FinishReason.LENGTH), (0, 1, None)]
    h.call(2, "resume_scheduler")
    h.turn()
    assert h.log[4:] == [(0, 2, None), (0, "b", [1])]


def test_what_a_utility_raises_goes_to_its_caller_only() -> None:
    h = Harness()
    h.add("a")
    h.call(1, "collective_rpc", "raise_error", None, ["why"])
    h.turn()
    assert h.log == [(0, 1, "Call to collective_rpc method failed: RuntimeError: why"), (0, "a", [1])]


def test_told_to_stop_it_aborts_and_refuses_what_comes_too_late() -> None:
    """Protocol I.1: SIGTERM in abort mode."""
    h = Harness()
    h.add("a")
    h.turn()
    h.stop()
    h.add("b")
    h.call(1, "list_loras")
    h.run()
    assert h.log == [
        (0, "a", [1]),
        (0, "b", FinishReason.ABORT),
        (0, 1, "Server shutting down"),
        (0, "a", FinishReason.ABORT),
    ]


def test_told_to_stop_with_time_it_finishes_what_is_there() -> None:
    """Protocol I.1: drain; waiting requests run too."""
    h = Harness(shutdown_timeout_s=60, max_num_seqs=1)
    h.add("a", max_tokens=2)
    h.add("b", max_tokens=1)
    h.turn()
    h.stop()
    h.add("late")
    h.in_step(2, lambda: h.call(1, "is_sleeping"))
    h.run()
    assert h.log == [
        (0, "a", [1]),
        (0, "late", FinishReason.ABORT),
        (0, 1, "Server shutting down"),
        (0, "a", FinishReason.LENGTH),
        (0, "b", FinishReason.LENGTH),
    ]


def test_told_again_it_stops_draining() -> None:
    """Defect 12: a repeated signal changes nothing or escalates, and never starts over."""
    h = Harness(shutdown_timeout_s=60)
    h.add("a", max_tokens=1000)
    h.turn()
    h.stop()
    h.turn()
    assert h.loop.phase is Phase.DRAINING
    h.stop()
    h.stop()
    h.run()
    assert h.log[-1] == (0, "a", FinishReason.ABORT)
    assert [entry[2] for entry in h.log].count(FinishReason.ABORT) == 1


def test_draining_ends_when_its_time_is_over() -> None:
    h = Harness(shutdown_timeout_s=0.001)
    h.add("a", max_tokens=100_000)
    h.stop()
    h.run()
    assert h.log[-1] == (0, "a", FinishReason.ABORT)


def test_draining_a_paused_scheduler_does_not_wait_for_what_will_not_run() -> None:
    h = Harness(shutdown_timeout_s=60)
    h.add("a")
    h.turn()
    h.call(1, "pause_scheduler", "keep", False)
    h.stop()
    h.run()
    assert h.log == [(0, "a", [1]), (0, 1, None), (0, "a", FinishReason.ABORT)]


def test_a_pause_that_shutdown_overtakes_is_answered() -> None:
    h = Harness(shutdown_timeout_s=60)
    h.add("a", max_tokens=3)
    h.turn()
    h.call(1, "pause_scheduler", "wait", True)
    h.stop()
    h.run()
    assert (0, 1, "Server shutting down") in h.log
    assert h.log[-1] == (0, "a", FinishReason.LENGTH)


def test_what_a_step_raises_ends_the_loop() -> None:
    h = Harness(executor_options={"fail_at_step": 2})
    h.add("a")
    with pytest.raises(RuntimeError, match="failing at step 2"):
        h.run()


def test_a_thread_that_is_gone_ends_the_loop() -> None:
    h = Harness()
    h.receiver.thread_failed(OSError("no more sockets"))
    with pytest.raises(OSError, match="no more sockets"):
        h.run()


# With the executor in a process of its own: the loop goes on during a step.


def child_of(h: Harness) -> FakeChild:
    assert h.child is not None
    return h.child


def test_during_a_step_elsewhere_requests_are_taken_and_aborted() -> None:
    h = Harness(with_child=True)
    h.add("a")
    h.turn()
    h.add("b")
    h.abort("a")
    h.turn()
    (step_input,) = child_of(h).waiting  # told at once, and not only after the result
    assert step_input.aborts == ["a"]
    assert [each.request_id for each in step_input.adds] == ["b"]
    h.finish_step()
    h.turn()
    assert h.log == []
    h.finish_step()
    h.turn()
    assert h.log == [(0, "b", [1])]


def test_a_step_elsewhere_is_followed_by_the_next_without_waiting_for_an_answer() -> None:
    """Decision 4."""
    h = Harness(with_child=True)
    h.add("a", max_tokens=9)
    h.turn()
    for number in range(1, 9):
        h.finish_step()
        assert child_of(h).steps.is_due
        h.turn()
        assert len(h.log) == number


def test_an_executor_elsewhere_that_hears_nothing_makes_one_step_more() -> None:
    """It cannot run away from an engine that is slower than its steps."""
    h = Harness(with_child=True)
    h.add("a", max_tokens=9)
    h.turn()
    assert child_of(h).result().goes_on
    assert not child_of(h).result().goes_on
    assert not child_of(h).steps.is_due


def test_a_step_that_began_before_a_request_ended_brings_nothing_for_it_or_for_the_next_of_its_name() -> None:
    """Decision 4."""
    h = Harness(with_child=True)
    h.add("a", max_tokens=1)
    h.turn()
    h.finish_step()
    h.turn()
    h.add("a", max_tokens=9)  # another one, while a step is made for the first
    h.turn()
    h.finish_step()
    h.turn()
    assert h.log == [(0, "a", FinishReason.LENGTH)]
    h.finish_step()
    h.turn()
    assert h.log[1:] == [(0, "a", [1])]


def test_calls_that_need_the_executor_wait_for_the_step_and_nothing_overtakes_them() -> None:
    h = Harness(with_child=True)
    h.add("a", max_tokens=9)
    h.turn()
    h.call(1, "pause_scheduler", "abort", True)
    h.add("after")
    h.add("gone")
    h.abort("gone")
    h.call(2, "is_scheduler_paused")
    h.turn()
    assert h.log == [(0, 2, False)]
    h.finish_step()
    h.finish_step()  # says that no other follows
    h.turn()
    assert h.log[1:] == [(0, "a", [1]), (0, "a", FinishReason.ABORT), (0, 1, None)]
    assert h.core.scheduler.find("after") is not None
    assert h.core.scheduler.find("gone") is None


def test_stopping_does_not_wait_for_a_step_elsewhere() -> None:
    h = Harness(with_child=True)
    h.add("a")
    h.turn()
    h.stop()
    h.call(1, "list_loras")
    h.run()
    assert h.log == [(0, "a", FinishReason.ABORT), (0, 1, "Server shutting down")]
    assert h.loop.is_step_in_flight


def test_draining_waits_for_a_step_elsewhere() -> None:
    h = Harness(with_child=True, shutdown_timeout_s=60)
    h.add("a", max_tokens=1)
    h.turn()
    h.stop()
    h.turn()
    assert h.loop.phase is Phase.DRAINING
    h.finish_step()
    h.turn()
    assert h.log == [(0, "a", FinishReason.LENGTH)]
    h.finish_step()  # begun before it was told of that end
    h.finish_step()  # says that no other follows
    h.run()
    assert h.log == [(0, "a", FinishReason.LENGTH)]
    assert not h.loop.is_step_in_flight


def test_the_death_of_the_other_process_ends_the_loop() -> None:
    h = Harness(with_child=True)
    h.add("a")
    h.turn()
    h.events.put((EventKind.FAILED, RuntimeError("executor process killed")))
    with pytest.raises(RuntimeError, match="executor process killed"):
        h.run()
