"""The frontends over the real model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from echo_helpers import wait_until

from enginewire import LLM, AsyncLLM, InvalidRequestError, RequestOutputKind, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

MODEL = "smollm2-135m"

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Der Himmel über Berlin ist",
    {"prompt_token_ids": [504, 3575, 282, 4649, 314]},
]

GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, forward_engine_log=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """Greedy texts, one request at a time, from an engine in another process."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]


def test_greedy_texts_are_sensible(texts: list[str]) -> None:
    assert "Paris" in texts[0]
    assert "return" in texts[1]
    assert all(texts)


def test_greedy_texts_are_equal_with_the_engine_in_this_process(texts: list[str]) -> None:
    """Issue: greedy texts, one request at a time, are equal in both."""
    with LLM(MODEL, multiprocess_mode=False) as llm:
        assert [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS] == texts


def test_ctrl_c_is_still_a_keyboard_interrupt_after_an_engine_in_this_process_has_closed() -> None:
    """Errors that users will meet: KeyboardInterrupt. In a process of its own, which a wrong signal stack ends."""
    script = f"""
import os, signal
from enginewire import LLM
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
LLM({MODEL!r}, multiprocess_mode=False).shutdown()
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_greedy_texts_are_equal_from_asyncio_piece_by_piece(texts: list[str]) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
        async with await AsyncLLM.create(MODEL, forward_engine_log=False) as llm:
            for prompt, text in zip(PROMPTS, texts, strict=True):
                pieces = [output.outputs[0].text async for output in llm.generate(prompt, params)]
                assert "".join(pieces) == text
                assert len(pieces) > 1  # those that come while this loop has to wait are one
                assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

    asyncio.run(main())


def test_a_conversation_is_answered_and_ends_by_itself(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=200))
    completion = output.outputs[0]
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in completion.text
    assert completion.token_ids[-1] in llm.tokenizer.eos_token_ids


def test_a_seed_reproduces_a_sample_and_completions_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16)
    first, second = (llm.generate("Once upon a time", params)[0].outputs[0].text for _ in range(2))
    assert first == second
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=1.0, n=3, max_tokens=16))
    assert len({completion.text for completion in output.outputs}) > 1


def test_a_stop_string_ends_the_text_in_front_of_it(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=64, stop=["Par"]))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "Par")
    assert "Par" not in completion.text
    assert "Par" in llm.decode(completion.token_ids)


def test_logprobs_are_those_of_the_sampled_tokens(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8, logprobs=0))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[token] for token in completion.token_ids]
    assert all(
        -20 < row[token].logprob <= 0 for row, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )


def test_structured_output_follows_its_regex(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, structured_outputs={"regex": "[0-9]{3}-[0-9]{4}"})  # type: ignore[arg-type]
    (output,) = llm.generate("My phone number is", params)
    number = output.outputs[0].text
    assert len(number) == 8
    assert number.replace("-", "", 1).isdigit()


def test_what_the_engine_cannot_do_is_refused_before_it_is_sent(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="does not support logit_bias"):
        llm.generate("x", SamplingParams(logit_bias={1: 1.0}))
    with pytest.raises(InvalidRequestError, match="token id 49152"):
        llm.generate([49_152])


def test_leaving_a_stream_frees_the_engine(llm: LLM) -> None:
    for output in llm.stream("Once upon a time", SamplingParams(max_tokens=4000, ignore_eos=True)):
        assert not output.finished
        break

    def is_idle() -> bool:
        llm.generate("x", SamplingParams(max_tokens=1))
        return llm.scheduler_stats is not None and llm.scheduler_stats.num_running_reqs == 0

    wait_until(is_idle, "the engine is idle")
