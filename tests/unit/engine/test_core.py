"""The core over the echo executor: steps, pauses, sleep, utilities."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.engine.core import EngineCore
from enginewire.engine.executor import Executor, ExecutorCapacity
from enginewire.engine.utilities import UTILITIES, Answered, failure_text, invoke_utility
from enginewire.errors import ConfigError, DuplicateRequestIdError, InvalidRequestError
from enginewire.executors import EchoExecutor
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from enginewire.wire.sampling import SamplingParams


def make_core(executor_class: type[Executor] = EchoExecutor, log_stats: bool = False, **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig.create("echo", **settings), executor_class, log_stats)


def add(core: EngineCore, request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> None:
    params = SamplingParams(**fields.pop("params", {"max_tokens": 4}))
    request = EngineCoreRequest(request_id, list(prompt), sampling_params=params, **fields)
    core.add_request(core.preprocess_add_request(request))


def step(core: EngineCore) -> list[EngineCoreOutput]:
    messages = core.step_fn()
    core.post_step()
    return [output for message in messages.values() for output in message.outputs]


class CachesPrefixes(EchoExecutor):
    """Has a prefix cache that can be reset, or fails to."""

    fails = False

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capabilities = Capabilities(prefix_caching=True, sleep_levels=(1,))
        self.resets: list[bool] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if self.fails:
            raise RuntimeError("the cache cannot be reset")
        self.resets.append(reset_running_requests)
        return True


class CannotReset(CachesPrefixes):
    fails = True


def executor_of(core: EngineCore) -> CachesPrefixes:
    assert isinstance(core.executor, CachesPrefixes)
    return core.executor


class Minimal(Executor):
    """Offers nothing that is optional."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capacity = ExecutorCapacity(max_model_len=50, num_gpu_blocks=2, block_size=10)

    def add_request(self, request: EngineCoreRequest) -> None:
        pass

    def abort_requests(self, request_ids: Any) -> None:
        pass

    def step(self) -> list[EngineCoreOutput]:
        return []

    def has_unfinished_requests(self) -> bool:
        return False


def test_a_step_is_one_token_for_every_request() -> None:
    """C-11."""
    core = make_core()
    assert step(core) == []
    add(core, "a")
    add(core, "b", (7, 8))
    outputs = [step(core) for _ in range(4)]
    assert [[output.new_token_ids for output in each] for each in outputs] == [
        [[1], [7]],
        [[2], [8]],
        [[3], [7]],
        [[1], [8]],
    ]
    assert {output.finish_reason for output in outputs[-1]} == {FinishReason.LENGTH}
    assert step(core) == []


def test_the_context_is_the_least_of_executor_configuration_and_cache() -> None:
    assert make_core(Minimal).max_model_len == 20
    assert make_core(Minimal, max_model_len=15).max_model_len == 15
    assert make_core(max_model_len=200).max_model_len == 200


def test_a_request_that_cannot_run_is_refused_before_it_is_queued() -> None:
    """Defect 8."""
    core = make_core(max_model_len=10)
    for prompt in ((), tuple(range(10))):
        with pytest.raises(InvalidRequestError):
            add(core, "a", prompt)
    assert not core.scheduler.has_requests()


def test_a_live_id_is_refused_and_the_first_goes_on() -> None:
    """Defect 4."""
    core = make_core()
    add(core, "a")
    step(core)
    with pytest.raises(DuplicateRequestIdError):
        add(core, "a")
    assert [output.new_token_ids for output in step(core)] == [[2]]


def test_abort_immediately_leaves_nothing() -> None:
    core = make_core()
    add(core, "a", abort_immediately=True)
    assert not core.scheduler.has_requests()
    assert step(core) == []


def test_an_executor_that_refuses_or_breaks_on_a_request_fails_that_one_only() -> None:
    """Defect 8."""

    class Picky(EchoExecutor):
        def add_request(self, request: EngineCoreRequest) -> None:
            if request.request_id == "refused":
                raise InvalidRequestError("not this one")
            if request.request_id == "broken":
                raise KeyError("oops")
            super().add_request(request)

    core = make_core(Picky)
    for request_id in ("refused", "broken", "fine"):
        add(core, request_id)
    outputs = {output.request_id: output for output in step(core)}
    assert outputs["refused"].stop_reason == "invalid_request: not this one"
    assert outputs["broken"].stop_reason == "internal: KeyError: 'oops'"
    assert outputs["refused"].finish_reason == outputs["broken"].finish_reason == FinishReason.ERROR
    assert outputs["fine"].new_token_ids == [1]
    assert core.scheduler.num_running == 1


def test_pause_abort_ends_everything_at_once() -> None:
    """C-61."""
    core = make_core(max_num_seqs=1)
    add(core, "runs")
    add(core, "waits")
    step(core)
    assert core.pause_scheduler("abort") is None
    assert core.is_scheduler_paused()
    assert not core.executor.has_unfinished_requests()
    add(core, "later")
    assert {(output.request_id, output.finish_reason) for output in step(core)} == {
        ("runs", FinishReason.ABORT),
        ("waits", FinishReason.ABORT),
    }
    assert step(core) == []
    core.resume_scheduler()
    assert [output.request_id for output in step(core)] == ["later"]


def test_pause_wait_is_complete_when_running_requests_have_ended() -> None:
    """C-61."""
    core = make_core(max_num_seqs=1)
    add(core, "runs", params={"max_tokens": 3})
    add(core, "waits")
    step(core)
    future = core.pause_scheduler("wait")
    assert isinstance(future, Future)
    assert [output.request_id for output in step(core)] == ["runs"]
    assert not future.done()
    step(core)
    assert future.result(timeout=0) is None
    assert step(core) == []
    core.resume_scheduler()
    assert [output.request_id for output in step(core)] == ["waits"]


def test_pause_keep_stops_requests_where_they_are() -> None:
    """C-61."""
    core = make_core()
    add(core, "a")
    step(core)
    assert core.pause_scheduler("keep") is None
    assert step(core) == []
    core.resume_scheduler()
    assert [output.new_token_ids for output in step(core)] == [[2]]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_of_an_idle_engine_is_complete_at_once(mode: str) -> None:
    core = make_core()
    assert core.pause_scheduler(mode) is None
    assert core.is_scheduler_paused()


def test_a_pause_clears_the_prefix_cache_if_asked() -> None:
    core = make_core(CachesPrefixes)
    core.pause_scheduler("keep", clear_cache=False)
    assert executor_of(core).resets == []
    core.pause_scheduler("keep", clear_cache=True)
    assert executor_of(core).resets == [True]


def test_an_unknown_pause_mode_changes_nothing() -> None:
    core = make_core()
    with pytest.raises(ValueError, match=r"^Invalid pause mode: gently$"):
        core.pause_scheduler("gently")
    with pytest.raises(ValueError, match=r"^Invalid pause mode: gently$"):
        core.sleep(1, "gently")
    assert not core.is_scheduler_paused()


def test_a_failure_at_the_end_of_a_pause_goes_to_its_caller() -> None:
    """Defect 10: it killed the engine, and the caller never got an answer."""
    core = make_core(CannotReset)
    with pytest.raises(RuntimeError, match="cannot be reset"):
        core.pause_scheduler("keep")
    core.resume_scheduler()
    add(core, "a", params={"max_tokens": 2})
    step(core)
    future = core.pause_scheduler("wait")
    assert future is not None
    assert [output.finished for output in step(core)] == [True]
    with pytest.raises(RuntimeError, match="cannot be reset"):
        future.result(timeout=0)


def test_resuming_during_a_pause_tells_who_waits_for_it() -> None:
    core = make_core()
    add(core, "a")
    step(core)
    future = core.pause_scheduler("wait")
    assert future is not None
    core.resume_scheduler()
    with pytest.raises(RuntimeError, match="resumed before"):
        future.result(timeout=0)
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize(("level", "asleep"), [(0, False), (1, True), (2, True)])
def test_sleep_levels(level: int, asleep: bool) -> None:
    """C-61."""
    core = make_core()
    assert core.sleep(level) is None
    assert core.is_sleeping()
    assert core.executor.is_sleeping is asleep
    assert core.sleep(level) is None
    if asleep:
        with pytest.raises(ValueError, match="wake_up"):
            core.resume_scheduler()
    core.wake_up()
    assert not core.is_sleeping()


def test_sleep_wait_is_complete_when_the_executor_sleeps() -> None:
    core = make_core()
    add(core, "a", params={"max_tokens": 2})
    step(core)
    future = core.sleep(1, "wait")
    assert future is not None
    assert not core.executor.is_sleeping
    step(core)
    assert future.result(timeout=0) is None
    assert core.executor.is_sleeping


def test_partial_wake_up_keeps_the_scheduler_paused() -> None:
    """C-61: tags."""
    core = make_core()
    core.sleep(2)
    core.wake_up(["weights"])
    assert (core.executor.is_sleeping, core.is_scheduler_paused()) == (True, True)
    core.wake_up(["scheduling"])
    assert core.is_scheduler_paused()
    core.wake_up(["kv_cache", "scheduling"])
    assert (core.executor.is_sleeping, core.is_scheduler_paused()) == (False, False)
    with pytest.raises(ValueError, match="Invalid wake_up tags: coffee"):
        core.wake_up(["coffee"])


def test_the_scheduling_tag_ends_a_mere_pause() -> None:
    core = make_core()
    core.sleep(0)
    core.wake_up(["scheduling"])
    assert not core.is_sleeping()


def test_a_level_that_is_not_offered_aborts_nothing() -> None:
    core = make_core(CachesPrefixes)
    add(core, "a")
    step(core)
    with pytest.raises(NotImplementedError, match="does not offer sleep level 2; it offers 0, 1"):
        core.sleep(2)
    with pytest.raises(ValueError, match="Invalid sleep level: 3"):
        core.sleep(3)
    assert not core.is_sleeping()
    assert [output.new_token_ids for output in step(core)] == [[2]]


def test_kept_requests_go_on_after_a_sleep() -> None:
    core = make_core()
    add(core, "a")
    step(core)
    core.sleep(1, "keep")
    assert step(core) == []
    with pytest.raises(ValueError, match="wake_up"):
        core.pause_scheduler("wait")
    core.wake_up()
    assert [output.new_token_ids for output in step(core)] == [[2]]


@pytest.mark.parametrize("method", sorted(UTILITIES))
def test_every_utility_is_a_method_of_the_core(method: str) -> None:
    assert callable(getattr(EngineCore, method))


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", [1]),
        ("add_lora", [["name", 1, "/path"]]),
        ("remove_lora", [1]),
        ("pin_lora", [1]),
        ("list_loras", []),
        ("profile", []),
        ("save_sharded_state", ["/path"]),
        ("execute_dummy_batch", []),
        ("collective_rpc", ["anything"]),
        ("reset_prefix_cache", []),
    ],
)
def test_what_an_executor_does_not_offer_fails_clearly(method: str, args: list[Any]) -> None:
    """Section 9."""
    with pytest.raises(NotImplementedError, match="does not offer"):
        invoke_utility(make_core(Minimal), method, args)


def test_utilities_that_read() -> None:
    core = make_core()
    assert core.get_supported_tasks() == ["generate"]
    assert core.get_kv_cache_group_metadata() == [
        {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}
    ]
    assert invoke_utility(core, "reset_mm_cache", []) is None
    assert invoke_utility(core, "reset_encoder_cache", []) is None
    assert core.reset_prefix_cache() is True
    assert {name for name, when in UTILITIES.items() if when is Answered.AT_ONCE} == {
        "compute_weight_checksums",
        "get_supported_tasks",
        "get_kv_cache_group_metadata",
        "get_weight_version",
        "is_scheduler_paused",
        "is_sleeping",
        "release_kv_cache_memory",
        "reset_encoder_cache",
        "reset_mm_cache",
        "set_weight_version",
    }


def test_struct_arguments_are_made_from_their_wire_form() -> None:
    """Section F: LoRARequest comes as an array."""
    core = make_core()
    assert invoke_utility(core, "add_lora", [["name", 7, "/path", None, None, False, False]]) is True
    assert core.list_loras() == {7}
    assert core.pin_lora(7) is True
    assert core.remove_lora(7) is True


def failure(method: str, *args: Any) -> str:
    try:
        invoke_utility(make_core(), method, args)
    except Exception as exc:
        return failure_text(method, exc)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("no_such_method", [], "'EngineCoreProc' object has no attribute 'no_such_method'"),
        ("shutdown", [], "'EngineCoreProc' object has no attribute 'shutdown'"),
        ("_pause", ["abort"], "'EngineCoreProc' object has no attribute '_pause'"),
        ("pause_scheduler", ["gently", True], "Invalid pause mode: gently"),
        ("is_sleeping", [1], "TypeError: too many positional arguments"),
        ("save_sharded_state", [], "TypeError: missing a required argument: 'path'"),
        ("sleep", ["deep"], "argument level: Expected `int`, got `str`"),
        ("add_lora", [["name", 1, ""]], "argument lora_request: lora_path must not be empty"),
        ("collective_rpc", ["raise_error", None, ["a reason"]], "RuntimeError: a reason"),
        ("save_sharded_state", ["/p"], "EchoExecutor does not offer save_sharded_state"),
    ],
)
def test_failure_texts(method: str, args: list[Any], text: str) -> None:
    """Protocol F, defects 7 and 14: an allow-list, and a text that says something."""
    assert failure(method, *args) == f"Call to {method} method failed: {text}"


def test_a_failure_without_a_text_names_its_class() -> None:
    """Defect 14: the reference's text was empty."""
    assert failure_text("sleep", AssertionError()) == "Call to sleep method failed: AssertionError"
    assert failure_text("sleep", ValueError()) == "Call to sleep method failed: ValueError"


def test_shutdown_releases_the_executor_and_whoever_waits_for_a_pause() -> None:
    core = make_core()
    add(core, "a")
    step(core)
    future = core.pause_scheduler("wait")
    assert future is not None
    core.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        future.result(timeout=0)


def test_more_context_than_the_executor_has_is_refused() -> None:
    """C-60: what was asked for is not quietly less."""
    config = EngineConfig.create("echo", max_model_len=1000, executor_options={"max_model_len": 500})
    with pytest.raises(ConfigError, match="max_model_len is 1000, and this engine holds at most 500"):
        EngineCore(config, EchoExecutor)
