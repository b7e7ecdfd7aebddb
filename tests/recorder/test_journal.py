"""The file of a recorder: whole after every message, in the form of the golden vectors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from enginewire.errors import DecodeError
from enginewire.recorder.entry import Entry, read_file
from enginewire.recorder.journal import Journal
from enginewire.recorder.kinds import type_of


def outputs(n: int, version: str | None = "0.25.1", group: str = "engine0.frontend0") -> Entry:
    payload = msgspec.msgpack.encode([0, [], None, float(n)])
    return Entry(
        direction="engine->frontend (output socket)", frames=[payload, b"\xff"], name=f"m{n}", version=version,
        t=n / 10, group=group,
    )  # fmt: skip


def write(journal: Journal, *entries: Entry) -> None:
    for entry in entries:
        journal.write(entry, type_of(entry))


def test_the_file_is_a_whole_array_after_every_message(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    with Journal(path) as journal:
        assert json.loads(path.read_text()) == []
        for n in range(1, 5):
            write(journal, outputs(n))
            assert [it["name"] for it in json.loads(path.read_text())] == [f"m{k}" for k in range(1, n + 1)]


def test_an_entry_is_a_golden_vectors(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    with Journal(path) as journal:
        write(journal, outputs(1))
    (entry,) = json.loads(path.read_text())
    assert entry == {
        "version": "0.25.1",
        "name": "m1",
        "direction": "engine->frontend (output socket)",
        "t": 0.1,
        "group": "engine0.frontend0",
        "frames": ["940090c0cb3ff0000000000000", "ff"],
        "payload_frame": 0,
        "value": [0, [], None, 1.0],
    }


def test_what_came_before_an_engines_version_was_known_has_it_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    with Journal(path) as journal:
        write(journal, outputs(1, None, "engine0"), outputs(2, None, "engine1"))
        assert [it["version"] for it in json.loads(path.read_text())] == [None, None]
        write(journal, outputs(3, "0.32.0", "engine0.frontend1"))
    assert [it["version"] for it in json.loads(path.read_text())] == ["0.32.0", None, "0.32.0"]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    written = [outputs(n) for n in range(3)]
    with Journal(path) as journal:
        write(journal, *written)
    assert read_file(path) == (written, "")


@pytest.mark.parametrize("lost_bytes", [1, 3, 4, 40, 100])
def test_a_file_that_was_cut_off_lacks_its_last_message_only(tmp_path: Path, lost_bytes: int) -> None:
    path = tmp_path / "it.json"
    with Journal(path) as journal:
        write(journal, *(outputs(n) for n in range(5)))
    os.truncate(path, path.stat().st_size - lost_bytes)
    entries, problem = read_file(path)
    assert [entry.name for entry in entries[:4]] == ["m0", "m1", "m2", "m3"]
    assert bool(problem) is (lost_bytes > 1), "the last byte is a line's end"


def test_undecodable_and_raw_frames_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    frames = {"engine->frontend (output socket)": [b"\xc1"], "coordinator->engine (XPUB)": [b"READY"]}
    with Journal(path) as journal:
        write(journal, *(Entry(direction=direction, frames=them) for direction, them in frames.items()))
    broken, ready = json.loads(path.read_text())
    assert (broken["frames"], broken["value"]) == (["c1"], None)
    assert (ready["frames"], ready["value"]) == ([b"READY".hex()], "READY")


def test_the_file_is_private(tmp_path: Path) -> None:
    """It holds prompts."""
    path = tmp_path / "it.json"
    with Journal(path):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{}", '[{"frames": 3}]', '[{"direction": "a->b", "frames": ["xy"]}]', "[1]"]
)
def test_what_is_no_recorded_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(DecodeError, match=r"it\.json"):
        read_file(path)
