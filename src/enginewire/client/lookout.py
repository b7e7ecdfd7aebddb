"""The lookout: losses of engines, found out by looking a few times a second.

A process of ours that ends is seen by its manager. Everything else is seen here: a connection that drops, a death
marker, an engine that registers anew or says HELLO. How engines come back is written in ``returns``.

Over tcp anybody may send a marker or a HELLO. Such a hint is checked with a *ping*. Source: the notes on remote
engines; defects 22, 36, 37.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Final

import zmq

from enginewire.client.balancer import LoadBalancer
from enginewire.client.coordination import CoordinatorLink
from enginewire.client.engines import Engine, Engines, EngineState
from enginewire.client.inbox import Arrival, Failures, Inbox
from enginewire.client.link import Link
from enginewire.client.outbox import Outbox
from enginewire.client.resources import BackgroundResources
from enginewire.client.returns import CONNECTION_LOST, Returns
from enginewire.client.startup import is_of
from enginewire.config import EngineConfig
from enginewire.errors import ENGINE_LOST_PREFIX, INTERNAL_PREFIX, EngineDeath
from enginewire.transport.sockets import receive_message
from enginewire.wire.frames import describe_identity, engine_index_of
from enginewire.wire.messages import ReceivedOutputs

logger = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
"""How long an engine that is said to be dead has to show that it is not."""

DROPPED_AT_ONCE: Final = 64
"""Messages: an engine may send more than anybody can drop."""

REPORTED_DEATH: Final = "it reported a fatal error"
LAST_OUTPUT_DROPPED: Final = f"{INTERNAL_PREFIX}its last output could not be decoded and was dropped"


class Lookout:
    """Watches the engines of one client. Holds no reference to it.

    Its methods are called by the receiver, which has taken in what the engines sent before; in the sync face under the
    send lock.

    Args:
        config: of the client.
        returns: takes engines back, and new ones in.
        balancer: forgets what it knows of an engine that is gone.

    Attributes:
        interval_s: how often a receiver looks, if nothing else makes it.
        coordination: to the coordinator, if there is one; what it publishes is taken in along with the rest.
        has_found: the last look found losses, which the next one tells of, at once: what those engines sent before is
            there by now, and may not have been when the receiver took it in.
    """

    interval_s: float = 0.25

    def __init__(
        self,
        config: EngineConfig,
        engines: Engines,
        inbox: Inbox,
        outbox: Outbox,
        resources: BackgroundResources,
        returns: Returns,
        balancer: LoadBalancer,
    ) -> None:
        self._config = config
        self._engines = engines
        self._inbox = inbox
        self._outbox = outbox
        self._resources = resources
        self.returns = returns
        self._balancer = balancer
        self.coordination: CoordinatorLink | None = None
        self.has_found = False
        self._pings = returns.pings
        self._news = returns.news
        self._disconnected: set[int] = set()
        """Engines of ours that have lost a connection."""

    def look(self, now: float) -> list[Arrival]:
        """Find out what has changed, and act on it.

        Args:
            now: monotonic seconds.

        Returns:
            messages for the consumer. When all engines are dead, ``engines.death`` is set.
        """
        self.has_found = False
        if self._resources.closing:
            return []
        num_untold = len(self._engines.untold)
        self._outbox.release_sent()
        if self.coordination is not None:
            self.coordination.take(now)
        for link in self._inbox.links:
            self._read_input(link)
        self._read_handshake()
        self._look_at_connections(now)
        for loss in self._pings.look(now):
            self._engines.lost(loss)
        has_found = len(self._engines.untold) > num_untold
        self.has_found = has_found and not any(self.has_gap(link) for link in self._inbox.links)
        if self.has_found:
            return []
        arrivals = self._tell_losses(now)
        if self._engines.death is None:
            for engine in self._engines:
                if engine.in_doubt and engine.state is EngineState.READY:
                    self._ask_for_losses(engine)
                self.returns.act_on(engine, now)
            if self._inbox.failover is not None:
                for engine, end in self._inbox.failover.send_waiting(now):
                    arrivals.append(ReceivedOutputs(engine.index, [end]))
        return arrivals

    def has_loss(self, link: Link) -> bool:
        """Whether a link's engine has lost the connection for its outputs, and nobody has been told of that yet."""
        engine = link.sole
        if engine is None or not link.has_ended():
            return False
        is_told = engine.state not in (EngineState.READY, EngineState.LEAVING)
        return not is_told or any(engine is each for each, _ in tuple(self._engines.untold))

    def has_gap(self, link: Link) -> bool:
        """Whether that engine has another connection by now: there is a gap before what comes on it."""
        return self.has_loss(link) and link.has_new_output()

    def drops(self, link: Link) -> bool:
        """Drop what comes behind a gap, if there is one; it is for requests that fail, or go on from before it."""
        has_gap = self.has_gap(link)
        if has_gap:
            for _ in itertools.islice(_drained(link.output_socket), DROPPED_AT_ONCE):
                pass
        return has_gap

    def has_heard_out(self) -> bool:
        """Whether all is there that engines sent before they ended. Asked at the end, when ours have been stopped.

        A process that has ended may have left a request's last output with the system, for ZeroMQ to fetch.
        """
        stopped = [engine for engine in self._engines if engine.is_ours] if self.returns.launcher is not None else []
        return all(engine.link.has_ended() for engine in stopped if engine.live)

    # Signs.

    def _read_input(self, link: Link) -> None:
        for frames in _drained(link.input_socket):
            index, sender = engine_index_of(frames[0]), describe_identity(frames[0])
            if index is None or len(frames) != 2 or not is_of(link.engines, frames[0]):
                self._inbox.drop(f"a message of {len(frames)} frames on an input socket, from {sender}")
            else:
                self.returns.take_ready(index, frames)

    def _read_handshake(self) -> None:
        socket = self._resources.handshake_socket
        for frames in [] if socket is None else _drained(socket):
            self.returns.take_handshake(frames)

    def _look_at_connections(self, now: float) -> None:
        while self._inbox.marked:  # first: what an engine says of its death says more than its connection
            for engine in self._inbox.marked.popleft().engines:
                if engine.is_ours:
                    if engine.state is EngineState.READY:  # otherwise it is known, and another process has its place
                        self._expect_death(engine, REPORTED_DEATH)
                else:
                    self._suspect(engine, f"{REPORTED_DEATH}; its log is on its host", now + ANSWER_S)
        for link in self._inbox.links:
            if link.has_lost_peer(now):  # always asked: a monitor that nobody drains stops ZeroMQ
                self._connection_lost(link, now)

    def _connection_lost(self, link: Link, now: float) -> None:
        """Take the loss of a connection for an engine's loss: outputs may be lost with it, and nobody would know."""
        for engine in link.engines:
            if engine.is_ours and engine.state is not EngineState.READY:
                continue
            if engine.is_ours and engine.index not in self._disconnected:
                self._disconnected.add(engine.index)  # its last word may still be on its way over the other socket
            elif engine.is_ours:
                sign = "the connection to it was lost"
                if not self._config.starts_by_tcp:  # of vLLM's processes the one that is watched ends seconds later
                    sign += f", as by an output beyond max_frame_bytes ({self._config.max_frame_bytes})"
                self._expect_death(engine, sign)
            elif link.sole is None:  # whose connection it was is not known
                self._suspect(engine, CONNECTION_LOST, now + ANSWER_S)
            elif engine.state is EngineState.READY:
                suspicion = self._pings.get(engine.index)
                cause = (suspicion and suspicion.cause) or CONNECTION_LOST
                self._engines.lost(EngineDeath(engine.index, cause))
        if link.sole is None:
            link.settle()

    def _expect_death(self, engine: Engine, sign: str) -> None:
        if self._resources.engine_manager is not None:
            self._resources.engine_manager.expect_death(sign, engine.index)

    def _suspect(self, engine: Engine, cause: str, deadline: float) -> None:
        """Have an engine show that it lives, or take it for lost."""
        if engine.state is not EngineState.READY:
            return

        def on_answer(_: float) -> None:
            logger.error("engine=%d answers, although it seemed that %s", engine.index, cause)

        if not self._pings.ask(engine, deadline, on_answer, cause):
            self._engines.lost(EngineDeath(engine.index, cause))

    # What follows.

    def _tell_losses(self, now: float) -> list[Arrival]:
        """Fail what ran on engines that are gone, or was lost on the way."""
        arrivals: list[Arrival] = []
        if self._engines.death is not None:
            return arrivals
        while self._engines.untold:
            engine, death = self._engines.untold.popleft()
            if engine.is_ours and not engine.is_running:
                self._disconnected.discard(engine.index)
            cause = f"engine {engine.index}: {death.cause}"
            self._inbox.calls.engine_lost(engine.index, f"the engine was lost meanwhile: {death.cause}")
            request_ids = list(engine.live)  # a copy: consumers in other threads change it meanwhile
            arrivals.append(Failures(engine, request_ids, f"{ENGINE_LOST_PREFIX}{cause}", is_loss=True))
            engine.stale.update(request_ids)
            engine.is_haunted = True
            self.returns.was_lost(engine, now)
            self._balancer.removed(engine.index)
        while self._news:
            arrivals.append(self._news.popleft())
        return arrivals

    def dismiss(self, engine: Engine) -> None:
        """Forget an engine whose process has been stopped."""
        self._disconnected.discard(engine.index)
        self._balancer.removed(engine.index)
        self._inbox.calls.engine_lost(engine.index, "the engine was taken out meanwhile")
        self._news.append(Failures(engine, (), "it was taken out", is_loss=True))
        self.returns.dismiss(engine)

    def _ask_for_losses(self, engine: Engine) -> None:
        """Ask an engine which requests it knows, after a message was dropped that nobody could read.

        On tcp it was a stranger's, as like as not; but if it held a request's last output, nothing would follow, and
        its caller would wait for ever. Answers travel behind outputs, so what the answer leaves out has ended.
        """
        engine.in_doubt = False
        asked = frozenset(engine.live)
        call = self._pings.call(engine, "get_request_ids", concurrent.futures.Future())
        if call is not None:
            call.waiter.add_done_callback(functools.partial(self._note_known, engine, asked))

    def _note_known(self, engine: Engine, asked: frozenset[str], answer: concurrent.futures.Future[list[str]]) -> None:
        if answer.exception() is None:
            self._news.append(Failures(engine, [*asked.difference(answer.result())], LAST_OUTPUT_DROPPED))
        else:
            logger.warning("a message was dropped, and the engine cannot say whether it ended a request")


def _drained(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield the messages that are there."""
    with contextlib.suppress(zmq.ZMQError):
        while True:
            yield receive_message(socket)
