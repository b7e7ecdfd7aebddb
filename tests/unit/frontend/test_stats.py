"""What a stat logger is told, without any engine."""

from __future__ import annotations

import pytest

from enginewire.config import EngineConfig
from enginewire.frontend.inputs import InputProcessor
from enginewire.frontend.processor import OutputProcessor
from enginewire.frontend.requests import RequestState
from enginewire.frontend.stats import FinishedRequestStats, IterationStats
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from enginewire.wire.sampling import SamplingParams
from enginewire.wire.stats import EngineCoreEvent, EngineCoreEventType, SchedulerStats

ARRIVAL = 100.0


class Notes:
    """A stat logger that keeps everything."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, SchedulerStats | None, IterationStats]] = []
        self.unfinished: list[tuple[int, FinishReason]] = []

    def record(self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration: IterationStats) -> None:
        self.messages.append((engine_index, scheduler_stats, iteration))

    def record_unfinished(self, engine_index: int, reason: FinishReason) -> None:
        self.unfinished.append((engine_index, reason))

    @property
    def last(self) -> IterationStats:
        return self.messages[-1][2]


@pytest.fixture
def outputs() -> OutputProcessor:
    outputs = OutputProcessor()
    outputs.stat_logger = Notes()
    return outputs


@pytest.fixture
def notes(outputs: OutputProcessor) -> Notes:
    assert isinstance(outputs.stat_logger, Notes)
    return outputs.stat_logger


def add(outputs: OutputProcessor, **params: object) -> tuple[RequestState, list[str]]:
    """Start a request of a six-token prompt; return it and its ids on the engine."""
    inputs = InputProcessor(EngineConfig.create("echo", max_model_len=1000, vocab_size=260))
    prepared = inputs.prepare("prompt", SamplingParams(**({"max_tokens": 9} | params)), request_id="mine")  # type: ignore[arg-type]
    return outputs.add(prepared, now=ARRIVAL), [request.request_id for request in prepared.requests]


def send(outputs: OutputProcessor, now: float, *sent: EngineCoreOutput, timestamp: float = 1.0) -> None:
    outputs.process(EngineCoreOutputs(outputs=list(sent), timestamp=timestamp), now)


def test_times_are_counted_from_arrival_and_between_tokens(outputs: OutputProcessor, notes: Notes) -> None:
    _, (engine_id,) = add(outputs)
    send(outputs, 101.5, EngineCoreOutput(engine_id, [65]))
    assert notes.last == IterationStats(
        101.5, 1.0, num_prompt_tokens=6, num_generation_tokens=1, time_to_first_tokens=[1.5]
    )
    send(outputs, 101.75, EngineCoreOutput(engine_id, [66, 67]))
    assert notes.last == IterationStats(101.75, 1.0, num_generation_tokens=2, inter_token_latencies=[0.125, 0.125])


def test_an_end_sums_the_completion_up_by_the_clocks_of_each_side(outputs: OutputProcessor, notes: Notes) -> None:
    """The engine's clock may be another machine's: only differences within it are used."""
    _, (engine_id,) = add(outputs)
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 7000.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 7000.5),
        EngineCoreEvent(EngineCoreEventType.PREEMPTED, 7000.6),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 7000.7),
    ]
    send(outputs, 102.0, EngineCoreOutput(engine_id, [65], events=events), timestamp=7001.5)
    send(outputs, 105.0, EngineCoreOutput(engine_id, [66], finish_reason=FinishReason.STOP), timestamp=7004.0)
    assert notes.last.finished_requests == [
        FinishedRequestStats(
            FinishReason.STOP,
            num_prompt_tokens=6,
            num_generation_tokens=2,
            max_tokens=9,
            e2e_latency=5.0,
            queued_time=0.5,
            prefill_time=1.0,
            decode_time=3.0,
        )
    ]
    assert notes.unfinished == []


def test_each_of_n_completions_has_times_of_its_own(outputs: OutputProcessor, notes: Notes) -> None:
    _, (first, second) = add(outputs, n=2, temperature=1.0)
    send(outputs, 101.0, EngineCoreOutput(first, [65]))
    send(outputs, 103.0, EngineCoreOutput(first, [65]), EngineCoreOutput(second, [65]))
    assert notes.last.inter_token_latencies == [2.0]
    assert notes.last.time_to_first_tokens == [3.0]


def test_a_stop_string_is_an_end_of_which_the_engine_knows_nothing(outputs: OutputProcessor, notes: Notes) -> None:
    _, (engine_id,) = add(outputs, stop=["B"])
    send(outputs, 101.0, EngineCoreOutput(engine_id, [65, 66]))
    assert [finished.finish_reason for finished in notes.last.finished_requests] == [FinishReason.STOP]


def test_aborts_and_failures_are_told_once_and_of_the_engine_that_had_them(
    outputs: OutputProcessor, notes: Notes
) -> None:
    aborted, _ = add(outputs, n=3, temperature=1.0)
    for completion, index in zip(aborted.completions, (4, 2), strict=False):  # the third was not sent to any
        completion.engine_index = index
    outputs.abort(aborted)
    outputs.discard(aborted)
    assert notes.unfinished == [(4, FinishReason.ABORT), (2, FinishReason.ABORT)]
    _, (engine_id,) = add(outputs)
    failed = EngineCoreOutput(engine_id, [], finish_reason=FinishReason.ERROR, stop_reason="internal: x")
    outputs.process(EngineCoreOutputs(engine_index=3, outputs=[failed], timestamp=1.0), 101.0)
    assert notes.unfinished[2:] == [(3, FinishReason.ERROR)]
    assert notes.last.finished_requests == []


def test_every_message_with_statistics_is_told(outputs: OutputProcessor, notes: Notes) -> None:
    """They have changes since the last: a message that is skipped is tokens that are never counted."""
    for step in (1, 2):
        stats = SchedulerStats(step_counter=step)
        outputs.process(EngineCoreOutputs(engine_index=3, scheduler_stats=stats), 101.0)
    assert [(index, stats.step_counter) for index, stats, _ in notes.messages if stats] == [(3, 1), (3, 2)]
