"""What happened in a soak, for whoever has to find out why it failed."""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

MINUTES: Final = float(os.environ.get("ENGINEWIRE_SOAK_MINUTES", "30"))
"""How long the long soaks last; .ci/run sets it."""

SEED: Final = os.environ.get("ENGINEWIRE_SOAK_SEED", "enginewire")
"""Of all that is drawn. What comes of it differs a little from run to run, as processes and sockets do."""

EVENTS_KEPT: Final = 150


class Story:
    """The last events of a run, and how many of each kind there were.

    Args:
        name: of the run.
        seconds: how long it is to last.
        show: prints a line.
    """

    def __init__(self, name: str, seconds: float, show: Callable[[str], None]) -> None:
        self.name = name
        self._show = show
        self.seconds = seconds
        self.counts: Counter[str] = Counter()
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.say(f"{seconds:.0f} s, ENGINEWIRE_SOAK_SEED={SEED}")

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def rng(self, part: str) -> random.Random:
        """Return the random numbers of one part of the run, which do not depend on the other parts' speed."""
        return random.Random(f"{SEED}/{self.name}/{part}")

    def tell(self, kind: str, what: str = "") -> None:
        """Note an event."""
        self.counts[kind] += 1
        self._events.append(f"{self.elapsed:9.3f}  {kind}  {what}")

    def say(self, what: str) -> None:
        """Say how it goes."""
        self._show(f"soak {self.name}: {what}")

    def __str__(self) -> str:
        counts = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.counts.items()))
        return "\n".join([f"soak {self.name}, seed {SEED}; {counts}; the last events:", *self._events])
