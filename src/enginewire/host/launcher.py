"""What a client needs of whoever watches its engines (``EngineManager``) and starts them (``EngineLauncher``).

A rank has engines one after another, its *incarnations*. Everything that is said of a rank is about the current one:
what was known of an earlier one is gone once the next is started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from enginewire.errors import EngineDeath

if TYPE_CHECKING:
    from enginewire.engine.spec import EngineSpec

LAST_WORDS_S: Final = 1.0
"""How long a death may wait for exit status and log before those who wait on the engine are told (C-27)."""


class EngineManager(Protocol):
    """Watches engines, of its own or by news of them from elsewhere. Any thread may call any of it."""

    def has(self, engine_index: int) -> bool:
        """Whether an engine is watched here."""
        ...

    def watch_deaths(self, on_death: Callable[[EngineDeath], None]) -> None:
        """Have each death reported, once, from any thread; one that happened already is reported at once."""
        ...

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that has ended, ``None`` while all live."""
        ...

    def wait_for_death(self, timeout: float, engine_index: int | None = None) -> EngineDeath | None:
        """Return the death of an engine that has ended or is just ending, ``None`` while it lives.

        Args:
            timeout: how long to wait for it.
            engine_index: which engine; ``None``: any.
        """
        ...

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported within about a second, even if nothing else shows it.

        Args:
            sign: of the death, which is the cause if there is no better one: ``"it reported a fatal error"``.
            engine_index: which engine; ``None``: all.
        """
        ...

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        ...

    def shutdown(self, timeout: float) -> None:
        """Stop the engines and kill those that have not left in time, or stop watching others'. Idempotent."""
        ...


class EngineLauncher(EngineManager, Protocol):
    """Starts engines and takes them out, one at a time, while others serve.

    Implementations: :class:`~enginewire.host.manager.CoreEngineProcManager` (processes of this machine) and
    :class:`~enginewire.host.ray_actors.CoreEngineActorManager` (a Ray cluster).
    """

    @property
    def host(self) -> str | None:
        """The address at which its engines reach this machine; ``None``: they run on it."""
        ...

    def start(self, spec: EngineSpec) -> None:
        """Start an engine: of a new rank, or another one of a rank that has one, which counts no longer.

        Returns at once; that it comes up shows in its HELLO, that it does not in a death. A former engine that still
        runs is killed, and its end is not reported: no report of it comes after this has returned.

        Raises:
            EngineStartupError: it could not be launched, or this launcher has been shut down.
        """
        ...

    def stop(self, engine_index: int, timeout: float) -> None:
        """Take a rank out: ask its engine to leave, and kill it after ``timeout`` seconds. No death is reported.

        Returns once nothing is left of it, so it does not belong on an event loop. No-op for an unknown rank.
        """
        ...
