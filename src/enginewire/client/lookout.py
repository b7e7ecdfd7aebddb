"""The lookout: losses of engines and their returns, found out by looking a few times a second.

A process of ours that ends is seen by its manager. Everything else is seen here: a connection that drops, a death
marker, an engine that registers anew or says HELLO on the handshake socket, which stays open for that.

Over tcp anybody may send a marker or a HELLO. Such a hint is checked with a *ping*. Source: "Two ways back" in the
notes on remote engines; defects 21, 22, 36, 37.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from enginewire.client.balancer import LoadBalancer
from enginewire.client.coordination import CoordinatorLink
from enginewire.client.engines import Engine, Engines, EngineState, Link
from enginewire.client.inbox import Arrival, Failures, Inbox
from enginewire.client.outbox import Outbox
from enginewire.client.pings import REPEAT_S, Pings
from enginewire.client.reception import Reception
from enginewire.client.remembered import Memory
from enginewire.client.resources import BackgroundResources
from enginewire.client.startup import EngineStartup, Ready, apply_ready_responses, is_of
from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.errors import (
    ENGINE_LOST_PREFIX,
    INTERNAL_PREFIX,
    DecodeError,
    EngineDeath,
    EngineStartupError,
)
from enginewire.host.launcher import EngineLauncher
from enginewire.transport.sockets import receive_message, send_message
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import engine_index_of
from enginewire.wire.handshake import HandshakeMessage
from enginewire.wire.messages import EngineCoreOutputs, ReceivedOutputs, SchedulerStats

logger = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
"""How long an engine that is said to be dead has to show that it is not."""

CONNECTION_LOST: Final = (
    "the connection to it was lost; its process ended, or its host is gone or silent; its log is on that host"
)
REPORTED_DEATH: Final = "it reported a fatal error"
LAST_OUTPUT_DROPPED: Final = f"{INTERNAL_PREFIX}its last output could not be decoded and was dropped"


class Lookout:
    """Watches the engines of one client. Holds no reference to it.

    Its methods are called by the receiver, which has taken in what the engines sent before; in the sync face under the
    send lock.

    Args:
        config: of the client; what engines say of themselves is written into it.
        max_model_len: what was asked for.
        reception: makes links for engines that are restarted; ``None``: somebody else does the handshake.
        balancer: forgets what it knows of an engine that is gone.
        memory: is told of each engine that becomes ready, for a frontend that comes after this one.
        launcher: starts engines of ours; ``None``: somebody else starts them.
        specs: what it starts, by rank.

    Attributes:
        held: ranks that take no requests yet, although they are ready: others are to be ready with them.
    """

    def __init__(
        self,
        config: EngineConfig,
        engines: Engines,
        inbox: Inbox,
        outbox: Outbox,
        resources: BackgroundResources,
        *,
        max_model_len: int | None,
        reception: Reception | None,
        balancer: LoadBalancer | None,
        memory: Memory | None,
        launcher: EngineLauncher | None,
        specs: dict[int, EngineSpec],
    ) -> None:
        self._config = config
        self._engines = engines
        self._inbox = inbox
        self._outbox = outbox
        self._resources = resources
        self._max_model_len = max_model_len
        self._reception = reception
        self._balancer = balancer
        self._memory = memory
        self.launcher = launcher
        self.specs = specs
        self.held: frozenset[int] = frozenset()
        self.coordination: CoordinatorLink | None = None
        """To the coordinator, if there is one; what it publishes is taken in along with the rest."""
        self._pings = Pings(inbox.calls, outbox)
        self._disconnected: set[int] = set()
        """Engines of ours that have lost a connection."""
        self._starting: dict[int, EngineStartup] = {}
        self._newcomers: dict[int, list[bytes]] = {}
        """HELLOs of ranks that have an engine, or had one."""
        self._give_up_at: dict[int, float] = {}
        self._news: deque[Arrival] = deque()
        """For the consumer, next time."""
        self._handshake_decoder = MsgpackDecoder(HandshakeMessage)

    def look(self, now: float) -> list[Arrival]:
        """Find out what has changed, and act on it.

        Args:
            now: monotonic seconds.

        Returns:
            messages for the consumer. When all engines are dead, ``engines.death`` is set.
        """
        if self._resources.closing:
            return []
        self._outbox.release_sent()
        if self.coordination is not None:
            self.coordination.take(now)
        for link in self._inbox.links:
            self._read_input(link)
        self._read_handshake()
        self._look_at_connections(now)
        for loss in self._pings.look(now):
            self._engines.lost(loss)
        arrivals = self._tell_losses(now)
        if self._engines.death is None:
            for engine in self._engines:
                self._act_on(engine, now)
            if self._inbox.failover is not None:
                for engine, end in self._inbox.failover.send_waiting(now):
                    arrivals.append(ReceivedOutputs(engine.index, [end]))
        return arrivals

    def has_heard_out(self) -> bool:
        """Whether all is there that engines sent before they ended. Asked at the end, when ours have been stopped.

        A process that has ended may have left a request's last output with the system, for ZeroMQ to fetch.
        """
        stopped = [engine for engine in self._engines if engine.is_ours] if self.launcher is not None else []
        return all(engine.link.has_ended() for engine in stopped if engine.live)

    # Signs.

    def _read_input(self, link: Link) -> None:
        for frames in _drained(link.input_socket):
            index = engine_index_of(frames[0])
            if index is None or len(frames) != 2 or not is_of(link.engines, frames[0]):
                self._inbox.drop(f"a message of {len(frames)} frames on an input socket, from {frames[0]!r}")
                continue
            startup = self._starting.get(index) or EngineStartup({index: None}, max_model_len=self._max_model_len)
            try:
                startup.on_ready_response(*frames)
            except EngineStartupError as exc:
                self._inbox.drop(str(exc))
                continue
            if index not in self._starting:  # it was not greeted, and came back to the link that it had
                logger.warning("engine %s was restarted: it says ready again; requests in flight are lost", index)
                self._starting[index] = startup
                self._engines.lost(EngineDeath(index, "it was restarted"), is_back=True)

    def _read_handshake(self) -> None:
        socket = self._resources.handshake_socket
        for frames in [] if socket is None else _drained(socket):
            self.take_handshake(frames)

    def take_handshake(self, frames: list[bytes]) -> None:
        """Take a message of the handshake socket, of an engine that was ready once or should have been."""
        index = engine_index_of(frames[0])
        try:
            if index is None or self._engines.get(index) is None or len(frames) != 2:
                raise DecodeError("it is none of an engine that is expected")
            message = self._handshake_decoder.decode(frames[1:])
            if message.status == "HELLO":
                self._newcomers[index] = frames
            elif index in self._starting:
                self._starting[index].on_handshake(*frames)
        except (DecodeError, EngineStartupError) as exc:
            self._inbox.drop(f"a handshake message of {frames[0]!r}: {exc}")

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

        def on_answer() -> None:
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
            self._pings.drop(engine.index)
            if engine.is_ours and not engine.is_running:  # so nobody is on the way any longer
                self._disconnected.discard(engine.index)
                self._starting.pop(engine.index, None)
                self._newcomers.pop(engine.index, None)
            cause = f"engine {engine.index}: {death.cause}"
            self._inbox.calls.engine_lost(engine.index, f"the engine was lost meanwhile: {death.cause}")
            request_ids = list(engine.live)  # a copy: consumers in other threads change it meanwhile
            if request_ids:
                arrivals.append(Failures(engine, request_ids, f"{ENGINE_LOST_PREFIX}{cause}", is_loss=True))
            engine.stale.update(request_ids)
            engine.is_haunted = True
            self._await_return(engine, now)
            if self._balancer is not None:
                self._balancer.removed(engine.index)
        while self._news:
            arrivals.append(self._news.popleft())
        return arrivals

    def _act_on(self, engine: Engine, now: float) -> None:
        """Do what is next for an engine."""
        index = engine.index
        if engine.state is EngineState.LEAVING:
            return
        if self.is_up(index):
            if index not in self.held:
                self.welcome(engine, self._starting.pop(index).ready_of(index))
        elif engine.state is EngineState.READY:
            if index in self._newcomers:
                self._question(engine, now)
            elif engine.in_doubt:
                self._ask_for_losses(engine)
            elif engine.stale:
                self._abort_stale(engine, now, lambda: None)
        elif engine.is_ours and not engine.is_running:
            if engine.restart_at is not None and now >= engine.restart_at:
                self._start_again(engine, now)
        elif index in self._newcomers:
            self._greet(engine, now)
        elif engine.state is not EngineState.DEAD and now > self._give_up_at[index]:
            self._give_up(engine)
        elif engine.state is EngineState.LOST and index not in self._starting:
            self._abort_stale(engine, now, functools.partial(self._restored, engine, engine.link.num_closed))

    def _start_again(self, engine: Engine, now: float) -> None:
        engine.restart_at = None
        engine.num_restarts += 1
        restarts = engine.restarts
        logger.warning("engine=%d is started again restart=%d/%d", engine.index, restarts.in_a_row, restarts.limit)
        self.start(engine, now)

    def start(self, engine: Engine, now: float) -> None:
        """Have an engine of ours started. It says HELLO, as any other that comes; if it cannot start, it is lost."""
        assert self.launcher is not None, "it is ours"
        config = self._config
        # HELLO comes from the second process of vLLM, which imports all of it before; Ray has to find a place.
        limit = config.ready_timeout_s if config.starts_by_tcp else config.hello_timeout_s
        self._give_up_at[engine.index] = now + limit
        engine.is_running = True
        self._engines.starts_anew(engine)
        try:
            self.launcher.start(self.specs[engine.index])
        except EngineStartupError as exc:
            self._engines.lost(EngineDeath(engine.index, str(exc)))

    def open_link(self, index: int) -> Link:
        """Bind a link for an engine that is to be started. Raises :class:`OSError`."""
        assert self._reception is not None, "who starts engines receives them"
        return self._reception.open_link(index)

    def is_up(self, index: int) -> bool:
        """Whether an engine that was started is ready, and does not take requests yet."""
        return index in self._starting and self._starting[index].is_complete

    def dismiss(self, engine: Engine) -> None:
        """Forget an engine whose process has been stopped."""
        index = engine.index
        for memory in (self._starting, self._newcomers, self._give_up_at, self.specs):
            memory.pop(index, None)
        self._pings.drop(index)
        self._disconnected.discard(index)
        self._close_link(engine.link)
        self._engines.remove(engine)
        if self._balancer is not None:
            self._balancer.removed(index)
        self._apply_ready_responses()

    def _abort_stale(self, engine: Engine, now: float, then: Callable[[], None]) -> None:
        """Abort what an engine may still be running for nobody; the answer to a ping behind that says that it has."""
        ping = self._pings.get(engine.index)
        if ping is not None and now < ping.repeat_at:
            return
        ids = list(engine.stale)
        with contextlib.suppress(zmq.ZMQError):  # not connected yet
            if ids:
                self._outbox.abort(engine, ids)

        def on_answer() -> None:
            engine.stale.difference_update(ids)
            then()

        if ping is None:
            deadline = now + self._config.heartbeat_timeout_s
            self._pings.ask(engine, deadline, on_answer, repeat_at=now + REPEAT_S)
        else:
            self._pings.repeat(engine, ping, now)

    def _restored(self, engine: Engine, num_closed: int) -> None:
        """Take an engine back that answers again on its old link: it was never gone, its connection was.

        Not if another connection has ended since it was asked (``num_closed`` of them then): a host that is back
        delivers the question with what the lost connection had left in its system's buffers.
        """
        if engine.link.num_closed != num_closed:
            return
        # Late reports may have come of what it has just aborted, and a later one may have gone to a frontend that it
        # took for gone: nothing runs there for us.
        engine.load.report(0, 0)
        self._news.append(EngineCoreOutputs(engine.index, scheduler_stats=SchedulerStats()))
        engine.link.settle()
        self._engines.became_ready(engine)

    def _question(self, engine: Engine, now: float) -> None:
        """Find out whether a newcomer is an engine's next incarnation, or its rank was started twice."""
        ping = self._pings.get(engine.index)
        if ping is not None and ping.cause is not None:
            return  # asked already
        limit = self._config.heartbeat_timeout_s
        cause = f"another process says HELLO for its rank, and it did not answer for {limit:g} s"
        if not self._pings.ask(engine, now + limit, functools.partial(self._refuse, engine), cause):
            self._engines.lost(EngineDeath(engine.index, CONNECTION_LOST))

    def _refuse(self, engine: Engine) -> None:
        del self._newcomers[engine.index]
        logger.error(
            "engine=%d was started twice: another process says HELLO for this rank, and the one that is here answers. "
            "The newcomer gets no INIT; end it, or give it another rank",
            engine.index,
        )

    def _greet(self, engine: Engine, now: float) -> None:
        """Give an engine's next incarnation a link of its own, and send INIT."""
        index, frames = engine.index, self._newcomers.pop(engine.index)
        assert self._reception is not None, "there is no handshake socket without a reception"
        assert self._resources.handshake_socket is not None
        try:
            link = self._reception.open_link(index)
        except OSError as exc:
            logger.error("engine=%d is not taken back: %s", index, exc)
            return
        startup = EngineStartup({index: self._reception.expected(index, link)}, max_model_len=self._max_model_len)
        try:
            reply = startup.on_handshake(*frames)
            assert reply is not None, "HELLO is answered with INIT"
            send_message(self._resources.handshake_socket, (engine.identity, reply))
        except (EngineStartupError, zmq.ZMQError) as exc:
            logger.error("engine=%d is not taken back: %s", index, exc)
            link.close()
            return
        self._close_link(engine.link)
        engine.use_link(link)
        engine.is_haunted = False
        engine.stale.clear()
        self._inbox.links = (*self._inbox.links, link)
        self._starting[index] = startup
        if engine.is_ours:
            self._give_up_at[index] = now + self._config.ready_timeout_s
        else:
            self._await_return(engine, now, self._config.ready_timeout_s)
        if engine.state is not EngineState.STARTING:
            self._engines.starts_anew(engine)

    def _close_link(self, link: Link) -> None:
        """Close what no incarnation uses any longer."""
        self._inbox.links = tuple(each for each in self._inbox.links if each is not link)
        link.close()

    def welcome(self, engine: Engine, ready: Ready) -> None:
        """Have an engine take requests, as what it says that it is.

        Here, and nowhere else, the death of its last incarnation is over. Its cause can still be read.
        """
        self._introduce(engine, ready)
        engine.link.settle()
        self._engines.became_ready(engine)

    def remember(self, engine: Engine, ready: Ready, now: float) -> None:
        """Await an engine that was another client's, on the link it has: it takes requests once it answers there."""
        self._introduce(engine, ready)
        engine.is_haunted = True
        self._await_return(engine, now, self._config.ready_timeout_s)  # as long as the start of any other
        self._engines.is_away(engine)

    def _introduce(self, engine: Engine, ready: Ready) -> None:
        engine.use_profile(ready.profile)
        engine.ready = ready.response
        self._apply_ready_responses()
        engine.has_been_ready = True
        if self._memory is not None:
            self._memory.remember(self._engines)

    def _apply_ready_responses(self) -> None:
        responses = [each.ready for each in self._engines if each.ready is not None]
        apply_ready_responses(self._config, responses, max_model_len=self._max_model_len)

    def _await_return(self, engine: Engine, now: float, at_least_s: float = 0.0) -> None:
        limit = self._config.engine_return_timeout_s
        self._give_up_at[engine.index] = math.inf if limit is None else now + max(limit, at_least_s)

    def _give_up(self, engine: Engine) -> None:
        if engine.is_ours and self.launcher is not None:
            self._give_up_start(engine)
            return
        cause = engine.death.cause if engine.death is not None else "an earlier frontend had it"
        limit = self._config.engine_return_timeout_s
        if (startup := self._starting.pop(engine.index, None)) is not None:
            why = f"another process took its place and is not ready: {startup.missing()}"
        else:
            why = f"it did not return within {limit:g} s"
        self._engines.given_up(EngineDeath(engine.index, f"{cause}; {why}"))

    def _give_up_start(self, engine: Engine) -> None:
        """Take an engine that was started again and does not come up for dead; it may be started once more."""
        assert self.launcher is not None, "it was started"
        startup = self._starting.get(engine.index)
        missing = startup.missing() if startup is not None else f"engine {engine.index} has not said HELLO"
        log_tail = self.launcher.log_tail(engine.index)
        self._engines.lost(EngineDeath(engine.index, f"it does not come up: {missing}", None, log_tail))
        if engine.state is EngineState.DEAD:
            stop = functools.partial(self.launcher.stop, engine.index, 0.0)  # waits for its end
            threading.Thread(target=stop, name="enginewire-stop-engine", daemon=True).start()

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
