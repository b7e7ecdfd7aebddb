"""Makes RESULTS.md and its charts of the committed figures.

    python benchmarks/report.py

Needs matplotlib (``pip install 'enginewire[bench]'``). A target is a row's ratio to a peer of the same run, or a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from harness import RESULTS, Row, Suite, figure

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9, "legend.frameon": False})

PAGE = RESULTS.with_name("RESULTS.md")

WHAT_STOPS_THE_REST = """\
What stops the rest: decoding, which is msgspec's in both clients and two thirds of a message of 64 outputs, and the
wake-ups of ZeroMQ's threads, which are most of a call (decisions
[18](../docs/decisions/0018-whoever-waits-receives.md) and
[2](../docs/decisions/0002-reader-on-the-zeromq-descriptor.md)); for `LLM`, the processor time that its three processes
take from the model ([decision 4](../docs/decisions/0004-executors-that-hold-the-gil.md)); for the server, the kernel's
write of each event, and what a message costs before its first token
([decision 24](../docs/decisions/0024-what-a-streamed-token-costs.md))."""


@dataclass(frozen=True)
class Target:
    """What a figure has to be: ``must`` times better than ``base`` or more; without a base, ``must`` or less."""

    suite: str
    row: str
    column: str
    base: str | None
    must: float
    aim: float

    def line(self, suites: dict[str, Suite]) -> str | None:
        """Return the table's line, or nothing where the run had no such column."""
        row = suites[self.suite].rows.get(self.row) if self.suite in suites else None
        if row is None or self.column not in row.values or (self.base and self.base not in row.values):
            return None
        if self.base:
            value = row.ratio(self.column, self.base)
            is_met, has_aim, sign = value >= self.must, value >= self.aim, "×"
        else:
            value = row.median(self.column)
            is_met, has_aim, sign = value <= self.must, value <= self.aim, ""
        verdict = "aim" if has_aim else "must" if is_met else "**short**"
        cells = (self.row, self.column, self.base or "a limit", f"{sign}{value:.3g}", self.must, self.aim, verdict)
        return f"| {' | '.join(map(str, cells))} |"


def targets() -> Iterable[Target]:
    """Return the targets against vLLM 0.25.1's clients, its server and the bare engine."""
    faces = {"async": "vLLM async", "uvloop": "vLLM uvloop", "sync": "vLLM sync"}
    wanted = {
        "messages/s, B=1": ((5, 10), (6, 10)),
        "messages/s, B=64": ((2.5, 3.3), (2, 2.8)),
        "messages/s, B=64, logprobs untouched": ((5, 9), (5, 9)),
        "messages/s, B=64, logprobs read": ((1.6, 2.5), (1.6, 2.5)),
        "B=64, 1,000/s: CPU per message, µs": ((1.5, 2.2), (1.5, 2.2)),
        "add to first output, 1 in flight, p50 µs": ((1.25, 1.7), (1.3, 2)),
        "utility call, p50 µs": ((1.4, 2), (1.6, 2.7)),
        "add_request, 32 tokens, CPU µs": ((1.8, 6), (1.25, 2.5)),
    }
    for row, (in_asyncio, in_sync) in wanted.items():
        for column, base in faces.items():
            must, aim = in_sync if column == "sync" else in_asyncio
            yield Target("client", row, column, base, must, aim)
    limits = {
        "longest block of the loop in a burst, ms": (5, 1),
        "process start to connected, s": (0.25, 0.12),
        "resident memory, MB": (45, 30),
        "growth per unread message, × its size": (2.3, 1.1),
    }
    for row, (must, aim) in limits.items():
        for column in faces:
            yield Target("client", row, column, None, must, aim)
    for batch in (16, 64):
        for peer in ("vLLM", "llama.cpp"):
            yield Target("llm", f"tokens/s, {batch} requests", "LLM", peer, 1, 1.5)
    for what in ("1 request", "16 requests", "64 requests"):
        yield Target("llm", f"tokens/s, {what}", "LLM", "bare OpenVINO", 0.95, 1)
    yield Target("llm", "tokens/s, 64 requests", "server", "bare OpenVINO", 0.9, 1)
    yield Target("llm", "ready, s", "LLM", "vLLM", 5, 10)
    yield Target("llm", "utility call p99, ms, during a prompt of 4,000", "LLM", None, 10, 1)
    for level in ("64 streams, paced", "64 streams, chat, paced", "64 streams, full speed"):
        yield Target("serve", f"{level}: CPU s per million tokens", "enginewire", "vLLM", 3, 5)


def markdown(suite: Suite) -> Iterable[str]:
    """Yield a suite's table: medians, and in brackets the smallest and the largest round, then ratios."""
    columns = suite.columns()
    yield suite.legend()
    yield ""
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in suite.rows.values():
        cells = []
        for column in columns:
            if column not in row.values:
                cells.append("")
                continue
            values = row.values[column]
            spread = f" ({figure(min(values))}–{figure(max(values))})" if len(values) > 1 else ""
            cells.append(figure(row.median(column)) + spread + suite.versus(row, column))
        yield f"| {row.name} | " + " | ".join(cells) + " |"


def plain_numbers(axis: Any, form: str = "{:g}") -> None:
    """Put plain numbers at a logarithmic axis."""
    axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: form.format(value)))
    axis.set_minor_locator(mpl.ticker.NullLocator())


def bars(axes: Any, rows: list[tuple[str, Row]], columns: list[str]) -> None:
    """Draw a group of horizontal bars per row, with a line from its smallest to its largest round."""
    height = 0.8 / len(columns)
    for i, column in enumerate(columns):
        for y, (_, row) in enumerate(rows):
            if column not in row.values:
                continue
            values, median = row.values[column], row.median(column)
            spread = [[median - min(values)], [max(values) - median]]
            label = column if y == next(n for n, (_, each) in enumerate(rows) if column in each.values) else None
            axes.barh(y + i * height, median, height * 0.9, xerr=spread, color=f"C{i}", label=label, ecolor="#555555")
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], [name for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, title: str, height: float, paint: Callable[[Any], None]) -> None:
    """Make one picture."""
    drawing, axes = plt.subplots(figsize=(8, height), layout="constrained")
    axes.set_title(title, loc="left")
    paint(axes)
    drawing.legend(loc="outside lower left", ncols=2)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def draw_client(suite: Suite) -> None:
    """Draw how many times better the clients are than vLLM's, on a logarithmic axis."""
    ratios = {
        name: Row(name, values={c: [row.ratio(c, f"vLLM {c}")] for c in ("async", "sync") if f"vLLM {c}" in row.values})
        for name, row in suite.rows.items()
    }
    rows = [(name, row) for name, row in ratios.items() if row.values]
    if not rows:
        return

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis, "×{:g}")
        bars(axes, rows, ["async", "sync"])
        axes.axvline(1, color="#555555", linewidth=1)

    draw(RESULTS / "client.svg", "Clients: how many times better than vLLM 0.25.1's own", 0.32 * len(rows) + 1, paint)


def draw_some(suite: Suite, title: str, unit: str, levels: Iterable[str], *, is_log: bool = False) -> None:
    """Draw those of a suite's rows that are called ``level: unit`` or ``unit, level`` as they are."""
    named = [(level, suite.rows.get(f"{level}: {unit}") or suite.rows.get(f"{unit}, {level}")) for level in levels]
    found = [(level, row) for level, row in named if row is not None]
    columns = [column for column in suite.columns() if any(column in row.values for _, row in found)]

    def paint(axes: Any) -> None:
        if is_log:
            axes.set_xscale("log")
            plain_numbers(axes.xaxis)
        bars(axes, found, columns)

    draw(RESULTS / f"{suite.name}.svg", title, 0.25 * len(columns) * len(found) + 0.8, paint)


def draw_growth(suite: Suite) -> None:
    """Draw what a token or a request costs against the number of what grows, both axes logarithmic."""
    grows = r"(in flight|tokens|engines|streams,|server processes)"
    sized = re.compile(rf"(.*?)\b(\d+)( {grows}.*: CPU .*)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in suite.rows.values():
        if found := sized.fullmatch(row.name):
            before, size, after, _ = found.groups()
            after = after.replace("CPU µs", "µs")
            lines.setdefault(f"{before}N{after}", []).append((int(size), row.median(suite.columns()[0])))

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        plain_numbers(axes.xaxis)
        plain_numbers(axes.yaxis)
        axes.set_xlabel("N")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)

    draw(RESULTS / "scaling.svg", "CPU µs per token or request, where there are N", 5, paint)


PICTURES: dict[str, Callable[[Suite], None]] = {
    "client": draw_client,
    "llm": lambda suite: draw_some(
        suite,
        "Tokens per second, SmolLM2-135M on the CPU",
        "tokens/s",
        ("1 request", "16 requests", "64 requests"),
    ),
    "serve": lambda suite: draw_some(
        suite,
        "The server's CPU seconds per million streamed tokens (less is better)",
        "CPU s per million tokens",
        [
            *(
                f"{streams}, paced"
                for streams in ("1 stream", "16 streams", "64 streams", "256 streams", "64 streams, chat")
            ),
            *(f"{streams}, full speed" for streams in ("1 stream", "64 streams", "256 streams")),
        ],
        is_log=True,
    ),
    "scaling": draw_growth,
}


def main() -> None:
    """Write the page and draw its charts."""
    suites = {path.stem: Suite.load(path) for path in sorted(RESULTS.glob("*.json"))}
    lines = [
        "# Results",
        "",
        "The last published figures, made by `make bench` and `make bench-publish`. A cell is the median of the",
        "rounds, their smallest and largest, and how many times better (×) it is than the columns it is compared with.",
        "All columns of a table ran in turns; a suite may have been run again since another was. Absolute figures",
        "belong to one shared machine and one day: read the ratios.",
        "",
        "## Targets",
        "",
        "| | who | against | measured | must | aim | reached |",
        "|---|---|---|---|---|---|---|",
        *filter(None, (target.line(suites) for target in targets())),
        "",
        WHAT_STOPS_THE_REST,
    ]
    for suite in suites.values():
        if suite.name in PICTURES:
            PICTURES[suite.name](suite)
        about = suite.machine
        lines += ["", f"## {suite.name}", ""]
        if (RESULTS / f"{suite.name}.svg").exists():
            lines += [f"![{suite.name}](results/{suite.name}.svg)", ""]
        lines += [*markdown(suite), ""]
        lines.append(
            f"{about['processor']}, {about['cpus']} CPUs, {about['system']}, Python {about['python']}, "
            + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            + f"; load at the end {about['load_at_end']}"
            + ("; a quick run: few and short rounds." if about.get("is_quick") else ".")
        )
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()
