"""What a client sends: encoded as each engine understands it, and kept while ZeroMQ still reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from enginewire.client.engines import Engine
from enginewire.config import EngineConfig
from enginewire.transport.sockets import send_message, send_small
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ABORT, ADD, UTILITY, Buffer
from enginewire.wire.messages import EngineCoreRequest, LoRARequest


class Outbox:
    """Sends to engines. Whoever calls it holds the send lock (sync) or is the loop's thread (asyncio).

    Args:
        config: of the client.
        client_index: which of the engines' frontends this is.

    Attributes:
        pending: messages whose arrays ZeroMQ still reads, with what keeps those arrays alive.

    Raises (any method):
        EncodeError: the message has a value that cannot go on the wire.
        ZMQError: there is no connection to the engine; nothing was sent.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        self.pending: deque[tuple[zmq.MessageTracker, object]] = deque()
        self._client_index = client_index
        self._encoder = MsgpackEncoder(zero_copy_threshold=config.zero_copy_threshold, allow_pickle=config.allow_pickle)

    def add(self, engine: Engine, request: EngineCoreRequest) -> None:
        """Send a request, which is live from before that: its first output may be faster than us."""
        request.client_index = self._client_index
        message = engine.profile.request_of(request)
        frames = self._encoder.encode(message)
        engine.live[request.request_id] = None
        try:
            self._send(engine, ADD, message, frames)
        except BaseException:
            engine.live.pop(request.request_id, None)
            raise

    def abort(self, engine: Engine, request_ids: Sequence[str]) -> None:
        """Send ABORT."""
        message = list(request_ids)
        self._send(engine, ABORT, message, self._encoder.encode(message))

    def call(self, engine: Engine, call_id: int, method: str, args: Sequence[Any]) -> None:
        """Call a utility."""
        if args:
            args = [engine.profile.lora_of(arg) if isinstance(arg, LoRARequest) else arg for arg in args]
        message = (self._client_index, call_id, method, args)
        self._send(engine, UTILITY, message, self._encoder.encode(message))

    def _send(self, engine: Engine, request_type: bytes, message: object, frames: Sequence[Buffer]) -> None:
        """Send one message.

        Arrays of at least ``zero_copy_threshold`` bytes are not copied: the message is kept until ZeroMQ is done with
        them (C-28).
        """
        if self.pending:
            self.release_sent()
        socket = engine.link.input_socket
        if len(frames) == 1:
            send_small(socket, engine.identity, request_type, frames[0])
            return
        for tracker in send_message(socket, (engine.identity, request_type, frames[0]), frames[1:]):
            self.pending.append((tracker, message))

    def release_sent(self) -> None:
        """Let go of messages that ZeroMQ is done with."""
        while self.pending and self.pending[0][0].done:
            self.pending.popleft()
