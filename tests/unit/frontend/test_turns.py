"""Callers go before the one who steps in a loop."""

from __future__ import annotations

import threading

import pytest

from enginewire.frontend.turns import Turns

DEADLINE_S = 5.0


def test_a_caller_is_let_in_before_the_next_step() -> None:
    """A plain lock would let the loop go on for as long as it likes."""
    turns = Turns()
    events: list[str] = []

    def call() -> None:
        with turns.call():
            events.append("call")

    caller = threading.Thread(target=call)
    with turns.step():
        caller.start()
        polling = threading.Event()
        while not turns._num_callers:  # the caller has come to wait
            polling.wait(0.001)
    with turns.step():
        events.append("step")
    caller.join(DEADLINE_S)
    assert events == ["call", "step"]


def test_one_at_a_time() -> None:
    turns = Turns()
    inside: list[int] = []
    most = 0

    def work(patient: bool) -> None:
        nonlocal most
        for _ in range(200):
            with turns.step() if patient else turns.call():
                inside.append(1)
                most = max(most, len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(patient,)) for patient in (True, False, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert most == 1


def test_a_turn_ends_with_an_error_too() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.step():
        assert turns.are_mine
        raise KeyError
    assert not turns.are_mine
    with turns.call():
        assert turns.are_mine
