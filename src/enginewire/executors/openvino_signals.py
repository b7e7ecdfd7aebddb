"""Gives a thread its signal stack back after OpenVINO has exchanged it.

OpenVINO's CPU plugin puts a stack of its own (AMX asks for a large one) in the place of the alternate signal stack of
the thread that loads it, and puts back what it found when it is released. Two that are not released in reverse order,
or one that another thread releases, leave the thread with memory that is gone; and Python has every signal handled on
that stack: the next Ctrl-C or SIGTERM is a SIGSEGV, or a write into what has the memory now. So with OpenVINO 2026.4.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Final

_SS_DISABLE: Final = 2
"""Linux: there is no alternate stack, signals are handled on the thread's own."""


class _Stack(ctypes.Structure):
    """Linux's ``stack_t``."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextlib.contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Have the thread's signal stack be afterwards what it was; OpenVINO's CPU plugin is to be loaded in here.

    To release it needs no such care, whichever thread does: it leaves alone a stack that is not its own.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    before = _Stack()
    sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        if sigaltstack(ctypes.byref(before), None) != 0:  # it is too small, now that this process may use AMX
            sigaltstack(ctypes.byref(_Stack(flags=_SS_DISABLE)), None)
