"""How an engine process starts: ``python -m enginewire.engine.main --lifeline-fd N``.

N is one end of a socket pair. The parent sends an :class:`~enginewire.engine.spec.EngineSpec` over it and keeps its
end open; when that closes, by whatever means, the parent is gone, and this process ends with all its children (C-62).
The other way goes ``READY`` and, if it dies, a :class:`~enginewire.engine.spec.DeathNote`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, Literal

from enginewire.engine.channel import Channel
from enginewire.engine.proc import EngineCoreProc, StoppedWhileStarting
from enginewire.engine.process_setup import configure_logging, send_stdout_to_stderr
from enginewire.engine.spec import READY, DeathNote, EngineSpec, describe, explains_itself

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""How long an executor's Python code may keep the I/O threads waiting. Python's own 5 ms would be an engine's whole
latency; shorter costs throughput."""


def run_engine(spec: EngineSpec, lifeline: Channel | None = None) -> int:
    """Run an engine in this process until it is told to stop, and return the exit status.

    Args:
        spec: what to run.
        lifeline: where to leave a note if it dies; ``None`` without a parent (headless).
    """
    configure_logging(spec.engine_index)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stage: Literal["startup", "running"] = "startup"

    def leave_note(exc: BaseException) -> None:
        if lifeline is not None:
            DeathNote.of(stage, exc).send(lifeline)

    engine = EngineCoreProc(spec, on_death=leave_note)

    def stop(signum: int, frame: FrameType | None) -> None:
        engine.request_shutdown()

    try:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        wake_up_for_signals(engine.wake)
        engine.start()
        gc.freeze()  # what is there now stays; no use in looking through it again and again
        stage = "running"
        if lifeline is not None:
            with contextlib.suppress(OSError):  # nobody is left to tell, and the lifeline's watcher ends us
                lifeline.send(READY)
        engine.run_busy_loop()
    except StoppedWhileStarting:
        logger.info("stopped while starting")
    except BaseException as exc:
        if stage == "startup":
            trace = None if explains_itself(stage, exc) else exc
            logger.critical("the engine cannot start: %s", describe(exc), exc_info=trace)
            leave_note(exc)
        return 1
    finally:
        engine.close()
    return 0


def wake_up_for_signals(wake: Callable[[], None]) -> None:
    """Have ``wake`` called after every signal, in a thread of its own.

    Python runs a signal's handler in the main thread, between two bytecodes. A signal that comes just before that
    thread blocks, as SIGTERM does right after the last output, does not end the wait.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)

    def watch() -> None:
        while receiver.recv(64):
            wake()

    threading.Thread(target=watch, name="signals", daemon=True).start()


def end_with_parent(lifeline: Channel, cleanup_paths: list[str]) -> None:
    """End this process and its children when the parent is gone, and remove what it can no longer remove itself."""

    def watch() -> None:
        while lifeline.receive() is not None:
            pass  # nothing is sent after the spec
        for path in cleanup_paths:
            remove(path)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def remove(path: str) -> None:
    """Remove a socket file, or a folder of them; it may be gone already."""
    try:
        if os.path.isdir(path):
            for entry in os.scandir(path):
                os.unlink(entry.path)
            os.rmdir(path)
        else:
            os.unlink(path)
    except OSError:
        pass  # nobody is left to tell


def main() -> int:
    """Run an engine for the parent that started this process."""
    if len(sys.argv) != 3 or sys.argv[1] != "--lifeline-fd":
        sys.stderr.write("usage: python -m enginewire.engine.main --lifeline-fd N (started by enginewire's clients)\n")
        return 2
    lifeline = Channel.adopt(int(sys.argv[2]))
    send_stdout_to_stderr()
    # This thread's frames only: walking those of threads that run meanwhile may crash, and hide the first cause.
    faulthandler.enable(all_threads=False)
    payload = lifeline.receive()
    if payload is None:
        return 1  # the parent was gone before it said anything
    spec = EngineSpec.decode(payload)
    end_with_parent(lifeline, spec.cleanup_paths)
    return run_engine(spec, lifeline)


if __name__ == "__main__":
    sys.exit(main())
