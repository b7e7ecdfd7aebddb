"""What engines send, sorted: utility answers go to their callers, the rest waits for the consumer.

An :class:`Inbox` is shared by a client and its receiver and holds no reference to the client. It counts and drops what
makes no sense: no message ends a receiver (defects 17 to 20).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from enginewire.client.engines import Engine, Engines
from enginewire.client.failover import Failover
from enginewire.client.link import Link
from enginewire.client.utilities import UtilityCalls
from enginewire.config import EngineConfig
from enginewire.errors import DecodeError
from enginewire.wire.codec import NOT_DECODABLE, OutputsDecoder
from enginewire.wire.frames import Buffer, is_death_marker, may_hold_utility_output, sender_of
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    ReceivedOutput,
    ReceivedOutputs,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

Frames = Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Failures:
    """An engine's requests that fail, unless they have ended by the time that the consumer gets here.

    Attributes:
        reason: why, as a ``stop_reason``.
        is_loss: the engine is gone with them, and they may go on elsewhere.
        is_death: it ended, and was not taken out.
    """

    engine: Engine
    request_ids: Sequence[str]
    reason: str
    is_loss: bool = False
    is_death: bool = True


Arrival = tuple[Link, Frames] | Failures | EngineCoreOutputs
"""What waits for the consumer: a message as it came, and from where; or one of our own."""


class Inbox:
    """Sorts what arrives.

    Args:
        config: of the client.
        engines: who may send to us.

    Attributes:
        calls: utility calls in flight.
        dropped: messages that made no sense, so far.
        links: what the receiver reads; replaced, not changed, when it is to read others.
        failover: moves requests, if they are to be moved.
        marked: links on which a death marker came that nobody has looked into yet.
    """

    def __init__(self, config: EngineConfig, engines: Engines) -> None:
        self.config = config
        self.calls = UtilityCalls(allow_pickle=config.allow_pickle)
        self.dropped = 0
        self.failover: Failover | None = None
        self.marked: deque[Link] = deque()
        self.links: tuple[Link, ...] = ()
        self._engines = engines
        # Not the engines' own: a receiving thread looks for utility answers, the same in every layout, while the
        # consumer decodes outputs.
        self._utility_decoder = OutputsDecoder()

    @property
    def live(self) -> set[str]:
        """Ids of the requests whose last output has not been taken yet."""
        return set(self._engines.owners)

    # The receiver's side.

    def sort(self, link: Link, frames: Frames) -> bool:
        """Take one message of an output socket; ``True`` if it is for the consumer, in wire form."""
        payload = frames[0]
        if len(frames) == 1:
            head = payload[:3]
            if head in link.heads:  # nearly always
                return True
            if head in link.answer_heads:  # nearly all others
                return self._sort_without_outputs(link, frames)
        if len(frames) > self.config.max_frames:
            self.drop(f"a message of {len(frames)} frames; max_frames is {self.config.max_frames}")
        elif not payload:
            self.drop("an empty message")
        elif is_death_marker(frames):
            self.marked.append(link)
        elif may_hold_utility_output(payload):
            return self._sort_without_outputs(link, frames)
        else:
            return True
        return False

    def _sort_without_outputs(self, link: Link, frames: Frames) -> bool:
        try:
            message = self._utility_decoder.decode(frames)
        except DecodeError as exc:
            self._drop_in_doubt(link, str(exc))
            return False
        if message.utility_output is None:
            return True
        index, sole = message.engine_index, link.sole
        if sole.index == index if sole is not None else any(engine.index == index for engine in link.engines):
            self.calls.finish(message.utility_output, index)
        else:
            self.drop(f"an answer of engine {index}, which is not ours")
        return False

    # The consumer's side.

    def take(self, item: Arrival) -> EngineCoreOutputs | None:
        """Decode a message for the consumer and forget the requests that it ends; ``None`` if it makes no sense."""
        if not isinstance(item, tuple):
            return self._take_failures(item) if isinstance(item, Failures) else item
        link, frames = item
        engine = link.sole
        try:
            if engine is None:
                engine = self._sender(link, frames)
            decoder = link.decoders[engine.index]
            last_end = decoder.last_end
            message = decoder.decode(frames)
        except DecodeError as exc:
            self._drop_in_doubt(link, str(exc))
            return None
        if message.engine_index != engine.index:
            self.drop(f"outputs of engine {message.engine_index}, which is not ours")
            return None
        if message.utility_output is not None:  # with outputs, which it overrides: :meth:`sort` did not see it
            self.calls.finish(message.utility_output, message.engine_index)
            return None
        self._note(engine, message, has_ends=decoder.last_end is not last_end)
        return message

    def take_single(self, link: Link, frame: Buffer) -> EngineCoreOutputs | None:
        """Do the same at once with what comes from the only engine of a link, in one frame.

        ``None``: it is damaged, or not for the consumer, and is to be sorted.
        """
        engine = link.sole
        if engine is None:
            return None
        decoder = link.decoders[engine.index]
        last_end = decoder.last_end
        try:
            message = decoder.decode_sound(frame)
        except NOT_DECODABLE:
            return None
        if message.engine_index != engine.index or message.utility_output is not None:
            return None
        if message.timestamp == 0.0:
            message.timestamp = monotonic()
        self._note(engine, message, has_ends=decoder.last_end is not last_end)
        return message

    def _note(self, engine: Engine, message: EngineCoreOutputs, *, has_ends: bool) -> None:
        if message.scheduler_stats is not None:
            stats = message.scheduler_stats
            num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            engine.load.report(num_waiting, stats.num_running_reqs, stats.kv_cache_usage)
        if engine.is_haunted:
            message.outputs = _without_strangers(engine, message.outputs)
        if self.failover is not None:
            message.outputs = self.failover.delivered(engine, message.outputs)
        if has_ends:
            for output in message.outputs:
                if output.finish_reason is not None:
                    request_id = output.request_id
                    engine.live.pop(request_id, None)
                    self._engines.owners.pop(request_id, None)

    def _take_failures(self, failures: Failures) -> EngineCoreOutputs | None:
        engine, owners, reason = failures.engine, self._engines.owners, failures.reason
        request_ids = [request_id for request_id in failures.request_ids if request_id in engine.live]
        for request_id in request_ids:
            engine.live.pop(request_id, None)
        if self.failover is None:
            engine.num_lost += len(request_ids) if failures.is_loss else 0
            outputs: list[EngineCoreOutput] = [
                ReceivedOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
                for request_id in request_ids
                if owners.pop(request_id, None) is not None
            ]
        elif failures.is_loss:
            outputs = [*self.failover.lost(engine, request_ids, reason, is_death=failures.is_death)]
        else:
            outputs = [*self.failover.fail(request_ids, reason)]
        stats = None
        if failures.is_loss and (engine.load.running or engine.load.waiting):
            # What it reported last went down with it. Nobody must be left with that picture, balancers least of all.
            engine.load.report(0, 0)
            stats = SchedulerStats()
        if not outputs and stats is None:
            return None
        return ReceivedOutputs(engine.index, outputs, scheduler_stats=stats)

    def _sender(self, link: Link, frames: Frames) -> Engine:
        """Find out who of several on one link sent a message. Raises :class:`DecodeError`."""
        index = sender_of(frames[0])
        for engine in link.engines:
            if engine.index == index:
                return engine
        raise DecodeError(f"outputs of engine {index}, which is not ours")

    def drop(self, what: str) -> None:
        """Count a message that makes no sense."""
        self.dropped += 1
        logger.error("dropped %s", what)

    def _drop_in_doubt(self, link: Link, what: str) -> None:
        self.drop(what)
        for engine in link.engines:
            engine.in_doubt = True


def _without_strangers(engine: Engine, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
    """Leave out what is for requests that are not live, and have those aborted: nobody waits for them."""
    ours = []
    for output in outputs:
        if output.request_id in engine.live:
            ours.append(output)
        elif output.finish_reason is None:
            engine.stale.add(output.request_id)
    return ours
