"""The progress bar on stderr."""

from __future__ import annotations

import io

import pytest

from enginewire.frontend.progress import ProgressBar, download_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_draws_on_terminals_only() -> None:
    for file, draws in ((io.StringIO(), False), (Terminal(), True)):
        with ProgressBar(4, "requests", file=file) as bar:
            bar.update(2, "busy")
            bar.update(4, is_last=True)
        assert bool(file.getvalue()) is bar.enabled is draws


def test_a_bar_can_be_asked_for_and_switched_off() -> None:
    asked, off = io.StringIO(), Terminal()
    with ProgressBar(4, "requests", enabled=True, file=asked) as bar:
        bar.update(1)
    with ProgressBar(4, "requests", enabled=False, file=off) as bar:
        bar.update(1)
    assert "requests ██████·················· 1/4" in asked.getvalue()
    assert asked.getvalue().endswith("\n")
    assert off.getvalue() == ""


def test_a_bar_redraws_seldom_but_shows_the_end() -> None:
    file = Terminal()
    with ProgressBar(1000, "requests", file=file) as bar:
        for done in range(1000):
            bar.update(done)
        bar.update(1000, is_last=True)
    assert "1000/1000" in file.getvalue()
    assert file.getvalue().count("\r") < 500


def test_a_shorter_line_wipes_the_longer_one() -> None:
    file = Terminal()
    with ProgressBar(2, "x", file=file) as bar:
        bar.update(1, "a long note", is_last=True)
        bar.update(2, is_last=True)
    first, second = file.getvalue().rstrip("\n").split("\r")[1:]
    assert len(second) == len(first)


def test_a_terminal_of_few_characters_gets_replacements() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with ProgressBar(2, "x", enabled=True, file=file) as bar:
        bar.update(1)
    file.flush()
    assert b"1/2" in file.buffer.getvalue()  # type: ignore[attr-defined]


def test_nothing_to_do_draws_nothing() -> None:
    file = Terminal()
    with ProgressBar(0, "requests", file=file) as bar:
        bar.update(0, is_last=True)
    assert file.getvalue() == ""


def test_a_download_has_one_bar_per_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with download_progress(enabled=True) as report:
        report(50_000_000, 100_000_000, "downloading")
        report(100_000_000, 100_000_000, "downloading")
        report(90_000_000, 90_000_000, "unpacking")
    downloading, unpacking = capsys.readouterr().err.rstrip("\n").split("\n")
    assert "downloading, MB" in downloading
    assert "100/100" in downloading
    assert "unpacking, MB" in unpacking
    assert "90/90" in unpacking
