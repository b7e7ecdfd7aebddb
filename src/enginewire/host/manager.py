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
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath, EngineStartupError
from enginewire.host.incarnations import Incarnations
from enginewire.host.launcher import LAST_WORDS_S
from enginewire.host.process import EngineProcess

logger = logging.getLogger(__name__)

SENTINEL_POLL_S: Final = 0.5
"""How often exit statuses are looked at. The lifeline's end of file is faster; this is for an engine whose own child
holds the lifeline open."""

KILLED_S: Final = 10.0
"""How long a killed process may take to disappear; the kernel may be writing its memory out."""


class CoreEngineProcManager(Incarnations[EngineProcess]):
    """Owns engine processes and the one thread that watches and reaps them: an ``EngineLauncher`` of this machine.

    The thread holds no reference to a client and ends with :meth:`shutdown`.

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
        super().__init__(LAST_WORDS_S)
        self._forward_log = forward_log
        self._on_ready = on_ready
        self._running: list[EngineProcess] = []  # former ones too, until they are reaped
        self._newcomers: list[EngineProcess] = []
        self._is_watched = False
        self._is_closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="enginewire-monitor", daemon=True)
        try:
            for spec in specs:
                self.start(spec)
            self._thread.start()
            _managers.add(self)
        except BaseException:
            self._give_up()
            raise

    @property
    def host(self) -> None:
        """Engines run here."""
        return None

    @property
    def processes(self) -> dict[int, EngineProcess]:
        """The current one of each rank."""
        return self.current

    def _give_up(self) -> None:
        """Undo a construction that failed or was interrupted, which may be while the thread starts."""
        with self._lock:
            self._is_closing = True
        if self._is_watched:  # the thread reaps, and nobody else
            self.shutdown(timeout=0)
            return
        for process in self._running:
            process.reap()
        self._wake_receiver.close()
        self._wake_sender.close()

    def start(self, spec: EngineSpec) -> None:
        """Start an engine, of a new rank or in the place of a former one; see ``EngineLauncher``."""
        index = spec.engine_index
        process = EngineProcess(spec, forward_log=self._forward_log, on_ready=self._on_ready)
        with self._report_lock, self._lock:
            if not self._is_closing:
                if (former := self._replace(process)) is not None:
                    self._signal([former], signal.SIGKILL, group=True)
                self._running.append(process)
                self._newcomers.append(process)
                self._wake()
                return
        process.reap()
        raise EngineStartupError("the launcher has been shut down", stage="launch", engine_index=index)

    def stop(self, engine_index: int, timeout: float) -> None:
        """Take a rank out: SIGTERM, and SIGKILL after ``timeout`` seconds; see ``EngineLauncher``."""
        if (process := self._take_out(engine_index)) is not None:
            self._end([process], timeout)

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported within a second, even if the process does not end; see ``EngineManager``."""
        super().expect_death(sign, engine_index)
        self._wake()

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        process = self.processes.get(engine_index)
        return () if process is None else tuple(process.log_tail)

    def shutdown(self, timeout: float) -> None:
        """Stop all engines: SIGTERM, and SIGKILL to those that have not left after ``timeout`` seconds. Idempotent."""
        with self._lock:
            self._on_death = None
            self._is_closing = True
            running = list(self._running)
        self._end(running, timeout)
        if threading.current_thread() is not self._thread:
            self._thread.join(KILLED_S)

    def _end(self, processes: Sequence[EngineProcess], timeout: float) -> None:
        """End processes, politely first. The thread reaps them."""

        def running() -> list[int]:
            return [process.engine_index for process in processes if process.is_running]

        self._signal(processes, signal.SIGTERM)
        with self._someone_ended:
            if self._someone_ended.wait_for(lambda: not running(), timeout):
                return
            if timeout > 0:
                logger.warning("engines %s did not leave within %.1f s and are killed", running(), timeout)
            self._signal(processes, signal.SIGKILL, group=True)
            self._someone_ended.wait_for(lambda: not running(), KILLED_S)

    def _signal(self, processes: Sequence[EngineProcess], number: int, *, group: bool = False) -> None:
        with self._lock:  # not between a process's reaping and the note of it
            for process in processes:
                if process.is_running:
                    process.signal(number, group=group)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: it has ended
            self._wake_sender.send(b"\0")

    def _watch(self) -> None:
        with self._lock:
            self._is_watched = not self._is_closing
        if not self._is_watched:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ, lambda: bool(self._wake_receiver.recv(4096)))
            while (running := self._take_in(selector)) is not None:
                for key, _ in selector.select(_poll_s(running)):
                    if not key.data():  # end of file
                        selector.unregister(key.fileobj)
                for process in running:
                    self._look_at(process, selector)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _take_in(self, selector: selectors.BaseSelector) -> Sequence[EngineProcess] | None:
        """Return what is running, newcomers among them; ``None``: nothing, and nothing more will come."""
        with self._lock:
            running, newcomers = list(self._running), self._newcomers
            self._newcomers = []
            is_over = self._is_closing and not running
        for process in newcomers:
            selector.register(process.log, selectors.EVENT_READ, process.read_log)
            selector.register(process.lifeline, selectors.EVENT_READ, process.read_lifeline)
        return None if is_over else running

    def _look_at(self, process: EngineProcess, selector: selectors.BaseSelector) -> None:
        """Reap a process that has ended, and report a death that is known or overdue."""
        if process.has_ended():
            for stream in (process.log, process.lifeline):
                with contextlib.suppress(KeyError):
                    selector.unregister(stream)
            with self._lock:
                death = process.reap()
                self._running.remove(process)
                self._someone_ended.notify_all()
            self._report(process, death)
        elif (sign := process.overdue_sign()) is not None:
            cause = f"{sign}, and its process has not ended since"
            self._report(process, EngineDeath(process.engine_index, cause, None, tuple(process.log_tail)))
            if not process.is_vllm:  # that takes its engines along if it ends by itself, which takes seconds
                self._signal([process], signal.SIGKILL, group=True)  # it was stopped or hangs, and works for nobody


def _poll_s(running: Sequence[EngineProcess]) -> float:
    """Look again soon while an end is near: a closed lifeline precedes the exit status by milliseconds."""
    is_near = any(
        process.is_leaving or (process.expected_death is not None and process.death is None) for process in running
    )
    return 0.02 if is_near else SENTINEL_POLL_S


_managers: Final[weakref.WeakSet[CoreEngineProcManager]] = weakref.WeakSet()


def _leave_lifelines_to_parent() -> None:
    """Close our copies in a forked child: an engine would not notice its parent's end while one is open (C-62)."""
    for manager in _managers:
        for process in manager._running:
            process.lifeline.close()


os.register_at_fork(after_in_child=_leave_lifelines_to_parent)
