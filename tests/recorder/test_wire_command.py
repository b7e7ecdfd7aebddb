"""``enginewire wire``: recording between a real client and a real engine, and showing what was recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from client_harness import Face, make_client, mock_config, request
from enginewire.recorder.entry import read_file
from enginewire.recorder.reading import Reader
from enginewire.testing import free_tcp_port, wait_until
from enginewire.wire.profile import PROFILES, WireProfile, decode_ready

WIRE = [sys.executable, "-m", "enginewire", "wire"]
DATA = Path(__file__).parents[1] / "vectors" / "data"
DEADLINE_S = 30.0

ENGINE = """
import sys
from enginewire import EngineConfig
from enginewire.engine.main import run_engine
from enginewire.engine.spec import EngineSpec
config = EngineConfig.create("echo", wire_version=sys.argv[2])
spec = EngineSpec(config=config, handshake_address=sys.argv[1], local=False, headless=True)
sys.exit(run_engine(spec))
"""


@contextmanager
def process(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process; it is killed at the end if it has not ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    running = subprocess.Popen(words, text=True, **pipes)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.wait(DEADLINE_S)
        for stream in (running.stdout, running.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def recorded_conversation(
    path: Path, *options: str, version: str = "0.25.1", stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Have a client and an echo engine talk through a recorder; yield the recorder when they have."""
    listen, frontend = (f"tcp://127.0.0.1:{free_tcp_port()}" for _ in range(2))
    words = [*WIRE, "record", "--listen", listen, "--frontend", frontend, "-o", str(path), *options]
    with (
        process(*words, stdout=stdout) as recorder,
        process(sys.executable, "-c", ENGINE, listen, version, stderr=subprocess.DEVNULL),
    ):
        port = int(frontend.rpartition(":")[2])
        face = Face("sync", lambda: make_client("sync", mock_config(port)))
        try:
            face.add_request(request("r1", max_tokens=3, logprobs=2))
            assert sum(len(it.new_token_ids) for it in face.outputs(3)) == 3
            assert face.call_utility("is_sleeping") is False
        finally:
            face.close()
        wait_until(lambda: "UTILITY_OUTPUT" in types_in(path), DEADLINE_S, "recording of the conversation")
        yield recorder


def types_in(path: Path) -> list[str]:
    reader = Reader()
    return [reader.read(entry).type for entry in read_file(path)[0]]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_what_is_recorded_between_a_client_and_an_engine_is_a_file_of_vectors(
    profile: WireProfile, tmp_path: Path
) -> None:
    path = tmp_path / "it.json"
    with recorded_conversation(path, version=profile.vllm_version) as recorder:
        recorder.send_signal(signal.SIGINT)
        shown, told = recorder.communicate(timeout=DEADLINE_S)
        assert recorder.returncode == 0
    entries = json.loads(path.read_text())
    assert {entry["version"] for entry in entries} == {profile.vllm_version}
    assert len({entry["name"] for entry in entries}) == len(entries)
    assert entries[0]["value"]["status"] == "HELLO"
    reader = Reader()
    messages = [reader.read(entry) for entry in read_file(path)[0]]
    assert [message.problem for message in messages if message.problem] == []
    (ready,) = (message.entry.frames[1:] for message in messages if message.type == "READY_RESPONSE")
    assert decode_ready(ready)[0] is profile
    assert "ADD r1" in shown
    assert "is_sleeping = false" in shown
    assert "new_logprobs={logprob_token_ids: <i" in shown
    assert "ADD 1 (" in told.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_recorder_that_is_stopped_or_killed_leaves_a_whole_file(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    with recorded_conversation(path) as recorder:
        recorder.send_signal(number)
        _, told = recorder.communicate(timeout=DEADLINE_S)
        assert recorder.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert types_in(path).count("ADD") == 1
    json.loads(path.read_text())
    assert ("messages, " in told) is (number == signal.SIGTERM)


def test_nobody_waits_for_a_terminal_that_takes_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
        path = tmp_path / "it.json"
        with recorded_conversation(path, "--full", stdout=writer) as recorder:
            recorder.send_signal(signal.SIGINT)
            recorder.wait(DEADLINE_S)
    finally:
        os.close(reader)
        os.close(writer)


def show(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WIRE, "show", *words], capture_output=True, text=True, timeout=DEADLINE_S)


LIVE = str(DATA / "live-0.32.0.json")


def test_a_golden_file_is_shown() -> None:
    result = show(LIVE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "READY_RESPONSE" in result.stdout
    assert 'UTILITY_OUTPUT get_supported_tasks = ["generate"]' in result.stdout


def test_filters_select_by_type_request_and_engine() -> None:
    lines = show(LIVE, "--json", "--type", "add", "--type", "abort").stdout.splitlines()
    assert {json.loads(line)["type"] for line in lines} == {"ADD", "ABORT"}
    request_id = json.loads(lines[0])["request_ids"][0]
    selected = [json.loads(line) for line in show(LIVE, "--json", "--request-id", request_id).stdout.splitlines()]
    assert {it["type"] for it in selected} >= {"ADD", "OUTPUTS"}
    assert all(any(request_id in one for one in it["request_ids"]) for it in selected)
    assert show(LIVE, "--engine", "7").stdout == ""
    assert show(LIVE, "--engine", "0", "--type", "hello").stdout.count("HELLO") == 1


def test_an_unknown_type_is_refused_with_those_that_there_are() -> None:
    result = show(LIVE, "--type", "ads")
    assert result.returncode == 2
    assert "no message is of type ADS; types: hello, init" in result.stderr


@pytest.mark.parametrize(
    ("words", "reason", "status"),
    [
        (["show"], "show needs the FILE", 2),
        (["show", "/nowhere"], "cannot read /nowhere: No such file", 1),
        (["show", __file__], "is no file of recorded messages", 1),
        (["record", "x.json"], "a file that is given with -o", 2),
        (["record", "--listen", "tcp://*:5"], "--listen must be the tcp address that engines connect to", 2),
        (["record", "--listen", "ipc:///x"], "--listen must be the tcp address that engines connect to", 2),
        (["record", "--frontend", "nonsense", "--listen", f"tcp://127.0.0.1:{free_tcp_port()}"], "nonsense", 2),
        (["record", "-o", "/nowhere/x.json"], "cannot write /nowhere/x.json", 1),
    ],
)
def test_what_is_refused_is_one_line(words: list[str], reason: str, status: int) -> None:
    """2: the command line is wrong; 1: a file is."""
    result = subprocess.run([*WIRE, *words], capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == status
    (line,) = result.stderr.splitlines()
    assert line.startswith("enginewire: error: ")
    assert reason in line


def test_a_reader_that_has_seen_enough_ends_show() -> None:
    result = subprocess.run(
        f"{' '.join(WIRE)} show {LIVE} | head -n 1", shell=True, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 1
