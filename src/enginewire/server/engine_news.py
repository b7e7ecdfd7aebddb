"""``EngineNews``: engine processes that the launcher started, as a client in one of its server processes sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from enginewire.errors import EngineDeath


class EngineNews:
    """Stands where a client that starts engines itself has its ``CoreEngineProcManager``. From any thread.

    Args:
        ranks: the engines that the launcher started.
        ask: tells the launcher that an engine seems to be dying, and why.
    """

    def __init__(self, ranks: Collection[int], ask: Callable[[int, str], None]) -> None:
        self.ranks = frozenset(ranks)
        self._ask = ask
        self._deaths: dict[int, EngineDeath] = {}
        self._on_death: Callable[[EngineDeath], None] | None = None
        self._someone_died = threading.Condition()  # guards the two above as well: a death is reported once

    def died(self, death: EngineDeath) -> None:
        """Take note of what the launcher says."""
        with self._someone_died:
            self._deaths[death.engine_index] = death
            on_death = self._on_death
            self._someone_died.notify_all()
        if on_death is not None:
            on_death(death)

    # As in the manager.

    def has(self, engine_index: int) -> bool:
        """Whether the launcher started an engine."""
        return engine_index in self.ranks

    def watch_deaths(self, on_death: Callable[[EngineDeath], None]) -> None:
        """Have each death reported; one that happened already is reported at once."""
        with self._someone_died:
            self._on_death = on_death
            deaths = list(self._deaths.values())
        for death in deaths:
            on_death(death)

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that has ended, ``None`` while all live."""
        return next(iter(self._deaths.values()), None)

    def wait_for_death(self, timeout: float, engine_index: int | None = None) -> EngineDeath | None:
        """Return the death of an engine that has ended or is just ending, ``None`` while it lives."""

        def death() -> EngineDeath | None:
            return self.first_death() if engine_index is None else self._deaths.get(engine_index)

        with self._someone_died:
            self._someone_died.wait_for(lambda: death() is not None, timeout)
            return death()

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported within a second, even if the process does not end."""
        for index in self.ranks if engine_index is None else [engine_index]:
            self._ask(index, sign)

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return nothing: the launcher has the engines' logs."""
        return ()

    def shutdown(self, timeout: float) -> None:
        """Hear no more; the engines are the launcher's to stop."""
        with self._someone_died:
            self._on_death = None
