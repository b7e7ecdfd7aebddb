"""What the benchmarks share: ratios, tables, and the comparison with the last full run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from enginewire.testing import wait_until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    import harness

    return harness


@pytest.fixture
def run(harness: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The runner, with a folder of its own for what is committed."""
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    return run


def suite_of(harness: Any, ours: list[float], theirs: list[float], *, lower_is_better: bool = False) -> Any:
    suite = harness.Suite("client", {"ours": ["theirs", "nobody"]})
    for mine, other in zip(ours, theirs, strict=True):
        suite.add("row", "ours", mine, lower_is_better=lower_is_better)
        suite.add("row", "theirs", other, lower_is_better=lower_is_better)
    return suite


@pytest.mark.parametrize(("lower_is_better", "expected"), [(False, 2.0), (True, 0.5)])
def test_a_ratio_is_how_many_times_better_and_the_median_of_the_rounds(
    harness: Any, lower_is_better: bool, expected: float
) -> None:
    """The second round ran on a machine that was ten times slower for both, the third hit one side alone."""
    suite = suite_of(harness, [20, 2, 20], [10, 1, 1], lower_is_better=lower_is_better)
    assert suite.ratios() == {("row", "ours", "theirs"): expected}


def test_figures_are_the_same_after_they_were_saved(harness: Any, tmp_path: Path) -> None:
    suite = suite_of(harness, [123.456, 2.0], [1.0, 2.0])
    read = harness.Suite.load(suite.save(tmp_path))
    assert read.rows["row"].values == {"ours": [123.5, 2.0], "theirs": [1.0, 2.0]}
    assert (read.name, read.bases, read.machine["cpus"] > 0) == ("client", suite.bases, True)
    assert read.table() == "×: ours against theirs.\n            ours  theirs\nrow  62.8 ×62.25    1.50"


@pytest.mark.parametrize(("now", "expected"), [(1.1, []), (0.9, ["×0.90, was ×2.00"])])
def test_a_ratio_below_half_of_the_committed_one_falls_short(
    harness: Any, run: Any, tmp_path: Path, now: float, expected: list[str]
) -> None:
    suite_of(harness, [2.0], [1.0]).save(run.RESULTS)
    suite_of(harness, [now], [1.0]).save(tmp_path)
    compared, short = run.shortfalls("client", tmp_path)
    assert compared == 1
    assert short == [f"client: row, ours against theirs: {each}" for each in expected]


def test_a_benchmark_that_is_ended_leaves_nothing_running() -> None:
    """What went on would take the processors from the next measurement."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), "client", "--quick", "--no-vllm"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        runner = psutil.Process(process.pid)
        wait_until(
            lambda: len(runner.children(recursive=True)) > 3, 30, "contestants beside the suite and the fake engine"
        )
        family = runner.children(recursive=True)
        process.terminate()
        assert process.wait(30) == 1
    _, left = psutil.wait_procs(family, 30)
    assert left == []
