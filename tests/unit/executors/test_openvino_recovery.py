"""A pipeline that raises: who is blamed, who goes on. OpenVINO is replaced by a fake that breaks like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.errors import InvalidRequestError
from enginewire.executors import openvino
from enginewire.executors.openvino import OpenVINOExecutor
from enginewire.executors.openvino_memory import ModelGeometry
from enginewire.executors.openvino_pipeline import PipelineSettings
from enginewire.executors.openvino_recovery import Live, judge, why_not_resumable
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from enginewire.wire.sampling import SamplingParams, StructuredOutputsParams

JSON = StructuredOutputsParams(json="{}")


@dataclass(eq=False)
class FakeHandle:
    """A request in the fake pipeline; its tokens count up from the length of what it was given."""

    prompt: list[int]
    settings: Mapping[str, Any]
    made: int = 0
    unread: list[Any] = field(default_factory=list)
    is_cancelled: bool = False
    status: int = 0

    def can_read(self) -> bool:
        return bool(self.unread) and not self.is_cancelled

    def read(self) -> Mapping[int, Any]:
        output = self.unread.pop(0)
        return {} if output is None else {0: output}

    def get_status(self) -> int:
        return self.status

    def cancel(self) -> None:
        self.is_cancelled = True


class FakePipeline:
    """Gives every request a token per step. Once ``breaks`` raised it is stuck until all are cancelled."""

    breaks: Callable[[list[FakeHandle]], None]
    built = 0
    can_settle = True

    def __init__(self, model: Path, settings: PipelineSettings) -> None:
        type(self).built += 1
        self.model_eos = 2
        self.cache_usage = 0.5
        self.handles: list[FakeHandle] = []
        self.is_stuck = False

    def add(self, token_ids: Sequence[int], settings: Mapping[str, Any], constraint: object) -> FakeHandle:
        self.handles.append(FakeHandle(list(token_ids), settings))
        return self.handles[-1]

    def step(self) -> None:
        self.handles = [handle for handle in self.handles if not handle.is_cancelled]
        if self.is_stuck and self.handles:
            raise RuntimeError("already scheduled")
        self.is_stuck = True
        type(self).breaks(self.handles)
        self.is_stuck = False
        for handle in list(self.handles):
            handle.made += 1
            is_last = handle.made == handle.settings["max_new_tokens"]
            token = len(handle.prompt) + handle.made
            output = SimpleNamespace(generated_ids=[token], generated_log_probs=[-0.5], finish_reason=2 * is_last)
            handle.unread.append(output)
            if is_last:
                self.handles.remove(handle)

    def settle(self, handles: Sequence[FakeHandle] = ()) -> bool:
        for handle in handles:
            handle.cancel()
        self.handles = [handle for handle in self.handles if not handle.is_cancelled]
        self.is_stuck = self.is_stuck and bool(self.handles)
        return self.can_settle and not self.handles

    def close(self, handles: Sequence[FakeHandle] = ()) -> None:
        self.settle(handles)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> type[FakePipeline]:
    """Put a fake in OpenVINO's place; the class, to set how it breaks."""

    class Fake(FakePipeline):
        breaks = staticmethod(lambda handles: None)

    core = SimpleNamespace(get_property=lambda device, name: SimpleNamespace(to_string=lambda: "f32"))
    monkeypatch.setattr(openvino, "import_openvino", lambda: (None, SimpleNamespace(Core=lambda: core)))
    monkeypatch.setattr(openvino, "resolve_model", lambda name: Path(name))
    geometry = ModelGeometry(2, 2, 8, 8, context_length=1000, vocab_size=1000)
    monkeypatch.setattr(openvino.ModelGeometry, "read", lambda model: geometry)
    monkeypatch.setattr(openvino, "Pipeline", Fake)
    monkeypatch.setattr(openvino, "GrammarProbe", lambda: SimpleNamespace(check=lambda constraint: None))
    return Fake


@pytest.fixture
def executor(pipeline: type[FakePipeline]) -> OpenVINOExecutor:
    return OpenVINOExecutor(EngineConfig.create("model"))


def request(request_id: str, prompt: int = 10, **params: Any) -> EngineCoreRequest:
    """A request whose undisturbed output is ``prompt + 1, prompt + 2, …``."""
    params = {"temperature": 0, "max_tokens": 6} | params
    return EngineCoreRequest(request_id, [1] * prompt, sampling_params=SamplingParams(**params))


def drain(executor: OpenVINOExecutor, max_steps: int = 100) -> dict[str, tuple[list[int], FinishReason, object]]:
    """Step until nothing is left: per request its tokens, finish reason and stop reason."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[FinishReason, object]] = {}
    for _ in range(max_steps):
        if not executor.has_unfinished_requests():
            return {name: (tokens[name], *ends[name]) for name in ends}
        outputs = executor.step()
        assert len({output.request_id for output in outputs}) == len(outputs), "at most one output per request"
        for output in outputs:
            assert output.request_id not in ends, "no output after the last"
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.stop_reason)
    raise AssertionError(f"still unfinished after {max_steps} steps: {tokens}")


def whole(prompt: int = 10, count: int = 6) -> tuple[list[int], FinishReason, None]:
    return [prompt + i + 1 for i in range(count)], FinishReason.LENGTH, None


def raise_for(length: int, message: str = "boom") -> Callable[[list[FakeHandle]], None]:
    """Break on the request whose prompt has this length."""

    def breaks(handles: list[FakeHandle]) -> None:
        if any(len(handle.prompt) == length for handle in handles):
            raise RuntimeError(message)

    return breaks


def raise_once(at: Callable[[list[FakeHandle]], bool]) -> Callable[[list[FakeHandle]], None]:
    pending = [True]

    def breaks(handles: list[FakeHandle]) -> None:
        if pending and at(handles):
            pending.clear()
            raise RuntimeError("boom")

    return breaks


def test_an_invalid_grammar_that_slips_through_is_answered_and_the_others_go_on_undisturbed(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.breaks = staticmethod(raise_for(99, "Unclosed '['"))
    for name, prompt in (("a", 10), ("b", 20)):
        executor.add_request(request(name, prompt))
    first = executor.step()
    executor.add_request(request("bad", 99, structured_outputs=JSON))
    executor.add_request(request("late", 30))
    results = drain(executor)
    assert [output.new_token_ids for output in first] == [[11], [21]]
    assert results == {
        "a": (whole(10)[0][1:], FinishReason.LENGTH, None),
        "b": (whole(20)[0][1:], FinishReason.LENGTH, None),
        "late": whole(30),
        "bad": ([], FinishReason.ERROR, "invalid_request: OpenVINO: Unclosed '['"),
    }
    assert pipeline.built == 1, "the pipeline was repaired, not rebuilt"


def test_among_several_new_requests_the_one_to_blame_is_found_by_trial(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.breaks = staticmethod(raise_for(40))
    for prompt in (10, 20, 30, 40, 50):
        executor.add_request(request(str(prompt), prompt))
    results = drain(executor)
    assert results.pop("40") == ([], FinishReason.ERROR, "internal: OpenVINO: boom")
    assert results == {str(prompt): whole(prompt) for prompt in (10, 20, 30, 50)}


def test_a_request_that_openvino_ended_unasked_fails_instead_of_running_for_ever(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    """Decision 4: why a request ended is read only where one can end."""

    def end_silently(handles: list[FakeHandle]) -> None:
        for handle in [handle for handle in handles if handle.prompt == [1] * 20 and handle.made == 2]:
            handle.status = openvino.FINISHED
            handles.remove(handle)

    pipeline.breaks = staticmethod(end_silently)
    executor.add_request(request("a", 10))
    executor.add_request(request("b", 20))
    assert drain(executor) == {
        "a": whole(10),
        "b": ([21, 22], FinishReason.ERROR, "internal: OpenVINO ended the request at a token that ends none"),
    }


def test_requests_that_come_during_a_trial_are_not_suspected(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.breaks = staticmethod(raise_for(20))
    executor.add_request(request("10", 10))
    executor.add_request(request("20", 20))
    executor.step()
    executor.add_request(request("new", 60))
    results = drain(executor)
    assert results.pop("20")[1] is FinishReason.ERROR
    assert results == {"10": whole(10), "new": whole(60)}


def test_requests_that_all_have_produced_tokens_are_put_on_trial_and_go_on(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.breaks = staticmethod(raise_once(lambda handles: all(handle.made == 3 for handle in handles)))
    for prompt in (10, 20, 30):
        executor.add_request(request(str(prompt), prompt, min_tokens=5, eos_token_id=2))
    assert drain(executor) == {str(prompt): whole(prompt) for prompt in (10, 20, 30)}


def test_what_cannot_be_taken_up_in_mid_text_fails_with_the_cause(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    for name, params in {
        "grammar": {"structured_outputs": JSON},
        "penalty": {"presence_penalty": 1.0},
        "seed": {"temperature": 1.0, "seed": 5},
        "unseeded": {"temperature": 1.0},
    }.items():
        executor.add_request(request(name, **params))
    executor.step()
    pipeline.breaks = staticmethod(raise_for(99))
    executor.add_request(request("bad", 99, structured_outputs=JSON))
    results = drain(executor)
    assert results.pop("unseeded") == (whole()[0][1:], FinishReason.LENGTH, None)
    assert {reason for _, reason, _ in results.values()} == {FinishReason.ERROR}
    assert results["grammar"][2] == (
        "internal: another request made OpenVINO fail (boom), and its grammar cannot be taken up in mid-text"
    )
    assert "penalties would not count" in str(results["penalty"][2])
    assert "seed cannot be taken up" in str(results["seed"][2])


def test_a_pipeline_that_cannot_be_repaired_is_rebuilt(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.can_settle = False
    pipeline.breaks = staticmethod(raise_once(lambda handles: True))
    executor.add_request(request("a"))
    executor.add_request(request("b", 20))
    assert drain(executor) == {"a": whole(10), "b": whole(20)}
    assert pipeline.built == 2


def test_failing_again_and_again_without_progress_ends_the_engine_with_the_cause(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    def breaks(handles: list[FakeHandle]) -> None:
        if handles:
            raise RuntimeError("broken for good")

    pipeline.breaks = staticmethod(breaks)
    for prompt in range(10, 20):
        executor.add_request(request(str(prompt), prompt))
    with pytest.raises(RuntimeError, match=r"4 times in a row .* broken for good"):
        drain(executor)


def test_many_invalid_grammars_in_a_row_do_not_end_the_engine(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    pipeline.breaks = staticmethod(raise_for(99))
    for i in range(8):
        executor.add_request(request(str(i), 99, structured_outputs=JSON))
        assert drain(executor)[str(i)][1] is FinishReason.ERROR


def test_requests_that_openvino_drops_are_added_again(executor: OpenVINOExecutor, pipeline: type[FakePipeline]) -> None:
    """When one request does not fit the KV cache, OpenVINO drops all of them."""
    executor.add_request(request("a"))
    executor.add_request(request("b", 20))
    executor.step()

    def drop(handles: list[FakeHandle]) -> None:
        for handle in list(handles):
            handle.status = 2
            handle.unread.append(None)
            handles.remove(handle)
        pipeline.breaks = staticmethod(lambda handles: None)

    pipeline.breaks = staticmethod(drop)
    results = drain(executor)
    assert results == {name: (whole(p)[0][1:], FinishReason.LENGTH, None) for name, p in (("a", 10), ("b", 20))}


def test_an_aborted_request_is_forgotten_wherever_it_is(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    executor.add_request(request("running"))
    executor.step()
    executor.sleep(1)
    executor.add_request(request("waiting"))
    executor.abort_requests(["running", "waiting", "unknown"])
    executor.wake_up()
    assert not executor.has_unfinished_requests()
    executor.add_request(request("a"))
    executor.abort_requests(["a"])
    assert executor.step() == []


def test_asleep_requests_wait_and_running_ones_go_on_afterwards(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    executor.add_request(request("a"))
    assert executor.step()[0].new_token_ids == [11]
    executor.sleep(2)
    executor.add_request(request("b", 20))
    assert (executor.is_sleeping, executor.has_unfinished_requests(), executor.step()) == (True, False, [])
    executor.wake_up(["weights"])
    assert (executor.is_sleeping, pipeline.built) == (True, 1)
    executor.wake_up(["kv_cache"])
    assert (executor.is_sleeping, pipeline.built) == (False, 2)
    assert drain(executor) == {"a": (whole()[0][1:], FinishReason.LENGTH, None), "b": whole(20)}


def test_waking_up_by_an_unknown_tag_is_refused(executor: OpenVINOExecutor) -> None:
    executor.sleep(1)
    with pytest.raises(ValueError, match="unknown tag soul"):
        executor.wake_up(["soul"])
    assert executor.is_sleeping


def test_resetting_the_prefix_cache_needs_leave_to_interrupt_running_requests(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    assert (executor.reset_prefix_cache(), pipeline.built) == (True, 1), "nothing was cached yet"
    executor.add_request(request("a"))
    executor.step()
    assert (executor.reset_prefix_cache(), pipeline.built) == (False, 1)
    assert (executor.reset_prefix_cache(reset_running_requests=True), pipeline.built) == (True, 2)
    assert drain(executor)["a"][0] == whole()[0][1:]
    assert (executor.reset_prefix_cache(), pipeline.built) == (True, 3)


def test_a_refused_grammar_reaches_neither_the_pipeline_nor_the_books(
    executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(constraint: object) -> None:
        raise InvalidRequestError("no good", parameter="structured_outputs")

    monkeypatch.setattr(openvino, "GrammarProbe", lambda: SimpleNamespace(check=check))
    with pytest.raises(InvalidRequestError, match="no good"):
        executor.add_request(request("a", structured_outputs=JSON))
    assert not executor.has_unfinished_requests()


def test_a_grammar_refused_after_a_wait_is_answered_with_an_error(
    executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(constraint: object) -> None:
        raise InvalidRequestError("no good", parameter="structured_outputs")

    monkeypatch.setattr(openvino, "GrammarProbe", lambda: SimpleNamespace(check=check))
    executor.sleep(1)
    executor.add_request(request("a", structured_outputs=JSON))
    executor.wake_up()
    assert drain(executor) == {"a": ([], FinishReason.ERROR, "invalid_request: no good")}


def test_without_a_probe_grammars_run_unchecked(
    executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no temporary folder")

    monkeypatch.setattr(openvino, "GrammarProbe", fail)
    for name in ("a", "b"):
        executor.add_request(request(name, structured_outputs=JSON))
    assert drain(executor)["b"][1] is FinishReason.LENGTH
    assert [record.message for record in caplog.records].count(
        "grammars are not checked before they run: the probe cannot be made"
    ) == 1


def test_a_cache_salt_is_refused_unless_prefixes_are_not_shared(
    executor: OpenVINOExecutor, pipeline: type[FakePipeline]
) -> None:
    salted = request("a")
    salted.cache_salt = "mine"
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        executor.add_request(salted)
    unshared = OpenVINOExecutor(EngineConfig.create("model", executor_options={"enable_prefix_caching": False}))
    unshared.add_request(salted)
    assert drain(unshared)["a"] == whole()


def test_output_is_capped_by_max_model_len(pipeline: type[FakePipeline]) -> None:
    executor = OpenVINOExecutor(EngineConfig.create("model", max_model_len=12))
    executor.add_request(request("a", 10, max_tokens=100))
    assert drain(executor)["a"] == whole(10, 2)


def test_logprobs_of_the_sampled_token_come_with_its_rank_where_it_is_known(executor: OpenVINOExecutor) -> None:
    executor.add_request(request("greedy", logprobs=0))
    executor.add_request(request("sampled", temperature=1.0, logprobs=0))
    executor.add_request(request("none"))
    greedy, sampled, none = executor.step()
    assert (none.new_logprobs, greedy.new_logprobs is None, sampled.new_logprobs is None) == (None, False, False)
    assert [array.tolist() for array in _arrays(greedy)] == [[[11]], [[-0.5]], [1]]
    assert [array.tolist() for array in _arrays(sampled)] == [[[11]], [[-0.5]], [0]]


def _arrays(output: EngineCoreOutput) -> list[Any]:
    assert output.new_logprobs is not None
    return list(output.new_logprobs[:3])


def live(name: str, *, delivered: int = 0, constrained: bool = False, on_trial: bool = False, **params: Any) -> Live:
    sampling = SamplingParams(structured_outputs=JSON if constrained else None, **params)
    return Live(EngineCoreRequest(name, [1]), sampling, rank=0, delivered=list(range(delivered)), on_trial=on_trial)


@pytest.mark.parametrize(
    ("running", "guilty", "suspects"),
    [
        ([live("a", delivered=1), live("b")], "b", ""),
        ([live("a", delivered=1), live("b"), live("c")], None, "bc"),
        ([live("a"), live("b", constrained=True), live("c")], "b", ""),
        ([live("a"), live("b", constrained=True), live("c", constrained=True)], None, "abc"),
        ([live("a", delivered=1)], "a", ""),
        ([live("a", delivered=1), live("b", delivered=1)], None, "ab"),
        ([live("a", delivered=1), live("b", delivered=1, constrained=True)], "b", ""),
        ([live("a"), live("b", on_trial=True)], "b", ""),
        ([live("a", delivered=1), live("b", delivered=3, on_trial=True)], "b", ""),
    ],
)
def test_suspicion_falls_on_those_on_trial_then_the_unproven_then_the_one_with_a_grammar(
    running: list[Live], guilty: str | None, suspects: str
) -> None:
    verdict = judge(running)
    named = [item.request.request_id for item in verdict.suspects]
    assert (verdict.guilty.request.request_id if verdict.guilty else None, "".join(named)) == (guilty, suspects)
    everyone = [*verdict.suspects, *verdict.innocent] + ([verdict.guilty] if verdict.guilty else [])
    assert {id(item) for item in everyone} == {id(item) for item in running}
    assert len(everyone) == len(running)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (live("a", constrained=True, presence_penalty=1, seed=5), None),
        (live("a", delivered=1), None),
        (live("a", delivered=1, temperature=0, seed=5, repetition_penalty=1.2, min_tokens=3), None),
        (live("a", delivered=1, constrained=True), "grammar"),
        (live("a", delivered=1, frequency_penalty=-0.5), "penalties"),
        (live("a", delivered=1, seed=0), "seed"),
    ],
)
def test_what_can_go_on_from_its_tokens_so_far(item: Live, expected: str | None) -> None:
    got = why_not_resumable(item)
    assert got is None if expected is None else expected in str(got)
