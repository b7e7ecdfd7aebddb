"""When an engine that ended is started again, and when it is given up: a pure decision."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Bounds of the pause before a restart, which doubles from one to the next: an engine that cannot live does not keep
the machine busy, and one that was unlucky is soon back."""


class Restarts:
    """The restarts of one engine. Times are monotonic seconds.

    Args:
        limit: how many in a row, see ``EngineConfig.restart_engine``.
        window_s: an engine that served for so long ends the row.

    Attributes:
        in_a_row: how many there were since it served that long.
    """

    def __init__(self, limit: int = 0, window_s: float = 0.0) -> None:
        self.limit = limit
        self.in_a_row = 0
        self._window_s = window_s
        self._serves_since: float | None = None

    def serves(self, now: float) -> None:
        """Note that the engine takes requests."""
        self._serves_since = now

    def ended(self, now: float) -> float | None:
        """Note that the engine ended; return when to start it again, ``None``: it is given up."""
        if self._serves_since is not None and now - self._serves_since >= self._window_s:
            self.in_a_row = 0
        self._serves_since = None
        if self.in_a_row >= self.limit:
            return None
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.in_a_row, 10), LONGEST_PAUSE_S)
        self.in_a_row += 1
        return now + pause_s
