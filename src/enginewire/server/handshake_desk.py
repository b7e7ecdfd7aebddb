"""``HandshakeDesk``: shakes hands with engines, as long as the server lives, for several clients in other processes.

The clients hear of an engine that begins anew from the engine itself: its ready response comes on the link they have.
Source: protocol B.1, B.2, B.5; "Two ways back" in the notes on remote engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import zmq

from enginewire.client.startup import EngineStartup, Expected, not_expected, refusal
from enginewire.errors import DecodeError, EngineStartupError
from enginewire.transport.sockets import bind_also, bind_router, receive_message, send_message
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import describe_identity, engine_index_of
from enginewire.wire.handshake import HandshakeMessage

logger = logging.getLogger(__name__)

READ_EVERY_S: Final = 0.1
"""How long an engine may wait for our reply; its model takes longer."""


class HandshakeDesk:
    """The handshake socket, and what is agreed with each engine.

    Args:
        context: of the socket.
        endpoints: where it is bound: engines started here come to the first, those started elsewhere to the last.
        expected: what is agreed, by rank.
        max_frame_bytes: larger frames are refused.
        answers: tells whether an engine that has been ready answers a question now.

    Attributes:
        addresses: where it is bound, resolved.

    Raises:
        OSError: an address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Sequence[str],
        expected: Mapping[int, Expected],
        max_frame_bytes: int,
        answers: Callable[[int], Awaitable[bool]],
    ) -> None:
        first, *others = endpoints
        self._socket, address = bind_router(context, first, max_frame_bytes)
        self.addresses = [address, *(bind_also(self._socket, endpoint) for endpoint in others)]
        self._expected = expected
        self._answers = answers
        self._starting = {index: EngineStartup({index: agreed}) for index, agreed in expected.items()}
        self._silent = {index for index, agreed in expected.items() if agreed.is_local}
        self._decoder = MsgpackDecoder(HandshakeMessage)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def all_local_said_hello(self) -> bool:
        """Whether every engine that was started here has been heard of."""
        return not self._silent

    def missing(self) -> str:
        """Say which engines are missing, and what of them."""
        return "; ".join(startup.missing() for startup in self._starting.values())

    def read(self) -> None:
        """Take what has come.

        Raises:
            EngineStartupError: an engine contradicts what was agreed.
        """
        while True:
            try:
                frames = receive_message(self._socket)
            except zmq.Again:
                return
            index = engine_index_of(frames[0])
            try:
                if len(frames) != 2:
                    raise DecodeError(f"it has {len(frames)} frames")
                message = self._decoder.decode(frames[1:])
            except DecodeError as exc:
                logger.warning("ignored a handshake message of %s: %s", describe_identity(frames[0]), exc)
                continue
            if index is None or index not in self._expected:
                self._refuse(frames[0], message, not_expected(frames[0], self._expected))
            else:
                self._take(index, message, frames)

    async def keep_reading(self) -> None:
        """Take what comes, for ever. Who contradicts what was agreed is refused, and the others go on."""
        while True:
            try:
                self.read()
            except EngineStartupError as exc:
                logger.error("refused an engine: %s", exc)
            await asyncio.sleep(READ_EVERY_S)

    def close(self) -> None:
        """Close the socket."""
        for task in self._tasks.values():
            task.cancel()
        self._socket.close(linger=0)

    def _take(self, index: int, message: HandshakeMessage, frames: list[bytes]) -> None:
        startup = self._starting.get(index)
        if startup is None:
            if message.status == "HELLO" and (index not in self._tasks or self._tasks[index].done()):
                self._tasks[index] = asyncio.create_task(self._greet_again(index, frames), name="enginewire-newcomer")
            return
        reply = startup.on_handshake(*frames)
        self._silent.discard(index)
        if reply is not None:
            try:
                send_message(self._socket, (frames[0], reply))
            except zmq.ZMQError as exc:
                logger.warning("engine %d is gone since its HELLO: %s", index, exc.strerror)
        if message.status == "READY":
            del self._starting[index]

    async def _greet_again(self, index: int, frames: list[bytes]) -> None:
        """Answer the HELLO of an engine that has been there before, unless it still is."""
        hello = self._decoder.decode(frames[1:])
        if await self._answers(index):
            self._refuse(frames[0], hello, f"engine {index} was started twice: the first one lives")
            return
        logger.warning("engine %d was restarted", index)
        self._starting[index] = EngineStartup({index: self._expected[index]})
        self._take(index, hello, frames)

    def _refuse(self, identity: bytes, hello: HandshakeMessage, why: str) -> None:
        """Say, in the log and to an engine of ours, why it is not taken."""
        logger.error("an engine that says HELLO is refused: %s", why)
        if (reply := refusal(hello, why)) is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                send_message(self._socket, (identity, reply))
