"""From an engine's outputs to what users read, without any engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire.config import EngineConfig
from enginewire.errors import EngineDeadError, EngineDeath, EngineGenerateError, InvalidRequestError
from enginewire.frontend.inputs import InputProcessor
from enginewire.frontend.outputs import RequestOutput
from enginewire.frontend.processor import OutputProcessor, Processed
from enginewire.frontend.requests import RequestState
from enginewire.wire.arrays import LogprobsLists, LogprobsTensors, Tensor
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, ReceivedOutput
from enginewire.wire.sampling import RequestOutputKind, SamplingParams
from enginewire.wire.stats import PrefillStats, SchedulerStats

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
EOS = 257


class Bench:
    """A processor with one request in it, and an engine's part played by the test."""

    def __init__(self, prompt: Any = "prompt", **params: Any) -> None:
        inputs = InputProcessor(EngineConfig.create("echo", max_model_len=1000, vocab_size=260))
        self.outputs = OutputProcessor()
        self.prepared = inputs.prepare(prompt, SamplingParams(**({"max_tokens": 50} | params)), request_id="mine")
        self.request: RequestState = self.outputs.add(self.prepared, now=100.0)
        self.ids = [request.request_id for request in self.prepared.requests]
        self._now = itertools.count(101)

    def step(self, tokens: str | list[int] = "", finish: FinishReason | None = None, **fields: Any) -> Processed:
        """Let the engine send one output, of completion ``index``."""
        engine_id = self.ids[fields.pop("index", 0)]
        token_ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
        output = EngineCoreOutput(engine_id, token_ids, finish_reason=finish, **fields)
        return self.outputs.process(EngineCoreOutputs(outputs=[output]), float(next(self._now)))

    def take(self) -> RequestOutput:
        output = self.request.take()
        assert output is not None
        return output


# Text.


def test_delta_brings_what_is_new_and_cumulative_everything() -> None:
    delta, cumulative = Bench(output_kind=DELTA), Bench(output_kind=CUMULATIVE)
    for bench, expected in ((delta, "lo"), (cumulative, "hello")):
        bench.step("hel")
        assert bench.take().outputs[0].text == "hel"
        assert bench.request.take() is None
        bench.step("lo")
        assert bench.take().outputs[0].text == expected
    assert delta.request.completions[0].token_ids == list(b"hello")


def test_final_only_is_ready_when_all_is_done() -> None:
    bench = Bench(output_kind=FINAL_ONLY)
    assert bench.step("hel").ready == []
    assert bench.request.take() is None
    assert bench.step("lo", FinishReason.STOP).ready == [bench.request]
    output = bench.take()
    assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (True, "hello", "stop")
    assert bench.request.take() is None


def test_outputs_that_a_slow_reader_has_not_taken_are_merged() -> None:
    bench = Bench(output_kind=DELTA)
    for letter in "hello":
        assert bench.step(letter).ready == [bench.request]
    output = bench.take()
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("hello", list(b"hello"))


def test_an_output_taken_does_not_change_later() -> None:
    bench = Bench()
    bench.step("a")
    early = bench.take()
    bench.step("b")
    late = bench.take()
    assert early.outputs[0].token_ids == [97]
    assert (early.metrics.num_generation_tokens, late.metrics.num_generation_tokens) == (1, 2)


def test_half_a_character_is_never_shown() -> None:
    bench = Bench(output_kind=DELTA)
    bench.step([0xC3])
    assert bench.take().outputs[0].text == ""
    bench.step([0xBC], FinishReason.STOP)
    assert bench.take().outputs[0].text == "ü"


def test_the_token_that_ended_it_is_no_text_unless_asked_for() -> None:
    for included, text in ((False, "a"), (True, "ab")):
        bench = Bench(stop_token_ids=[ord("b")], include_stop_str_in_output=included)
        bench.step("ab", FinishReason.STOP, stop_reason=ord("b"))
        output = bench.take().outputs[0]
        assert (output.text, output.token_ids, output.stop_reason) == (text, [97, 98], ord("b"))


def test_eos_is_no_text_even_with_special_tokens_shown() -> None:
    bench = Bench(skip_special_tokens=False)
    bench.step([97, 256, EOS], FinishReason.STOP)
    assert bench.take().outputs[0].text == "a<|bos|>"


def test_the_last_token_of_an_executor_that_ended_by_itself_is_text() -> None:
    bench = Bench()
    bench.step("ab", FinishReason.STOP)
    assert bench.take().outputs[0].text == "ab"


def test_detokenize_false_gives_token_ids_only() -> None:
    bench = Bench(detokenize=False)
    bench.step("ab", FinishReason.STOP)
    completion = bench.take().outputs[0]
    assert (completion.text, completion.token_ids) == ("", list(b"ab"))


# Stop strings.


def test_a_stop_string_across_tokens_ends_text_and_tokens_and_is_told_to_the_engine() -> None:
    bench = Bench(stop=["llo"])
    assert bench.step("he").to_abort == []
    processed = bench.step("llo world")
    assert processed.to_abort == bench.ids
    output = bench.take()
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("he", "stop", "llo")
    assert (completion.token_ids, output.finished) == (list(b"hello"), True)


def test_a_stop_string_in_the_engines_last_output_needs_no_abort() -> None:
    bench = Bench(stop="b", max_tokens=2, include_stop_str_in_output=True)
    assert bench.step("ab", FinishReason.LENGTH).to_abort == []
    assert (bench.take().outputs[0].text, bench.request.completions[0].stop_reason) == ("ab", "b")


def test_text_that_may_become_a_stop_string_is_held_back_and_comes_in_the_end() -> None:
    bench = Bench(stop=["xyz"], output_kind=DELTA, max_tokens=4)
    bench.step("abx")
    assert bench.take().outputs[0].text == "a"
    bench.step("y", FinishReason.LENGTH)
    assert bench.take().outputs[0].text == "bxy"


def test_outputs_behind_a_stop_string_are_dropped() -> None:
    bench = Bench(stop="b")
    bench.step("ab")
    assert bench.step("c").ready == []
    assert bench.take().outputs[0].text == "a"


@given(
    text=st.text(st.sampled_from("abcü€𝄞 "), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 60)),
    reads=st.sets(st.integers(0, 60)),
    stop=st.lists(st.text(st.sampled_from("abcü€ "), min_size=1, max_size=3), max_size=2),
    keep=st.booleans(),
)
def test_delta_pieces_join_to_the_cumulative_text(
    text: str, cuts: list[int], reads: set[int], stop: list[str], keep: bool
) -> None:
    """However the engine cuts the tokens and whenever the reader looks."""
    data = list(text.encode())
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces: list[str] = []
    tokens: list[int] = []
    cumulative, delta, final = (
        Bench(stop=stop, include_stop_str_in_output=keep, max_tokens=len(data), output_kind=kind)
        for kind in (CUMULATIVE, DELTA, FINAL_ONLY)
    )
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        finish = FinishReason.LENGTH if end == len(data) else None
        for bench in (delta, cumulative, final):
            bench.step(data[start:end], finish)
        if (number in reads or finish) and (output := delta.request.take()) is not None:
            pieces.append(output.outputs[0].text)
            tokens += output.outputs[0].token_ids
            assert cumulative.take().outputs[0].text == "".join(pieces)
    whole = final.take().outputs[0]
    assert ("".join(pieces), tokens) == (whole.text, whole.token_ids)
    if not any(word in text for word in stop):
        assert whole.text == text


# Several completions.


def test_several_completions_are_finished_when_the_last_one_is() -> None:
    bench = Bench(n=2, output_kind=FINAL_ONLY)
    assert bench.step("b", FinishReason.STOP, index=1).ready == []
    assert bench.step("a", FinishReason.STOP, index=0).ready == [bench.request]
    output = bench.take()
    assert [(completion.index, completion.text) for completion in output.outputs] == [(0, "a"), (1, "b")]
    assert output.finished


def test_delta_holds_only_the_completions_with_news_and_each_end_once() -> None:
    bench = Bench(n=3, output_kind=DELTA)
    bench.step("a", index=0)
    bench.step("b", FinishReason.STOP, index=1)
    assert [completion.index for completion in bench.take().outputs] == [0, 1]
    bench.step("", FinishReason.STOP, index=0)
    bench.step("c", index=2)
    output = bench.take()
    assert [(completion.index, completion.finish_reason) for completion in output.outputs] == [(0, "stop"), (2, None)]
    assert not output.finished


def test_cumulative_holds_all_completions() -> None:
    bench = Bench(n=2)
    bench.step("b", index=1)
    assert [completion.text for completion in bench.take().outputs] == ["", "b"]


def test_a_failed_completion_fails_the_request_and_aborts_the_others() -> None:
    bench = Bench(n=3)
    processed = bench.step(finish=FinishReason.ERROR, index=1)
    assert processed.ready == [bench.request]
    assert processed.to_abort == [bench.ids[0], bench.ids[2]]
    with pytest.raises(EngineGenerateError):
        bench.request.take()


# Ends that are not good.


@pytest.mark.parametrize(
    ("reason", "error", "text"),
    [
        ("invalid_request: no such grammar", InvalidRequestError, "request mine: no such grammar"),
        ("internal: it broke", EngineGenerateError, "request mine: it broke"),
        (None, EngineGenerateError, "request mine: the engine gave no reason"),
    ],
)
def test_an_error_output_raises_what_the_engine_says(reason: str | None, error: type[Exception], text: str) -> None:
    """client-layer, section 11: Why a request failed."""
    bench = Bench()
    bench.step("a")
    bench.step(finish=FinishReason.ERROR, stop_reason=reason)
    with pytest.raises(error, match=text):
        bench.request.take()


@pytest.mark.parametrize(
    ("reason", "parameter"),
    [
        ("invalid_request: cache_salt is not supported", "cache_salt"),
        ("invalid_request: structured_outputs: the regex is not valid", "structured_outputs"),
        ("invalid_request: the prompt is empty", None),
    ],
)
def test_a_refusal_is_about_the_parameter_that_it_begins_with(reason: str, parameter: str | None) -> None:
    bench = Bench()
    bench.step(finish=FinishReason.ERROR, stop_reason=reason)
    with pytest.raises(InvalidRequestError) as caught:
        bench.request.take()
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("max_tokens", [4, 5000])
def test_too_few_tokens_at_the_length_limit_are_an_error(max_tokens: int) -> None:
    """Defect 37: a dropped connection loses outputs, and the request seems to end well."""
    bench = Bench(prompt=[1] * 996, max_tokens=max_tokens)  # room for 4
    bench.step("abc", FinishReason.LENGTH)
    with pytest.raises(EngineGenerateError, match=r"outputs were lost: .* 3 tokens instead of 4"):
        bench.request.take()


def test_all_tokens_at_the_length_limit_are_no_error() -> None:
    bench = Bench(max_tokens=3)
    bench.step("abc", FinishReason.LENGTH)
    assert bench.take().outputs[0].finish_reason == "length"


def test_an_aborted_request_ends_with_its_tokens_so_far() -> None:
    """client-layer, section 11: Abort."""
    bench = Bench(n=2, output_kind=FINAL_ONLY)
    bench.step("ab", index=0)
    bench.step("c", FinishReason.STOP, index=1)
    assert bench.outputs.abort(bench.request) == [bench.ids[0]]
    output = bench.take()
    assert output.finished
    ends = [(completion.text, completion.finish_reason) for completion in output.outputs]
    assert ends == [("ab", "abort"), ("c", "stop")]
    assert bench.step("late").ready == []


def test_an_abort_by_the_engine_is_an_end_like_others() -> None:
    bench = Bench()
    bench.step("a")
    bench.step(finish=FinishReason.ABORT)
    assert (bench.take().outputs[0].finish_reason, bench.outputs.requests) == ("abort", [])


def test_outputs_of_unknown_requests_are_dropped() -> None:
    outputs = OutputProcessor()
    message = EngineCoreOutputs(outputs=[EngineCoreOutput("ghost", [1], finish_reason=FinishReason.STOP)])
    assert outputs.process(message, 0.0) == Processed()


def test_a_request_fails_once_and_with_the_first_error() -> None:
    bench = Bench()
    death = EngineDeath(0, "killed by signal 9 (SIGKILL)")
    assert bench.outputs.fail(bench.request, death.exception()) == bench.ids
    assert bench.outputs.fail(bench.request, EngineGenerateError("later")) == []
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        bench.request.take()


def test_what_there_is_of_a_failed_request_can_still_be_had() -> None:
    bench = Bench(output_kind=FINAL_ONLY)
    bench.step("ab")
    error = EngineGenerateError("it broke")
    bench.outputs.fail(bench.request, error)
    output = bench.request.take_failed(error)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.error) == ("ab", "error", error)


def test_discarding_is_idempotent() -> None:
    bench = Bench(n=2)
    assert bench.outputs.discard(bench.request) == bench.ids
    assert bench.outputs.discard(bench.request) == []


# Log probabilities.


def lists(*rows: list[tuple[int, float]], ranks: list[int]) -> LogprobsLists:
    return LogprobsLists(
        np.array([[token_id for token_id, _ in row] for row in rows], dtype="<i4"),
        np.array([[logprob for _, logprob in row] for row in rows], dtype="<f4"),
        np.array(ranks),
    )


def test_logprobs_come_as_one_map_per_token() -> None:
    bench = Bench(logprobs=2, output_kind=DELTA)
    bench.step("a", new_logprobs=lists([(97, -1.5), (98, -0.5), (97, -1.5)], ranks=[2]))
    completion = bench.take().outputs[0]
    assert completion.logprobs is not None
    assert [(i, lp.logprob, lp.rank, lp.decoded_token) for i, lp in completion.logprobs[0].items()] == [
        (97, -1.5, 2, "a"),
        (98, -0.5, 1, "b"),
    ]
    bench.step("c", FinishReason.STOP, new_logprobs=lists([(99, -0.25), (99, -0.25), (97, -3.0)], ranks=[1]))
    completion = bench.take().outputs[0]
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[99, 97]]
    assert completion.cumulative_logprob == -1.75


def test_logprobs_are_cut_with_the_tokens_behind_a_stop_string() -> None:
    bench = Bench(logprobs=0, stop="b")
    bench.step("abc", new_logprobs=lists([(97, -1.0)], [(98, -2.0)], [(99, -4.0)], ranks=[1, 1, 1]))
    completion = bench.take().outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids == [97, 98]
    assert completion.cumulative_logprob == -3.0


def test_chosen_tokens_have_no_rank() -> None:
    bench = Bench(logprobs=2, logprob_token_ids=[5, 6])
    bench.step("a", new_logprobs=lists([(97, -1.0), (5, -2.0), (6, -3.0)], ranks=[4]))
    completion = bench.take().outputs[0]
    assert completion.logprobs is not None
    assert [logprob.rank for logprob in completion.logprobs[0].values()] == [4, None, None]


def test_logprobs_that_nobody_asked_for_are_not_looked_at() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    bench = Bench()
    bench.step("a", FinishReason.STOP, new_logprobs=Untouchable())
    completion = bench.take().outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_logprobs_without_detokenizing_have_no_texts() -> None:
    bench = Bench(logprobs=0, detokenize=False)
    bench.step("a", new_logprobs=lists([(97, -1.0)], ranks=[1]))
    completion = bench.take().outputs[0]
    assert completion.logprobs is not None
    assert completion.logprobs[0][97].decoded_token is None


def test_unreadable_logprobs_fail_their_request_only() -> None:
    """Errors that users will meet: a frame that cannot be decoded."""
    broken, healthy = Bench(logprobs=0), Bench()
    outputs = broken.outputs
    other = outputs.add(healthy.prepared, 0.0)
    message = EngineCoreOutputs(
        outputs=[
            ReceivedOutput(broken.ids[0], [97], new_logprobs=["no", "arrays"]),
            ReceivedOutput(healthy.ids[0], [97]),
        ]
    )
    processed = outputs.process(message, 1.0)
    assert processed.to_abort == broken.ids
    with pytest.raises(EngineGenerateError, match="cannot be read"):
        broken.request.take()
    assert other.take() is not None


def test_prompt_logprobs_begin_with_none() -> None:
    def tensor(values: Any, dtype: str) -> Tensor:
        return Tensor.from_numpy(np.array(values, dtype=dtype))

    tensors = LogprobsTensors(
        tensor([[98, 97], [99, 99]], "int32"), tensor([[-2.0, -1.0], [-0.5, -0.5]], "float32"), tensor([2, 1], "int64")
    )
    for kind, second in ((CUMULATIVE, True), (DELTA, False)):
        bench = Bench(prompt="abc", prompt_logprobs=1, output_kind=kind)
        bench.step("x", new_prompt_logprobs_tensors=tensors)
        rows = bench.take().prompt_logprobs
        assert rows is not None
        assert rows[0] is None
        assert [{i: (lp.logprob, lp.rank) for i, lp in row.items()} for row in rows[1:] if row] == [
            {98: (-2.0, 2), 97: (-1.0, 1)},
            {99: (-0.5, 1)},
        ]
        bench.step("y")
        assert (bench.take().prompt_logprobs is not None) is second


# The rest.


def test_timings_count_from_arrival() -> None:
    bench = Bench()
    bench.step("a")  # at 101
    bench.step("b")
    bench.step("c", FinishReason.STOP, prefill_stats=PrefillStats(num_cached_tokens=4))
    output = bench.take()
    assert output.metrics.first_token_latency == 1.0
    assert output.metrics.tokens_per_second == 1.0
    assert output.num_cached_tokens == 4


def test_before_the_first_token_there_are_no_rates() -> None:
    bench = Bench()
    bench.outputs.abort(bench.request)
    metrics = bench.take().metrics
    assert (metrics.first_token_latency, metrics.tokens_per_second) == (None, None)


def test_the_latest_statistics_are_kept() -> None:
    outputs = OutputProcessor()
    outputs.process(EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=3)), 0.0)
    outputs.process(EngineCoreOutputs(), 0.0)
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.num_running_reqs == 3


def test_an_output_without_tokens_is_no_news() -> None:
    bench = Bench()
    assert bench.step("", kv_transfer_params={"block": 1}).ready == []
    assert not bench.request.is_ready
    assert bench.step("a").ready == [bench.request]
    assert bench.request.is_ready
    assert bench.take().kv_transfer_params == {"block": 1}
