"""Numbers that grow: a histogram and a rate. Plain lists, as they are fed with every token.

They are structs, so that server processes can send them to each other, and can be added up.

``prometheus_client``'s own histogram takes 0.8 to 1.2 µs for a value, this one 0.2 µs; at 20,000 tokens a second the
difference is 2 % of the process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field

RATE_WINDOW_S: Final = 5
"""What "tokens per second" looks back on: long enough to be read, short enough to be now."""

HISTORY_S: Final = 60
"""How far back the page's curve goes."""


class Histogram(Struct):
    """How many values fell where.

    Attributes:
        bounds: upper ends of the buckets, each included, rising; above the last is one bucket more.
        counts: values per bucket, ``[len(bounds) + 1]``.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.total += value

    def add(self, other: Histogram) -> None:
        """Count what another one has counted, as well as these bounds can tell."""
        for bound, count in zip((*other.bounds, float("inf")), other.counts, strict=True):
            self.counts[bisect_left(self.bounds, bound)] += count
        self.total += other.total


class Rate(Struct):
    """Something per second, now and in the last minute. Times are monotonic seconds and never go back.

    Attributes:
        latest: the latest time that was heard of.
        counts: by second, ``HISTORY_S`` whole ones and the one that goes on; a ring.
    """

    latest: float
    counts: list[int] = field(default_factory=lambda: [0] * (HISTORY_S + 1))

    def count(self, number: int, now: float) -> None:
        """Count what happened at ``now``."""
        self._advance(now)
        self.counts[int(self.latest) % len(self.counts)] += number

    def per_second(self, now: float) -> float:
        """Return the mean over the last five seconds."""
        self._advance(now)
        second = int(self.latest)
        recent = sum(self.counts[(second - back) % len(self.counts)] for back in range(RATE_WINDOW_S + 1))
        return recent / (RATE_WINDOW_S + now - second)

    def history(self, now: float) -> list[int]:
        """Return the count of each of the last ``HISTORY_S`` whole seconds, oldest first."""
        self._advance(now)
        start = (int(self.latest) + 1) % len(self.counts)
        return (self.counts[start:] + self.counts[:start])[:HISTORY_S]

    def add(self, other: Rate) -> None:
        """Count what another one has counted."""
        self._advance(other.latest)
        other._advance(self.latest)
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]

    def _advance(self, now: float) -> None:
        """Empty the seconds in which nothing happened."""
        if now <= self.latest:
            return
        for second in range(max(int(self.latest), int(now) - len(self.counts)) + 1, int(now) + 1):
            self.counts[second % len(self.counts)] = 0
        self.latest = now
