"""Ray itself: this process's connection to a cluster, and what its errors say. The only module that imports it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any, Final

from enginewire.errors import ConfigError

# Not a module to type checkers: it need not be there, and a remote class has no attribute for its remote methods.
ray: Any = importlib.import_module("ray")

SIGACTION_BYTES: Final = 512
"""More than any system's ``struct sigaction``; what is in it does not matter here."""

_CAUSE: Final = re.compile(r"^The actor (?:is dead|died) because (.+?)(?:\. |\.?$)", re.MULTILINE)


class Connection:
    """This process's connection to the cluster, which all managers in it share; what we opened, the last one closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ours = False

    def open(self, *, forward_log: bool) -> None:
        """Connect, unless that is done. Raises :class:`ConfigError`."""
        with self._lock:
            if not ray.is_initialized():
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                try:
                    with _kept_signal_handlers():
                        ray.init(namespace="enginewire", include_dashboard=False, log_to_driver=forward_log)
                except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as exc:
                    raise ConfigError(f"cannot connect to a Ray cluster (RAY_ADDRESS says where): {exc}") from exc
                self._is_ours = True
            self._num_users += 1

    def close(self) -> None:
        """Disconnect if nobody else is left who came by :meth:`open`."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._is_ours:
                self._is_ours = False
                with _kept_signal_handlers():
                    ray.shutdown()


connection: Final = Connection()


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Put back the handlers of SIGTERM that Ray replaces: Python's, and the process's own beneath it.

    Ray's ends the process with a list of its stack. Only the main thread can set Python's, and Ray only does it there.
    """
    libc, beneath = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    handler = signal.getsignal(signal.SIGTERM)
    libc.sigaction(signal.SIGTERM, None, beneath)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        libc.sigaction(signal.SIGTERM, beneath, None)


def is_done(answer: Any) -> bool:
    """Whether an actor's answer, an ``ObjectRef``, is there."""
    return bool(ray.wait([answer], timeout=0)[0])


def cause_of(exc: Exception) -> str:
    """Put an error of Ray's into one sentence: of its half a page, why the actor is gone."""
    text = str(exc).strip()
    if match := _CAUSE.search(text):
        return match[1]
    return text.splitlines()[-1] if text else type(exc).__name__
