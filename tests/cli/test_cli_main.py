"""Help, version, listings, and what the terminal shows."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest
from command_line import run

import enginewire
from enginewire import models
from enginewire.cli import terminal
from enginewire.cli.main import COMMANDS
from enginewire.cli.options import DEFAULT_MODEL_NAME
from enginewire.config import DEFAULT_MODEL
from enginewire.errors import ModelError
from enginewire.models import Progress


def test_the_version_is_the_package_s() -> None:
    assert run("--version").stdout == f"enginewire {enginewire.__version__}\n"


def test_help_lists_every_command_and_the_default_model() -> None:
    text = run("--help").stdout
    for command in COMMANDS:
        assert f"\n  {command} " in text
        assert "examples:\n  enginewire" in run(command, "--help").stdout
    assert DEFAULT_MODEL_NAME == DEFAULT_MODEL


def test_help_and_version_load_neither_sockets_nor_codecs() -> None:
    """They answer at once: 0.15 s with everything."""
    program = (
        "import sys\n"
        "from enginewire.cli.main import main\n"
        "for words in (['--version'], ['run', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit as exc: assert exc.code == 0\n"
        "assert not {'zmq', 'msgspec', 'numpy', 'asyncio', 'tokenizers'} & set(sys.modules)\n"
    )
    begin = time.monotonic()
    result = exit_code_of(program)
    assert result == 0
    assert time.monotonic() - begin < 5  # a coarse net: it takes 0.08 s on an idle machine


def exit_code_of(program: str) -> int:
    """Run a program in a fresh interpreter; return its exit code."""
    import subprocess

    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=30).returncode


def test_models_are_listed_with_size_licence_and_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENGINEWIRE_CACHE", str(tmp_path))
    result = run("models")
    header, first, *_ = result.stdout.splitlines()
    assert header.split() == ["ALIAS", "INSTALLED", "SIZE", "LICENCE", "PATH"]
    assert re.fullmatch(r"smollm2-135m +no +98 MB +Apache-2.0 +-", first)


def test_an_error_of_several_lines_becomes_one() -> None:
    assert terminal.one_line(ModelError("pip failed (status 1):\n  | tried\n  | no space left")) == (
        "pip failed (status 1): no space left"
    )
    assert terminal.one_line(ModelError("no such file\n  Last lines of its log:\n  | x")) == "no such file"
    assert terminal.one_line(KeyError()) == "KeyError"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_is_wiped_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.status("loading …"):
        assert screen.getvalue() == "loading …"
    assert screen.getvalue() == "loading …\r\x1b[K"


def test_where_there_is_no_terminal_there_is_no_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.status("loading …"):
        pass
    assert screen.getvalue() == ""


def fake_download(name: str, *, progress: Progress) -> Path:
    for done in (0, 50_000_000, 92_000_000):
        progress(done, 92_000_000, "downloading")
    progress(98_000_000, 98_000_000, "unpacking")
    return Path("/cache/model.gguf")


def test_a_download_is_told_in_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(models, "resolve_model", fake_download)
    assert terminal.fetch("m") == Path("/cache/model.gguf")
    assert screen.getvalue() == "m: downloading, 92 MB\nm: unpacking, 98 MB\n"


def test_a_download_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(models, "resolve_model", fake_download)
    terminal.fetch("m")
    assert "downloading, MB" in screen.getvalue()
    assert "92/92" in screen.getvalue()


def test_a_message_for_nobody_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    terminal.say("hello")
    assert not terminal.is_terminal()
