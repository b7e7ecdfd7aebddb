"""``Pings``: asking engines whether they live, with a utility call that every engine answers between two steps."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

from enginewire.client.engines import Engine
from enginewire.client.outbox import Outbox
from enginewire.client.utilities import Call, UtilityCalls
from enginewire.errors import EngineDeath

PING: Final = "is_scheduler_paused"
"""Cheap, without effect, and known to every engine."""

REPEAT_S: Final = 1.0
"""What is sent into a connection that is just being lost is lost with it, and ZeroMQ does not say so."""

Future = concurrent.futures.Future[Any]
OnAnswer = Callable[[float], None]
"""What follows from an answer, at a monotonic second."""


@dataclass(slots=True)
class Ping:
    """A question to an engine, asked once or several times.

    Attributes:
        calls: of one and the same waiter: whichever is answered, the engine lives.
        deadline: when an answer does not count any longer.
        repeat_at: when to ask again.
        cause: of the engine's loss, if it does not answer in time; ``None``: its silence means nothing.
        on_answer: what follows from an answer.
    """

    calls: list[Call[Future]]
    deadline: float
    repeat_at: float
    cause: str | None
    on_answer: OnAnswer

    @property
    def waiter(self) -> Future:
        return self.calls[0].waiter


class Pings:
    """At most one question to each engine. The lookout and the returns share them.

    Args:
        calls: where answers are waited for.
        outbox: through which questions are sent.
    """

    def __init__(self, calls: UtilityCalls, outbox: Outbox) -> None:
        self._calls = calls
        self._outbox = outbox
        self._pings: dict[int, Ping] = {}

    def get(self, index: int) -> Ping | None:
        """Return the question to an engine that is waiting for an answer."""
        return self._pings.get(index)

    def ask(
        self,
        engine: Engine,
        deadline: float,
        on_answer: OnAnswer,
        cause: str | None = None,
        repeat_at: float = math.inf,
    ) -> bool:
        """Ask an engine whether it lives; what was asked before counts no longer. ``False``: it is not connected."""
        self.drop(engine.index)
        call = self.call(engine, PING, concurrent.futures.Future())
        if call is not None:
            self._pings[engine.index] = Ping([call], deadline, repeat_at, cause, on_answer)
        return call is not None

    def repeat(self, engine: Engine, ping: Ping, now: float) -> None:
        """Ask once more. An answer to an earlier call counts as well: a step may take longer than a repetition."""
        call = self.call(engine, PING, ping.waiter)
        if call is not None:
            ping.calls.append(call)
            ping.repeat_at = now + REPEAT_S

    def drop(self, index: int) -> None:
        """Forget what an engine was asked."""
        if (ping := self._pings.pop(index, None)) is not None:
            for call in ping.calls:
                self._calls.forget(call.call_id)

    def call(self, engine: Engine, method: str, waiter: Future) -> Call[Future] | None:
        """Call a utility of one engine; ``None``: it is not connected."""
        call = self._calls.start(method, waiter, engine.index)
        try:
            self._outbox.call(engine, call.call_id, method, ())
        except zmq.ZMQError:
            self._calls.forget(call.call_id)
            return None
        return call

    def look(self, now: float) -> list[EngineDeath]:
        """Do what follows from answers; return the losses that follow from silence."""
        losses = []
        for index, ping in list(self._pings.items()):
            if ping.waiter.done():
                self.drop(index)
                ping.on_answer(now)
            elif now > ping.deadline:
                self.drop(index)
                if ping.cause is not None:
                    losses.append(EngineDeath(index, ping.cause))
        return losses
