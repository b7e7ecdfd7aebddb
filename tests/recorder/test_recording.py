"""What becomes of passing messages: names, versions and totals; a slow view and a full disk stop nobody."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewire.recorder import recording as module
from enginewire.recorder.entry import Entry, read_file
from enginewire.recorder.journal import Journal
from enginewire.recorder.recording import Recording

READY = {"max_model_len": 8, "num_gpu_blocks": 1, "block_size": 1, "dtype": "float32", "vllm_version": "0.25.1"}


def passing(direction: str, value: object, group: str = "engine0.frontend0", head: tuple[bytes, ...] = ()) -> Entry:
    frames = [*head, msgspec.msgpack.encode(value)]
    return Entry(direction=direction, frames=frames, payload_frame=len(head), group=group, t=1.0)


HELLO = passing("engine->frontend (handshake)", {"status": "HELLO"}, "engine0", (b"\0\0",))
RESPONSE = passing("engine->frontend (input socket)", READY, head=(b"\0\0",))
OUTPUTS = passing("engine->frontend (output socket)", [0, [], None, 1.0])


def test_messages_get_names_and_their_engines_version(tmp_path: Path) -> None:
    shown: list[Any] = []
    with Journal(tmp_path / "it.json") as journal, Recording(journal, shown.append) as recording:
        for entry in (HELLO, RESPONSE, OUTPUTS, OUTPUTS):
            recording.message(entry)
    written, _ = read_file(tmp_path / "it.json")
    assert [entry.name for entry in written] == [
        "engine0.hello.1",
        "engine0.frontend0.ready_response.1",
        "engine0.frontend0.outputs.1",
        "engine0.frontend0.outputs.2",
    ]
    assert {entry.version for entry in written} == {"0.25.1"}
    assert [entry.name for entry in shown] == [entry.name for entry in written]


def test_the_summary_counts_messages_and_bytes_by_type() -> None:
    with Recording(None, lambda item: None) as recording:
        for entry in (HELLO, OUTPUTS, OUTPUTS):
            recording.message(entry)
    assert recording.summary() == "3 messages, 42 B: OUTPUTS 2 (26 B), HELLO 1 (16 B)"


def test_what_a_slow_view_cannot_take_is_counted_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSEEN", 2)
    is_stuck, go_on = threading.Event(), threading.Event()

    def show(item: object) -> None:
        is_stuck.set()
        go_on.wait(20)

    with Journal(tmp_path / "it.json") as journal, Recording(journal, show) as recording:
        recording.message(OUTPUTS)
        assert is_stuck.wait(20)
        for _ in range(5):
            recording.message(OUTPUTS)
        assert recording.summary().endswith("; 3 were not shown: the output was too slow")
        go_on.set()
    assert len(read_file(tmp_path / "it.json")[0]) == 6


def test_a_file_that_cannot_be_written_any_more_ends_and_nothing_else_does(tmp_path: Path) -> None:
    shown: list[Any] = []
    journal = Journal(tmp_path / "it.json")
    with Recording(journal, shown.append) as recording:
        recording.message(OUTPUTS)
        journal.close()  # what is written to it now is an error, as on a disk that is full
        recording.message(OUTPUTS)
        recording.message(OUTPUTS)
    notices = [item for item in shown if isinstance(item, tuple)]
    assert len(notices) == 1
    assert "the file ends here, it cannot be written" in notices[0][1]
    assert len(shown) == 4
    assert len(read_file(tmp_path / "it.json")[0]) == 1


def test_a_view_that_fails_is_known_to_whoever_runs_the_relay() -> None:
    def show(item: object) -> None:
        raise BrokenPipeError

    with Recording(None, show) as recording:
        recording.message(OUTPUTS)
        recording.message(OUTPUTS)
    assert isinstance(recording.failure, BrokenPipeError)
