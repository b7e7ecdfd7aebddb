"""``Inbox``: what arrives is sorted, what makes no sense is counted and dropped."""

from __future__ import annotations

import threading

import msgspec
import pytest

from client_harness import output
from enginewire import EngineConfig, EngineCoreOutputs, FinishReason
from enginewire.client.inbox import Inbox
from enginewire.errors import DuplicateRequestIdError, EngineDeath
from enginewire.testing import mock_ready
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ENGINE_CORE_DEAD, Buffer
from enginewire.wire.messages import utility_output

encode = MsgpackEncoder().encode


@pytest.fixture
def markers() -> list[int]:
    return []


@pytest.fixture
def inbox(markers: list[int]) -> Inbox:
    return Inbox(EngineConfig.create("echo", max_frames=4), [0], lambda: markers.append(1))


@pytest.mark.parametrize(
    ("frames", "is_for_consumer"),
    [
        (encode(EngineCoreOutputs(outputs=[output()])), True),
        (encode(EngineCoreOutputs()), True),
        (encode(EngineCoreOutputs(utility_output=utility_output(1, 2))), False),
        ([b"\xc1"], True),  # the consumer finds out
        ([b""], False),
        ([ENGINE_CORE_DEAD], False),
        ([ENGINE_CORE_DEAD, b""], True),
        ([b"\x90", b"", b"", b"", b""], False),
    ],
)
def test_messages_are_sorted_without_decoding_outputs(
    inbox: Inbox, frames: list[Buffer], is_for_consumer: bool
) -> None:
    assert inbox.sort(frames) is is_for_consumer


@pytest.mark.parametrize("engine_index", [0, 5, 127, 128, 255, 256, 65535, 65536, 1 << 32])
def test_an_answer_is_recognised_whatever_the_width_of_the_engine_index(inbox: Inbox, engine_index: int) -> None:
    """A utility caller must not wait for a slow consumer."""
    frames = encode(EngineCoreOutputs(engine_index=engine_index, utility_output=utility_output(1, 2)))
    assert inbox.sort(frames) is False


def test_a_death_marker_is_reported_once_and_when_asked(inbox: Inbox, markers: list[int]) -> None:
    """C-27: what came before it is handed over first."""
    inbox.sort([ENGINE_CORE_DEAD])
    assert markers == []
    inbox.report_marker()
    inbox.report_marker()
    assert markers == [1]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b"\x07"],
        encode(EngineCoreOutputs(engine_index=1, outputs=[output()])),
        encode(EngineCoreOutputs(engine_index=-1, outputs=[output()])),
    ],
)
def test_what_makes_no_sense_is_counted(inbox: Inbox, frames: list[Buffer], caplog: pytest.LogCaptureFixture) -> None:
    """Defect 19."""
    assert inbox.take(frames) is None
    assert inbox.dropped == 1
    assert "dropped" in caplog.text


def test_a_request_lives_from_its_admission_to_its_last_output(inbox: Inbox) -> None:
    inbox.admit("r")
    with pytest.raises(DuplicateRequestIdError):
        inbox.admit("r")
    inbox.take(encode(EngineCoreOutputs(outputs=[output("r")])))
    assert inbox.live == {"r"}
    inbox.take(encode(EngineCoreOutputs(outputs=[output("r", finished=True)])))
    assert inbox.live == set()
    inbox.admit("r")
    inbox.forget(["r", "unknown"])
    assert inbox.live == set()


def test_the_first_cause_of_death_stays(inbox: Inbox) -> None:
    """Rule 5 of the style guide."""
    first = EngineDeath(0, "killed")
    assert inbox.engine_died(first)
    assert not inbox.engine_died(EngineDeath(0, "lost"))
    assert inbox.death == first


def test_ready_again_fails_what_the_engine_forgot(inbox: Inbox) -> None:
    """Defect 21."""
    inbox.admit("a")
    failures = inbox.ready_again([b"\x00\x00", msgspec.msgpack.encode(mock_ready(max_model_len=0))])
    assert failures is not None
    assert [(it.request_id, it.finish_reason) for it in failures.outputs] == [("a", FinishReason.ERROR)]
    assert inbox.live == {"a"}  # until somebody takes them
    assert inbox.take(failures) is failures
    assert inbox.live == set()


def test_ready_again_while_consumers_finish_requests(inbox: Inbox) -> None:
    """It walked the live set, which consumers in other threads change: the receiver ended with a RuntimeError."""
    inbox.live.update(map(str, range(50_000)))
    stop = threading.Event()

    def churn() -> None:
        i = 0
        while not stop.is_set():
            inbox.live.add(f"x{i}")
            inbox.live.discard(f"x{i}")
            i += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        frames = [b"\x00\x00", msgspec.msgpack.encode(mock_ready())]
        for _ in range(3):
            assert inbox.ready_again(frames) is not None
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x01\x00", msgspec.msgpack.encode(mock_ready())],
        [b"\x00\x00"],
        [b"\x00\x00", b"\xc1"],
        [b"\x00\x00", b""],
        [b"\x00\x00", msgspec.msgpack.encode(mock_ready()), b""],
        [b"", b""],
    ],
)
def test_other_messages_on_the_input_socket_are_counted(inbox: Inbox, frames: list[bytes]) -> None:
    """Defect 20."""
    assert inbox.ready_again(frames) is None
    assert inbox.dropped == 1
