"""Taking requests' outputs on an event loop."""

from __future__ import annotations

import asyncio

import pytest

from enginewire.config import EngineConfig
from enginewire.errors import EngineGenerateError
from enginewire.frontend.inputs import InputProcessor
from enginewire.frontend.output_handler import READERS_PER_TURN, Herald
from enginewire.frontend.processor import OutputProcessor
from enginewire.frontend.reader import Reader
from enginewire.frontend.requests import RequestState
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from enginewire.wire.sampling import RequestOutputKind, SamplingParams


class Bench:
    """A processor with requests in it, and an engine's part played by the test."""

    def __init__(self, *prompts: str, n: int = 1) -> None:
        self.outputs = OutputProcessor()
        inputs = InputProcessor(EngineConfig.create("echo", max_model_len=1000, vocab_size=260))
        params = SamplingParams(max_tokens=50, n=n, output_kind=RequestOutputKind.DELTA)
        self.requests: list[RequestState] = [
            self.outputs.add(inputs.prepare(prompt, params, request_id=prompt), now=0.0) for prompt in prompts
        ]

    def step(self, position: int, text: str, finish: FinishReason | None = None, completion: int = 0) -> None:
        engine_id = self.requests[position].completions[completion].engine_id
        output = EngineCoreOutput(engine_id, list(text.encode()), finish_reason=finish)
        for request in self.outputs.process(EngineCoreOutputs(outputs=[output]), 1.0).ready:
            request.wake()


def test_what_came_before_the_reader_and_between_its_turns_is_merged() -> None:
    async def run() -> None:
        bench = Bench("a")
        bench.step(0, "on")
        reader = Reader(bench.requests)
        bench.step(0, "ce")
        bench.step(0, " upon")
        position, (news,) = await reader.next()
        assert (position, news.text, reader.is_done) == (0, "once upon", False)

    asyncio.run(run())


def test_a_waiting_reader_is_woken_by_either_request_and_done_when_both_are() -> None:
    async def run() -> None:
        bench = Bench("a", "b")
        reader = Reader(bench.requests)
        for position, finish in ((1, FinishReason.LENGTH), (0, None), (0, FinishReason.STOP)):
            waiting = asyncio.ensure_future(reader.next())
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not reader.is_done
            bench.outputs.process(EngineCoreOutputs(), 1.0)
            bench.requests[position].max_output_len = 1
            bench.step(position, "x", finish)
            at, (news,) = await waiting
            assert (at, news.text, news.finished) == (position, "x", finish is not None)
        assert reader.is_done

    asyncio.run(run())


def test_a_request_that_is_woken_again_behind_its_end_counts_once() -> None:
    async def run() -> None:
        bench = Bench("a", "b", n=2)
        reader = Reader(bench.requests)
        bench.step(0, "x", FinishReason.STOP)
        bench.step(0, "y", FinishReason.STOP, completion=1)
        position, news = await reader.next()
        assert (position, [each.text for each in news]) == (0, ["x", "y"])
        bench.requests[0].wake()
        bench.step(1, "z")
        position, news = await reader.next()
        assert (position, [each.text for each in news], reader.is_done) == (1, ["z"], False)

    asyncio.run(run())


def test_the_shortcut_is_asked_while_somebody_waits_and_only_then() -> None:
    async def run() -> None:
        bench = Bench("a", "b")
        reader = Reader(bench.requests)
        taken: list[tuple[int, str]] = []

        def take(request: RequestState) -> bool:
            (completion,) = request.completions
            if (text := completion.take_text()) is None:
                return False
            taken.append((request.position, text))
            return True

        reader.shortcut = take
        bench.step(0, "nobody waits yet")
        position, (news,) = await reader.next()
        assert (position, news.text, taken) == (0, "nobody waits yet", [])
        waiting = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0)
        bench.step(1, "x")
        bench.step(0, "y")
        bench.requests[0].max_output_len = 1
        bench.step(0, "z", FinishReason.LENGTH)
        bench.step(1, "behind it")
        position, (news,) = await waiting
        assert (position, news.text, news.finish_reason) == (0, "z", "length")
        assert taken == [(1, "x"), (0, "y")]
        position, (news,) = await reader.next()
        assert (position, news.text) == (1, "behind it")

    asyncio.run(run())


def test_a_shortcut_that_fails_fails_its_reader_and_nobody_else() -> None:
    async def run() -> None:
        bench = Bench("a")
        reader = Reader(bench.requests)

        def fail(request: RequestState) -> bool:
            raise ValueError("a bug")

        reader.shortcut = fail
        waiting = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0)
        bench.step(0, "x")
        with pytest.raises(ValueError, match="a bug"):
            await waiting

    asyncio.run(run())


def test_many_readers_hear_of_news_in_turns_and_of_several_messages_once() -> None:
    """A burst for hundreds of streams does not keep the loop from everybody else."""

    async def run() -> None:
        bench = Bench(*map(str, range(2 * READERS_PER_TURN + 1)))
        heard: list[RequestState] = []

        class Listener:
            def hear(self, request: RequestState) -> None:
                heard.append(request)

        for request in bench.requests:
            request.listener = Listener()
        herald = Herald()
        herald.announce(bench.requests[:3])
        herald.announce(bench.requests)
        seen = []
        while len(heard) < len(bench.requests):
            await asyncio.sleep(0)
            seen.append(len(heard))
        assert seen == [READERS_PER_TURN, 2 * READERS_PER_TURN, 2 * READERS_PER_TURN + 1]
        assert heard == bench.requests
        herald.announce(bench.requests[:1])
        await asyncio.sleep(0)
        assert heard[len(bench.requests) :] == bench.requests[:1]

    async def in_time() -> None:
        async with asyncio.timeout(30):
            await run()

    asyncio.run(in_time())


def test_a_failure_is_raised_where_the_outputs_are_taken() -> None:
    async def run() -> None:
        bench = Bench("a", "b")
        reader = Reader(bench.requests)
        bench.step(0, "x")
        await reader.next()
        waiting = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0)
        bench.outputs.fail(bench.requests[1], EngineGenerateError("broke", request_id="b"))
        bench.requests[1].wake()
        with pytest.raises(EngineGenerateError, match="broke"):
            await waiting

    asyncio.run(run())
