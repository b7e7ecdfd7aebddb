"""What ``enginewire top`` shows: a server's state as lines of a terminal. Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from enginewire.server.engine_state import SEVERITY, Health
from enginewire.server.snapshot import EngineSnapshot, StateSnapshot

PLAIN: Final = ""
BOLD: Final = "1"
DIM: Final = "2"
HEAD: Final = "1;7"
NOTE: Final = "1;33"
"""Styles are the parameters of ECMA-48's SGR."""

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of a line: a style and a text for each."""

HEALTH_STYLES: Final = {
    Health.READY: "32",
    Health.PAUSED: "33",
    Health.ASLEEP: "33",
    Health.DRAINING: "33",
    Health.LEAVING: "33",
    Health.STALLED: "31",
    Health.STARTING: "33",
    Health.LOST: "31",
    Health.DEAD: "1;31",
}

BARS: Final = "▁▂▃▄▅▆▇█"
FEWEST: Final = 10
"""Tokens per second that fill a curve's height if there are never more: a trickle is to look like one."""

KV_CELLS: Final = 10
WIDE: Final = 100
"""Columns from which there is room for a picture of the KV cache and a cause of death."""

CURVE_CELLS: Final = 20
FEWEST_CURVE_CELLS: Final = 8
"""What an engine's curve takes of the columns from ``WIDE`` on."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A moment of a server.

    Attributes:
        url: of the server.
        state: what it said.
    """

    url: str
    state: StateSnapshot

    def lines(self, width: int, height: int = 0, *, note: str = "") -> list[Line]:
        """Lay it out.

        Args:
            width: columns.
            height: lines; 0: as many as it takes. Where not all engines fit, those that are ready are left out first.
            note: stands in the place of the engines' health: what is shown is old.
        """
        lines = [*self._summary(width, note), *self._table(width, max(height - 8, 1) if height else 0)]
        return lines[:height] if height else lines

    def _summary(self, width: int, note: str) -> Iterator[Line]:
        state = self.state
        facts = f"{_clean(state.model)} · enginewire {_clean(state.version)} · up {duration(state.uptime_s)}"
        yield [(BOLD, self.url), (DIM, f"  {facts}")]
        yield [(NOTE, note)] if note else self._health()
        yield []
        sums = {
            "running": sum(engine.num_running for engine in state.engines),
            "waiting": sum(engine.num_waiting for engine in state.engines),
            "in flight": state.num_in_flight,
            "served": state.num_requests_served,
            "tokens": state.num_generation_tokens,
        }
        rate = f"{state.generation_tokens_per_s:,.1f} tokens/s  "
        yield [(BOLD, rate), ("36", curve(state.generation_history, min(60, width - len(rate) - 1)))]
        yield [(PLAIN, " · ".join(f"{name} {count:,}" for name, count in sums.items()))]
        yield self._losses()
        yield []

    def _health(self) -> Line:
        engines = self.state.engines
        counts = {health: sum(engine.health is health for engine in engines) for health in Health}
        many = "engine" if len(engines) == 1 else "engines"
        line: Line = [(PLAIN, f"{len(engines)} {many}: ")]
        for health, count in counts.items():
            if count:
                line += [(HEALTH_STYLES[health], f"{count} {health}"), (PLAIN, ", ")]
        line.pop()
        return [*line, (NOTE, "  scaling")] if self.state.is_scaling else line

    def _losses(self) -> Line:
        state = self.state
        counts = {
            "deaths": state.num_deaths,
            "restarts": state.num_restarts,
            "resumed": state.num_moved,
            "lost": state.num_lost,
            "clients gone": state.num_disconnects,
        }
        line: Line = []
        for name, count in counts.items():
            style = "31" if count and name in ("deaths", "lost") else PLAIN
            line += [(style, f"{name} {count:,}"), (PLAIN, " · ")]
        return line[:-1]

    def _table(self, width: int, most: int) -> Iterator[Line]:
        has_bar = width >= WIDE
        cells = min(width - WIDE - FEWEST_CURVE_CELLS, CURVE_CELLS)
        cells = cells if cells >= FEWEST_CURVE_CELLS else 0
        head = f"{'ENGINE':>6}  {'STATE':<8}  {'RUNNING':>7}  {'WAITING':>7}  "
        head += f"{'KV CACHE':<{KV_CELLS + 6}}" if has_bar else f"{'KV':>5}"
        head += f"  {'TOKENS/S':>9}" + (f"  {'HISTORY':<{cells}}" if cells else "")
        yield [(HEAD, f"{head}  {'RESTARTS':>8}  LAST DEATH".ljust(width - 1))]
        engines, left_out = _fitting(self.state.engines, most)
        for engine in engines:
            yield _row(engine, has_bar=has_bar, curve_cells=cells)
        if left_out:
            yield [(DIM, f"{'…':>6}  and {left_out} more")]


def _row(engine: EngineSnapshot, *, has_bar: bool, curve_cells: int) -> Line:
    usage = engine.kv_cache_usage
    line: Line = [
        (BOLD, f"{engine.index:>6}"),
        (HEALTH_STYLES[engine.health], f"  {engine.health:<8}"),
        (PLAIN, f"  {engine.num_running:>7,}  {engine.num_waiting:>7,}  "),
    ]
    if has_bar:
        filled = round(usage * KV_CELLS)
        style = "31" if usage > 0.95 else "33" if usage > 0.8 else "36"
        line += [(style, "█" * filled), (DIM, "░" * (KV_CELLS - filled)), (PLAIN, " ")]
    line.append((PLAIN, f"{usage:>5.0%}  {engine.generation_tokens_per_s:>9,.1f}"))
    if curve_cells:
        line.append(("36", f"  {curve(engine.generation_history, curve_cells):<{curve_cells}}"))
    line.append((PLAIN, f"  {engine.num_restarts:>8,}  "))
    if engine.death is not None:
        line.append((DIM if engine.health is Health.READY else "31", _clean(engine.death)))
    return line


def _fitting(engines: Sequence[EngineSnapshot], most: int) -> tuple[Sequence[EngineSnapshot], int]:
    """Return the engines to show, and how many are left out."""
    if not most or len(engines) <= most:
        return engines, 0
    count = max(most - 1, 1)
    shown = sorted(engines, key=lambda engine: (-SEVERITY[engine.health], engine.index))[:count]
    return sorted(shown, key=lambda engine: engine.index), len(engines) - count


def curve(counts: Sequence[int], width: int) -> str:
    """Draw the latest ``width`` counts, a character each."""
    latest = counts[-width:] if width > 0 else []
    top = max(FEWEST, *latest) if latest else FEWEST
    return "".join(BARS[min(count * len(BARS) // top, len(BARS) - 1)] for count in latest)


def painted(lines: Sequence[Line], width: int, *, in_colour: bool) -> list[str]:
    """Turn lines into what a terminal takes. Each is cut so that the last column stays free: nothing wraps."""
    return [_painted(line, width - 1, in_colour=in_colour) for line in lines]


def _painted(line: Line, room: int, *, in_colour: bool) -> str:
    parts: list[str] = []
    for style, text in line:
        shown = text if len(text) <= room else f"{text[: max(room - 1, 0)]}…" if room > 0 else ""
        room -= len(shown)
        parts.append(f"\x1b[{style}m{shown}\x1b[m" if in_colour and style and shown else shown)
    return "".join(parts) if in_colour else "".join(parts).rstrip()


def duration(seconds: float) -> str:
    """Say how long that is, in the two units that matter."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _clean(text: str) -> str:
    """Leave out what a terminal might obey: names and causes are a server's, and others chose them."""
    return "".join(character if character.isprintable() else " " for character in text)
