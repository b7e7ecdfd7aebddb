"""``SyncMPClient`` alone: threads, time-outs, Ctrl-C."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from client_harness import PATIENCE_S, Face, mock_face, mp_client, output, request
from enginewire.testing import MockEngine, wait_until


@pytest.fixture
def pair() -> Iterator[tuple[Face, MockEngine]]:
    with mock_face("sync") as pair:
        yield pair


def test_get_output_can_time_out(pair: tuple[Face, MockEngine]) -> None:
    """C-40: the time-out is ours."""
    face, engine = pair
    with pytest.raises(TimeoutError, match=r"no output within 0\.02 s"):
        face.client.get_output(timeout=0.02)
    with pytest.raises(TimeoutError):
        face.client.get_output(timeout=0)
    engine.send_outputs([output("r", [3])])
    assert face.client.get_output(timeout=PATIENCE_S).outputs[0].new_token_ids == [3]


def test_several_consumers_share_what_arrives_together(pair: tuple[Face, MockEngine]) -> None:
    """A batch that one consumer got belonged to it alone: the others waited beside messages that had arrived."""
    face, engine = pair
    inbox = mp_client(face).inbox
    sent = threading.Event()
    sort = inbox.sort

    def slow_sort(link: Any, frames: Any) -> bool:
        sent.wait(PATIENCE_S)  # until all messages are there: they will be handed over together
        return sort(link, frames)

    inbox.sort = slow_sort  # type: ignore[method-assign]
    consumers = [face.start("get_output", timeout=PATIENCE_S) for _ in range(8)]
    for i in range(8):
        engine.send_outputs([output("r", [i])])
    sent.set()
    got = sorted(consumer.result(PATIENCE_S).outputs[0].new_token_ids[0] for consumer in consumers)
    assert got == list(range(8))


def test_consumers_and_callers_on_many_threads(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    num_messages, num_consumers = 2000, 4
    taken: list[int] = []
    lock = threading.Lock()

    def consume() -> None:
        while True:
            message = face.client.get_output(timeout=PATIENCE_S)
            with lock:
                taken.extend(it.new_token_ids[0] for it in message.outputs)
            if message.outputs[0].new_token_ids[0] < 0:
                return

    def call() -> None:
        for i in range(20):
            assert face.client.call_utility("echo", i, timeout=PATIENCE_S) == i
            face.client.add_request(request(f"{threading.get_ident()}-{i}"))

    def answer() -> None:
        for _ in range(60):
            asked = engine.expect_utility()
            engine.answer_utility(asked, asked.args[0])

    threads = [threading.Thread(target=consume) for _ in range(num_consumers)]
    threads += [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    answering = threading.Thread(target=answer)
    answering.start()
    for i in range(num_messages):
        engine.send_outputs([output("r", [i])])
    for _ in range(num_consumers):
        engine.send_outputs([output("r", [-1])])
    for thread in [*threads, answering]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(it for it in taken if it >= 0) == list(range(num_messages))
    assert sum(1 for it in engine.received if it.kind == "ADD") == 60


def test_ctrl_c_ends_get_output_and_nothing_else(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    try:
        for operation in (face.client.get_output, lambda: face.client.call_utility("is_sleeping")):
            timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                operation()
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert face.pending_calls() == 0
    engine.send_outputs([output("r", [3])])
    assert face.client.get_output(timeout=PATIENCE_S).outputs[0].new_token_ids == [3]


def test_the_receivers_own_failure_comes_out_of_every_wait(pair: tuple[Face, MockEngine]) -> None:
    """C-40: an exception in the thread comes out of get_output; and out of utility calls, which would wait for ever."""
    face, engine = pair

    def broken(link: Any, frames: Any) -> bool:
        raise ZeroDivisionError("a bug")

    mp_client(face).inbox.sort = broken  # type: ignore[method-assign]
    call = face.start("call_utility", "is_sleeping")
    engine.answer_utility(engine.expect_utility())
    with pytest.raises(RuntimeError, match=r"the receiver failed: ZeroDivisionError\('a bug'\)"):
        face.client.get_output(timeout=PATIENCE_S)
    with pytest.raises(RuntimeError, match="a bug"):
        call.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="a bug"):
        face.client.call_utility("is_sleeping")


def test_the_receiver_holds_no_reference_to_the_client(pair: tuple[Face, MockEngine]) -> None:
    """C-21, C-40: dropping the last reference is enough; the caller is told that it forgot."""
    face, _ = pair
    alive = weakref.ref(face.client)
    resources = face.client.resources

    def drop() -> None:
        del face.__dict__["client"]
        gc.collect()
        wait_until(lambda: resources.closed, PATIENCE_S, "the resources to close")

    with pytest.warns(ResourceWarning, match="was not shut down"):
        drop()
    assert alive() is None


def test_many_threads_shutting_down_wait_for_the_first(pair: tuple[Face, MockEngine]) -> None:
    """C-22."""
    face, _ = pair
    closed: list[bool] = []

    def close() -> None:
        face.client.shutdown()
        closed.append(face.client.resources.context.closed)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert closed == [True] * 8


def test_an_answer_at_the_last_moment_is_not_a_time_out(pair: tuple[Face, MockEngine]) -> None:
    """The time-out fired, then the answer arrived, then the caller looked: a bare TimeoutError came out."""
    face, engine = pair
    receiver = face.client._receiver
    wait = receiver.wait

    def wait_too_long(is_there: Any, deadline: float | None) -> bool:
        engine.answer_utility(engine.expect_utility(), "late")
        assert wait(is_there, None)
        return False

    receiver.wait = wait_too_long
    assert face.client.call_utility("is_sleeping", timeout=5) == "late"


def test_shutdown_ends_a_wait_at_once(pair: tuple[Face, MockEngine]) -> None:
    """C-23: the receiver is woken by its own socket, not by the next poll."""
    face, _ = pair
    waiting = face.start("get_output")
    began = time.monotonic()
    face.client.shutdown()
    assert waiting.exception(PATIENCE_S) is not None
    assert time.monotonic() - began < 0.9  # the poll's own interval is 1 s
