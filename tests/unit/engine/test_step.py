"""Steps of an executor that is told things while it steps."""

from __future__ import annotations

from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.engine.step import StepInput, StepOutput, Steps
from enginewire.executors import EchoExecutor
from enginewire.wire.messages import EngineCoreRequest, FinishReason
from enginewire.wire.sampling import RequestOutputKind, SamplingParams


class AlwaysTelling(Steps):
    """Steps of which each is told, as far as the test knows."""

    def make(self) -> StepOutput:
        result = super().make()
        assert result is not None
        return result


def steps() -> AlwaysTelling:
    return AlwaysTelling(EchoExecutor(EngineConfig.create("echo")))


def told(
    number: int, *adds: str, aborts: tuple[str, ...] = (), num_steps: int = 2, hold_s: float = 0.0, **params: Any
) -> StepInput:
    wishes = SamplingParams(**({"max_tokens": 9} | params))
    requests = [EngineCoreRequest(request_id, [1, 2, 3], sampling_params=wishes) for request_id in adds]
    return StepInput(list(aborts), requests, num_steps, number == 2, number, hold_s)


def test_as_many_steps_are_made_as_the_last_input_says() -> None:
    s = steps()
    s.take(told(1, "a", num_steps=2))
    assert [s.make().goes_on, s.make().goes_on, s.is_due] == [True, False, False]
    s.take(told(2, num_steps=3))
    s.make()
    s.take(told(3, num_steps=1))
    assert [s.make().goes_on, s.is_due] == [False, False]


def test_a_step_takes_in_everything_that_came_before_it() -> None:
    """An abort waits for one step, however much was said before it."""
    s = steps()
    s.take(told(1, "a"))
    s.make()
    s.take(told(2, "b"))
    s.take(told(3, "c", aborts=("a",)))
    result = s.make()
    assert [output.request_id for output in result.outputs] == ["b", "c"]
    assert (result.number, result.stats is not None) == (3, True)


def test_an_input_without_a_step_is_answered_and_nothing_follows() -> None:
    s = steps()
    s.take(told(1, "a"))
    assert s.make().goes_on
    s.take(told(2, num_steps=0))
    assert s.is_due
    result = s.make()
    assert (result.outputs, result.has_unfinished, result.goes_on, result.number) == ([], True, False, 2)
    assert not s.is_due


def test_what_is_not_taken_in_is_told_once() -> None:
    s = steps()
    s.take(told(1, "a"))
    s.take(StepInput([], [EngineCoreRequest("broken", None)], 2, False, 2))
    assert [output.request_id for output in s.make().outputs] == ["broken", "a"]
    assert [output.request_id for output in s.make().outputs] == ["a"]


# Tokens whose readers wait for the last one.


def waiting(number: int, *adds: str, **told_too: Any) -> StepInput:
    """Requests whose readers want one final output, and are told of tokens at the end of the time."""
    return told(number, *adds, hold_s=3600.0, **({"output_kind": RequestOutputKind.FINAL_ONLY} | told_too))


def tokens(result: StepOutput | None) -> dict[str, list[int]] | None:
    return None if result is None else {output.request_id: output.new_token_ids for output in result.outputs}


def patient_steps(**settings: Any) -> Steps:
    return Steps(EchoExecutor(EngineConfig.create("echo", **settings)))


def test_tokens_that_nobody_waits_for_are_told_with_the_last_one() -> None:
    """Decision 4: the first token at once, the last at once, and nothing in between wakes the engine."""
    s = patient_steps()
    s.take(waiting(1, "a", max_tokens=5))
    assert tokens(s.make()) == {"a": [1]}
    assert [s.make(), s.make(), s.make()] == [None, None, None]
    assert s.is_due
    result = s.make()
    assert result is not None
    assert (tokens(result), result.num_steps) == ({"a": [2, 3, 1, 2]}, 4)


def test_tokens_that_nobody_waits_for_are_told_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 4: an engine that is lost takes little along. Steps that are not told of are not counted."""
    clock = [100.0]
    monkeypatch.setattr("enginewire.engine.step.time.monotonic", lambda: clock[0])
    s = patient_steps()
    s.take(waiting(1, "a", num_steps=2))
    s.make()
    assert [s.make(), s.make()] == [None, None]
    clock[0] += 3600
    result = s.make()
    assert result is not None
    assert (tokens(result), result.goes_on, s.is_due) == ({"a": [2, 3, 1]}, False, False)


def test_a_reader_who_looks_at_each_token_gets_each_step_told() -> None:
    """What others have comes along."""
    s = patient_steps()
    s.take(waiting(1, "a", max_tokens=20))
    s.make()
    assert s.make() is None
    s.take(told(2, "b", hold_s=3600.0, max_tokens=2))
    assert tokens(s.make()) == {"a": [2, 3], "b": [1]}
    assert tokens(s.make()) == {"a": [1], "b": [2]}


def test_a_stop_rule_that_only_the_core_knows_is_not_waited_for() -> None:
    """Decision 5: the executor goes on; the core, which has the same rules, is told at that token."""
    s = patient_steps()
    s.take(waiting(1, "a", stop_token_ids=[3], num_steps=9))
    s.make()
    assert s.make() is None
    assert tokens(s.make()) == {"a": [2, 3]}


@pytest.mark.parametrize("number_of_steps", [0, 2])
def test_an_input_is_answered_by_the_end_of_the_step_with_all_there_is(number_of_steps: int) -> None:
    """A pause, and an abort of another: the step in progress is the longest wait."""
    s = patient_steps()
    s.take(waiting(1, "a", "b"))
    s.make()
    assert s.make() is None
    s.take(waiting(2, aborts=("b",), num_steps=number_of_steps))
    result = s.make()
    assert result is not None
    assert (tokens(result), result.number) == ({"a": [2, 3] if number_of_steps else [2]}, 2)


def test_an_input_that_only_says_to_go_on_is_not_answered_at_once() -> None:
    """Otherwise the two would keep each other awake."""
    s = patient_steps()
    s.take(waiting(1, "a"))
    s.make()
    s.take(waiting(2))
    assert s.make() is None


def test_what_was_held_of_an_aborted_request_is_not_told_of_the_next_one_with_its_id() -> None:
    s = patient_steps()
    s.take(waiting(1, "a"))
    s.make()
    assert s.make() is None
    s.take(waiting(2, "a", aborts=("a",)))
    assert tokens(s.make()) == {"a": [1]}


def test_a_request_that_is_not_taken_in_is_told_at_once() -> None:
    s = patient_steps()
    s.take(waiting(1, "a"))
    s.make()
    s.take(StepInput([], [EngineCoreRequest("broken", None)], 2, False, 2, 3600.0))
    result = s.make()
    assert result is not None
    assert [(output.request_id, output.finish_reason) for output in result.outputs] == [
        ("broken", FinishReason.ERROR),
        ("a", None),
    ]
