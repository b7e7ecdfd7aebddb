"""``Waves``: when engines that run in lock-step run, and when they rest together. Pure.

Ranks of such a model meet in every step, so one that has nothing to do steps along (a dummy batch) as long as any other
has work. Every :data:`SYNC_INTERVAL` steps they agree; when nobody has work, all stop at the same step. That ends a
*wave*, and the next one has the next number. A request, or word of another rank's, starts it. A pause is agreed on in
the same way, so that no rank stops while others wait for it. Source: protocol sections H and J.4.
"""

from __future__ import annotations

from typing import Final

SYNC_INTERVAL: Final = 16
"""Steps from one agreement to the next; the first is after the first step. It bounds how long engines go on idly, and
is vLLM 0.32's; 0.25's is 32, which nobody can tell on the wire."""

LAST_WAVE: Final = 1 << 53
"""No deployment gets so far: a larger number is a mistake, and taken over it would be everybody's for ever."""


class Waves:
    """One rank's view. Methods that may start a wave return its number if the coordinator is to hear of that.

    Attributes:
        current_wave: the number of the wave that runs, or of the next one.
        is_running: whether this rank has to step.
        is_paused: all ranks have agreed to pause; nothing starts a wave before :meth:`resume`.
        step_counter: steps since the wave began.
    """

    def __init__(self, rank: int) -> None:
        self.current_wave = 0
        self.is_running = False
        self.is_paused = False
        self.step_counter = 0
        self._rank = rank

    def request_added(self, wave: int) -> int | None:
        """Start for a request whose frontend believes that ``wave`` is current, and may be late or early.

        The coordinator hears of it in any case: the reference relies on the frontend's word when the number is right,
        and that may be lost.
        """
        if self.is_paused or self.is_running:
            return None
        if wave <= LAST_WAVE:
            self.current_wave = max(self.current_wave, wave)
        self.is_running = True
        return self.current_wave

    def told_to_start(self, wave: int, excluded: int | None) -> int | None:
        """Start because the coordinator says so (START_DP_WAVE), unless on this rank's own word or for an old wave."""
        if self.is_paused or self.is_running or excluded == self._rank or not self.current_wave <= wave <= LAST_WAVE:
            return None
        self.current_wave = wave
        return self._start()

    def pause_pending(self) -> int | None:
        """Step until all ranks have agreed to pause."""
        return None if self.is_paused or self.is_running else self._start()

    def resume(self) -> int | None:
        """Go on after a pause. All ranks do, and meet at the agreement after the first step."""
        self.is_paused = False
        return self._start()

    def stepped(self) -> bool:
        """Count a step, with requests or without; return whether the ranks have to agree now."""
        self.step_counter += 1
        return (self.step_counter - 1) % SYNC_INTERVAL == 0

    def agreed(self, *, any_has_work: bool, all_pause: bool) -> int | None:
        """Do what all ranks have agreed on: go on, rest, or pause. Returns the wave that is complete, if one is."""
        if any_has_work and not all_pause:
            return None
        self.is_paused = all_pause
        complete = self.current_wave
        self.current_wave += 1
        self.is_running = False
        self.step_counter = 0
        return complete

    def _start(self) -> int | None:
        # One rank speaks for all: vLLM 0.32's coordinator believes that engines run when one of them says so.
        self.is_running = True
        return self.current_wave if self._rank == 0 else None
