"""``enginewire chat``. The model echo answers with the conversation itself, so that answers show what the model got."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO

import pytest
from command_line import DEADLINE_S, Start, run

from enginewire import SamplingParams
from enginewire.cli.chat import Conversation

CHAT = ["chat", "echo", "--executor-option", "step_time_s=0"]


def test_each_line_of_standard_input_is_answered() -> None:
    result = run(*CHAT, "--max-tokens", "10", stdin="hello\n\nagain\n")
    assert result.stdout == "user\nhell\n" * 2
    assert result.stderr == ""
    assert result.returncode == 0


class Recorder:
    """Stands in for an ``LLM``: keeps what it is asked and answers ``No. 1``, ``No. 2`` … in two deltas."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[SimpleNamespace]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        for text in ("No. ", str(len(self.asked))):
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])


def test_the_model_is_told_what_was_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    conversation = Conversation(recorder, SamplingParams(), "Be brief.")  # type: ignore[arg-type]
    conversation.answer("A")
    conversation.answer("B")
    system, first = ("system", "Be brief."), ("user", "A")
    assert recorder.asked == [[system, first], [system, first, ("assistant", "No. 1"), ("user", "B")]]
    conversation.reset()
    conversation.answer("C")
    assert recorder.asked[-1] == [system, ("user", "C")]
    assert capsys.readouterr().out == "No. 1\nNo. 2\nNo. 3\n"


def test_reset_forgets_everything_but_the_system_message() -> None:
    result = run(*CHAT, "--system", "S", "--max-tokens", "9", stdin="A\n/reset\nB\n")
    assert result.stdout == "system\nS\n" * 2


def test_exit_leaves_and_help_lists_the_commands() -> None:
    result = run(*CHAT, "--max-tokens", "6", stdin="/help\n/exit\nhello\n")
    assert result.stdout == ""
    for command in ("/reset", "/exit", "/help", "Ctrl-C"):
        assert command in result.stderr


def test_a_conversation_that_grew_too_long_is_told_and_goes_on() -> None:
    result = run(*CHAT, "--executor-option", "max_model_len=60", "--max-tokens", "7", stdin=f"A\n{'B' * 60}\nC\n")
    assert result.stdout == "user\nA\n" * 2
    assert "max_model_len" in result.stderr
    assert "/reset" in result.stderr
    assert result.returncode == 0


class Terminal:
    """The far end of a pseudo terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def read_until(self, text: str) -> str:
        """Return what is shown up to ``text``, which must appear."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._seen:
            readable, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} did not appear in {self._seen!r}"
            self._seen += os.read(self._descriptor, 65536).decode()
        shown, _, self._seen = self._seen.partition(text)
        return shown


@pytest.fixture
def pty() -> Iterator[tuple[Terminal, IO[bytes]]]:
    """A terminal, and the end of it that a program gets."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r+b", buffering=0) as stream:
        yield Terminal(ours), stream
    os.close(ours)


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(start: Start, pty: tuple[Terminal, IO[bytes]]) -> None:
    terminal, stream = pty
    slow = ["--executor-option", "step_time_s=0.02", "--max-tokens", "100000"]
    process = start("chat", "echo", *slow, stdin=stream, stdout=stream, stderr=stream)
    terminal.read_until("> ")
    terminal.type("hello hello hello hello hello hello hello hello hello\n")
    terminal.read_until("user\r\nhello hello")
    process.send_signal(signal.SIGINT)
    terminal.read_until("(stopped)")
    terminal.read_until("> ")
    process.send_signal(signal.SIGINT)
    terminal.type(
        "\n"
    )  # readline looks for signals when it waits: one that came just before is noticed with the next key
    terminal.read_until("Ctrl-D or /exit leaves.")
    terminal.type("/exit\n")
    assert process.wait(DEADLINE_S) == 0


def test_end_of_input_on_a_terminal_leaves(start: Start, pty: tuple[Terminal, IO[bytes]]) -> None:
    terminal, stream = pty
    process = start(*CHAT, stdin=stream, stdout=stream, stderr=stream)
    assert "loading echo" in terminal.read_until("/help lists commands")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert process.wait(DEADLINE_S) == 0
