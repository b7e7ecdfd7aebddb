"""``CoreEngineProcManager``: starts engine processes, tees their logs, notices their deaths, stops them.

An engine runs under a fresh interpreter (``python -m enginewire.engine.main``), in a process group of its own. Neither
fork nor multiprocessing's spawn: the first copies locks and ZeroMQ threads, the second imports the caller's
``__main__`` again. One end of a socket pair, the *lifeline*, ties the two processes together: what the engine has to
know goes over it first; its end of file tells either side that the other is gone, however it went; and an engine says
on it when it is ready, and why it dies of an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath
from enginewire.host.process import EngineProcess

logger = logging.getLogger(__name__)

SENTINEL_POLL_S: Final = 0.5
"""How often exit statuses are looked at. The lifeline's end of file is faster; this is for an engine whose own child
holds the lifeline open."""

LAST_WORDS_S: Final = 1.0
"""How long a death may wait for exit status and log before those who wait on the engine are told (C-27)."""

KILLED_S: Final = 10.0
"""How long a killed process may take to disappear; the kernel may be writing its memory out."""


class EngineManager(Protocol):
    """What a client asks of whoever watches the processes of its engines: a manager, or news from one elsewhere."""

    def has(self, engine_index: int) -> bool:
        """Whether an engine's process is watched here."""
        ...

    def watch_deaths(self, on_death: Callable[[EngineDeath], None]) -> None:
        """Have each death reported, from any thread; one that happened already is reported at once."""
        ...

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that has ended, ``None`` while all live."""
        ...

    def wait_for_death(self, timeout: float, engine_index: int | None = None) -> EngineDeath | None:
        """Return the death of an engine, or of any, that has ended or is just ending; ``None`` while it lives."""
        ...

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported within a second, even if the process does not end; ``sign`` says why."""
        ...

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        ...

    def shutdown(self, timeout: float) -> None:
        """Stop the engines, or stop watching those of others. Idempotent."""
        ...


class CoreEngineProcManager:
    """Owns engine processes and the one thread that watches and reaps them.

    The thread holds no reference to a client and ends when all processes have.

    Args:
        specs: one per engine to start.
        forward_log: pass their logs on to our stderr.
        on_ready: is told, by the watching thread, the index of each engine of ours that says it is ready.

    Raises:
        EngineStartupError: a process could not be started; none is left.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        forward_log: bool = True,
        on_ready: Callable[[int], None] = lambda engine_index: None,
    ) -> None:
        self.processes: list[EngineProcess] = []
        # Guards each process's `death` together with `_on_death`: a death is reported once, to whoever watches.
        # Reentrant: the garbage collector may call `shutdown` in the middle of anything.
        self._lock = threading.RLock()
        self._on_death: Callable[[EngineDeath], None] | None = None
        self._is_watched = False
        self._is_given_up = False
        self._all_reaped = threading.Event()
        self._someone_died = threading.Condition(self._lock)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="enginewire-monitor", daemon=True)
        try:
            for spec in specs:
                self.processes.append(EngineProcess(spec, forward_log=forward_log, on_ready=on_ready))
            self._thread.start()
            _managers.add(self)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Undo a construction that failed or was interrupted, which may be while the thread starts."""
        with self._lock:
            self._is_given_up = not self._is_watched
        if self._is_watched:  # the thread reaps, and nobody else
            self.shutdown(timeout=0)
            return
        for process in self.processes:
            process.reap()
        self._wake_receiver.close()
        self._wake_sender.close()

    def watch_deaths(self, on_death: Callable[[EngineDeath], None]) -> None:
        """Have each death reported by the watching thread; one that happened already is reported at once."""
        with self._lock:
            self._on_death = on_death
            deaths = [process.death for process in self.processes if process.death is not None]
        for death in deaths:
            on_death(death)

    def has(self, engine_index: int) -> bool:
        """Whether an engine was started here."""
        return any(process.engine_index == engine_index for process in self.processes)

    def first_death(self) -> EngineDeath | None:
        """Return the death of an engine that has ended, ``None`` while all live."""
        return next((process.death for process in self.processes if process.death is not None), None)

    def death_of(self, engine_index: int) -> EngineDeath | None:
        """Return the death of one engine, ``None`` while it lives."""
        return next((process.death for process in self.processes if process.engine_index == engine_index), None)

    def wait_for_death(self, timeout: float, engine_index: int | None = None) -> EngineDeath | None:
        """Return the death of an engine that has ended or is just ending, ``None`` while it lives.

        Args:
            timeout: how long to wait for it.
            engine_index: which engine; ``None``: any.
        """

        def death() -> EngineDeath | None:
            return self.first_death() if engine_index is None else self.death_of(engine_index)

        with self._someone_died:
            self._someone_died.wait_for(lambda: death() is not None, timeout)
        return death()

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported within a second, even if the process does not end.

        Args:
            sign: of the death, which is the cause if there is no better one: ``"it reported a fatal error"``.
            engine_index: which engine; ``None``: all.
        """
        for process in self.processes:
            if engine_index in (None, process.engine_index):
                process.expected_death = process.expected_death or (time.monotonic() + LAST_WORDS_S, sign)
        self._wake()

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        return next((tuple(p.log_tail) for p in self.processes if p.engine_index == engine_index), ())

    def shutdown(self, timeout: float) -> None:
        """Stop all engines: SIGTERM, and SIGKILL to those that have not left after ``timeout`` seconds. Idempotent."""
        with self._lock:
            self._on_death = None
        self._signal_running(signal.SIGTERM)
        if not self._all_reaped.wait(timeout):
            if timeout > 0:
                late = [process.engine_index for process in self.processes if process.is_running]
                logger.warning("engines %s did not leave within %.1f s and are killed", late, timeout)
            self._signal_running(signal.SIGKILL, group=True)
            self._all_reaped.wait(KILLED_S)
        if threading.current_thread() is not self._thread:
            self._thread.join(KILLED_S)

    def _signal_running(self, number: int, *, group: bool = False) -> None:
        with self._lock:  # not between a process's reaping and the note of it
            for process in self.processes:
                if process.is_running:
                    process.signal(number, group=group)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: it has ended
            self._wake_sender.send(b"\0")

    def _watch(self) -> None:
        with self._lock:
            self._is_watched = not self._is_given_up
        if self._is_given_up:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ, lambda: bool(self._wake_receiver.recv(4096)))
            for process in self.processes:
                selector.register(process.log, selectors.EVENT_READ, process.read_log)
                selector.register(process.lifeline, selectors.EVENT_READ, process.read_lifeline)
            while any(process.is_running for process in self.processes):
                for key, _ in selector.select(self._poll_s()):
                    if not key.data():  # end of file
                        selector.unregister(key.fileobj)
                for process in self.processes:
                    self._look_at(process, selector)
        self._wake_receiver.close()
        self._wake_sender.close()
        self._all_reaped.set()

    def _poll_s(self) -> float:
        """Look again soon while an end is near: a closed lifeline precedes the exit status by milliseconds."""
        is_near = any(
            process.is_running and (process.is_leaving or process.expected_death is not None)
            for process in self.processes
        )
        return 0.02 if is_near else SENTINEL_POLL_S

    def _look_at(self, process: EngineProcess, selector: selectors.BaseSelector) -> None:
        """Reap a process that has ended, and report a death that is known or overdue."""
        death: EngineDeath | None = None
        if process.is_running and process.has_ended():
            for stream in (process.log, process.lifeline):
                with contextlib.suppress(KeyError):
                    selector.unregister(stream)
            with self._lock:
                death = process.reap()
        elif process.death is None and process.expected_death is not None:
            deadline, sign = process.expected_death
            if time.monotonic() > deadline:
                cause = f"{sign}, and its process has not ended since"
                death = EngineDeath(process.engine_index, cause, None, tuple(process.log_tail))
        if death is None or process.death is not None:  # the first cause sticks
            return
        with self._lock:
            process.death = death
            on_death = self._on_death
            self._someone_died.notify_all()
        if on_death is not None:
            on_death(death)


_managers: Final[weakref.WeakSet[CoreEngineProcManager]] = weakref.WeakSet()


def _leave_lifelines_to_parent() -> None:
    """Close our copies in a forked child: an engine would not notice its parent's end while one is open (C-62)."""
    for manager in _managers:
        for process in manager.processes:
            process.lifeline.close()


os.register_at_fork(after_in_child=_leave_lifelines_to_parent)
