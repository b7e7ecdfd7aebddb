"""``ExecutorProcess``: an executor that runs in a child process, as its engine sees it.

The engine sends inputs and gets each step's result through a callback, so it never waits for one. Everything else is a
plain call, made between steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from enginewire.engine.channel import Channel
from enginewire.engine.executor import Executor
from enginewire.engine.spec import AlreadyDescribed, DeathNote, EngineSpec
from enginewire.engine.step import StepInput, StepOutput
from enginewire.engine.worker import CALL, DIED, INLINE, LOAD, QUIT, RAISED, STEP, STEPPED, Call, Loaded, Returned
from enginewire.errors import EngineClientError, describe_exit
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.messages import LoRARequest

logger = logging.getLogger(__name__)

QUIT_TIMEOUT_S: Final = 2.0
"""How long the child may take to leave when told to. The client's own limit for the engine is 5 s."""

SIGNAL_CHECK_S: Final = 0.5
"""How often waiting for an answer is interrupted: a signal that comes just before it begins does not end it."""


class ExecutorProcessDied(AlreadyDescribed):
    """The executor's process is gone; its text is the cause.

    Attributes:
        traceback_tail: from that process, if it could still say.
    """

    def __init__(self, cause: str, traceback_tail: Sequence[str] = ()) -> None:
        self.traceback_tail = list(traceback_tail)
        super().__init__(cause)


class ExecutorCallError(EngineClientError):
    """A call raised in the executor's process; its text says what."""


class ExecutorProcess(Executor):
    """Starts the child, loads the executor there, and passes calls on.

    Args:
        spec: what to load.
        on_result: gets each step's result, or the child's death; called in a thread of this object.

    Raises:
        ExecutorProcessDied: it could not be loaded.
    """

    def __init__(self, spec: EngineSpec, on_result: Callable[[StepOutput | BaseException], None]) -> None:
        super().__init__(spec.config)
        self._on_result = on_result
        self._encoder = MsgpackEncoder(zero_copy_threshold=INLINE)
        self._answers: queue.SimpleQueue[tuple[bytes, memoryview] | ExecutorProcessDied] = queue.SimpleQueue()
        self._quitting = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: the current folder must not shadow modules.
                [sys.executable, "-P", "-m", "enginewire.engine.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Our own import path: it may have been extended since this interpreter started.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._channel = Channel(ours)
        self._waiter = threading.Thread(target=self._wait, name="executor-waiter", daemon=True)
        self._waiter.start()
        self._reader = threading.Thread(target=self._read, name="executor-reader", daemon=True)
        self._reader.start()
        try:
            loaded = msgspec.msgpack.decode(self._ask(LOAD + spec.encode()), type=Loaded)
        except BaseException:  # a signal too: nobody else knows of the child yet
            self._kill()
            raise
        self.capacity = loaded.capacity
        self.capabilities = loaded.capabilities
        self._is_sleeping = loaded.is_sleeping

    def start_step(self, step_input: StepInput) -> None:
        """Send an input: for the next step, if one is being made. No other call before the last result."""
        self._send(STEP + bytes(self._encoder.encode(step_input)[0]))

    def shutdown(self, *, wait: bool = True) -> None:
        """End the child, after its current command or, if it is not worth waiting for, at once."""
        self._quitting = True
        if wait:
            self._send(QUIT)
            self._waiter.join(QUIT_TIMEOUT_S)
            if self._waiter.is_alive():
                logger.warning("the executor's process does not leave within %g s; killing it", QUIT_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        self._quitting = True
        self._process.kill()
        self._waiter.join()
        self._reader.join()
        self._channel.close()

    # What an executor can be asked, between steps.

    @property
    def is_sleeping(self) -> bool:
        """Whether any memory is given up, as of the last call."""
        return self._is_sleeping

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""
        self._call("abort_requests", list(request_ids))

    def sleep(self, level: int) -> None:
        """Give up memory."""
        self._call("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back."""
        self._call("wake_up", tags)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes."""
        return bool(self._call("reset_prefix_cache", reset_running_requests))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        return bool(self._call("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return bool(self._call("remove_lora", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return bool(self._call("pin_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        return set(self._call("list_loras"))

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop a profiler."""
        self._call("profile", is_start, profile_prefix)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights to a folder."""
        self._call("save_sharded_state", path, pattern, max_size)

    def join_group(self, rank: int, parallel_config: dict[str, Any]) -> None:
        """Meet the other ranks."""
        self._call("join_group", rank, parallel_config)

    def execute_dummy_batch(self) -> None:
        """Run a step without requests."""
        self._call("execute_dummy_batch")

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method by name."""
        return list(self._call("collective_rpc", method, timeout, list(args), kwargs))

    # Taking in requests and stepping happen in the child only (`run_step`).

    def add_request(self, request: object) -> None:
        """Not here: requests go with a step."""
        raise NotImplementedError("requests go to the executor's process with start_step")

    def step(self) -> list[Any]:
        """Not here: see :meth:`start_step`."""
        raise NotImplementedError("the executor's process is stepped with start_step")

    def has_unfinished_requests(self) -> bool:
        """Not here: a step's result says so."""
        raise NotImplementedError("a step's result says whether work remains")

    # The channel.

    def _call(self, method: str, *args: Any) -> Any:
        (payload,) = self._encoder.encode(Call(method, list(args)))
        returned = msgspec.msgpack.decode(self._ask(CALL + bytes(payload)), type=Returned)
        self._is_sleeping = returned.is_sleeping
        return returned.value

    def _ask(self, message: bytes) -> memoryview:
        self._send(message)
        answer = self._next_answer()
        if isinstance(answer, ExecutorProcessDied):
            self._answers.put(answer)  # for whoever asks next
            raise answer
        kind, payload = answer
        if kind == RAISED:
            raise ExecutorCallError(msgspec.msgpack.decode(payload, type=str))
        return payload

    def _next_answer(self) -> tuple[bytes, memoryview] | ExecutorProcessDied:
        while True:
            try:
                return self._answers.get(timeout=SIGNAL_CHECK_S)
            except queue.Empty:
                continue  # the handler of a signal has run, if there was one

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone; the reader says why, to everybody who waits
            self._channel.send(message)

    def _wait(self) -> None:
        """End the reader with the child, even if a process that the child forked keeps the channel open."""
        self._process.wait()
        self._channel.hang_up()

    def _read(self) -> None:
        """Hand on what the child says, until its end; in a thread of its own."""
        decoder = msgspec.msgpack.Decoder(StepOutput)
        note: DeathNote | None = None
        try:
            while (message := self._channel.receive()) is not None:
                kind, payload = message[:1], memoryview(message)[1:]
                if kind == STEPPED:
                    self._on_result(decoder.decode(payload))
                elif kind == DIED:
                    note = msgspec.msgpack.decode(payload, type=DeathNote)
                else:
                    self._answers.put((kind, payload))
        except Exception as exc:  # noqa: BLE001 - a reader that ends in silence leaves the engine waiting
            note = DeathNote.of("running", exc)
            self._process.kill()
        self._waiter.join()
        if self._quitting:
            return
        if note is None:
            died = ExecutorProcessDied(f"executor process {describe_exit(self._process.returncode)}")
        else:
            died = ExecutorProcessDied(note.cause, note.traceback_tail)
        self._answers.put(died)
        self._on_result(died)
