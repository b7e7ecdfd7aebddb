"""``OutputThread``: owns an engine's PUSH sockets, encodes and sends what is put into its queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Final

import zmq

from enginewire.config import EngineConfig
from enginewire.engine.frontends import Frontend
from enginewire.engine.input_thread import Receiver
from enginewire.engine.step import error_output
from enginewire.engine.utilities import failure_text
from enginewire.errors import EncodeError
from enginewire.transport.sockets import connect_push
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ENGINE_CORE_DEAD, Buffer
from enginewire.wire.messages import EngineCoreOutputs, UtilityOutput
from enginewire.wire.profile import WireProfile

logger = logging.getLogger(__name__)

LINGER_MS: Final = 4000
"""How long closing may wait for the last messages (the death marker) to leave."""

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the end of an engine waits for this thread. Longer than the linger; it only has its queue to empty."""

_Item = tuple[int, EngineCoreOutputs, str] | threading.Event | bytes | None
"""Of the queue: a message and its receiver, somebody who waits until it is reached, the death marker, the end."""

MAX_QUEUED: Final = 8
"""Messages that may wait while the engine steps on (decision 27). A model's step leaves time for hundreds; an executor
of plain Python keeps the interpreter lock, and would leave this thread further behind with every step."""

STATE_CHECK_S: Final = 0.5
"""How often waiting for this thread is interrupted, to see whether there still is one."""


class OutputThread(threading.Thread):
    """Sends messages to frontends in the order they were put.

    Args:
        addresses: of the frontends' PULLs; position is the client index. The coordinator's, if there is one, is last.
        frontends: whose they are, in the same order.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        frontends: Sequence[Frontend],
        engine_index: int,
        config: EngineConfig,
        *,
        has_coordinator: bool = False,
    ) -> None:
        super().__init__(name="engine-output", daemon=True)
        self._context = context
        self._addresses = list(addresses)
        self._frontends = frontends
        self._num_clients = len(addresses) - has_coordinator
        self._engine_index = engine_index
        self._encoder = MsgpackEncoder(zero_copy_threshold=config.zero_copy_threshold, allow_pickle=config.allow_pickle)
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._receiver: Receiver | None = None

    def start_for(self, receiver: Receiver) -> None:
        """Start. The receiver hears of requests whose output could not be sent, as aborts, and of this thread's end."""
        self._receiver = receiver
        self.start()

    def put(self, client_index: int, message: EngineCoreOutputs, method: str = "") -> None:
        """Queue a message, any thread; ``method`` is the utility it answers."""
        self._queue.put((client_index, message, method))

    def catch_up(self) -> None:
        """Wait until everything queued is on its way, if that is more than a few messages."""
        if self._queue.qsize() > MAX_QUEUED:
            caught_up = threading.Event()
            self._queue.put(caught_up)
            while not caught_up.wait(STATE_CHECK_S) and self.is_alive():
                pass

    def put_dead(self) -> None:
        """Queue the death marker for every frontend; the last thing sent."""
        self._queue.put(ENGINE_CORE_DEAD)

    def stop(self) -> None:
        """Send what is queued, then end (defect 11). Returns after at most 5 s."""
        self._queue.put(None)
        if self.ident is not None:
            self.join(FLUSH_TIMEOUT_S)

    def run(self) -> None:
        """Send until stopped."""
        sockets: list[zmq.Socket[bytes]] = []
        try:
            sockets.extend(connect_push(self._context, address) for address in self._addresses)
            num_losses = [0] * len(sockets)
            while (item := self._queue.get()) is not None:
                if isinstance(item, bytes):
                    for socket in sockets[: self._num_clients]:
                        socket.send(item)
                    break
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                client_index, message, method = item
                if not self._frontends[client_index].is_here and not concerns_somebody(message):
                    # Statistics count up from message to message, and any frontend will do for them.
                    here = (index for index in range(self._num_clients) if self._frontends[index].is_here)
                    client_index = next(here, client_index)
                frontend = self._frontends[client_index]
                if frontend.num_losses != num_losses[client_index]:
                    # What waits in the socket is for a frontend that is gone; who comes next starts with a new one.
                    num_losses[client_index] = frontend.num_losses
                    sockets[client_index].close(0)
                    sockets[client_index] = connect_push(self._context, self._addresses[client_index])
                if frontend.is_here or concerns_somebody(message):
                    frames = self._encode(message, method, frontend.layout)
                    sockets[client_index].send_multipart(frames, copy=len(frames) == 1)
        except BaseException as exc:  # noqa: BLE001 - an engine without a voice must not look alive
            if self._receiver is not None:
                self._receiver.thread_failed(exc)
        finally:
            for socket, frontend in zip(sockets, self._frontends, strict=False):
                socket.close(LINGER_MS if frontend.is_here else 0)

    def _encode(self, message: EngineCoreOutputs, method: str, layout: WireProfile) -> list[Buffer]:
        message.engine_index = self._engine_index
        try:
            return self._encoder.encode(layout.outputs_of(message))
        except EncodeError as exc:
            self._replace_broken(message, method, exc)
            return self._encoder.encode(layout.outputs_of(message))

    def _replace_broken(self, message: EngineCoreOutputs, method: str, why: EncodeError) -> None:
        """Replace what has no form on the wire by a failure, for those alone whom it concerns (defect 6)."""
        if (answer := message.utility_output) is not None:
            logger.error("utility method=%s call_id=%d: its result cannot be sent: %s", method, answer.call_id, why)
            message.utility_output = UtilityOutput(answer.call_id, failure_text(method, why))
        broken: list[str] = []
        for position, output in enumerate(message.outputs):
            try:
                self._encoder.encode(output)
            except EncodeError as exc:
                broken.append(output.request_id)
                message.outputs[position] = error_output(output.request_id, exc)
        if broken and self._receiver is not None:  # their clients have their ERROR; nobody waits for more
            self._receiver.receive_abort(broken)


def concerns_somebody(message: EngineCoreOutputs) -> bool:
    """Whether a message is worth keeping for a frontend that is away: statistics alone would pile up without end.

    The rest is little: all its requests are aborted. It learns so if it comes back without having noticed.
    """
    return bool(message.outputs) or message.utility_output is not None or message.wave_complete is not None
