"""``LLM`` over real clients: an echo engine in this process, and one in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from echo_helpers import ENDLESS, children, echo, kill_engine, num_running, params, wait_until

from enginewire import (
    LLM,
    ClientClosedError,
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    UtilityCallError,
)

MakeLLM = Callable[..., LLM]


@pytest.fixture(params=[True, False], ids=["subprocess", "in-process"])
def multiprocess(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_llm(multiprocess: bool) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        settings = {"forward_engine_log": False} | options.pop("settings", {})
        made.append(LLM("echo", multiprocess_mode=multiprocess, executor_options=options, **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(vocab_size=260)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# Results.


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = [f"prompt {i}" for i in range(20)]
    outputs = llm.generate(texts, [params(max_tokens=1 + (7 * i) % 20) for i in range(20)])
    assert [output.prompt for output in outputs] == texts
    assert [output.outputs[0].text for output in outputs] == [
        echo(text, 1 + (7 * i) % 20) for i, text in enumerate(texts)
    ]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_prompts_of_all_kinds_go_together(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    outputs = llm.generate(["ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}, conversation], params())
    assert [output.outputs[0].text for output in outputs] == ["abababab"] * 4 + ["<|im_start|>user\nhi"[12:20]]


def test_a_single_prompt_gives_a_list_of_one(llm: LLM) -> None:
    assert [output.outputs[0].text for output in llm.generate("ab", params(max_tokens=3))] == ["aba"]
    assert [output.outputs[0].token_ids for output in llm.generate([7, 8], params(max_tokens=3))] == [[7, 8, 7]]


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_conversation_is_answered(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(conversation, params(max_tokens=None, stop="<|im_end|>", skip_special_tokens=False))
    assert single.outputs[0].text == "<|im_start|>user\nhi"
    several = llm.chat([conversation, conversation], params(), add_generation_prompt=False)
    assert [output.prompt for output in several] == ["<|im_start|>user\nhi<|im_end|>\n"] * 2


def test_several_completions_come_together(llm: LLM) -> None:
    (output,) = llm.generate("ab", params(n=3, max_tokens=4, seed=1))
    assert [(completion.index, completion.text) for completion in output.outputs] == [(i, "abab") for i in range(3)]
    assert output.metrics.num_generation_tokens == 12


def test_a_stop_string_across_tokens_ends_the_request_on_the_engine_too(llm: LLM) -> None:
    (output,) = llm.generate("hello ", params(stop=["o hel"], max_tokens=ENDLESS))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hell", "stop", "o hel")
    llm.generate("x", params())
    wait_for_idle(llm)


def test_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("ab", params(logprobs=2, prompt_logprobs=0, max_tokens=3))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    assert [row[token].decoded_token for row, token in zip(completion.logprobs, completion.token_ids, strict=True)] == [
        "a",
        "b",
        "a",
    ]
    assert completion.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert [None if row is None else list(row) for row in output.prompt_logprobs] == [None, [98]]


def test_timings_are_there(llm: LLM) -> None:
    (output,) = llm.generate("ab", params())
    assert output.metrics.first_token_latency is not None
    assert 0 <= output.metrics.first_token_latency < 10
    assert output.num_cached_tokens == 0


def test_text_and_tokens_can_be_converted(llm: LLM) -> None:
    assert llm.decode(llm.encode("hü")) == "hü"


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ([300], "token id 300 is not in the vocabulary"),
        ([1] * 2000, "the prompt has 2000 tokens"),
        ({"no": "prompt"}, "unknown key"),
    ],
)
def test_one_bad_prompt_in_a_list_is_named_and_nothing_is_sent(make_llm: MakeLLM, prompt: Any, text: str) -> None:
    llm = make_llm(max_model_len=1000, vocab_size=260)
    with pytest.raises(InvalidRequestError, match=rf"^prompts\[1\]: .*{text}"):
        llm.generate(["good", prompt, "good"], params())
    assert num_running(llm) is None
    with pytest.raises(InvalidRequestError, match=rf"^(?!prompts).*{text}"):
        llm.generate(prompt, params())
    assert llm.generate("ab", params(max_tokens=2))[0].outputs[0].text == "ab"


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"temperature": 5.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
    ],
)
def test_bad_parameters_are_refused_by_name(llm: LLM, changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("x", params(**changes))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("wrong", [[SamplingParams()], {"max_tokens": 3}, 7])
def test_parameters_must_be_one_for_all_or_one_per_prompt(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"one for all or one per prompt \(2\)|must be SamplingParams"):
        llm.generate(["a", "b"], wrong)


def refused_by_the_engine() -> SamplingParams:
    """Make parameters that only the engine looks into."""
    return params(extra_args={"resume_output_len": 99})


def test_a_request_that_the_engine_refuses_raises_when_the_others_are_done(llm: LLM) -> None:
    prompts, each = ["ab", "ab", "ab"], [params(max_tokens=30), refused_by_the_engine(), params()]
    with pytest.raises(InvalidRequestError, match="resume_output_len") as caught:
        llm.generate(prompts, each)
    assert any("1 of 3 requests failed" in note for note in caught.value.__notes__)
    wait_for_idle(llm)


def test_failed_requests_can_be_returned_among_the_others(llm: LLM) -> None:
    outputs = llm.generate(["ab", "ab", "ab"], [params(), refused_by_the_engine(), params()], on_error="return")
    assert [output.outputs[0].text for output in outputs] == ["abababab", "", "abababab"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, RequestError)
    assert outputs[0].error is None


# Streams.


def test_a_stream_brings_pieces_that_join_to_the_text(llm: LLM) -> None:
    outputs = list(llm.stream("hü€", params(max_tokens=12, output_kind=RequestOutputKind.DELTA)))
    assert "".join(output.outputs[0].text for output in outputs) == "hü€hü€"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    for output in llm.stream("ab", params(max_tokens=ENDLESS, n=2)):
        assert not output.finished
        break
    wait_for_idle(llm)


def test_streams_and_batches_may_be_mixed(llm: LLM) -> None:
    stream = llm.stream("ab", params(max_tokens=50))
    next(stream)
    assert llm.generate("xy", params())[0].outputs[0].text == "xyxyxyxy"
    assert list(stream)[-1].outputs[0].text == "ab" * 25


def wait_for_idle(llm: LLM) -> None:
    """Wait until the engine has nothing to do. Its statistics come with outputs, so something is run meanwhile."""

    def is_idle() -> bool:
        llm.generate("x", params(max_tokens=1))
        return num_running(llm) == 0

    wait_until(is_idle, "the engine is idle")


# Threads.


def test_many_threads_share_one_engine(llm: LLM) -> None:
    def work(number: int) -> list[str]:
        texts = []
        for round_ in range(4):
            prompts = [f"{number}.{round_}.{i}" for i in range(3)]
            texts += [output.outputs[0].text for output in llm.generate(prompts, params(max_tokens=10 + number))]
        return texts

    with ThreadPoolExecutor(8) as pool:
        for number, texts in enumerate(pool.map(work, range(8))):
            assert texts == [echo(f"{number}.{r}.{i}", 10 + number) for r in range(4) for i in range(3)]


def test_utilities_are_answered_while_another_thread_generates(make_llm: MakeLLM) -> None:
    llm = make_llm(step_time_s=0.001)
    stop = threading.Event()

    def generate() -> None:
        for _ in llm.stream("ab", params(max_tokens=ENDLESS)):
            if stop.is_set():
                return

    thread = in_thread(generate)
    try:
        wait_until(lambda: bool(num_running(llm)), "a request runs")
        assert llm.is_paused() is False
        assert llm.generate("xy", params(max_tokens=2))[0].outputs[0].text == "xy"
    finally:
        stop.set()
        thread.join(10)


def test_a_paused_engine_goes_on_when_it_is_resumed(llm: LLM) -> None:
    """C-61: adds are queued while paused."""
    llm.pause_generation("keep")
    assert llm.is_paused()
    texts: list[str] = []
    thread = in_thread(lambda: texts.extend(output.outputs[0].text for output in llm.generate(["ab"], params())))
    wait_until(lambda: bool(llm._pump._outputs.requests), "the request is sent")
    llm.resume_generation()
    thread.join(10)
    assert texts == ["abababab"]


# Interrupts and ends.


def test_keyboard_interrupt_aborts_what_runs_and_leaves_it_usable(make_llm: MakeLLM) -> None:
    """Errors that users will meet: KeyboardInterrupt."""
    llm = make_llm(step_time_s=0.001)

    def interrupt() -> None:
        wait_until(lambda: num_running(llm) == 4, "all requests run")
        os.kill(os.getpid(), signal.SIGINT)

    thread = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            ["a", "b", "c"], [params(max_tokens=ENDLESS), params(max_tokens=ENDLESS, n=2), params(max_tokens=ENDLESS)]
        )
    thread.join(10)
    wait_for_idle(llm)
    assert llm.generate("ab", params())[0].outputs[0].text == "abababab"


def test_keyboard_interrupt_of_a_waiting_thread_leaves_the_leader_alone(make_llm: MakeLLM) -> None:
    llm = make_llm(step_time_s=0.001)
    texts: list[str] = []
    thread = in_thread(
        lambda: texts.extend(output.outputs[0].text for output in llm.generate(["ab"], params(max_tokens=300)))
    )
    wait_until(lambda: llm._pump._leader == thread.ident, "the other thread receives")

    def interrupt() -> None:
        wait_until(lambda: num_running(llm) == 2, "both run")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("xy", params(max_tokens=ENDLESS))
    thread.join(10)
    interrupter.join(10)
    assert texts == ["ab" * 150]
    wait_for_idle(llm)


def test_keyboard_interrupts_lose_nothing_of_other_threads(make_llm: MakeLLM) -> None:
    """The main thread leaves receiving to threads that cannot be interrupted with a message in hand."""
    llm = make_llm(step_time_s=0.0002)
    texts: list[str] = []
    threads = [
        in_thread(
            lambda: texts.extend(output.outputs[0].text for output in llm.generate(["ab"], params(max_tokens=1500)))
        )
        for _ in range(2)
    ]

    def interrupt_later() -> None:
        steps = llm.scheduler_stats.step_counter if llm.scheduler_stats else 0
        wait_until(lambda: llm.scheduler_stats is not None and llm.scheduler_stats.step_counter > steps + 20, "steps")
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(10):
        interrupter = in_thread(interrupt_later)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x"] * 4, params(max_tokens=ENDLESS))
        interrupter.join(10)
    for thread in threads:
        thread.join(10)
    assert texts == ["ab" * 750] * 2


def test_an_engine_that_fails_says_why_to_every_thread(make_llm: MakeLLM) -> None:
    """Errors that users will meet: engine loop raising (cause in the error)."""
    llm = make_llm(fail_at_step=20)
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(["ab"] * 3, params(max_tokens=ENDLESS))
        except EngineDeadError as exc:
            errors.append(exc)

    threads = [in_thread(generate) for _ in range(3)]
    for thread in threads:
        thread.join(10)
    assert len({id(error) for error in errors}) == 3
    assert all("failing at step 20" in str(error) for error in errors)
    with pytest.raises(EngineDeadError, match="failing at step 20"):
        llm.generate("ab", params())


def test_shutdown_ends_what_other_threads_wait_for(make_llm: MakeLLM) -> None:
    """An engine in another process has the time to say that it aborts its requests."""
    llm = make_llm(step_time_s=0.001)
    ends: list[object] = []

    def generate() -> None:
        try:
            (output,) = llm.generate("ab", params(max_tokens=ENDLESS))
            ends.append(output.outputs[0].finish_reason)
        except ClientClosedError as exc:
            ends.append(type(exc))

    threads = [in_thread(generate) for _ in range(2)]
    wait_until(lambda: num_running(llm) == 2, "the requests run")
    llm.shutdown()
    llm.shutdown()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 2
    assert set(ends) <= {"abort", ClientClosedError}
    with pytest.raises(ClientClosedError):
        llm.generate("ab", params())
    with pytest.raises(ClientClosedError):
        llm.is_sleeping()


def test_a_killed_engine_fails_all_threads_within_two_seconds_and_names_the_signal() -> None:
    """Errors that users will meet: engine killed with requests pending."""
    before = children()
    with LLM("echo", executor_options={"step_time_s": 0.001}, forward_engine_log=False) as llm:
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                llm.generate(["ab", "cd"], params(max_tokens=ENDLESS))
            except EngineDeadError as exc:
                errors.append(exc)

        threads = [in_thread(generate) for _ in range(3)]
        wait_until(lambda: num_running(llm) == 6, "the requests run")
        kill_engine(before)
        killed = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - killed < 2
        assert len(errors) == 3
        assert all("SIGKILL" in str(error) for error in errors)


def test_dropped_without_shutdown_it_leaves_nothing(multiprocess: bool) -> None:
    """C-22. The leak check around every test does the rest."""
    llm = LLM("echo", multiprocess_mode=multiprocess, forward_engine_log=False)
    llm.generate("ab", params())
    ref = weakref.ref(llm)
    with pytest.warns(ResourceWarning, match="not shut down") if multiprocess else contextlib.nullcontext():
        del llm  # no cycle holds it: this is the end
    assert ref() is None


# Utilities.


def test_utilities_reach_the_engine(llm: LLM) -> None:
    assert llm.get_supported_tasks() == ("generate",)
    llm.sleep(1)
    assert llm.is_sleeping()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.reset_prefix_cache() is True
    assert llm.collective_rpc("echo", args=[1]) == [{"args": [1], "kwargs": {}}]
    assert llm.list_loras() == set()
    llm.start_profile()
    llm.stop_profile()


def test_a_failing_utility_raises_the_engines_words_and_harms_nothing(llm: LLM) -> None:
    with pytest.raises(UtilityCallError, match="out of order"):
        llm.collective_rpc("raise_error", args=["out of order"])
    assert llm.generate("ab", params())[0].outputs[0].text == "abababab"


# Set-up.


def test_the_settings_hold_what_the_engine_reported(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=777)
    assert llm.config.max_model_len == 777
    (output,) = llm.generate("ab", params(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 775


def test_a_whole_configuration_can_be_given(multiprocess: bool) -> None:
    config = EngineConfig.create("echo", forward_engine_log=False, max_num_seqs=2)
    with LLM(config=config, multiprocess_mode=multiprocess) as llm:
        assert len(llm.generate(["a", "b", "c"], params())) == 3
    assert config.max_model_len is None


def test_progress_is_drawn_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], params())
    assert "requests" not in capsys.readouterr().err
    llm.generate(["a", "b"], params(), progress=True)
    assert "2/2" in capsys.readouterr().err


def test_two_engines_live_in_one_process(make_llm: MakeLLM) -> None:
    """Errors that users will meet: two clients in one process."""
    first, second = make_llm(max_model_len=100), make_llm(max_model_len=200)
    assert (first.config.max_model_len, second.config.max_model_len) == (100, 200)
    first.shutdown()
    assert second.generate("ab", params())[0].outputs[0].text == "abababab"
