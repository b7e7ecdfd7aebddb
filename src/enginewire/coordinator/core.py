"""``Coordinator``: what the coordinator knows and decides. No socket, thread or clock.

Statistics: engines report their counts, frontends get all of them in one message. Waves, for engines that run in
lock-step: engines rest together when nobody has work, and a request wakes them together. Source: protocol section J;
defects 9, 15, 29 to 32 of section L are not repeated.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from enginewire.errors import DecodeError
from enginewire.wire.codec import MsgpackDecoder, array_length
from enginewire.wire.frames import ALL_ENGINES_LISTEN, START_DP_WAVE, engine_index_of
from enginewire.wire.messages import EngineCoreOutputs
from enginewire.wire.profile import V0_25, V0_32, profile_named
from enginewire.wire.stats import SchedulerStats

logger = logging.getLogger(__name__)

SCALE: Final = "SCALE_ELASTIC_EP"

MIN_INTERVAL_S: Final = 0.1
"""Changed counts are published at most so often: frontends count their own requests in between."""

MAX_INTERVAL_S: Final = 5.0
"""Unchanged counts are published so often, for frontends that missed a message."""

STEP_GRACE_S: Final = 0.05
"""Engines in lock-step report the same step within this time; a publication waits for all of them."""

MAX_ENGINES: Final = 1 << 16
"""Identities have two bytes."""

MAX_NUMBER: Final = 1 << 53
"""No wave and no count is larger; such a number would be passed on to everybody."""

Counts = tuple[int, int, float]
"""Waiting, running, share of the KV cache in use."""

NOTHING: Final[Counts] = (0, 0, 0.0)

_requests: Final = msgspec.msgpack.Decoder(tuple[Any, int])


class Coordinator:
    """The state of one deployment.

    Args:
        size: number of engines.
        lock_step: they run in lock-step, so there are waves. Without, wave messages are ignored.
        wire_version: of the frontends that listen, which decides the form of the counts: ``[waiting, running]`` or,
            from 0.32 on, ``[waiting, running, kv_cache_usage]``. ``None``: of the first engine that reports; until then
            no counts are published, which every frontend understands.
        to_engines: sends a message of one or two frames to every engine.
        to_frontends: sends a message to every frontend.
    """

    def __init__(
        self,
        size: int,
        *,
        lock_step: bool,
        wire_version: str | None = None,
        to_engines: Callable[[list[bytes]], object],
        to_frontends: Callable[[bytes], object],
    ) -> None:
        self.lock_step = lock_step
        self.current_wave = 0
        self.engines_running = False
        self.is_ready = False
        self._to_engines = to_engines
        self._to_frontends = to_frontends
        self._counts: list[Counts] = [NOTHING] * size
        self._with_kv_usage = None if wire_version is None else profile_named(wire_version) is V0_32
        self._num_subscribers = 0
        # Somebody asked for a start: counts of this wave are then a sign that the engines run.
        self._is_start_asked = False
        self._step = (0, 0)
        self._is_step_unpublished = False
        self._is_changed = False
        self._changed_at = 0.0
        self._published_at = -math.inf
        self._earlier_step: list[Counts] | None = None
        self._outputs = MsgpackDecoder(EngineCoreOutputs)

    @property
    def size(self) -> int:
        """The number of engines."""
        return len(self._counts)

    def subscribed(self, num_subscribers: int, now: float) -> None:
        """Learn that an engine listens.

        Once all do, and again whenever one comes later (it was restarted, or added), READY goes out, so that nobody
        waits for it in vain. A late one that belongs to running engines starts with them.

        Args:
            num_subscribers: how many listen now, without those that left.
            now: seconds, as everywhere.
        """
        self._num_subscribers = num_subscribers
        if not self.is_ready and num_subscribers < self.size:
            return
        if not self.is_ready:
            logger.info("all %d engines listen", self.size)
            self._changed(now)
        self.is_ready = True
        self._to_engines([ALL_ENGINES_LISTEN])
        if self.engines_running:
            self._start_wave(exclude=None)

    def reported(self, frames: list[bytes], now: float) -> int | None:
        """Take a message from an engine: counts, the end of a wave, or a request that came too late for one.

        Returns:
            the engine's index, ``None`` if the message was dropped.
        """
        try:
            outputs = self._outputs.decode(frames)
        except DecodeError as exc:
            logger.warning("an engine sent what is no report; dropped: %s", exc)
            return None
        index = outputs.engine_index
        if index not in range(self.size):
            logger.warning("engine %d reports, and there are %d engines; dropped", index, self.size)
            return None
        if not _is_sound(outputs):
            logger.warning("engine %d reports what cannot be: %s; dropped", index, reprlib.repr(outputs))
            return None
        self._learn_version(array_length(frames[0]))
        if (stats := outputs.scheduler_stats) is not None:
            waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            counts = (waiting, stats.num_running_reqs, stats.kv_cache_usage)
            self._take_counts(index, counts, stats.current_wave, stats.step_counter, now)
        if self.lock_step and outputs.wave_complete is not None:
            self._wave_completed(outputs.wave_complete)
        if self.lock_step and outputs.start_wave is not None:
            self._wave_started(outputs.start_wave, index)
        return index

    def frontend_joined(self, now: float) -> None:
        """Learn that a frontend listens; it need not wait for the next change to know how things are."""
        self._changed(now)

    def engine_gone(self, index: int, now: float) -> None:
        """Learn that an engine's connection closed: what it had to do is not there any more."""
        if index < self.size and self._counts[index] != NOTHING:
            self._counts[index] = NOTHING
            self._changed(now)

    def asked(self, payload: bytes, now: float) -> None:
        """Take a message from a frontend: FIRST_REQ ``[target, wave]``, or ``["SCALE_ELASTIC_EP", size]``."""
        try:
            target, number = _requests.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            logger.warning("a frontend sent what is no request; dropped: %s", exc)
            return
        if isinstance(target, bytes):  # vLLM's frontends send the identity (defect 9)
            target = engine_index_of(target)
        if target == SCALE and 1 <= number <= MAX_ENGINES:
            self._resize(number, now)
        elif (target is None or type(target) is int) and 0 <= number <= MAX_NUMBER:
            self._first_request(target if target in range(self.size) else None, number)
        else:
            logger.warning("a frontend sent [%s, %d]; dropped", reprlib.repr(target), number)

    def next_publication(self, now: float) -> float:
        """Return in how many seconds :meth:`publish` is to be called; infinite before the engines are ready."""
        if not self.is_ready:
            return math.inf
        if self._earlier_step is not None:
            due = self._published_at + MIN_INTERVAL_S
        elif self._is_changed:
            due = self._published_at + MIN_INTERVAL_S
            if self.lock_step or math.isinf(due):
                due = max(due, self._changed_at + STEP_GRACE_S)
        else:
            due = self._published_at + MAX_INTERVAL_S
        return max(0.0, due - now)

    def publish(self, now: float) -> None:
        """Send all counts to the frontends."""
        if self._earlier_step is not None:
            counts, self._earlier_step = self._earlier_step, None
        else:
            counts, self._is_changed, self._is_step_unpublished = self._counts, False, False
        self._published_at = now
        self._publish(counts)

    def _publish(self, counts: list[Counts] | None, *, running: bool | None = None) -> None:
        shown: Any = None
        if counts is not None and self._with_kv_usage is not None:
            shown = counts if self._with_kv_usage else [(waiting, running) for waiting, running, _ in counts]
        state = self.engines_running if running is None else running
        self._to_frontends(msgspec.msgpack.encode((shown, self.current_wave, state)))

    def _changed(self, now: float) -> None:
        self._is_changed = True
        self._changed_at = now

    def _take_counts(self, index: int, counts: Counts, wave: int, step: int, now: float) -> None:
        if self.lock_step and (wave, step) > self._step:
            if self._is_step_unpublished and self._earlier_step is None:
                self._earlier_step = list(self._counts)  # some engines' counts of the new step are still to come
            self._step = (wave, step)
            self._is_step_unpublished = True
            self._changed(now)
        elif counts != self._counts[index] and not self._is_changed:
            self._changed(now)
        self._counts[index] = counts
        if self.lock_step and self._is_start_asked and counts[1] and wave >= self.current_wave:
            self.current_wave = wave
            self.engines_running = True

    def _learn_version(self, num_elements: int) -> None:
        with_kv_usage = num_elements > len(V0_25.outputs.__struct_fields__)
        if self._with_kv_usage is None:
            self._with_kv_usage = with_kv_usage
            logger.info("frontends get counts in the form of %s", V0_32 if with_kv_usage else V0_25)

    def _first_request(self, target: int | None, wave: int) -> None:
        """Wake the engines: a frontend sends a request to one of them and believes that they rest.

        They count as running only once they say so: they may be paused, and then this is to be tried again with the
        next request (defect 31).
        """
        if not self.lock_step or (self.engines_running and wave <= self.current_wave):
            return
        self._is_start_asked = True
        is_stale = wave < self.current_wave
        self.current_wave = max(self.current_wave, wave)
        self._start_wave(exclude=None if is_stale else target)
        if not self._with_kv_usage:  # 0.25: the other frontends need not ask as well
            self._publish(None, running=True)

    def _wave_completed(self, wave: int) -> None:
        if wave < self.current_wave:
            return
        self.current_wave = wave + 1
        self.engines_running = self._is_start_asked = False
        self._publish(None)

    def _wave_started(self, wave: int, index: int) -> None:
        if wave < self.current_wave or (wave == self.current_wave and self.engines_running):
            return
        self.current_wave = wave
        self.engines_running = True
        self._start_wave(exclude=index)
        self._publish(None)

    def _start_wave(self, exclude: int | None) -> None:
        self._to_engines([START_DP_WAVE, msgspec.msgpack.encode((self.current_wave, exclude))])

    def _resize(self, size: int, now: float) -> None:
        logger.info("there are %d engines now, there were %d", size, self.size)
        del self._counts[size:]
        self._counts += [NOTHING] * (size - self.size)
        self._earlier_step = None
        self._changed(now)
        if not self.is_ready and self._num_subscribers:
            self.subscribed(self._num_subscribers, now)


def _is_sound(outputs: EngineCoreOutputs) -> bool:
    """Whether the numbers in a report can be what they say."""
    stats = outputs.scheduler_stats or SchedulerStats()
    numbers = (
        stats.num_waiting_reqs,
        stats.num_skipped_waiting_reqs,
        stats.num_running_reqs,
        stats.current_wave,
        outputs.wave_complete or 0,
        outputs.start_wave or 0,
    )
    return all(0 <= number <= MAX_NUMBER for number in numbers) and 0 <= stats.kv_cache_usage <= 1
