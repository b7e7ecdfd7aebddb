"""One engine process over real ZeroMQ, seen from a frontend of raw sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginewire import __version__
from enginewire.config import EngineConfig
from enginewire.testing.mock_frontend import MockFrontend, UtilityFailed
from enginewire.wire.capabilities import EngineInfo
from enginewire.wire.handshake import HandshakeMessage
from enginewire.wire.messages import EngineCoreOutputs, FinishReason

SUPPORT = str(Path(__file__).parents[1] / "support")


def config(executor: str = "echo", *, log_stats: bool = False, **settings: Any) -> EngineConfig:
    return EngineConfig.create("echo", executor=executor, log_stats=log_stats, **settings)


@pytest.fixture(scope="module", params=["echo", "stub_executors:HoldsGil"], ids=["inline", "child"])
def shared(request: pytest.FixtureRequest) -> Iterator[MockFrontend]:
    """One engine for all tests that leave it as they found it; with its executor in it, and in a child."""
    with MockFrontend() as frontend:
        options = {"step_time_s": 0.002}
        frontend.launch(config(request.param, executor_options=options, max_model_len=2000), sys_path=[SUPPORT])
        frontend.shake_hands()
        frontend.utility("is_sleeping")  # now every connection is made, and none looks like a test's leak
        yield frontend


@pytest.fixture
def frontend(shared: MockFrontend) -> MockFrontend:
    shared.forget()
    return shared


def fresh(frontend: MockFrontend, config: EngineConfig) -> MockFrontend:
    """Start another engine for a test that needs its own."""
    frontend.launch(config, sys_path=[SUPPORT])
    frontend.shake_hands()
    return frontend


# Start-up (protocol B).


@pytest.mark.parametrize(("local", "headless"), [(True, False), (False, True)])
def test_start_up_as_the_frontend_sees_it(local: bool, headless: bool) -> None:
    """B.1 to B.5: HELLO as told, ready response on the input socket, READY; identity is the rank, little endian."""
    with MockFrontend(engine_index=258) as frontend:
        settings = config(executor_options={"num_gpu_blocks": 100, "block_size": 8, "vocab_size": 512})
        frontend.launch(settings, local=local, headless=headless)
        hello = frontend.expect_handshake("HELLO")
        assert hello == HandshakeMessage(status="HELLO", local=local, headless=headless, enginewire=__version__)
        frontend.send_init()
        frontend.expect_ready_responses()
        assert frontend.expect_handshake("READY") == HandshakeMessage(status="READY", local=local, headless=headless)
        (ready,) = frontend.ready
        assert (ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (800, 100, 8)
        assert (ready.vllm_version, ready.dtype, ready.world_size, ready.data_parallel_size) == (
            "0.32.0",  # a map for both versions is 0.32's
            "float32",
            1,
            1,
        )
        assert (ready.kv_cache_size_tokens, ready.kv_cache_max_concurrency) == (800, 1.0)
        assert isinstance(ready.enginewire, EngineInfo)
        assert (ready.enginewire.version, ready.enginewire.vocab_size) == (__version__, 512)
        assert ready.enginewire.executor == "EchoExecutor"
        assert ready.enginewire.capabilities.deterministic
        frontend.add("a", [1], max_tokens=1)
        frontend.wait_finished("a")
        assert frontend.messages[0][0].engine_index == 258


def test_the_ready_response_of_a_child_is_the_executors() -> None:
    with MockFrontend() as frontend:
        options = {"num_gpu_blocks": 50, "block_size": 4, "logprobs": 3}
        fresh(frontend, config("stub_executors:HoldsGil", executor_options=options))
        (ready,) = frontend.ready
        assert (ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (200, 50, 4)
        assert isinstance(ready.enginewire, EngineInfo)
        assert ready.enginewire.executor == "HoldsGil"
        assert ready.enginewire.capabilities.max_logprobs == 3


# Requests (protocol D, G).


def test_a_request_is_answered_token_by_token(frontend: MockFrontend) -> None:
    frontend.add("a", [5, 6, 7], max_tokens=5)
    assert frontend.wait_finished("a").finish_reason is FinishReason.LENGTH
    assert frontend.token_ids("a") == [5, 6, 7, 5, 6]
    first, *rest = frontend.outputs_of("a")
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_prompt_tokens == 3
    assert all(output.prefill_stats is None and output.events is None for output in rest)


def test_many_requests_run_side_by_side(frontend: MockFrontend) -> None:
    for number in range(100):
        frontend.add(f"r{number}", [number, number + 1], max_tokens=number % 7 + 1)
    for number in range(100):
        frontend.wait_finished(f"r{number}")
        assert frontend.token_ids(f"r{number}") == ([number, number + 1] * 4)[: number % 7 + 1]


def test_a_stop_token_is_named(frontend: MockFrontend) -> None:
    """D.6."""
    frontend.add("a", [5, 6, 7], stop_token_ids=[6], max_tokens=9)
    frontend.add("b", [5, 6, 7], eos_token_id=7, max_tokens=9)
    assert (frontend.wait_finished("a").finish_reason, frontend.wait_finished("a").stop_reason) == (
        FinishReason.STOP,
        6,
    )
    assert frontend.wait_finished("b").stop_reason is None
    assert frontend.token_ids("b") == [5, 6, 7]


def test_logprobs_cross_the_wire(frontend: MockFrontend) -> None:
    """D.7, D.8; large ones travel in frames of their own."""
    prompt = list(range(100, 200))
    frontend.add("a", prompt, max_tokens=2, logprobs=20, prompt_logprobs=3)
    frontend.wait_finished("a")
    first, second = frontend.outputs_of("a")
    assert first.new_prompt_logprobs_tensors is not None
    assert first.new_prompt_logprobs_tensors.logprobs.numpy().shape == (99, 4)
    assert first.new_prompt_logprobs_tensors.logprob_token_ids.numpy()[:, 0].tolist() == prompt[1:]
    assert second.new_prompt_logprobs_tensors is None
    for output, token_id in ((first, 100), (second, 101)):
        assert output.new_logprobs is not None
        assert output.new_logprobs.logprob_token_ids.shape == (1, 21)
        assert output.new_logprobs.logprob_token_ids[0, 0] == token_id
        assert np.all(np.diff(output.new_logprobs.logprobs[0, 1:]) < 0)


def test_an_aborted_request_is_silent(frontend: MockFrontend) -> None:
    """G: nothing is sent for it; unknown ids, and ids that ended, are ignored."""
    frontend.add("a", [1, 2], max_tokens=1000)
    frontend.wait_tokens("a", 2)
    frontend.abort("a", "never heard of")
    frontend.abort("a")
    frontend.add("b", [1, 2], max_tokens=3)
    frontend.wait_finished("b")
    assert not any(output.finished for output in frontend.outputs_of("a"))
    seen = len(frontend.outputs_of("a"))
    assert frontend.utility("is_sleeping") is False
    assert len(frontend.outputs_of("a")) == seen
    frontend.add("a", [9], max_tokens=1)  # the id is free
    frontend.wait_finished("a")
    assert frontend.token_ids("a")[-1] == 9


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "invalid_request: the prompt is empty"),
        ([1] * 2000, {}, "invalid_request: the prompt has 2000 tokens; at most 1999"),
        ([1, -1], {}, "invalid_request: token id -1"),
        ([1], {"max_tokens": None}, "invalid_request: max_tokens must be set"),
        ([1], {"n": 2}, "invalid_request: n must be 1"),
        ([1], {"logprobs": 21}, "invalid_request: this engine does not support logprobs=21"),
        ([1], {"bad_words": ["x"]}, "invalid_request: this engine does not support bad_words"),
        ([1], {"extra_args": {"resume_output_len": 9}}, "invalid_request: resume_output_len must be"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_reason(
    frontend: MockFrontend, prompt: list[int], params: dict[str, Any], reason: str
) -> None:
    """C-60, defect 8, section 11."""
    frontend.add("a", prompt, **params)
    output = frontend.wait_finished("a")
    assert output.finish_reason is FinishReason.ERROR
    assert str(output.stop_reason).startswith(reason)
    frontend.add("fine", [1], max_tokens=1)
    frontend.wait_finished("fine")


def test_outputs_go_to_the_frontend_that_asked() -> None:
    """C-52."""
    with MockFrontend(num_clients=2) as frontend:
        fresh(frontend, config(log_stats=True))
        assert len(frontend.ready) == 2
        frontend.add("one", [1], client_index=1, max_tokens=2)
        frontend.wait_finished("one", client_index=1)
        frontend.add("zero", [2], max_tokens=2)
        frontend.wait_finished("zero")
        assert frontend.outputs_of("one") == []
        assert frontend.outputs_of("zero", client_index=1) == []
        call_id = frontend.call("is_sleeping", client_index=1)
        assert frontend.wait_answer(call_id, client_index=1).failure_message is None


def test_by_priority_the_urgent_goes_first() -> None:
    """C-60."""
    with MockFrontend() as frontend:
        options = {"step_time_s": 0.02}
        fresh(frontend, config(scheduling_policy="priority", max_num_seqs=1, executor_options=options))
        frontend.add("first", [1], max_tokens=3)
        frontend.wait_tokens("first", 1)
        frontend.add("patient", [1], priority=5, max_tokens=1)
        frontend.add("urgent", [1], priority=-5, max_tokens=1)
        frontend.wait_finished("patient")
        order = [output.request_id for message in frontend.messages[0] for output in message.outputs if output.finished]
        assert order == ["first", "urgent", "patient"]


def test_statistics_tell_the_load_and_its_end() -> None:
    """D.5, D.10: with every step; once more when the last request has ended."""
    with MockFrontend() as frontend:
        options = {"num_gpu_blocks": 4, "block_size": 8, "step_time_s": 0.005}
        fresh(frontend, config(log_stats=True, max_num_seqs=1, executor_options=options))
        frontend.add("a", [1] * 8, max_tokens=4)
        frontend.add("b", [1], max_tokens=1)

        def after_the_end() -> EngineCoreOutputs | None:
            last = frontend.messages[0][-1] if frontend.messages[0] else None
            done = frontend.outputs_of("b") and last is not None and not last.outputs
            return last if done else None

        last = frontend.wait(after_the_end, "a message after the end")
        stats = [message.scheduler_stats for message in frontend.messages[0] if message.scheduler_stats is not None]
        assert stats[0].num_running_reqs == 1
        assert any(each.num_waiting_reqs == 1 for each in stats)
        assert stats[0].kv_cache_usage == 0.5
        assert [each.step_counter for each in stats] == sorted({each.step_counter for each in stats})
        assert last.scheduler_stats is not None
        assert (last.scheduler_stats.num_running_reqs, last.scheduler_stats.kv_cache_usage) == (0, 0.0)
        assert frontend.outputs_of("a")[0].events is not None


# Utility calls (protocol F).


@pytest.mark.parametrize(
    ("method", "args", "value"),
    [
        ("get_supported_tasks", [], ["generate"]),
        ("reset_mm_cache", [], None),
        ("reset_encoder_cache", [], None),
        ("reset_prefix_cache", [False, False], True),
        ("is_sleeping", [], False),
        ("is_scheduler_paused", [], False),
        ("profile", [True, None], None),
        ("execute_dummy_batch", [], None),
        ("collective_rpc", ["echo", None, [1, "x"], {"k": [2]}], [{"args": [1, "x"], "kwargs": {"k": [2]}}]),
        (
            "get_kv_cache_group_metadata",
            [],
            [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}],
        ),
    ],
)
def test_utilities_answer(frontend: MockFrontend, method: str, args: list[Any], value: object) -> None:
    """F.1."""
    assert frontend.utility(method, *args) == value


def test_an_adapter_is_added_listed_pinned_and_removed(frontend: MockFrontend) -> None:
    """F.1."""
    assert frontend.utility("add_lora", ["adapter", 3, "/path", None, None, False, False]) is True
    assert frontend.utility("list_loras") == [3]
    assert frontend.utility("pin_lora", 3) is True
    assert frontend.utility("remove_lora", 3) is True
    assert frontend.utility("list_loras") == []


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("no_such_method", [], "'EngineCoreProc' object has no attribute 'no_such_method'"),
        ("_reset_caches", [], "'EngineCoreProc' object has no attribute '_reset_caches'"),
        ("shutdown", [], "'EngineCoreProc' object has no attribute 'shutdown'"),
        ("pause_scheduler", ["gently", True], "Invalid pause mode: gently"),
        ("sleep", [1, "gently"], "Invalid pause mode: gently"),
        ("sleep", [4, "abort"], "Invalid sleep level: 4; 0, 1 or 2 was expected"),
        ("wake_up", [["coffee"]], "Invalid wake_up tags: coffee; known: weights, kv_cache, scheduling"),
        ("is_sleeping", [1, 2], "TypeError: too many positional arguments"),
        ("sleep", ["deep"], "argument level: Expected `int`, got `str`"),
        ("collective_rpc", ["raise_error", None, ["why"]], "RuntimeError: why"),
        ("collective_rpc", ["nothing"], "has no method 'nothing' to call"),
        ("save_sharded_state", ["/path"], "does not offer save_sharded_state"),
    ],
)
def test_utility_failures_say_why(frontend: MockFrontend, method: str, args: list[Any], text: str) -> None:
    """F, defects 7 and 14."""
    with pytest.raises(UtilityFailed) as caught:
        frontend.utility(method, *args)
    assert str(caught.value).startswith(f"Call to {method} method failed: ")
    assert text in str(caught.value)


def test_call_ids_take_all_of_64_bits(frontend: MockFrontend) -> None:
    call_id = 2**64 - 1
    frontend.send(b"\x03", msgspec.msgpack.encode([0, call_id, "is_sleeping", []]))
    assert frontend.wait_answer(call_id).failure_message is None


def test_a_success_without_a_value_is_a_pair_of_nils(frontend: MockFrontend) -> None:
    """D.12."""
    assert frontend.wait_answer(frontend.call("reset_mm_cache")).result == [None, None]


# Pauses and sleep (protocol H).


def test_pause_abort_over_the_wire(frontend: MockFrontend) -> None:
    """H: its last token, the ABORT output, the answer; what comes during the pause runs after it."""
    frontend.add("a", [1, 2], max_tokens=1000)
    frontend.wait_tokens("a", 1)
    call_id = frontend.call("pause_scheduler", "abort", True)
    frontend.wait_answer(call_id)
    assert frontend.outputs_of("a")[-1].finish_reason is FinishReason.ABORT
    position = next(i for i, m in enumerate(frontend.messages[0]) if m.finished_requests == ["a"])
    assert all(message.utility_output is None for message in frontend.messages[0][:position])
    assert frontend.messages[0][position].scheduler_stats is None
    frontend.add("b", [1], max_tokens=1)
    assert frontend.utility("is_scheduler_paused") is True
    assert frontend.utility("is_sleeping") is True
    assert frontend.utility("reset_prefix_cache", False, False) is True
    assert frontend.outputs_of("b") == []
    frontend.utility("resume_scheduler")
    frontend.wait_finished("b")


def test_pause_wait_over_the_wire(frontend: MockFrontend) -> None:
    """H: all remaining tokens, then the answer; other calls are answered meanwhile."""
    frontend.add("a", [1, 2], max_tokens=30)
    frontend.wait_tokens("a", 1)
    call_id = frontend.call("pause_scheduler", "wait", True)
    assert frontend.utility("reset_prefix_cache", False, False) is True
    assert len(frontend.token_ids("a")) < 30
    frontend.wait_answer(call_id)
    assert len(frontend.token_ids("a")) == 30
    frontend.utility("resume_scheduler")


def test_pause_keep_over_the_wire(frontend: MockFrontend) -> None:
    """H: the request goes on after resume, without a gap."""
    frontend.add("a", [1, 2, 3], max_tokens=20)
    frontend.wait_tokens("a", 2)
    frontend.utility("pause_scheduler", "keep", False)
    so_far = len(frontend.token_ids("a"))
    assert frontend.utility("reset_prefix_cache", False, False) is True
    assert len(frontend.token_ids("a")) == so_far
    frontend.utility("resume_scheduler")
    frontend.wait_finished("a")
    assert frontend.token_ids("a") == ([1, 2, 3] * 7)[:20]


def test_sleep_and_wake_up_over_the_wire(frontend: MockFrontend) -> None:
    """C-61."""
    frontend.add("a", [1, 2], max_tokens=10)
    frontend.utility("sleep", 1, "wait")
    frontend.add("b", [3], max_tokens=1)
    assert frontend.utility("is_sleeping") is True
    with pytest.raises(UtilityFailed, match="the executor is asleep; call wake_up"):
        frontend.utility("resume_scheduler")
    frontend.utility("wake_up", ["weights"])
    assert frontend.utility("is_sleeping") is True
    frontend.utility("wake_up", None)
    assert frontend.utility("is_sleeping") is False
    frontend.wait_finished("a")
    frontend.wait_finished("b")


# What a step in progress does to messages.


@pytest.mark.parametrize("executor", ["echo", "stub_executors:HogsGil"])
def test_in_mid_step_the_engine_answers_what_needs_no_executor(executor: str) -> None:
    """Section 11: also when the step holds the interpreter lock, because then it is not ours."""
    with MockFrontend() as frontend:
        fresh(frontend, config(executor, executor_options={"step_time_s": 5}))
        frontend.add("a", [1, 2], max_tokens=2)
        for _ in range(3):
            assert frontend.utility("is_sleeping", timeout_s=2) is False
            frontend.add("bad", [], max_tokens=1)
            frontend.wait_finished("bad", timeout_s=2)
        assert frontend.outputs_of("a") == [], "the step was over before this was tried"


def test_an_abort_in_mid_step_drops_that_steps_tokens() -> None:
    """C-60: aborts are noticed in mid-queue."""
    with MockFrontend() as frontend:
        fresh(frontend, config(executor_options={"step_time_s": 0.1}))
        frontend.add("a", [1, 2], max_tokens=100)
        frontend.wait_tokens("a", 1)
        frontend.abort("a")
        assert frontend.utility("list_loras") == []  # between steps, so after the one in progress
        assert frontend.token_ids("a") == [1]


def test_what_an_executor_prints_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """The parent's standard output is the parent's."""
    with MockFrontend() as frontend:
        engine = frontend.launch(config("stub_executors:Prints"), sys_path=[SUPPORT])
        frontend.shake_hands()
        log = engine.read_log()
    assert "printed by the executor" in log
    assert "printed by a child" in log
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("module", ["enginewire.engine.main", "enginewire.engine.worker", "enginewire.executors"])
def test_an_engine_process_loads_no_numpy_until_it_is_needed(module: str) -> None:
    """It is a fifth of a second of every start."""
    heavy = {"numpy", "asyncio", "openvino", "openvino_genai", "tokenizers", "cloudpickle"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.strip() == "[]"
