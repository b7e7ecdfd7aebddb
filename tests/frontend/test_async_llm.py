"""``AsyncLLM`` over an echo engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from echo_helpers import DEADLINE_S, ENDLESS, children, echo, kill_engine, num_running, params, until

from enginewire import (
    AsyncLLM,
    ClientClosedError,
    EngineConfig,
    EngineCoreClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    UtilityCallError,
)

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def make(**options: Any) -> AsyncLLM:
    return AsyncLLM("echo", executor_options=options, forward_engine_log=False)


async def text_of(llm: AsyncLLM, prompt: Any, **changes: Any) -> str:
    final = [output async for output in llm.generate(prompt, params(output_kind=FINAL_ONLY, **changes))]
    assert len(final) == 1
    return final[0].outputs[0].text


async def idle(llm: AsyncLLM) -> None:
    await until(lambda: num_running(llm) == 0, "the engine is idle")


async def busy(llm: AsyncLLM, count: int) -> None:
    await until(lambda: num_running(llm) == count, f"{count} requests run")


# Streams.


def test_each_kind_of_output_brings_what_it_says() -> None:
    async def main() -> None:
        async with make() as llm:
            seen: dict[RequestOutputKind, list[RequestOutput]] = {
                kind: [output async for output in llm.generate("hü€", params(max_tokens=12, output_kind=kind))]
                for kind in RequestOutputKind
            }
            texts = {kind: [output.outputs[0].text for output in outputs] for kind, outputs in seen.items()}
            assert "".join(texts[DELTA]) == texts[CUMULATIVE][-1] == "hü€hü€"
            assert all(
                late.startswith(early) for early, late in zip(texts[CUMULATIVE], texts[CUMULATIVE][1:], strict=False)
            )
            assert texts[FINAL_ONLY] == ["hü€hü€"]
            for outputs in seen.values():
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    asyncio.run(main())


def test_many_requests_run_together_and_users_may_repeat_their_ids() -> None:
    """client-layer, section 11: Duplicate ids."""

    async def one(llm: AsyncLLM, number: int) -> None:
        pieces: list[str] = []
        async for output in llm.generate(f"{number}.", params(max_tokens=20 + number, output_kind=DELTA), "same id"):
            assert output.request_id == "same id"
            pieces.append(output.outputs[0].text)
        assert "".join(pieces) == echo(f"{number}.", 20 + number)

    async def main() -> None:
        async with make() as llm:
            await asyncio.gather(*[one(llm, number) for number in range(40)])
            await idle(llm)

    asyncio.run(main())


def test_chat_is_a_stream_too() -> None:
    async def main() -> None:
        async with make() as llm:
            conversation = [{"role": "user", "content": "hi"}]
            outputs = [output async for output in llm.chat(conversation, params(output_kind=DELTA), "mine", priority=1)]
            assert outputs[-1].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            assert await text_of(llm, conversation) == "".join(output.outputs[0].text for output in outputs)

    asyncio.run(main())


def test_several_completions_stream_side_by_side() -> None:
    async def main() -> None:
        async with make() as llm:
            texts = ["", "", ""]
            async for output in llm.generate("ab", params(n=3, output_kind=DELTA)):
                for completion in output.outputs:
                    texts[completion.index] += completion.text
            assert texts == ["abababab"] * 3

    asyncio.run(main())


def test_a_stop_string_ends_the_request_on_the_engine_too() -> None:
    async def main() -> None:
        async with make() as llm:
            assert await text_of(llm, "hello ", stop=["o hel"], max_tokens=ENDLESS) == "hell"
            await idle(llm)

    asyncio.run(main())


def test_what_comes_while_the_reader_is_busy_is_merged() -> None:
    async def main() -> None:
        async with make() as llm:
            outputs: list[RequestOutput] = []
            async for output in llm.generate("ab", params(max_tokens=500, output_kind=DELTA)):
                outputs.append(output)
                if len(outputs) == 1:
                    await idle(llm)
            assert len(outputs) == 2
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == 500
            assert "".join(output.outputs[0].text for output in outputs) == "ab" * 250

    asyncio.run(main())


# Errors.


@pytest.mark.parametrize("prompt", ["", [-1], {"no": "prompt"}, "x" * 20_000])
def test_a_bad_prompt_is_refused_and_nothing_is_sent(prompt: Any) -> None:
    async def main() -> None:
        async with make(max_model_len=10_000) as llm:
            with pytest.raises(InvalidRequestError):
                await text_of(llm, prompt)
            assert num_running(llm) is None
            assert await text_of(llm, "ab") == "abababab"

    asyncio.run(main())


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    async def main() -> None:
        async with make() as llm:
            good = asyncio.ensure_future(text_of(llm, "ab", max_tokens=100))
            with pytest.raises(InvalidRequestError, match=r"request mine: .*resume_output_len"):
                async for _ in llm.generate("ab", params(extra_args={"resume_output_len": 9}), "mine"):
                    pass
            assert await good == "ab" * 50

    asyncio.run(main())


def test_a_killed_engine_fails_streams_and_utilities_each_with_an_error_of_its_own() -> None:
    """Errors that users will meet: engine killed with requests and utility calls pending."""

    async def main() -> None:
        before = children()
        async with make(step_time_s=0.001) as llm:
            streams = [asyncio.ensure_future(text_of(llm, "ab", max_tokens=ENDLESS)) for _ in range(3)]
            await busy(llm, 3)
            calls: list[asyncio.Future[Any]] = [
                *streams,
                asyncio.ensure_future(llm.collective_rpc("sleep_for", args=[60])),
            ]
            await asyncio.sleep(0)
            kill_engine(before)
            killed = time.monotonic()
            errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)
            assert time.monotonic() - killed < 2
            assert all(isinstance(error, EngineDeadError) and "SIGKILL" in str(error) for error in errors)
            assert len({id(error) for error in errors}) == 4
            with pytest.raises(EngineDeadError):
                await text_of(llm, "ab")
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    asyncio.run(main())


def test_an_engine_that_fails_says_why() -> None:
    async def main() -> None:
        async with make(fail_at_step=5) as llm:
            with pytest.raises(EngineDeadError, match="failing at step 5"):
                await text_of(llm, "ab", max_tokens=ENDLESS)

    asyncio.run(main())


# Aborts.


def test_an_aborted_stream_ends_with_its_tokens_so_far() -> None:
    """client-layer, section 11: Abort."""

    async def main() -> None:
        async with make(step_time_s=0.001) as llm:
            streams = [asyncio.ensure_future(text_of(llm, prompt, max_tokens=ENDLESS)) for prompt in ("ab", "cd")]
            outputs: list[RequestOutput] = []
            async for output in llm.generate("xy", params(max_tokens=ENDLESS, n=2), "mine"):
                outputs.append(output)
                if len(outputs) == 5:
                    await llm.abort("mine")
            last = outputs[-1]
            assert last.finished
            assert [completion.finish_reason for completion in last.outputs] == ["abort", "abort"]
            assert last.outputs[0].text.startswith("xyxy"[: len(last.outputs[0].token_ids)])
            assert last.outputs[0].token_ids
            await busy(llm, 2)
            await llm.abort(["0", "1", "unknown"])
            assert [text[:2] for text in await asyncio.gather(*streams)] == ["ab", "cd"]
            await idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_the_reader_aborts_on_the_engine(n: int) -> None:
    async def main() -> None:
        async with make(step_time_s=0.001) as llm:
            reader = asyncio.ensure_future(text_of(llm, "ab", max_tokens=ENDLESS, n=n))
            await busy(llm, n)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await idle(llm)
            assert llm._outputs.requests == []

    asyncio.run(main())


def test_closing_the_iterator_aborts_on_the_engine() -> None:
    async def main() -> None:
        async with make(step_time_s=0.001) as llm:
            async with contextlib.aclosing(llm.generate("ab", params(max_tokens=ENDLESS, n=2))) as outputs:
                async for _ in outputs:
                    break
            await idle(llm)

    asyncio.run(main())


def test_leaving_the_loop_aborts_on_the_engine() -> None:
    async def main() -> None:
        async with make(step_time_s=0.001) as llm:
            async for _ in llm.generate("ab", params(max_tokens=ENDLESS)):
                break
            gc.collect()
            await idle(llm)

    asyncio.run(main())


class SlowToSend(EngineCoreClient):
    """A client whose ADDs hang, as behind a full socket."""

    def __init__(self) -> None:
        self.config = EngineConfig.create("echo", max_model_len=100)
        self.sent: list[str] = []
        self.aborted: list[str] = []
        self.never = asyncio.Event()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.sent.append(request.request_id)
        if len(self.sent) > 1:
            await self.never.wait()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> EngineCoreOutputs:
        await self.never.wait()
        raise AssertionError

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def test_cancelling_while_requests_are_being_sent_aborts_all_of_them() -> None:
    async def main() -> None:
        client = SlowToSend()
        llm = AsyncLLM.from_client(client)
        reader = asyncio.ensure_future(text_of(llm, "ab", n=3))
        await until(lambda: len(client.sent) == 2, "the second ADD hangs")
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert set(client.sent) < set(client.aborted)
        assert len(client.aborted) == 3
        llm.shutdown()

    asyncio.run(main())


# Loops and ends.


def test_it_can_be_used_from_one_loop_after_another() -> None:
    llm = make()
    try:
        for _ in range(3):
            assert asyncio.run(text_of(llm, "ab")) == "abababab"
        with asyncio.Runner() as runner:
            assert runner.run(text_of(llm, "ab")) == "abababab"
            assert runner.run(text_of(llm, "cd")) == "cdcdcdcd"
    finally:
        llm.shutdown()


def test_a_loop_that_ends_with_readers_takes_nobody_elses_engine_down() -> None:
    llm = make(step_time_s=0.001)

    async def leave() -> None:
        asyncio.ensure_future(text_of(llm, "ab", max_tokens=ENDLESS))  # noqa: RUF006 - the loop's end cancels it
        await busy(llm, 1)

    async def go_on() -> None:
        assert await text_of(llm, "cd") == "cdcdcdcd"
        await idle(llm)

    try:
        asyncio.run(leave())
        asyncio.run(go_on())
    finally:
        llm.shutdown()


def test_two_loops_at_once_are_refused() -> None:
    """C-41: a clear error rather than hanging."""
    llm = make()
    try:
        with asyncio.Runner() as first:
            assert first.run(text_of(llm, "ab")) == "abababab"
            with asyncio.Runner() as second, pytest.raises(RuntimeError, match="another event loop"):
                second.run(asyncio.wait_for(text_of(llm, "ab"), DEADLINE_S))
            assert first.run(text_of(llm, "ab")) == "abababab"
    finally:
        llm.shutdown()


def test_a_loop_may_be_closed_while_the_handler_waits_in_it() -> None:
    llm = make()
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(text_of(llm, "ab")) == "abababab"
    loop.close()
    gc.collect()
    assert asyncio.run(text_of(llm, "ab")) == "abababab"
    llm.shutdown()
    gc.collect()


def test_shutdown_ends_streams_and_refuses_new_ones() -> None:
    async def main() -> None:
        llm = make(step_time_s=0.001)
        readers = [asyncio.ensure_future(text_of(llm, "ab", max_tokens=ENDLESS)) for _ in range(2)]
        await busy(llm, 2)
        llm.shutdown()
        llm.shutdown()
        ends = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), DEADLINE_S)
        # An engine that is told to stop may have had the time to say that it aborts them.
        assert all(isinstance(end, ClientClosedError) or end.startswith("ab") for end in ends)
        with pytest.raises(ClientClosedError):
            await text_of(llm, "ab")
        with pytest.raises(ClientClosedError):
            await llm.is_sleeping()
        assert llm._handler is not None
        await asyncio.wait_for(asyncio.wait([llm._handler]), DEADLINE_S)

    asyncio.run(main())


def test_dropped_without_shutdown_it_leaves_nothing() -> None:
    """C-22. The leak check around every test does the rest."""

    async def main() -> None:
        llm = make()
        assert await text_of(llm, "ab") == "abababab"
        handler, ref = llm._handler, weakref.ref(llm)
        with pytest.warns(ResourceWarning, match="not shut down"):
            del llm
        assert ref() is None
        assert handler is not None
        await asyncio.wait_for(asyncio.wait([handler]), DEADLINE_S)

    asyncio.run(main())


# Construction.


def test_create_does_not_stop_the_loop() -> None:
    async def main() -> None:
        making = asyncio.ensure_future(
            AsyncLLM.create("echo", executor_options={"load_time_s": 0.3}, forward_engine_log=False)
        )
        turns = 0
        while not making.done():
            await asyncio.sleep(0.01)
            turns += 1
        async with await making as llm:
            assert turns > 5
            assert await text_of(llm, "ab") == "abababab"

    asyncio.run(main())


def test_cancelling_create_leaves_nothing() -> None:
    async def main() -> None:
        before = children()
        making = asyncio.ensure_future(AsyncLLM.create("echo", forward_engine_log=False))
        await until(lambda: bool(children() - before), "the engine process is there")
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await until(lambda: not children() - before, "the engine process is gone")

    asyncio.run(main())


# Utilities.


def test_utilities_reach_the_engine() -> None:
    async def main() -> None:
        async with make() as llm:
            await llm.check_health()
            assert await llm.get_supported_tasks() == ("generate",)
            await llm.sleep(1)
            assert await llm.is_sleeping()
            await llm.wake_up()
            await llm.pause_generation("keep")
            assert await llm.is_paused()
            reader = asyncio.ensure_future(text_of(llm, "ab"))
            await llm.resume_generation()
            assert await reader == "abababab"
            assert await llm.reset_prefix_cache() is True
            assert await llm.collective_rpc("echo", args=[1]) == [{"args": [1], "kwargs": {}}]
            assert await llm.list_loras() == set()
            await llm.start_profile()
            await llm.stop_profile()
            with pytest.raises(UtilityCallError, match="out of order"):
                await llm.collective_rpc("raise_error", args=["out of order"])

    asyncio.run(main())


def test_pausing_in_abort_mode_ends_streams() -> None:
    async def main() -> None:
        async with make(step_time_s=0.001) as llm:
            stream: AsyncIterator[RequestOutput] = llm.generate("ab", params(max_tokens=ENDLESS))
            reader = asyncio.ensure_future(_last(stream))
            await busy(llm, 1)
            await llm.pause_generation("abort")
            assert (await reader).outputs[0].finish_reason == "abort"

    asyncio.run(main())


async def _last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]
