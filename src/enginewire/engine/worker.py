"""The process of an executor that holds the interpreter lock: ``python -m enginewire.engine.worker``.

Started by :class:`~enginewire.engine.worker_process.ExecutorProcess`, with the descriptor of a socket pair as its only
argument. It carries out one command after another and answers each; when there is none it makes further steps, if it
was told to. It ends when told to, or with its parent, in whatever it is doing then.

A message is one byte that says what it is, then msgpack. Commands: ``L`` load (an EngineSpec), ``S`` step (a
StepInput), ``C`` call (``[method, args, kwargs]``), ``Q`` quit. Answers: ``l`` loaded, ``s`` stepped (a StepOutput, for
one ``S``, several, or none), ``c`` returned, ``x`` the call raised, ``d`` died: a DeathNote, and nothing follows.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from enginewire.engine.channel import Channel
from enginewire.engine.executor import Executor, ExecutorCapacity
from enginewire.engine.process_setup import configure_logging, send_stdout_to_stderr
from enginewire.engine.registry import load_executor_class
from enginewire.engine.spec import DeathNote, EngineSpec, describe, describe_failure, explains_itself
from enginewire.engine.step import StepInput, Steps
from enginewire.engine.utilities import fit_arguments
from enginewire.errors import EncodeError
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder

logger = logging.getLogger(__name__)

LOAD: Final = b"L"
STEP: Final = b"S"
CALL: Final = b"C"
QUIT: Final = b"Q"
LOADED: Final = b"l"
STEPPED: Final = b"s"
RETURNED: Final = b"c"
RAISED: Final = b"x"
DIED: Final = b"d"

INLINE: Final = sys.maxsize
"""Zero-copy threshold that never splits: a message on this channel is one piece."""

PR_SET_PDEATHSIG: Final = 1


class Loaded(Struct, kw_only=True):
    """What the executor turned out to be."""

    capacity: ExecutorCapacity
    capabilities: Capabilities
    is_sleeping: bool = False


class Call(Struct, array_like=True):
    """A method of the executor to call."""

    method: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class Returned(Struct, array_like=True):
    """Its value; and whether the executor is now asleep, which its handle answers without asking."""

    value: Any
    is_sleeping: bool


def die_with_parent(channel: Channel, parent_pid: int) -> None:
    """Make sure that this process does not outlive its parent, whatever either is doing.

    Linux kills it (also in native code that holds the interpreter lock); elsewhere a thread notices the closed channel
    as soon as it may run.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before the line above
        os._exit(1)

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(channel.fileno(), 0)  # no event but the peer's end, which cannot be masked
        hang_up.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Worker:
    """Carries out commands on an executor."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = MsgpackEncoder(zero_copy_threshold=INLINE)
        self._step_decoder = MsgpackDecoder(StepInput)

    def run(self) -> int:
        """Serve until told to quit; return the exit status."""
        stage: Any = "startup"
        executor: Executor | None = None
        steps: Steps | None = None
        try:
            while True:
                if steps is not None and steps.is_due and not self._channel.is_readable():
                    if (result := steps.make()) is not None:
                        self._answer(STEPPED, result)
                    continue
                if (message := self._channel.receive()) is None:
                    break
                command, payload = message[:1], memoryview(message)[1:]
                if command == LOAD:
                    executor = self._load(EngineSpec.decode(bytes(payload)))
                    steps = Steps(executor)
                    stage = "running"
                elif command == QUIT or executor is None or steps is None:
                    break
                elif command == STEP:
                    steps.take(self._step_decoder.decode([payload]))
                else:
                    self._call(executor, msgspec.msgpack.decode(payload, type=Call))
        except BaseException as exc:
            trace = None if explains_itself(stage, exc) else exc
            logger.critical("the executor failed: %s", describe(exc), exc_info=trace)
            self._answer(DIED, DeathNote.of(stage, exc))
            return 1
        if executor is not None:
            executor.shutdown()
        return 0

    def _load(self, spec: EngineSpec) -> Executor:
        configure_logging(spec.engine_index)
        executor = load_executor_class(spec)(spec.config)
        loaded = Loaded(
            capacity=executor.capacity, capabilities=executor.capabilities, is_sleeping=executor.is_sleeping
        )
        gc.freeze()  # what is there now stays; no use in looking through it again and again
        self._answer(LOADED, loaded)
        return executor

    def _call(self, executor: Executor, call: Call) -> None:
        try:
            function = getattr(executor, call.method)
            value = function(*fit_arguments(function, call.args), **call.kwargs)
            self._answer(RETURNED, Returned(value, executor.is_sleeping))
        except Exception as exc:  # noqa: BLE001 - it is the caller's to know
            if isinstance(exc, EncodeError):
                exc = EncodeError(f"{call.method} returned what cannot be sent: {exc}")
            self._answer(RAISED, describe_failure(exc))

    def _answer(self, kind: bytes, answer: object) -> None:
        (payload,) = self._encoder.encode(answer)
        self._channel.send(kind + bytes(payload))


def main() -> int:
    """Run the worker: ``python -m enginewire.engine.worker FD PARENT_PID``."""
    channel = Channel.adopt(int(sys.argv[1]))
    die_with_parent(channel, int(sys.argv[2]))
    # Ctrl-C and a service manager signal every process of the group; it is the engine that decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send_stdout_to_stderr()
    # This thread's frames only: walking those of threads that run meanwhile may crash, and hide the first cause.
    faulthandler.enable(all_threads=False)
    return Worker(channel).run()


if __name__ == "__main__":
    sys.exit(main())
