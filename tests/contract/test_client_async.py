"""``AsyncMPClient`` alone: loops that come, go and are blocked; bursts; cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import itertools
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from client_harness import (
    PATIENCE_S,
    Face,
    Loop,
    make_client,
    mock_config,
    mock_face,
    mp_client,
    output,
    request,
)
from enginewire import ClientClosedError, EngineCoreOutputs, EngineDeadError, FinishReason
from enginewire.client import async_mp, async_receiver
from enginewire.client.async_mp import AsyncMPClient
from enginewire.client.async_receiver import AsyncReceiver
from enginewire.testing import MockEngine, Received, free_tcp_port, wait_until
from enginewire.wire.codec import MsgpackEncoder

LOOPS = ("asyncio", "uvloop")


@pytest.fixture(params=LOOPS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, MockEngine]]:
    with mock_face(request.param) as pair:
        yield pair


def answer_at_once(engine: MockEngine, received: Received) -> None:
    """Be an engine that finishes a request with one output and answers a call with its arguments."""
    if received.kind == "ADD":
        engine.send_outputs([output(received.message.request_id, [1], finished=True)])
    elif received.kind == "UTILITY":
        engine.answer_utility(received.message, received.message.args)


@pytest.fixture
def unbound() -> Iterator[tuple[AsyncMPClient, MockEngine]]:
    """A client that was made where no loop runs."""
    port = free_tcp_port()
    with MockEngine(f"tcp://127.0.0.1:{port}", on_message=answer_at_once) as engine:
        client = make_client("asyncio", mock_config(port, engine_return_timeout_s=0))
        assert isinstance(client, AsyncMPClient)
        try:
            yield client, engine
        finally:
            client.shutdown()


async def serve_one(client: AsyncMPClient, request_id: str) -> None:
    """Run one request and one call."""
    await client.add_request_async(request(request_id))
    message = await asyncio.wait_for(client.get_output_async(), PATIENCE_S)
    assert [it.request_id for it in message.outputs] == [request_id]
    assert await client.call_utility_async("echo", 1, timeout=PATIENCE_S) == [1]


# Loops.


@pytest.mark.parametrize("kind", LOOPS)
def test_the_receiver_starts_at_first_use_and_moves_to_the_next_loop(
    unbound: tuple[AsyncMPClient, MockEngine], kind: str
) -> None:
    """C-41: made without a loop, used on one after another."""
    client, _ = unbound
    for i in range(3):
        loop = Loop(kind)
        try:
            loop.run(serve_one(client, f"r{i}"))
        finally:
            loop.close()


def test_a_message_that_came_between_two_loops_is_not_lost(unbound: tuple[AsyncMPClient, MockEngine]) -> None:
    """The descriptor is edge-triggered: the edge for this one was on the first loop's watch."""
    client, engine = unbound
    asyncio.run(serve_one(client, "a"))
    engine.send_outputs([output("b", [2])])
    message = asyncio.run(asyncio.wait_for(client.get_output_async(), PATIENCE_S))
    assert message.outputs[0].request_id == "b"


def test_who_waited_on_a_loop_that_is_gone_is_forgotten(unbound: tuple[AsyncMPClient, MockEngine]) -> None:
    client, engine = unbound
    engine._on_message = None

    async def leave_behind() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = asyncio.ensure_future(client.call_utility_async("never answered"))
        await asyncio.sleep(0)
        assert len(client.inbox.calls) == 1
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_behind())
    loop.close()  # without cancelling what is pending
    engine._on_message = answer_at_once
    asyncio.run(serve_one(client, "b"))
    assert len(client.inbox.calls) == 0
    gc.collect()


def test_a_second_live_loop_is_refused(pair: tuple[Face, MockEngine]) -> None:
    """C-41: a clear error rather than hanging, for every operation."""
    face, engine = pair
    other = Loop("asyncio")
    try:
        for call in (
            lambda: face.client.get_output_async(),
            lambda: face.client.add_request_async(request()),
            lambda: face.client.call_utility_async("is_sleeping"),
            lambda: face.client.abort_requests_async(["r"]),
        ):
            with pytest.raises(RuntimeError, match="in use on another event loop"):
                other.run(call())
        other.run(face.client.abort_requests_async([]))
    finally:
        other.close()
    assert engine.received == []
    assert face.pending_calls() == 0


def test_of_two_loops_that_come_at_once_one_is_refused(
    unbound: tuple[AsyncMPClient, MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-41: loops of two threads, neither of which the other can wait for."""
    client, _ = unbound
    loops = [Loop("asyncio"), Loop("asyncio")]
    refused: list[RuntimeError] = []
    moved: list[threading.Thread] = []

    def claim(loop: Loop) -> None:
        try:
            loop.run(client.abort_requests_async(["r"]))
        except RuntimeError as exc:
            refused.append(exc)

    def make_slowly(*args: Any) -> Any:
        if not moved:
            moved.append(threading.Thread(target=claim, args=(loops[1],)))
            moved[0].start()
            moved[0].join(0.3)  # it would be through by then, if it could
        return AsyncReceiver(*args)

    monkeypatch.setattr(async_mp, "AsyncReceiver", make_slowly)
    try:
        claim(loops[0])
        moved[0].join()
    finally:
        for loop in loops:
            loop.close()
    assert len(refused) == 1
    assert "in use on another event loop" in str(refused[0])


def test_shutdown_on_the_loop(pair: tuple[Face, MockEngine]) -> None:
    """C-23."""
    face, _ = pair
    waiting = face.start("get_output")
    assert face.loop is not None
    face.loop.call(face.client.shutdown)
    assert face.client.resources.context.closed
    with pytest.raises(ClientClosedError):
        waiting.result(PATIENCE_S)


def test_shutdown_from_another_thread(pair: tuple[Face, MockEngine]) -> None:
    """C-23: the sockets are closed on their loop."""
    face, _ = pair
    waiting = [face.start("get_output"), face.start("call_utility", "is_sleeping")]
    wait_until(lambda: face.pending_calls() == 1, PATIENCE_S, "the call")
    thread = threading.Thread(target=face.client.shutdown)
    thread.start()
    thread.join(PATIENCE_S)
    assert face.client.resources.context.closed
    for future in waiting:
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE_S)


def test_shutdown_after_the_loop_is_closed(pair: tuple[Face, MockEngine]) -> None:
    """C-23."""
    face, _ = pair
    assert face.loop is not None
    face.loop.close()
    face.client.shutdown()
    assert face.client.resources.context.closed


def test_shutdown_while_the_loop_is_blocked(pair: tuple[Face, MockEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """C-23: it returns; the loop closes its sockets when it comes to itself, and nothing is left."""
    monkeypatch.setattr(async_receiver, "HAND_BACK_S", 0.05)
    face, _ = pair
    assert face.loop is not None
    waiting = face.start("get_output")
    gate, blocked = block(face.loop)
    face.client.shutdown()
    assert not face.client.resources.context.closed
    gate.set()
    blocked.result(PATIENCE_S)
    wait_until(lambda: face.client.resources.context.closed, PATIENCE_S, "the late end of the context")
    with pytest.raises(ClientClosedError):
        waiting.result(PATIENCE_S)


def block(loop: Loop) -> tuple[threading.Event, concurrent.futures.Future[None]]:
    """Have a callback hold up the loop until the gate is set."""
    entered, gate = threading.Event(), threading.Event()

    async def wait() -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    blocked = loop.start(wait())
    assert entered.wait(PATIENCE_S)
    return gate, blocked


def test_a_client_dropped_on_its_loop_is_cleaned_up(pair: tuple[Face, MockEngine]) -> None:
    """C-21, C-41: the receiver holds a weak reference only."""
    face, _ = pair
    alive = weakref.ref(face.client)
    resources = face.client.resources
    assert face.loop is not None
    loop = face.loop

    def drop() -> None:
        del face.__dict__["client"]
        loop.call(gc.collect)
        wait_until(lambda: resources.closed, PATIENCE_S, "the resources to close")

    with pytest.warns(ResourceWarning, match="was not shut down"):
        drop()
    assert alive() is None
    assert resources.context.closed


def test_leaving_the_context_does_not_block_the_loop(pair: tuple[Face, MockEngine]) -> None:
    """Requests that may finish during shutdown need a loop that receives."""
    face, _ = pair
    assert face.loop is not None
    gate = threading.Event()
    resources = face.client.resources
    close = resources.close
    resources.close = lambda timeout=None: gate.wait(PATIENCE_S) and close(timeout)  # an engine that takes its time

    async def leave() -> None:
        async with face.client:
            asyncio.get_running_loop().call_later(0.01, gate.set)

    face.loop.run(leave())
    assert gate.is_set()
    assert resources.closed


# Waiting.


def test_a_cancelled_get_output_takes_no_message_along(pair: tuple[Face, MockEngine]) -> None:
    """C-41."""
    face, engine = pair
    waiting = face.start("get_output")
    wait_until(lambda: face.client._arrivals.waiters, PATIENCE_S, "a waiter")
    waiting.cancel()
    wait_until(lambda: not face.client._arrivals.waiters, PATIENCE_S, "no waiter")
    engine.send_outputs([output("r", [9])])
    assert face.get_output().outputs[0].new_token_ids == [9]


def test_who_has_waited_longest_gets_the_first_message(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    assert face.loop is not None

    async def consume() -> list[int]:
        consumers = []
        for _ in range(3):
            consumers.append(asyncio.ensure_future(face.client.get_output_async()))
            await asyncio.sleep(0)  # it waits
        for i in range(3):
            engine.send_outputs([output("r", [i])])
            await asyncio.wait(consumers[i : i + 1])
        return [consumer.result().outputs[0].new_token_ids[0] for consumer in consumers]

    assert face.loop.run(consume()) == [0, 1, 2]


def test_a_message_for_a_consumer_that_is_being_cancelled_goes_to_another(pair: tuple[Face, MockEngine]) -> None:
    """C-41: it arrives between the cancellation and the turn of the loop in which the consumer hears of that."""
    face, engine = pair
    assert face.loop is not None

    async def consume() -> Any:
        client = face.client
        (link,) = client.inbox.links
        cancelled = asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0)
        other = asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0)
        link.sure_until = math.inf
        engine.send_outputs([output("r", [7])])
        link.output_socket.poll(PATIENCE_S * 1000)  # without a turn of the loop
        asyncio.get_running_loop().call_soon(client._receiver._on_readable, link)
        cancelled.cancel("because")
        with pytest.raises(asyncio.CancelledError, match="because"):
            await cancelled
        return (await other).outputs[0].new_token_ids

    assert face.loop.run(consume()) == [7]


def test_a_consumer_goes_on_as_itself(pair: tuple[Face, MockEngine]) -> None:
    """It is resumed where the message is received: by its own context and its own task, under its own time limit."""
    face, engine = pair
    assert face.loop is not None
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")

    async def consume(me: str) -> tuple[str, bool]:
        name.set(me)
        async with asyncio.timeout(PATIENCE_S):
            await face.client.get_output_async()
        return name.get(), asyncio.current_task() is tasks[me]

    async def both() -> list[tuple[str, bool]]:
        for me in ("a", "b"):
            tasks[me] = asyncio.ensure_future(consume(me))
            await asyncio.sleep(0)
        for _ in tasks:
            engine.send_outputs([output("r", [1])])
        here = await asyncio.gather(*tasks.values())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await face.client.get_output_async()
        return here

    tasks: dict[str, asyncio.Future[tuple[str, bool]]] = {}
    assert face.loop.run(both()) == [("a", True), ("b", True)]


def test_a_consumer_may_close_the_client_when_it_gets_a_message(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    assert face.loop is not None

    async def consume() -> None:
        await face.client.get_output_async()
        face.client.shutdown()
        with pytest.raises(ClientClosedError):
            await face.client.get_output_async()

    async def run() -> None:
        consumer = asyncio.ensure_future(consume())
        await asyncio.sleep(0)
        engine.send_outputs([output("r", [1])])
        await consumer

    face.loop.run(run())
    assert face.client.resources.closed


def test_many_consumers_get_a_message_each(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    consumers = [face.start("get_output") for _ in range(20)]
    for i in range(20):
        engine.send_outputs([output("r", [i])])
    got = sorted(consumer.result(PATIENCE_S).outputs[0].new_token_ids[0] for consumer in consumers)
    assert got == list(range(20))


def test_the_callers_own_time_limit_is_no_utility_timeout(pair: tuple[Face, MockEngine]) -> None:
    face, _ = pair
    assert face.loop is not None

    async def call() -> None:
        async with asyncio.timeout(0.02):
            await face.client.call_utility_async("is_sleeping", timeout=60)

    with pytest.raises(TimeoutError) as it:
        face.loop.run(call())
    assert type(it.value) is TimeoutError
    assert face.pending_calls() == 0


def test_the_receivers_own_failure_comes_out_of_every_wait(pair: tuple[Face, MockEngine]) -> None:
    """C-41: failed, it wakes every waiter with the right error."""
    face, engine = pair

    def broken(link: Any, frames: Any) -> bool:
        raise ZeroDivisionError("a bug")

    mp_client(face).inbox.sort = broken  # type: ignore[method-assign]
    waiting = [face.start("get_output"), face.start("call_utility", "is_sleeping")]
    engine.answer_utility(engine.expect_utility(), value=False)
    for future in waiting:
        with pytest.raises(RuntimeError, match=r"the receiver failed: ZeroDivisionError\('a bug'\)"):
            future.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="a bug"):
        face.get_output()


def test_a_death_reported_before_any_loop_ran_is_known_on_the_first(
    unbound: tuple[AsyncMPClient, MockEngine],
) -> None:
    """C-27."""
    from enginewire.errors import EngineDeath

    client, _ = unbound
    client._on_death(EngineDeath(0, "killed by signal 9 (SIGKILL)", -9))
    for call in (client.get_output_async, lambda: client.call_utility_async("x")):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            asyncio.run(call())


# Bursts.


@pytest.mark.parametrize(("wake_up_s", "most"), [(60.0, async_receiver.MESSAGES_PER_WAKE_UP), (-1.0, 1)])
def test_a_burst_leaves_turns_to_the_others(
    pair: tuple[Face, MockEngine], monkeypatch: pytest.MonkeyPatch, wake_up_s: float, most: int
) -> None:
    """C-41: the reference's receiver does not yield while messages are ready, 100 ms and more for 5,000 of them.

    Both limits, each by itself: so many messages, and so much time, which is up at once here.
    """
    monkeypatch.setattr(async_receiver, "WAKE_UP_S", wake_up_s)
    face, engine = pair
    assert face.loop is not None
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))
    num_messages = 5000

    def flood() -> None:
        for _ in range(num_messages):
            engine._outputs[0].send_multipart(frames)

    client = face.client
    drained: list[int] = []  # messages that arrived between two turns of somebody else
    turns: list[int] = []  # messages that the consumer took between two turns of somebody else
    taken = 0

    async def watch() -> None:
        arrived = client._arrivals.messages
        before = taken + len(arrived)
        mark = 0
        while taken < num_messages:
            await asyncio.sleep(0)
            now = taken + len(arrived)
            drained.append(now - before)
            turns.append(taken - mark)
            before, mark = now, taken

    async def consume() -> None:
        nonlocal taken
        while taken < num_messages:
            await client.get_output_async()
            taken += 1

    async def both() -> None:
        await asyncio.gather(watch(), consume())

    gate, blocked = block(face.loop)
    engine._on_io_thread(flood)  # all of it is there before the loop looks
    running = face.loop.start(both())
    gate.set()
    blocked.result(PATIENCE_S)
    running.result(6 * PATIENCE_S)
    # One read callback between two turns, or one and the check that runs once a second.
    assert max(drained) <= 2 * most
    assert max(turns) <= 1000
    assert sum(turns) <= num_messages


def test_the_loss_of_an_engine_comes_behind_all_that_it_sent(pair: tuple[Face, MockEngine]) -> None:
    """C-27: also when it sent more than is taken in one turn, and the loop sees all of it at once."""
    face, engine = pair
    assert face.loop is not None
    count = 10 * async_receiver.MESSAGES_PER_WAKE_UP
    face.add_request(request("a"))
    engine.expect_add()
    gate, blocked = block(face.loop)
    for i in range(count):
        engine.send_outputs([output("a", [i], finished=i == count - 1)])
    engine.leave()
    client = mp_client(face)
    wait_until(client.engines[0].link.has_ended, PATIENCE_S, "the loss")
    client._wake_receiver()
    gate.set()
    blocked.result(PATIENCE_S)
    ends = face.outputs(count)
    assert [it.new_token_ids for it in ends] == [[i] for i in range(count)]
    assert ends[-1].finish_reason is FinishReason.LENGTH


def test_a_backlog_leaves_turns_to_the_others_too(pair: tuple[Face, MockEngine]) -> None:
    """C-41: a consumer that finds messages waiting gives the loop a turn twice in a millisecond."""
    face, engine = pair
    assert face.loop is not None
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))
    num_messages = 5000

    def flood() -> None:
        for _ in range(num_messages):
            engine._outputs[0].send_multipart(frames)

    engine._on_io_thread(flood)
    wait_until(lambda: len(face.client._arrivals.messages) == num_messages, PATIENCE_S, "the backlog")
    taken = 0
    turns: list[int] = []

    async def consume() -> None:
        nonlocal taken
        for _ in range(num_messages):
            await face.client.get_output_async()
            taken += 1

    async def watch() -> None:
        while taken < num_messages:
            turns.append(taken)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(consume(), watch())

    face.loop.run(both())
    turns.append(num_messages)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 1500
