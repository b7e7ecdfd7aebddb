"""``CoordinatorLink``: a frontend's connection to the coordinator: who has how much to do, and the waves.

A coordinator publishes ``[counts, wave, running]``; a frontend that sends a request while the engines rest asks it to
wake them all. Source: protocol J.3 to J.5; C-50; defects 9 and 26.
"""

from __future__ import annotations

import logging
import reprlib
import time

import msgspec
import zmq

from enginewire.client.engines import Engine, Engines
from enginewire.transport.sockets import connect_xsub, receive_message
from enginewire.wire.frames import SUBSCRIBE_ALL

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 24
"""Room for the counts of 65536 engines."""

ASK_AGAIN_S = 1.0
"""What is published a moment after we asked may be older than that."""

_Publication = tuple[list[list[int | float]] | None, int, bool]


class CoordinatorLink:
    """Hears what the coordinator publishes, and tells it of first requests.

    Used under the client's send lock (sync) or on its loop (asyncio).

    Args:
        context: for the socket.
        address: where the coordinator publishes to frontends.
        engines: whose loads it reports.
        has_waves: they run in lock-step. Otherwise nobody has to be woken.

    Attributes:
        address: the same.
        wave: the current one, as far as known; requests carry it.
        engines_running: whether the engines are in a wave.
        descriptor: readable when there may be something to take.

    Raises:
        OSError: the address makes no sense.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, engines: Engines, *, has_waves: bool
    ) -> None:
        self.address = address
        self._has_waves = has_waves
        self._asked_at = 0.0
        self.wave = 0
        self.engines_running = False
        self._engines = engines
        self._decoder = msgspec.msgpack.Decoder(_Publication)
        self._socket = connect_xsub(context, address, MAX_FRAME_BYTES)
        self.descriptor = self._socket.fileno()
        self._socket.send(SUBSCRIBE_ALL)

    def take(self, now: float) -> None:
        """Take in what has been published. No message ends this (defect 26).

        Args:
            now: monotonic seconds.
        """
        while not self._socket.closed:
            try:
                frames = receive_message(self._socket)
            except zmq.ZMQError:
                return
            try:
                counts, self.wave, self.engines_running = self._decoder.decode(b"".join(frames))
                self._note_counts(counts or [])
            except (msgspec.DecodeError, ValueError) as exc:
                logger.error("dropped a message of the coordinator, %s: %s", reprlib.repr(frames), exc)
            if not self.engines_running and now - self._asked_at > ASK_AGAIN_S:
                self._wake_who_waits()

    def _note_counts(self, counts: list[list[int | float]]) -> None:
        for engine in self._engines:
            if engine.index < len(counts):
                waiting, running, *usage = counts[engine.index]  # 0.25 says nothing of the cache's usage
                engine.load.report(int(waiting), int(running), *usage[:1])

    def _wake_who_waits(self) -> None:
        """Ask again for engines that rest although we wait for one: the coordinator was away, or restarted."""
        waiting = next((engine for engine in self._engines.ready if engine.live), None)
        if waiting is not None:
            self.first_request(waiting)

    def first_request(self, engine: Engine) -> None:
        """Have all engines woken for a request that one of them gets; nothing to do while they run.

        The rank is sent as a number: the reference sends an identity, which nothing compares equal to (defect 9).
        """
        if self.engines_running or not self._has_waves:
            return
        self.engines_running = True
        self._asked_at = time.monotonic()
        try:
            self._socket.send(msgspec.msgpack.encode((engine.index, self.wave)), zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            logger.warning("the coordinator at %s is not reachable: %s", self.address, exc.strerror)
            self.engines_running = False
