"""Steps of an executor that is told things while it steps."""

from __future__ import annotations

from enginewire.config import EngineConfig
from enginewire.engine.step import StepInput, Steps
from enginewire.executors import EchoExecutor
from enginewire.wire.messages import EngineCoreRequest
from enginewire.wire.sampling import SamplingParams


def steps() -> Steps:
    return Steps(EchoExecutor(EngineConfig.create("echo")))


def told(number: int, *adds: str, aborts: tuple[str, ...] = (), num_steps: int = 2) -> StepInput:
    params = SamplingParams(max_tokens=9)
    requests = [EngineCoreRequest(request_id, [1, 2, 3], sampling_params=params) for request_id in adds]
    return StepInput(list(aborts), requests, num_steps, number == 2, number)


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
