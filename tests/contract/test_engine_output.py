"""The engine's output thread and what waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from enginewire.config import EngineConfig
from enginewire.engine.frontends import Frontend
from enginewire.engine.output_thread import MAX_QUEUED, OutputThread
from enginewire.testing import wait_until
from enginewire.transport.sockets import bind_pull, make_context
from enginewire.wire.messages import EngineCoreOutputs
from enginewire.wire.profile import V0_25

DEADLINE_S = 10.0


class GatedLayout:
    """Notes in ``log`` what is encoded, and holds the thread up until ``gate`` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.log: list[object] = []

    def outputs_of(self, message: EngineCoreOutputs) -> EngineCoreOutputs:
        self.gate.wait()
        self.log.append(message.wave_complete)
        return V0_25.outputs_of(message)


@pytest.fixture
def layout() -> GatedLayout:
    return GatedLayout()


@pytest.fixture
def output(layout: GatedLayout) -> Iterator[OutputThread]:
    context: zmq.Context[zmq.Socket[bytes]] = make_context()
    pull, address = bind_pull(context, "inproc://frontend", -1)
    profile: Any = layout
    thread = OutputThread(context, [address], [Frontend(profile)], 0, EngineConfig.create("echo"))
    thread.start()
    yield thread
    layout.gate.set()
    if thread.is_alive():
        thread.stop()
    pull.close()
    context.term()


def put(output: OutputThread, count: int) -> None:
    for number in range(count):
        output.put(0, EngineCoreOutputs(wave_complete=number))


def test_an_engine_that_is_far_ahead_of_its_output_waits_until_all_of_it_is_sent(
    output: OutputThread, layout: GatedLayout
) -> None:
    """Decision 27. Otherwise an executor of plain Python leaves its outputs further behind with every step."""
    put(output, 2 * MAX_QUEUED)
    queue = output._queue
    wait_until(lambda: queue.qsize() == 2 * MAX_QUEUED - 1, DEADLINE_S, "taking the first message")

    def open_when_awaited() -> None:
        try:
            wait_until(lambda: queue.qsize() == 2 * MAX_QUEUED, DEADLINE_S, "waiting in the queue")
        finally:
            layout.gate.set()

    opener = threading.Thread(target=open_when_awaited)
    opener.start()
    output.catch_up()
    layout.log.append("caught up")
    opener.join()
    assert layout.log == [*range(2 * MAX_QUEUED), "caught up"]


def test_a_few_messages_hold_no_engine_up(output: OutputThread, layout: GatedLayout) -> None:
    put(output, MAX_QUEUED)
    output.catch_up()
    assert layout.log == []


def test_nobody_waits_for_an_output_thread_that_is_gone(output: OutputThread, layout: GatedLayout) -> None:
    layout.gate.set()
    output.stop()
    put(output, 2 * MAX_QUEUED)
    output.catch_up()
    assert not output.is_alive()
