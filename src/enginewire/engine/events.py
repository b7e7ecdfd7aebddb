"""What goes into a busy loop, as events, and where its messages go."""

from __future__ import annotations

import queue
from enum import Enum, auto
from typing import Any, Protocol

from enginewire.wire.messages import EngineCoreOutputs


class EventKind(Enum):
    """What happened; with each comes its argument."""

    ADD = auto()
    """A :class:`Request`, checked."""
    ABORT = auto()
    """A list of request ids."""
    FRONTEND_LOST = auto()
    """A client index: nobody is there any more who would want what its requests bring."""
    START_WAVE = auto()
    """The coordinator says that ranks in lock-step are to run: the wave, and the rank that knows already, if any."""
    UTILITY = auto()
    """A :class:`UtilityCall` that is not answered at once."""
    STEP_DONE = auto()
    """The :class:`StepOutput` of a step in another process."""
    STOP = auto()
    """Told to stop; ``None``."""
    FAILED = auto()
    """The engine cannot go on: an exception."""


Event = tuple[EventKind, Any]
Events = queue.SimpleQueue[Event]


class Output(Protocol):
    """Where messages for clients go: the output thread. Safe in any thread."""

    def put(self, client_index: int, message: EngineCoreOutputs, method: str = "") -> None:
        """Hand over a message, without waiting; ``method`` is the utility that it answers."""

    def catch_up(self) -> None:
        """Wait for the output thread if it is far behind."""
