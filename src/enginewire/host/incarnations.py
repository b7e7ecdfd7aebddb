"""What launchers have in common: which engine of a rank is the current one, and who has been told of whose death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from enginewire.errors import EngineDeath


class Incarnation:
    """One engine of a rank, from its start to its end.

    Attributes:
        engine_index: the rank.
        death: why it has ended or is taken for dead; the first cause sticks.
        expected_death: when a death that was announced is overdue, in monotonic seconds, and what announced it.
    """

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.death: EngineDeath | None = None
        self.expected_death: tuple[float, str] | None = None

    def overdue_sign(self) -> str | None:
        """Return what announced its death, if that should be known by now and is not."""
        if self.death is not None or self.expected_death is None:
            return None
        deadline, sign = self.expected_death
        return sign if time.monotonic() > deadline else None


I = TypeVar("I", bound=Incarnation)  # noqa: E741


class Incarnations(Generic[I]):
    """The current engine of each rank; see ``EngineLauncher`` for what is public here.

    Attributes:
        current: by rank. Never changed, but replaced.
    """

    def __init__(self, last_words_s: float) -> None:
        self.current: dict[int, I] = {}
        self._last_words_s = last_words_s
        # Guards `current` and each engine's `death`. Reentrant: the garbage collector may call `shutdown` in the
        # middle of anything.
        self._lock = threading.RLock()
        # Held while a death is reported, and while a rank changes hands: no report is about a former engine.
        self._report_lock = threading.RLock()
        self._on_death: Callable[[EngineDeath], None] | None = None
        self._someone_ended = threading.Condition(self._lock)

    def has(self, engine_index: int) -> bool:
        """Whether an engine was started here."""
        return engine_index in self.current

    def watch_deaths(self, on_death: Callable[[EngineDeath], None]) -> None:
        """Have each death reported by the watching thread; one that happened already is reported at once."""
        with self._report_lock:
            with self._lock:
                self._on_death = on_death
                deaths = [engine.death for engine in self.current.values() if engine.death is not None]
            for death in deaths:
                on_death(death)

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that has ended, ``None`` while all live."""
        return next((engine.death for engine in self.current.values() if engine.death is not None), None)

    def wait_for_death(self, timeout: float, engine_index: int | None = None) -> EngineDeath | None:
        """Return the death of an engine that has ended or is just ending, ``None`` while it lives."""

        def death() -> EngineDeath | None:
            if engine_index is None:
                return self.first_death()
            engine = self.current.get(engine_index)
            return None if engine is None else engine.death

        with self._someone_ended:
            self._someone_ended.wait_for(lambda: death() is not None, timeout)
        return death()

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported soon, even if the engine does not end; see ``EngineManager``."""
        for index, engine in self.current.items():
            if engine_index in (None, index):
                engine.expected_death = engine.expected_death or (time.monotonic() + self._last_words_s, sign)

    def _replace(self, engine: I) -> I | None:
        """Make an engine the current one of its rank; return the former. The caller holds both locks."""
        former = self.current.get(engine.engine_index)
        self.current = {**self.current, engine.engine_index: engine}
        return former

    def _take_out(self, engine_index: int) -> I | None:
        """Forget a rank; return its engine."""
        with self._report_lock, self._lock:
            engine = self.current.get(engine_index)
            self.current = {index: each for index, each in self.current.items() if index != engine_index}
        return engine

    def _report(self, engine: I, death: EngineDeath) -> None:
        """Note a death, and tell of it if the engine is its rank's current one. The first cause sticks."""
        with self._report_lock:
            with self._lock:
                if engine.death is not None:
                    return
                engine.death = death
                is_current = self.current.get(engine.engine_index) is engine
                on_death = self._on_death if is_current else None
                self._someone_ended.notify_all()
            if on_death is not None:
                on_death(death)
