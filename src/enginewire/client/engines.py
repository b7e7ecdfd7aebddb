"""The engines of a client: their state, what they are working on, what happened to them.

An engine comes and goes in *incarnations*: it dies or is lost, and another process, or the same one over a new
connection, takes its place. Each incarnation has a :class:`Link` of its own, a first cause of death that sticks, and
the requests that were sent to it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from enginewire.client.balancer import EngineLoad, LoadBalancer
from enginewire.client.link import Link
from enginewire.client.restarts import Restarts
from enginewire.client.status import EngineStatus
from enginewire.errors import EngineDeath
from enginewire.wire.capabilities import EVERYTHING, Capabilities, EngineInfo
from enginewire.wire.codec import OutputsDecoder
from enginewire.wire.frames import engine_identity, heads_of_answers, heads_of_outputs
from enginewire.wire.profile import V0_25, WireProfile

if TYPE_CHECKING:
    from enginewire.wire.handshake import EngineCoreReadyResponse
    from enginewire.wire.messages import EngineCoreRequest

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    """Gone, and its return is awaited."""
    DEAD = "dead"
    LEAVING = "leaving"
    """Gets no requests any longer, and is taken out once those that it has are done."""
    REMOVED = "removed"


class Engine:
    """One engine as this client sees it.

    Attributes:
        index: global rank.
        identity: the same on sockets.
        is_ours: we started its process, and its manager sees it end.
        link: of this incarnation.
        state, death: how it is, and why it is gone or was the last time.
        num_deaths: how often it was lost.
        restarts: when it is started again, if it is ours.
        restart_at: the moment of that, while it is due.
        is_running: ours: its process has not ended, as far as we know.
        num_restarts: how often it was.
        profile: which layout it speaks.
        ready: what it said of itself; ``None`` too if that was nothing.
        has_been_ready: whether it ever was.
        live: ids of its requests whose last output has not been taken yet, in the order in which they were sent.
        stale: ids of requests that ended here with a loss or were left by another client, and that it may still run.
        is_haunted: it may send outputs for ids that are not live: from before a loss, or of another client.
        in_doubt: a message was dropped that may have been the last for one of its requests.
        load: what a balancer sees of it.
        num_moved, num_lost: requests that went on elsewhere, and that failed, because it was gone.
    """

    def __init__(self, index: int, link: Link, *, is_ours: bool, restarts: Restarts | None = None) -> None:
        self.index = index
        self.identity = engine_identity(index)
        self.is_ours = is_ours
        self.state = EngineState.STARTING
        self.death: EngineDeath | None = None
        self.num_deaths = 0
        self.restarts = restarts or Restarts()
        self.restart_at: float | None = None
        self.is_running = is_ours
        self.num_restarts = 0
        self.ready: EngineCoreReadyResponse | None = None
        self.has_been_ready = False
        self.live: dict[str, None] = {}
        self.stale: set[str] = set()
        self.is_haunted = False
        self.in_doubt = False
        self.load = EngineLoad(index)
        self.num_moved = 0
        self.num_lost = 0
        self.use_link(link)

    def use_link(self, link: Link) -> None:
        """Reach it over ``link`` from now on."""
        self.link = link
        link.engines.append(self)
        link.sole = self if len(link.engines) == 1 else None
        link.heads |= heads_of_outputs(self.index)
        link.answer_heads |= heads_of_answers(self.index)
        self.use_profile(V0_25)

    def use_profile(self, profile: WireProfile) -> None:
        """Speak this layout with it, over this link, from now on."""
        self.profile = profile
        self.link.decoders[self.index] = OutputsDecoder(profile.received_outputs)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, as it says; one that says nothing is trusted to refuse what it cannot."""
        info = None if self.ready is None else self.ready.enginewire
        return info.capabilities if isinstance(info, EngineInfo) else EVERYTHING

    def __repr__(self) -> str:
        return f"<Engine {self.index} {self.state} live={len(self.live)}>"


class Engines:
    """All engines of a client, by rank, and what happened to them that nobody has been told yet.

    Attributes:
        ready: those that take requests.
        owners: by request id, the engine that has a live request of this client, or had it last.
        death: why the client is dead: the last of its engines died, and none is awaited.
        untold: deaths and losses whose requests and calls have not been failed yet. The receiver does that, after
            what the engine sent before.
        on_change: told each change of state.
    """

    def __init__(self, return_timeout_s: float | None) -> None:
        self._engines: dict[int, Engine] = {}
        self._return_timeout_s = return_timeout_s
        # Guards states, `ready` and `death`, which change together. Reentrant: see UtilityCalls.
        self._lock = threading.RLock()
        self.ready: tuple[Engine, ...] = ()
        self.owners: dict[str, Engine] = {}
        self.death: EngineDeath | None = None
        self.untold: deque[tuple[Engine, EngineDeath]] = deque()
        self.on_change: Callable[[EngineStatus], None] | None = None

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    def add(self, engine: Engine) -> None:
        """Take in an engine, which is starting."""
        with self._lock:
            self._engines = {**self._engines, engine.index: engine}  # others may be going through it

    def leaves(self, engine: Engine) -> None:
        """Note that an engine is being taken out: it gets no requests any longer, and is not started again."""
        with self._lock:
            self._enter(engine, EngineState.LEAVING)
        logger.info("engine=%d leaves num_requests=%d", engine.index, len(engine.live))
        self._tell(engine)

    def stays(self, engine: Engine, state: EngineState) -> None:
        """Note that an engine is not taken out after all, and is what it was before, or what follows if it ended."""
        with self._lock:
            if engine.state is EngineState.DEAD and state is not EngineState.DEAD and engine.death is not None:
                state, engine.death = self._restart_or_give_up(engine, engine.death)
            self._enter(engine, state)
        self._tell(engine)

    def remove(self, engine: Engine) -> None:
        """Forget an engine that is gone by our own will."""
        with self._lock:
            self._engines = {index: each for index, each in self._engines.items() if each is not engine}
            engine.state = EngineState.REMOVED
            for other in self:
                self._enter(other, other.state)
        logger.info("engine=%d is taken out", engine.index)
        self._tell(engine)

    def get(self, index: int | None) -> Engine | None:
        """Return the engine of this rank, ``None`` if it is not ours."""
        return None if index is None else self._engines.get(index)

    def pick(self, request: EngineCoreRequest, balancer: LoadBalancer, among: Sequence[Engine]) -> Engine:
        """Have a balancer choose the engine that gets a request, which the caller sends."""
        if len(among) == 1:
            return among[0]
        for engine in among:
            engine.load.in_flight = len(engine.live)
        engine = self._engines[balancer.pick(request, [engine.load for engine in among])]
        engine.load.add()
        return engine

    def may_return(self, engine: Engine) -> bool:
        """Whether it can come back by itself once it is lost: somebody else starts it, and we wait."""
        return not engine.is_ours and self._return_timeout_s != 0

    def became_ready(self, engine: Engine) -> None:
        """Note that an engine takes requests."""
        with self._lock:
            engine.restarts.serves(time.monotonic())
            self._enter(engine, EngineState.READY)
        if engine.num_deaths:
            logger.warning("engine=%d is back", engine.index)
        self._tell(engine)

    def starts_anew(self, engine: Engine) -> None:
        """Note that another incarnation of an engine that was lost is starting."""
        with self._lock:
            self._enter(engine, EngineState.STARTING)
        self._tell(engine)

    def lost(self, death: EngineDeath, *, is_back: bool = False) -> bool:
        """Note that an engine died or was lost, from any thread; ``False`` if that is known. The first cause sticks.

        Args:
            is_back: its next incarnation is here already.
        """
        engine = self._engines[death.engine_index]
        with self._lock:
            is_told = engine.state is EngineState.DEAD or (engine.state is EngineState.LOST and not engine.is_running)
            if self.death is not None or is_told:
                return False
            if engine.is_ours:
                engine.is_running = is_back
            if is_back or self.may_return(engine):
                state = EngineState.LOST
            else:
                state, death = self._restart_or_give_up(engine, death)
            engine.death = death
            engine.num_deaths += 1
            self.untold.append((engine, death))
            self._enter(engine, state)
        if self.death is None:  # otherwise every caller hears of it
            logger.error("engine=%d is %s cause=%r", engine.index, engine.state, death.cause)
        self._tell(engine)
        return True

    def _restart_or_give_up(self, engine: Engine, death: EngineDeath) -> tuple[EngineState, EngineDeath]:
        if engine.state is EngineState.LEAVING:
            return EngineState.DEAD, death
        engine.restart_at = engine.restarts.ended(time.monotonic())
        if engine.restart_at is not None:
            return EngineState.LOST, death
        if (count := engine.restarts.in_a_row) > 0:
            times = "once" if count == 1 else f"{count} times"
            cause = f"{death.cause}; it was started again {times}, ended each time, and is given up (restart_engine)"
            death = dataclasses.replace(death, cause=cause)
        return EngineState.DEAD, death

    def is_away(self, engine: Engine) -> None:
        """Note that an engine is not connected yet, and that nothing was lost with it."""
        with self._lock:
            self._enter(engine, EngineState.LOST)

    def given_up(self, death: EngineDeath) -> None:
        """Note that a lost engine is not awaited any longer."""
        engine = self._engines[death.engine_index]
        with self._lock:
            engine.death = death
            self._enter(engine, EngineState.DEAD)
        logger.error("engine=%d is %s cause=%r", engine.index, engine.state, death.cause)
        self._tell(engine)

    def _enter(self, engine: Engine, state: EngineState) -> None:
        engine.state = state
        self.ready = tuple(each for each in self if each.state is EngineState.READY)
        if all(each.state is EngineState.DEAD for each in self):
            self.death = engine.death

    def _tell(self, engine: Engine) -> None:
        if self.on_change is not None:
            self.on_change(self.status(engine))

    def first_loss(self) -> EngineDeath | None:
        """Return why the first engine that is away is away."""
        return next((each.death for each in self if each.state is not EngineState.READY and each.death), None)

    def status(self, engine: Engine) -> EngineStatus:
        """Return how an engine is."""
        is_gone = engine.state is EngineState.LOST or (engine.state is EngineState.STARTING and engine.num_deaths > 0)
        return EngineStatus(
            engine.index,
            str(engine.state),
            engine.death,
            0 if engine.state is EngineState.DEAD else len(engine.live),
            engine.num_deaths,
            is_gone and (engine.is_ours or self.may_return(engine)),
            engine.ready,
            engine.num_restarts,
            engine.num_moved,
            engine.num_lost,
        )
