"""``EngineStatus``: what users of a client see of its engines."""

from __future__ import annotations

from dataclasses import dataclass

from enginewire.errors import EngineDeath
from enginewire.wire.handshake import EngineCoreReadyResponse


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a client knows of one of its engines.

    Attributes:
        index: global rank.
        state: ``starting``, ``ready``, ``lost`` (its return is awaited), ``dead``, ``leaving`` (to be taken out), or
            ``removed`` (``on_engine_change`` is told: the last of it).
        death: why it is gone, or was the last time; ``None``: it never was.
        num_in_flight: requests of this client that it has.
        num_deaths: how often it died or was lost.
        is_awaited: it is gone and may come back by itself, or is started again.
        ready: what it said of itself when it was ready; ``None``: nothing yet, or nothing at all.
        num_restarts: how often this client started it again.
        num_moved: requests that went on elsewhere, or began anew, after its deaths.
        num_lost: requests that failed with its deaths.
    """

    index: int
    state: str
    death: EngineDeath | None = None
    num_in_flight: int = 0
    num_deaths: int = 0
    is_awaited: bool = False
    ready: EngineCoreReadyResponse | None = None
    num_restarts: int = 0
    num_moved: int = 0
    num_lost: int = 0
