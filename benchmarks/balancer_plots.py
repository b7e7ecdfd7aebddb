"""Draws what ``balancer_sim.py --output FILE`` wrote.

    python benchmarks/balancer_plots.py FILE… [--folder docs/images]

Needs matplotlib (``pip install 'enginewire[bench]'``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

mpl.use("svg")
mpl.rcParams.update(
    {"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}
)

COLOURS = {
    "prefix": "#0072b2",
    "inflight": "#d55e00",
    "score": "#cc79a7",
    "two-choices": "#009e73",
    "random": "#999999",
}
Row = dict[str, Any]


def rows(files: Iterable[Path]) -> tuple[list[Row], list[Row]]:
    """Read results and coordinator costs; a later run of the same replaces an earlier one."""
    results: dict[object, Row] = {}
    costs: dict[object, Row] = {}
    for file in files:
        for line in file.read_text().splitlines():
            run = json.loads(line)
            for row in run["results"]:
                results[row["policy"], row["workload"], row["engines"], row["frontends"]] = row
            for row in run["coordinator"]:
                costs[row["engines"], row["frontends"]] = row
    return list(results.values()), list(costs.values())


def lines(
    axes: Any, results: list[Row], key: str, value: str, where: Callable[[Row], bool], *, log: bool = False
) -> None:
    """Draw one line per policy."""
    for policy, colour in COLOURS.items():
        points = sorted((row[key], row[value]) for row in results if row["policy"] == policy and where(row))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row[key] for row in results if where(row)}), minor=False)
    axes.xaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.set_xlabel(key)
    axes.set_yscale("log" if log else "linear")


def draw(results: list[Row], folder: Path) -> None:
    """Draw policies against engines, against frontends, and what they cost."""

    def chat(row: Row) -> bool:
        return row["workload"] == "chat" and row["frontends"] == 4

    def at_64(row: Row) -> bool:
        return row["workload"] == "chat" and row["engines"] == 64

    panels: list[tuple[str, Any]] = [
        ("time to first token, p50, s", lambda a: lines(a, results, "engines", "ttft_p50", chat, log=True)),
        ("queue wait, p99, s", lambda a: lines(a, results, "engines", "wait_p99", chat, log=True)),
        ("share of prompt tokens found in the cache", lambda a: lines(a, results, "engines", "hit", chat)),
        ("load of the busiest engine / average", lambda a: lines(a, results, "engines", "spread", chat)),
        ("found in the cache, 64 engines", lambda a: lines(a, results, "frontends", "hit", at_64)),
        ("cost of one decision, µs", lambda a: lines(a, results, "engines", "cost_us", chat, log=True)),
    ]
    figure, grid = plt.subplots(2, 3, figsize=(11, 6))
    for axes, (title, fill) in zip(grid.flat, panels, strict=True):
        fill(axes)
        axes.set_title(title, fontsize=9)
    grid.flat[0].legend()
    figure.suptitle("Conversations (workload chat), four frontends unless shown otherwise", fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / "balancers.svg", metadata={"Date": None})


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    results, _ = rows(arguments.files)
    draw(results, arguments.folder)


if __name__ == "__main__":
    main()
