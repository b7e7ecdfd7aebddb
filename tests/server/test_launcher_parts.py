"""What the launcher consists of, without processes: adding up, passing deaths on, shaking hands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest
import zmq

from enginewire.client.startup import Expected
from enginewire.config import EngineConfig
from enginewire.errors import EngineDeath, EngineStartupError
from enginewire.frontend.stats import IterationStats
from enginewire.server import tally
from enginewire.server.engine_news import EngineNews
from enginewire.server.handshake_desk import HandshakeDesk
from enginewire.server.lifeline import Collect, Collected, Report, Reported
from enginewire.server.server_process import ServerProcess
from enginewire.server.state import ServerState
from enginewire.server.tally import Tally
from enginewire.wire.frames import engine_identity
from enginewire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses, FrontendInfo, HandshakeMessage

KILLED = EngineDeath(1, "killed by signal 9 (SIGKILL)")


# Adding up.


class FakeProcess:
    """A server process that answers what the test says, at once or never.

    Attributes:
        counted: generated tokens so far.
        answers: whether it reports when asked.
    """

    def __init__(self, sums: Tally, counted: int = 0) -> None:
        self.sums = sums
        self.counted = counted
        self.answers = True
        self.is_serving = True
        self.latest: ServerState | None = None
        self.shown: list[int] = []

    def state(self) -> ServerState:
        state = ServerState.of(EngineConfig.create("echo", max_model_len=100), "m", 1000.0)
        state.record(0, None, IterationStats(1001.0, num_generation_tokens=self.counted))
        return state

    def send(self, message: object) -> None:
        if isinstance(message, Report) and self.answers:
            self.sums.reported(cast("ServerProcess", self), Reported(message.number, self.state()))
        elif isinstance(message, Collected):
            self.shown.append(message.state.engine(0).num_generation_tokens)


def collect(sums: Tally, asker: FakeProcess, *processes: FakeProcess) -> int:
    """Have one process ask for the sum; return the tokens in it."""
    asked = cast("list[ServerProcess]", list(processes))
    asyncio.run(sums.collect(cast("ServerProcess", asker), Collect(0, asker.state()), asked))
    return asker.shown[-1]


def test_whoever_asks_is_shown_the_sum() -> None:
    sums = Tally()
    first, second = FakeProcess(sums, 10), FakeProcess(sums, 5)
    assert collect(sums, first, first, second) == collect(sums, second, first, second) == 15
    second.counted += 1
    assert collect(sums, first, first, second) == 16


def test_counters_do_not_go_back_when_a_process_is_silent_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "REPORT_S", 0.05)
    sums = Tally()
    first, second, third = FakeProcess(sums, 10), FakeProcess(sums, 5), FakeProcess(sums, 0)
    assert collect(sums, first, first, second) == 15
    second.answers = False
    second.counted += 3  # nobody hears of them
    assert collect(sums, first, first, second) == 15
    sums.ended(cast("ServerProcess", second))
    assert collect(sums, first, first, third) == 15
    third.counted += 2
    sums.ended(cast("ServerProcess", first))
    assert collect(sums, third, third) == 17


def test_a_process_that_has_not_served_yet_is_not_asked() -> None:
    sums = Tally()
    first, starting = FakeProcess(sums, 10), FakeProcess(sums, 99)
    starting.is_serving = False
    assert collect(sums, first, first, starting) == 10


# Passing deaths on.


def test_news_of_a_death_reaches_whoever_waits_watches_or_asks_later() -> None:
    asked: list[tuple[int, str]] = []
    news = EngineNews([0, 1], lambda index, sign: asked.append((index, sign)))
    heard: list[EngineDeath] = []
    news.watch_deaths(heard.append)
    news.expect_death("it reported a fatal error", 1)
    assert asked == [(1, "it reported a fatal error")]
    assert news.wait_for_death(0.0, 1) is None
    teller = threading.Timer(0.05, lambda: news.died(KILLED))
    teller.start()
    assert news.wait_for_death(10.0, 1) == KILLED
    teller.join()
    assert (heard, news.first_death(), news.wait_for_death(0.0, 0)) == ([KILLED], KILLED, None)
    late: list[EngineDeath] = []
    news.watch_deaths(late.append)
    assert late == [KILLED]
    news.shutdown(0.0)
    news.died(EngineDeath(0, "gone"))
    assert late == [KILLED]
    assert (news.has(1), news.has(2)) == (True, False)


# Shaking hands.


class Engine:
    """An engine's side of the handshake."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, index: int = 0) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, engine_identity(index))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def say(self, status: str, **changes: Any) -> None:
        fields = {"status": status, "local": False, "headless": True} | changes
        self.socket.send(msgspec.msgpack.encode(HandshakeMessage(**fields)))

    def told(self) -> EngineHandshakeMetadata | None:
        """Return INIT, ``None`` if it does not come."""
        if not self.socket.poll(300):
            return None
        return msgspec.msgpack.decode(self.socket.recv(), type=EngineHandshakeMetadata)


@contextmanager
def desk(answers: Callable[[int], Awaitable[bool]]) -> Iterator[tuple[HandshakeDesk, Engine]]:
    """Give a desk that expects one engine from elsewhere, and that engine."""
    addresses = EngineZmqAddresses(inputs=["a", "b"], outputs=["c", "d"])
    with zmq.Context() as context:
        opened = HandshakeDesk(context, ["tcp://127.0.0.1:*"], {0: Expected(addresses, is_local=False)}, 1000, answers)
        engine = Engine(context, opened.addresses[0])
        try:
            yield opened, engine
        finally:
            engine.socket.close(0)
            opened.close()


async def until(condition: Callable[[], object], desk: HandshakeDesk) -> None:
    """Have the desk read until something is so."""
    async with asyncio.timeout(10):
        while not condition():
            desk.read()
            await asyncio.sleep(0.01)


async def nobody_answers(index: int) -> bool:
    return False


async def it_answers(index: int) -> bool:
    return True


def test_an_engine_is_told_where_every_process_listens() -> None:
    """Protocol B.2: the position in the lists is the client index."""

    async def greet() -> None:
        with desk(nobody_answers) as (opened, engine):
            assert "engine 0 has not said HELLO" in opened.missing()
            engine.say("HELLO")
            await until(lambda: "HELLO and is not ready" in opened.missing(), opened)
            told = engine.told()
            assert told is not None
            assert (told.addresses.inputs, told.addresses.outputs) == (["a", "b"], ["c", "d"])
            engine.say("READY")
            await until(lambda: not opened.missing(), opened)

    asyncio.run(greet())


def test_engines_of_ours_are_told_why_they_are_refused_and_vllms_are_not() -> None:
    async def refuse() -> None:
        with desk(it_answers) as (opened, engine):
            engine.say("HELLO")
            engine.say("READY")
            await until(lambda: not opened.missing(), opened)
            assert engine.told() is not None
            for twin_says, is_told in (({"enginewire": "1.0"}, True), ({}, False)):
                engine.say("HELLO", **twin_says)
                await until(lambda: opened._tasks[0].done() if 0 in opened._tasks else False, opened)
                told = engine.told()
                assert (told is not None) == is_told
                if told is not None:
                    assert isinstance(told.enginewire, FrontendInfo)
                    assert told.enginewire.refusal == "engine 0 was started twice: the first one lives"
                del opened._tasks[0]

    asyncio.run(refuse())


@pytest.mark.parametrize("lives", [True, False])
def test_another_hello_is_a_restart_if_the_engine_is_gone_and_a_mistake_if_it_lives(
    lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def restart() -> None:
        with desk(it_answers if lives else nobody_answers) as (opened, engine):
            engine.say("HELLO")
            engine.say("READY")
            await until(lambda: not opened.missing(), opened)
            assert engine.told() is not None
            engine.say("HELLO")
            await until(lambda: "started twice" in caplog.text if lives else opened.missing(), opened)
            assert (engine.told() is None) == lives

    asyncio.run(restart())


def test_what_makes_no_sense_is_ignored_and_an_engine_of_another_deployment_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def confuse() -> None:
        with desk(nobody_answers) as (opened, engine):
            engine.socket.send(b"garbage")
            engine.socket.send_multipart([b"too", b"many"])
            await until(lambda: caplog.text.count("ignored a handshake message") == 2, opened)
            engine.say("HELLO", local=True, headless=False)
            with pytest.raises(EngineStartupError, match="another deployment"):
                await until(lambda: False, opened)

    asyncio.run(confuse())
