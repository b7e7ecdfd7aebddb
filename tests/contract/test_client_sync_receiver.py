"""Who receives for ``SyncMPClient``: whoever waits, or its thread (decision 18)."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from client_harness import PATIENCE_S, Face, assert_serves, mock_face, output
from enginewire import ClientClosedError
from enginewire.client import sync_receiver
from enginewire.client.sync_receiver import SyncReceiver
from enginewire.testing import MockEngine, wait_until

Interrupt = Callable[[Face, Callable[[], object], Callable[[], object]], None]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Face, MockEngine]]:
    """A client whose callers go on receiving for some time."""
    monkeypatch.setattr(sync_receiver, "DIRECT_MS", 2000)
    with mock_face("sync") as pair:
        yield pair


@pytest.fixture
def interrupt_when_receiving() -> Iterator[Interrupt]:
    """Have the main thread run a signal handler in the middle of receiving, and another thread something after that."""
    threads: list[threading.Thread] = []
    main = threading.get_ident()
    previous = signal.getsignal(signal.SIGUSR1)

    def interrupt(face: Face, handler: Callable[[], object], then: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: handler())

        def run() -> None:
            wait_until(lambda: receiver_of(face)._reader == main, PATIENCE_S, "the caller to receive")
            signal.pthread_kill(main, signal.SIGUSR1)
            then()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield interrupt
    for thread in threads:
        thread.join(PATIENCE_S)
    signal.signal(signal.SIGUSR1, previous)


def receiver_of(face: Face) -> SyncReceiver:
    receiver = face.client._receiver
    assert isinstance(receiver, SyncReceiver)
    return receiver


def let_callers_receive(face: Face, engine: MockEngine) -> None:
    """Have the thread hand a message over, after which it leaves receiving to callers."""
    waiting = face.start("get_output")
    receiver = receiver_of(face)
    nobody_or_thread = (None, receiver._thread.ident)  # a caller who is quick receives by itself
    wait_until(
        lambda: receiver._num_followers or receiver._reader not in nobody_or_thread, PATIENCE_S, "the caller to wait"
    )
    engine.send_outputs([output("r", [1])])
    assert waiting.result(PATIENCE_S).outputs[0].new_token_ids == [1]
    wait_until(lambda: receiver_of(face)._reader is None, PATIENCE_S, "the thread to leave receiving to callers")


def test_who_receives_hands_over_what_others_wait_for(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    let_callers_receive(face, engine)
    consumer = face.start("get_output")
    reader = wait_until(lambda: receiver_of(face)._reader, PATIENCE_S, "the consumer to receive")
    call = face.start("call_utility", "is_sleeping")
    engine.answer_utility(engine.expect_utility("is_sleeping"), True)
    assert call.result(PATIENCE_S) is True
    assert receiver_of(face)._reader == reader, "told only when the consumer was tired of waiting"
    engine.send_outputs([output("r", [2])])
    assert consumer.result(PATIENCE_S).outputs[0].new_token_ids == [2]


def test_what_comes_while_nobody_waits_is_received_by_the_thread(pair: tuple[Face, MockEngine]) -> None:
    """A backlog is ours, still encoded, and not ZeroMQ's: it would take twice the memory there."""
    face, engine = pair
    let_callers_receive(face, engine)
    for i in range(100):
        engine.send_outputs([output("r", [i])])
    wait_until(lambda: len(receiver_of(face).arrived) == 100, PATIENCE_S, "all messages to be received")
    assert [face.get_output().outputs[0].new_token_ids for _ in range(100)] == [[i] for i in range(100)]


def test_an_interrupted_caller_leaves_receiving_to_others(
    pair: tuple[Face, MockEngine], interrupt_when_receiving: Interrupt
) -> None:
    """Ctrl-C."""
    face, engine = pair
    let_callers_receive(face, engine)

    def interrupt() -> None:
        raise KeyboardInterrupt

    interrupt_when_receiving(face, interrupt, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        face.client.get_output()
    assert receiver_of(face)._reader is None
    assert_serves(face, engine)


def interrupted(call: Callable[[], object], step: int) -> bool:
    """Call, with Ctrl-C before the ``step``-th instruction of the receiver's module; ``False``: it has fewer."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != sync_receiver.__file__:
            return None
        frame.f_trace_opcodes = True
        # Nothing happens in a NOP, and no handler need be there for it.
        count += event == "opcode" and frame.f_code.co_code[frame.f_lasti] != dis.opmap["NOP"]
        if count == step:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("timeout", [None, PATIENCE_S])
def test_ctrl_c_at_any_moment_leaves_receiving_to_others(pair: tuple[Face, MockEngine], timeout: float | None) -> None:
    """C-27: also between taking the role and knowing that it was taken."""
    face, engine = pair
    receiver, step = receiver_of(face), 1
    let_callers_receive(face, engine)
    engine.send_outputs([output("r", [1])])
    while interrupted(lambda: face.client.get_output(timeout), step):
        with pytest.raises(RuntimeError):
            receiver._role.release()  # as this thread does not have it
        assert receiver._reader != threading.get_ident()
        engine.send_outputs([output("r", [1])])  # the last one may be lost: it was on its way to the caller
        step += 1
    assert step > 50
    call = face.start("call_utility", "is_sleeping")
    engine.answer_utility(engine.expect_utility("is_sleeping"), True)
    assert call.result(PATIENCE_S) is True


def test_a_thread_of_the_receivers_former_identity_is_told_that_the_client_is_closed(
    pair: tuple[Face, MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives new threads the identities of those that have ended."""
    face, _ = pair
    thread = receiver_of(face)._thread
    face.client.shutdown()
    thread.join(PATIENCE_S)
    monkeypatch.setattr(sync_receiver, "get_ident", lambda: thread.ident)
    with pytest.raises(ClientClosedError):
        face.client.get_output()


def test_a_signal_handler_may_shut_the_client_down(
    pair: tuple[Face, MockEngine], interrupt_when_receiving: Interrupt
) -> None:
    """C-22: while another call is waiting, which is the same thread's here."""
    face, engine = pair
    let_callers_receive(face, engine)
    interrupt_when_receiving(face, lambda: face.client.shutdown(), lambda: None)
    with pytest.raises(ClientClosedError):
        face.client.get_output()
    wait_until(lambda: face.client.resources.context.closed, PATIENCE_S, "the sockets to be closed")


def test_a_signal_handler_that_would_wait_for_itself_is_told(
    pair: tuple[Face, MockEngine], interrupt_when_receiving: Interrupt
) -> None:
    face, engine = pair
    let_callers_receive(face, engine)
    errors: list[str] = []

    def handler() -> None:
        try:
            face.client.call_utility("is_sleeping")
        except RuntimeError as exc:
            errors.append(str(exc))

    interrupt_when_receiving(
        face, handler, lambda: (engine.expect_utility("is_sleeping"), engine.send_outputs([output("r", [3])]))
    )
    assert face.client.get_output().outputs[0].new_token_ids == [3]
    assert len(errors) == 1
    assert "in another thread" in errors[0]
    assert face.pending_calls() == 0
