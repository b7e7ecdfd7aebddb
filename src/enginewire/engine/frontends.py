"""``Frontend``: what an engine knows of each of its frontends: which layout it speaks, and whether it is there."""

from __future__ import annotations

from typing import Final

from enginewire.errors import DecodeError
from enginewire.wire.codec import array_length
from enginewire.wire.frames import Buffer
from enginewire.wire.profile import V0_25, WireProfile, is_complete_request, profile_of_request

COORDINATOR: Final = -1
"""The client index of the coordinator, where there is one. Its address stands behind those of the frontends."""


class Frontend:
    """One frontend of an engine. The input thread writes what it sees, the output thread reads it.

    Args:
        told: the layout that the configuration asks for; ``None``: that of the frontend's first request.

    Attributes:
        layout: what outputs are encoded in. Before the first request only answers to utility calls are sent, which
            every version reads alike.
        is_here: whether it is connected, as far as anybody watches.
        num_losses: how often its connection was lost. What was queued for it then is worth nothing.
    """

    __slots__ = ("_length", "_told", "is_here", "layout", "num_losses")

    def __init__(self, told: WireProfile | None) -> None:
        self.layout = told or V0_25
        self.is_here = True
        self.num_losses = 0
        self._told = told
        self._length = 0
        """Elements of the first request that told its version by them; 0: none yet."""

    def layout_of_request(self, payload: Buffer) -> WireProfile:
        """Find the layout that an ADD is to be read by; the first one settles what the frontend speaks.

        Raises:
            DecodeError: it is in another layout than the configuration asks for or earlier requests had.
        """
        if not is_complete_request(payload):
            return self._told or self.layout
        length = array_length(payload)
        shown = self.layout if length == self._length else profile_of_request(payload)
        if not self._length:  # outputs, refusals too, go in the layout that it can read
            self.layout, self._length = shown, length
        if shown is not (self._told or self.layout):
            why = f"this engine was told to speak {self._told}" if self._told else f"earlier ones were of {self.layout}"
            raise DecodeError(f"the request is in the layout of {shown}, and {why} (wire_version)")
        return shown

    def lose(self) -> None:
        """Note that its connection is gone. Who comes next may be of another version."""
        self.is_here = False
        self.num_losses += 1
        self._length = 0
