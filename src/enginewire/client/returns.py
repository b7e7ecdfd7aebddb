"""How engines come back: over the link that they had, or as a next incarnation with a link of its own.

Three ways lead to an engine that takes requests again. Its connection was lost and is there again: it answers a *ping*.
It was started anew, by us or by somebody else: it says HELLO on the handshake socket, which stays open for that. Or
its process started anew behind addresses that somebody else chose: it says ready on the link that it had, and then
answers a ping there, too.

Source: "Two ways back" in the notes on remote engines; defects 21, 36.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import zmq

from enginewire.client.engines import Engine, Engines, EngineState
from enginewire.client.inbox import Arrival, Inbox
from enginewire.client.link import Link
from enginewire.client.outbox import Outbox
from enginewire.client.pings import REPEAT_S, Pings
from enginewire.client.reception import Reception
from enginewire.client.remembered import Memory
from enginewire.client.resources import BackgroundResources
from enginewire.client.startup import (
    EngineStartup,
    Ready,
    apply_ready_responses,
    not_expected,
    refusal,
)
from enginewire.config import EngineConfig
from enginewire.errors import DecodeError, EngineDeath, EngineStartupError
from enginewire.transport.sockets import send_message
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import describe_identity, engine_index_of
from enginewire.wire.handshake import HandshakeMessage
from enginewire.wire.messages import EngineCoreOutputs, SchedulerStats

if TYPE_CHECKING:
    from enginewire.engine.spec import EngineSpec
    from enginewire.host.launcher import EngineLauncher

logger = logging.getLogger(__name__)

CONNECTION_LOST: Final = (
    "the connection to it was lost; its process ended, or its host is gone or silent; its log is on that host"
)


class Returns:
    """Takes engines back, and new ones in. Belongs to the lookout, which says when, and under which lock.

    Args:
        config: of the client; what engines say of themselves is written into it.
        max_model_len: what was asked for.
        reception: makes links for engines that are restarted; ``None``: somebody else does the handshake.
        memory: is told of each engine that becomes ready, for a frontend that comes after this one.
        launcher: starts engines of ours; ``None``: somebody else starts them.
        specs: what it starts, by rank.

    Attributes:
        held: ranks that take no requests yet, although they are ready: others are to be ready with them.
        pings: questions to engines, the lookout's among them.
        news: what is to be said to the consumer.
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
        self._memory = memory
        self.launcher = launcher
        self.specs = specs
        self.held: frozenset[int] = frozenset()
        self.pings = Pings(inbox.calls, outbox)
        self.news: deque[Arrival] = deque()
        self._starting: dict[int, EngineStartup] = {}
        self._newcomers: dict[int, list[bytes]] = {}
        """HELLOs of ranks that have an engine, or had one."""
        self._give_up_at: dict[int, float] = {}
        self._dismissed: set[int] = set()
        """Ranks that were taken out, whose last words may still be on their way."""
        self._handshake_decoder = MsgpackDecoder(HandshakeMessage)

    # What engines say of themselves.

    def take_handshake(self, frames: list[bytes]) -> None:
        """Take a message of the handshake socket, of an engine that was ready once or should have been."""
        index = engine_index_of(frames[0])
        if index in self._dismissed:
            return
        try:
            if len(frames) != 2:
                raise DecodeError(f"it has {len(frames)} frames")
            message = self._handshake_decoder.decode(frames[1:])
            if index is None or self._engines.get(index) is None:
                self._refuse(frames, not_expected(frames[0], (engine.index for engine in self._engines)))
            elif message.status == "HELLO":
                self._newcomers[index] = frames
            elif index in self._starting:
                self._starting[index].on_handshake(*frames)
        except (DecodeError, EngineStartupError) as exc:
            self._inbox.drop(f"a handshake message of {describe_identity(frames[0])}: {exc}")

    def take_ready(self, index: int, frames: list[bytes]) -> None:
        """Take a ready response, which an engine sends on its link."""
        startup = self._starting.get(index) or EngineStartup({index: None}, max_model_len=self._max_model_len)
        try:
            startup.on_ready_response(*frames)
        except EngineStartupError as exc:
            self._inbox.drop(str(exc))
            return
        if index not in self._starting:  # it was not greeted, and came back to the link that it had
            logger.warning("engine %s was restarted: it says ready again; requests in flight are lost", index)
            self._starting[index] = startup
            self.pings.drop(index)  # an answer that is still to come would be the former's
            self._engines[index].link.starts_anew()
            self._engines.lost(EngineDeath(index, "it was restarted"), is_back=True)

    # What follows.

    def act_on(self, engine: Engine, now: float) -> None:
        """Do what is next for an engine, now at the monotonic second ``now``."""
        index = engine.index
        if engine.state is EngineState.LEAVING:
            return
        if self.is_up(index):
            if index in self.held:
                return
            ready = self._starting.pop(index).ready_of(index)
            if engine.state is EngineState.STARTING:
                self.welcome(engine, ready)
            else:
                self._await_answer(engine, ready, now)
                self._call_back(engine, now)
        elif engine.state is EngineState.READY:
            if index in self._newcomers:
                self._question(engine, now)
            elif engine.stale:
                self._abort_stale(engine, now)
        elif engine.is_ours and not engine.is_running:
            if engine.restart_at is not None and now >= engine.restart_at:
                self._start_again(engine, now)
        elif index in self._newcomers:
            self._greet(engine, now)
        elif engine.state is not EngineState.DEAD and now > self._give_up_at[index]:
            self._give_up(engine)
        elif engine.state is EngineState.LOST and index not in self._starting:
            self._call_back(engine, now)

    def was_lost(self, engine: Engine, now: float) -> None:
        """Await an engine that was lost, as long as the configuration says."""
        self.pings.drop(engine.index)
        if engine.is_ours and not engine.is_running:  # so nobody is on the way any longer
            self._starting.pop(engine.index, None)
            self._newcomers.pop(engine.index, None)
        self._await(engine, now)

    def _await(self, engine: Engine, now: float, at_least_s: float = 0.0) -> None:
        limit = self._config.engine_return_timeout_s
        self._give_up_at[engine.index] = math.inf if limit is None else now + max(limit, at_least_s)

    # Over the link that it had.

    def _call_back(self, engine: Engine, now: float) -> None:
        """Ask an engine that was lost whether it is there again; have it abort what it still runs for nobody.

        One after the other. What is sent while one connection takes another's place may go into the old one and be
        lost, although the next message arrives; after an answer there is only the new one.
        """
        if (ping := self.pings.get(engine.index)) is not None:
            if now >= ping.repeat_at:
                self.pings.repeat(engine, ping, now)
        elif engine.stale:
            self._ask(engine, now, lambda now: self._abort_stale(engine, now, lambda: self._restored(engine)))
        else:
            self._ask(engine, now, lambda _: self._restored(engine))

    def _ask(self, engine: Engine, now: float, on_answer: Callable[[float], None]) -> None:
        """Ask an engine whether it lives.

        An answer does not count if a connection has ended since: it may have taken along what was sent with the
        question. And a host that is back delivers what the lost connection had left in its system's buffers.
        """
        link, num_closed = engine.link, engine.link.num_closed

        def check(now: float) -> None:
            if link.num_closed == num_closed:
                on_answer(now)

        self.pings.ask(engine, now + self._config.heartbeat_timeout_s, check, repeat_at=now + REPEAT_S)

    def _abort_stale(self, engine: Engine, now: float, then: Callable[[], None] = lambda: None) -> None:
        """Abort what an engine may still be running for nobody; the answer to a ping behind that says that it has."""
        if self.pings.get(engine.index) is not None:
            return
        ids = list(engine.stale)
        with contextlib.suppress(zmq.ZMQError):  # its connection is just being lost
            self._outbox.abort(engine, ids)

        def on_answer(_: float) -> None:
            engine.stale.difference_update(ids)
            then()

        self._ask(engine, now, on_answer)

    def _restored(self, engine: Engine) -> None:
        """Take an engine back that answers on its old link: itself, or the process that has taken its place."""
        # Late reports may have come of what it has just aborted, and a later one may have gone to a frontend that it
        # took for gone: nothing runs there for us.
        engine.load.report(0, 0)
        self.news.append(EngineCoreOutputs(engine.index, scheduler_stats=SchedulerStats()))
        engine.link.settle()
        self._engines.became_ready(engine)

    def remember(self, engine: Engine, ready: Ready, now: float) -> None:
        """Await an engine that was another client's, on the link it has."""
        engine.is_haunted = True
        self._await_answer(engine, ready, now)

    def _await_answer(self, engine: Engine, ready: Ready, now: float) -> None:
        """Await an engine that is ready, on the link it has: it takes requests once it answers there.

        Its outputs come on a connection of which nothing else is known. After an answer there is one.
        """
        self._introduce(engine, ready)
        self._await(engine, now, self._config.ready_timeout_s)  # as long as the start of any other
        self._engines.is_away(engine)

    # Started anew.

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
        self._dismissed.discard(engine.index)
        self._engines.starts_anew(engine)
        try:
            self.launcher.start(self.specs[engine.index])
        except EngineStartupError as exc:
            self._engines.lost(EngineDeath(engine.index, str(exc)))

    def open_link(self, index: int) -> Link:
        """Bind a link for an engine that is to be started. Raises :class:`OSError`."""
        assert self._reception is not None, "who starts engines receives them"
        return self._reception.open_link(index)

    def _question(self, engine: Engine, now: float) -> None:
        """Find out whether a newcomer is an engine's next incarnation, or its rank was started twice."""
        ping = self.pings.get(engine.index)
        if ping is not None and ping.cause is not None:
            return  # asked already
        limit = self._config.heartbeat_timeout_s
        cause = f"another process says HELLO for its rank, and it did not answer for {limit:g} s"
        if not self.pings.ask(engine, now + limit, lambda _: self._refuse_twin(engine), cause):
            self._engines.lost(EngineDeath(engine.index, CONNECTION_LOST))

    def _refuse_twin(self, engine: Engine) -> None:
        why = f"engine={engine.index} was started twice: the one that is here answers; give the newcomer another rank"
        self._refuse(self._newcomers.pop(engine.index), why)

    def _refuse(self, frames: list[bytes], why: str) -> None:
        """Say, in the log and to an engine of ours, why it is not taken. One of vLLM's waits in vain."""
        logger.error("an engine that says HELLO is refused: %s", why)
        reply = refusal(self._handshake_decoder.decode(frames[1:]), why)
        if reply is not None and self._resources.handshake_socket is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has gone
                send_message(self._resources.handshake_socket, (frames[0], reply))

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
        except EngineStartupError as exc:
            self._refuse(frames, str(exc))
            link.close()
            return
        except zmq.ZMQError as exc:
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
            self._await(engine, now, self._config.ready_timeout_s)
        if engine.state is not EngineState.STARTING:
            self._engines.starts_anew(engine)

    def is_up(self, index: int) -> bool:
        """Whether an engine that was started is ready, and does not take requests yet."""
        return index in self._starting and self._starting[index].is_complete

    def welcome(self, engine: Engine, ready: Ready) -> None:
        """Have an engine take requests, as what it says that it is.

        Here, and nowhere else, the death of its last incarnation is over. Its cause can still be read.
        """
        self._introduce(engine, ready)
        engine.link.settle()
        self._engines.became_ready(engine)

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

    # Given up.

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

    def dismiss(self, engine: Engine) -> None:
        """Forget an engine whose process has been stopped."""
        index = engine.index
        self._dismissed.add(index)
        for memory in (self._starting, self._newcomers, self._give_up_at, self.specs):
            memory.pop(index, None)
        self.pings.drop(index)
        self._close_link(engine.link)
        self._engines.remove(engine)
        self._apply_ready_responses()

    def _close_link(self, link: Link) -> None:
        """Close what no incarnation uses any longer."""
        self._inbox.links = tuple(each for each in self._inbox.links if each is not link)
        link.close()
