"""``enginewire top``: the frame by itself, and the command on a terminal and without."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import msgspec
import pytest
from command_line import DEADLINE_S, Start, error_line, run

from enginewire.cli.top_frame import Frame, curve, duration, painted
from enginewire.server.engine_state import Health
from enginewire.server.snapshot import EngineSnapshot, StateSnapshot
from enginewire.testing import free_tcp_port
from enginewire.testing.waiting import wait_until

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def engine(index: int, **changes: Any) -> EngineSnapshot:
    """Make an engine that is doing something."""
    made = EngineSnapshot(
        index=index,
        health=Health.READY,
        num_in_flight=5,
        num_running=4,
        num_waiting=1,
        kv_cache_usage=0.42,
        prefix_cache_hit_rate=None,
        prompt_tokens_per_s=10.0,
        generation_tokens_per_s=1234.5,
        generation_history=[0] * 59 + [1300],
    )
    return replace(made, **changes)


def state(*engines: EngineSnapshot, **changes: Any) -> StateSnapshot:
    """Make the state of a server with these engines."""
    made = StateSnapshot(
        model="m",
        version="1.2",
        max_model_len=4096,
        uptime_s=3725.0,
        num_requests_served=1203,
        num_in_flight=15,
        num_disconnects=0,
        engines=list(engines),
        generation_tokens_per_s=2469.0,
        generation_history=[0] * 59 + [2600],
    )
    return replace(made, **changes)


def text_of(shown: StateSnapshot, width: int = 120, height: int = 0, **more: str) -> list[str]:
    return painted(Frame("http://h:1", shown).lines(width, height, **more), width, in_colour=False)


# The frame.


def test_a_frame_tells_of_every_engine_and_of_what_became_of_requests() -> None:
    """Issue 6."""
    killed = "killed by signal 9 (SIGKILL)"
    lines = text_of(
        state(
            engine(0),
            engine(1, health=Health.STARTING, num_restarts=2, death=killed),
            engine(2, health=Health.LEAVING),
            is_scaling=True,
            num_deaths=2,
            num_restarts=2,
            num_moved=16,
            num_lost=1,
        )
    )
    assert lines[0] == "http://h:1  m · enginewire 1.2 · up 1 h 2 min"
    assert lines[1] == "3 engines: 1 ready, 1 leaving, 1 starting  scaling"
    assert lines[3].startswith("2,469.0 tokens/s  ▁")
    assert lines[3].endswith("█")
    assert lines[4] == "running 12 · waiting 3 · in flight 15 · served 1,203 · tokens 0"
    assert lines[5] == "deaths 2 · restarts 2 · resumed 16 · lost 1 · clients gone 0"
    table = [line.split() for line in lines[8:]]
    assert [row[:4] for row in table] == [
        ["0", "ready", "4", "1"],
        ["1", "starting", "4", "1"],
        ["2", "leaving", "4", "1"],
    ]
    assert table[0][4:7] == ["████░░░░░░", "42%", "1,234.5"]
    assert lines[9].endswith(f"2  {killed}")


@pytest.mark.parametrize("width", [1, 20, 40, 80, 99, 100, 140])
@pytest.mark.parametrize("height", [1, 5, 8, 9, 24])
def test_a_frame_fits_whatever_the_terminal_is(width: int, height: int) -> None:
    """A line that reaches the last column, or a line too many, would scroll the screen."""
    shown = state(*(engine(index, death="x" * 200) for index in range(40)))
    lines = text_of(shown, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) < width


def test_where_not_all_engines_fit_those_in_trouble_are_shown() -> None:
    shown = state(*(engine(index, health=Health.DEAD if index == 37 else Health.READY) for index in range(40)))
    table = text_of(shown, 120, 14)[8:]
    assert [line.split()[0] for line in table] == ["0", "1", "2", "3", "37", "…"]
    assert table[-1].endswith("and 35 more")


def test_names_and_causes_cannot_give_the_terminal_orders() -> None:
    lines = text_of(state(engine(0, death="\x1b]0;mine\x07 a\nb"), model="\x1b[2J"))
    assert not any(character in line for line in lines for character in "\x1b\x07\n\r")


def test_old_numbers_are_told_apart() -> None:
    lines = text_of(state(engine(0)), note="no answer; trying again")
    assert lines[1] == "no answer; trying again"
    assert "ready" in lines[8]


def test_a_curve_shows_the_latest_and_a_trickle_stays_low() -> None:
    assert curve([0, 1, 100, 50, 25], 3) == "█▅▃"
    assert curve([0, 1, 5], 60) == "▁▁▅"
    assert curve([1], 0) == curve([], 5) == ""


def test_durations_have_the_two_units_that_matter() -> None:
    texts = [duration(seconds) for seconds in (0.9, 61, 3600, 90061)]
    assert texts == ["0 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]


# The command.


class FakeServer(BaseHTTPRequestHandler):
    """A server whose answer to ``GET /state`` a test chooses."""

    status: ClassVar[int] = 200
    body: ClassVar[bytes] = b""
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("Authorization"))
        assert self.path == "/state"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """A server with two engines; its URL."""
    answer(state(engine(0), engine(1)))
    FakeServer.keys = []
    with serving(free_tcp_port()) as url:
        yield url


class serving:
    """Serve on a port."""

    def __init__(self, port: int) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), FakeServer)
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def answer(what: StateSnapshot | dict[str, Any], status: int = 200) -> None:
    """Have the fake server answer so from now on."""
    FakeServer.status, FakeServer.body = status, msgspec.json.encode(what)


def test_once_prints_one_frame(server: str) -> None:
    result = run("top", server.removeprefix("http://"), "--once", "--api-key", "secret")
    assert (result.returncode, result.stderr) == (0, "")
    assert "2 engines: 2 ready" in result.stdout
    assert "\x1b" not in result.stdout
    assert FakeServer.keys == ["Bearer secret"]


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error"}}


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        (error("the engine is starting"), 503, "the engine is starting"),
        (error("x"), 401, "wants an API key"),
        (error("x"), 404, "HTTP status 404; is that an enginewire server?"),
        ({"model": 5}, 200, "is not the state of an enginewire server"),
    ],
)
def test_once_fails_with_the_reason(server: str, what: dict[str, Any], status: int, words: str) -> None:
    answer(what, status)
    result = run("top", server, "--once")
    assert result.returncode == 1
    assert words in error_line(result)


def test_once_without_a_server_fails() -> None:
    result = run("top", f"http://127.0.0.1:{free_tcp_port()}", "--once")
    assert result.returncode == 1
    assert "Connection refused" in error_line(result)


@pytest.mark.parametrize("words", ["ftp://host", "http://", "http://host:port", "--interval 0", "--interval soon"])
def test_what_makes_no_sense_is_wrong_usage(words: str) -> None:
    result = run("top", *words.split())
    assert result.returncode == 2
    assert result.stderr.startswith("usage: enginewire top")


def test_without_a_terminal_frames_follow_each_other_and_a_server_is_awaited(start: Start) -> None:
    """Also the end of whoever reads them ends it."""
    answer(state(engine(0)))
    port = free_tcp_port()
    process = start("top", f"127.0.0.1:{port}", "--interval", "0.1")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "trying again" in process.stderr.readline()
    with serving(port):
        seen = 0
        while seen < 3:
            seen += "1 engine: 1 ready" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGPIPE


class Pty:
    """A terminal of so many columns and lines, with a program on it."""

    def __init__(self, start: Start, *words: str) -> None:
        self._ours, self.theirs = os.openpty()
        self.resize(120, 20)
        self.modes = termios.tcgetattr(self.theirs)
        self.seen = ""
        self.process: subprocess.Popen[str] = start(*words, stdin=self.theirs, stdout=self.theirs)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, text: str) -> str:
        """Return what is written up to ``text``, which must appear."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} did not appear in {self.seen[-2000:]!r}"
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.seen[-2000:]!r}"
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def top(start: Start, server: str) -> Iterator[Pty]:
    """The command on a terminal, with its first frame drawn."""
    pty = Pty(start, "top", server, "--interval", "0.1")
    pty.read_until(ENTER)
    pty.read_until("2 ready")
    yield pty
    pty.close()


@pytest.mark.parametrize(
    ("how", "status"), [("q", 0), ("\x03", 128 + signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_the_terminal_is_left_as_it_was(top: Pty, how: str | signal.Signals, status: int) -> None:
    assert termios.tcgetattr(top.theirs) != top.modes
    if isinstance(how, str):
        # Ctrl-C comes as a signal only in a session of its own, which a test's child has not.
        top.process.send_signal(signal.SIGINT) if how == "\x03" else top.type(how)
    else:
        top.process.send_signal(how)
    top.read_until("\x1b[?25h" + LEAVE)
    assert top.process.wait(DEADLINE_S) == status
    assert termios.tcgetattr(top.theirs) == top.modes
    assert top.process.stderr is not None
    assert top.process.stderr.read() == ""


def test_a_frame_follows_the_state_and_the_terminals_size(top: Pty) -> None:
    answer(state(engine(0), engine(1, health=Health.DEAD, death="killed by signal 9 (SIGKILL)")))
    top.read_until("SIGKILL")
    assert "░" in frame(top)
    top.resize(60, 20)
    wait_until(lambda: "░" not in frame(top), DEADLINE_S, "a frame that has no room for that")
    top.resize(100, 20)
    top.read_until("░")


def frame(top: Pty) -> str:
    """Return one whole frame: what is between two returns to the corner."""
    top.read_until("\x1b[H")
    return top.read_until("\x1b[H")


def test_a_server_that_is_gone_is_said_and_awaited(start: Start) -> None:
    answer(state(engine(0), engine(1)))
    port = free_tcp_port()
    with serving(port) as url:
        pty = Pty(start, "top", url, "--interval", "0.1")
        pty.read_until("2 ready")
    pty.read_until("Connection refused; trying again")
    assert "tokens/s" in frame(pty), "what was known last is still there"
    with serving(port):
        pty.read_until("2 ready")
        pty.type("q")
        assert pty.process.wait(DEADLINE_S) == 0
    pty.close()


def test_a_stopped_program_gives_the_terminal_back_until_it_goes_on(top: Pty) -> None:
    """Ctrl-Z."""
    top.process.send_signal(signal.SIGTSTP)
    top.read_until(LEAVE)
    wait_until(lambda: termios.tcgetattr(top.theirs) == top.modes, DEADLINE_S, "the modes are those from before")
    status = os.waitid(os.P_PID, top.process.pid, os.WSTOPPED)
    assert status is not None
    top.process.send_signal(signal.SIGCONT)
    top.read_until(ENTER)
    top.read_until("2 ready")
    top.type("q")
    assert top.process.wait(DEADLINE_S) == 0
