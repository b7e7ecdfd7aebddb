"""What every benchmark shares: figures of several rounds, ratios within a round, tables, JSON.

Only the standard library is imported here: the peers' interpreters run benchmarks too.

A *row* is one figure ("messages/s, B=64"), a *column* is who was measured ("async", "vLLM async"). Contestants take
turns round by round, so that what else the machine does hits all of them, and a ratio is the median of the rounds' own
ratios. A ratio says *how many times better*: above 1 is good for every row, whether its figure should be high or low.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""The last full run, one JSON file a suite; ``report.py`` makes RESULTS.md and the charts of them."""

FRESH = Path(__file__).parents[1] / "build" / "bench"
"""Where a run leaves its figures, unless told otherwise."""


@dataclass
class Row:
    """One figure: its values of each round, by column."""

    name: str
    lower_is_better: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)

    def median(self, column: str) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.values[column])

    def ratio(self, column: str, base: str) -> float:
        """Return how many times better ``column`` is than ``base``: median over rounds if both ran in all of them."""
        ours, theirs = self.values[column], self.values[base]
        if len(ours) != len(theirs):
            ours, theirs = [self.median(column)], [self.median(base)]
        pairs = zip(theirs, ours, strict=True) if self.lower_is_better else zip(ours, theirs, strict=True)
        return statistics.median(better / worse for better, worse in pairs if worse)


@dataclass
class Suite:
    """The figures of one benchmark.

    ``bases`` names the columns that a column is compared with, in tables and by ``bench-check``.
    """

    name: str
    bases: dict[str, Sequence[str]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def add(self, row: str, column: str, value: float, *, lower_is_better: bool = False) -> None:
        """Note one round's value."""
        self.rows.setdefault(row, Row(row, lower_is_better)).values.setdefault(column, []).append(value)

    def columns(self) -> list[str]:
        """Return the columns in the order in which they appeared."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row.values))

    def ratios(self) -> dict[tuple[str, str, str], float]:
        """Return the ratios of every cell that has bases, by row, column and base."""
        return {
            (row.name, column, base): row.ratio(column, base)
            for row in self.rows.values()
            for column, bases in self.bases.items()
            for base in bases
            if column in row.values and base in row.values
        }

    def versus(self, row: Row, column: str) -> str:
        """Return the ratios of one cell as text, in the order of its bases; nothing if it has none."""
        ratios = [row.ratio(column, base) for base in self.bases.get(column, ()) if base in row.values]
        return "".join(f" ×{ratio:.2f}" for ratio in ratios)

    def legend(self) -> str:
        """Return what the ratios are to."""
        there = self.columns()
        against = {column: [base for base in bases if base in there] for column, bases in self.bases.items()}
        parts = [f"{column} against {', then '.join(bases)}" for column, bases in against.items() if bases]
        return f"×: {'; '.join(parts)}." if parts else ""

    def table(self) -> str:
        """Return the medians as text; behind a median how many times better it is than its bases."""
        cells = [["", *self.columns()]]
        for row in self.rows.values():
            cells.append([row.name])
            for column in self.columns():
                is_there = column in row.values
                cells[-1].append(figure(row.median(column)) + self.versus(row, column) if is_there else "")
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return f"{self.legend()}\n" + "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        )

    def save(self, folder: Path = FRESH) -> Path:
        """Write ``<name>.json`` into a folder and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        rows = [
            {
                "name": row.name,
                "lower_is_better": row.lower_is_better,
                "values": {
                    column: [float(f"{value:.4g}") for value in values] for column, values in row.values.items()
                },
            }
            for row in self.rows.values()
        ]
        content = {
            "suite": self.name,
            "machine": {**machine(), **self.machine},
            "bases": self.bases,
            "rows": rows,
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Suite:
        """Read what ``save`` wrote."""
        content = json.loads(path.read_text())
        rows = {row["name"]: Row(row["name"], row["lower_is_better"], row["values"]) for row in content["rows"]}
        return cls(content["suite"], content["bases"], rows, content["machine"])


def arguments_for(doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return what the command line of every suite has.

    Args:
        doc: the module's docstring.
        quick: what that flag does here.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=FRESH, metavar="FOLDER", help="of the JSON (default: %(default)s)")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="that has vLLM 0.25.1, where it is a peer")
    return parser


def finish(suite: Suite, arguments: argparse.Namespace) -> None:
    """Print a suite's table and save its figures."""
    suite.machine["is_quick"] = arguments.quick
    print(f"\n{suite.table()}\n\nsaved as {suite.save(arguments.out)}")


def figure(value: float) -> str:
    """Return a number with three digits that count."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, Python, versions."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    versions = {}
    for package in ("enginewire", "pyzmq", "msgspec", "uvloop", "openvino-genai"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": model,
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_at_end": round(os.getloadavg()[0], 1),
        "versions": versions,
    }
