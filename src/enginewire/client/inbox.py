"""What an engine sends, sorted: utility answers go to their callers, the rest waits for the consumer.

An :class:`Inbox` is shared by a client and its receiver and holds a reference to neither, nor to a socket. It counts
and drops what makes no sense: no message ends a receiver (defects 17 to 20).
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Sequence

from enginewire.client.startup import apply_ready_responses
from enginewire.client.utilities import UtilityCalls
from enginewire.config import EngineConfig
from enginewire.errors import INTERNAL_PREFIX, DecodeError, DuplicateRequestIdError, EngineDeath, UtilityCallError
from enginewire.wire.codec import MsgpackDecoder, OutputsDecoder
from enginewire.wire.frames import ENGINE_CORE_DEAD, Buffer, engine_index_of, is_death_marker, may_hold_utility_output
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import EngineCoreOutputs, FinishReason, ReceivedOutput, ReceivedOutputs

logger = logging.getLogger(__name__)

Frames = Sequence[Buffer]


class Inbox:
    """Sorts what arrives, knows which requests live, and knows why nothing more will come.

    Args:
        config: of the client; a ready response that comes later is written into it.
        engine_indexes: engines that may send to us.
        on_death_marker: told that an engine sent its last word.

    Attributes:
        calls: utility calls in flight.
        live: ids of requests whose last output has not been taken yet.
        dropped: messages that made no sense, so far.
        in_doubt: one of them may have been an engine's, and the last that a request was to hear.
        death: why the engine is gone, once it is. The first cause sticks.
    """

    def __init__(
        self, config: EngineConfig, engine_indexes: Sequence[int], on_death_marker: Callable[[], None]
    ) -> None:
        self.config = config
        self.calls = UtilityCalls(allow_pickle=config.allow_pickle)
        self.live: set[str] = set()
        self.dropped = 0
        self.in_doubt = False
        self.death: EngineDeath | None = None
        self._engine_indexes = frozenset(engine_indexes)
        self._on_death_marker = on_death_marker
        self._has_marker = False
        self._lost: list[str] = []
        # Two decoders: a receiving thread looks for utility answers while the consumer decodes outputs.
        self._decoder = OutputsDecoder()
        self._utility_decoder = OutputsDecoder()
        self._ready_decoder: MsgpackDecoder[EngineCoreReadyResponse] = MsgpackDecoder(EngineCoreReadyResponse)

    # The receiver's side.

    def sort(self, frames: Frames) -> bool:
        """Take one message of the output socket; ``True`` if it is for the consumer, in wire form."""
        payload = frames[0]
        if len(frames) > self.config.max_frames:
            self._drop(f"a message of {len(frames)} frames; max_frames is {self.config.max_frames}")
        elif not payload:
            self._drop("an empty message")
        elif len(payload) == len(ENGINE_CORE_DEAD) and is_death_marker(frames):  # the cheap test first, per message
            self._has_marker = True
        elif may_hold_utility_output(payload):
            return self._sort_without_outputs(frames)
        else:
            return True
        return False

    def _sort_without_outputs(self, frames: Frames) -> bool:
        try:
            message = self._utility_decoder.decode(frames)
        except DecodeError as exc:
            self._drop(str(exc))
            self.in_doubt = True
            return False
        if message.utility_output is None:
            return True
        self.calls.finish(message.utility_output)
        return False

    def report_marker(self) -> None:
        """Tell of a death marker, if one was sorted. After what came before it was handed over."""
        if self._has_marker:
            self._has_marker = False
            self._on_death_marker()

    def ready_again(self, frames: Frames) -> EngineCoreOutputs | None:
        """Take a message of the input socket after start-up: an engine that was restarted registers anew.

        Returns:
            the failures of the requests it no longer knows, for the consumer; ``None``: it was no such message.
        """
        index = engine_index_of(bytes(frames[0]))
        if len(frames) != 2 or index not in self._engine_indexes:
            self._drop(f"a message of unexpected identity {bytes(frames[0])!r} on the input socket")
            return None
        try:
            response = self._ready_decoder.decode(frames[1:])
        except DecodeError as exc:
            self._drop(f"engine {index}: {exc}")
            return None
        logger.warning("engine %s was restarted: it says ready again; requests in flight are lost", index)
        apply_ready_responses(self.config, [response])
        reason = f"{INTERNAL_PREFIX}engine {index} was restarted while the request ran"
        self.calls.fail_pending(lambda: UtilityCallError(f"engine {index} was restarted meanwhile", method=""))
        return _failures(list(self.live), reason)  # a copy: consumers in other threads change it meanwhile

    def note_known(self, asked: frozenset[str], answer: concurrent.futures.Future[list[str]]) -> None:
        """Take the engine's answer to which requests it knows: those of ``asked`` that it does not know are lost."""
        if answer.cancelled() or answer.exception() is not None:
            logger.warning("a message was dropped, and the engine cannot say whether it ended a request")
        else:
            self._lost += asked.difference(answer.result())

    def take_losses(self) -> EngineCoreOutputs | None:
        """Return the failures of requests whose last output was dropped, for the consumer."""
        lost, self._lost = self._lost, []
        reason = f"{INTERNAL_PREFIX}its last output could not be decoded and was dropped"
        return _failures(lost, reason) if lost else None

    # The consumer's side.

    def take(self, item: Frames | EngineCoreOutputs) -> EngineCoreOutputs | None:
        """Decode a message for the consumer and forget the requests that it ends; ``None`` if it makes no sense."""
        if isinstance(item, EngineCoreOutputs):  # our own: failures of requests that may have ended meanwhile
            message = item
            message.outputs = [output for output in message.outputs if output.request_id in self.live]
        else:
            try:
                message = self._decoder.decode(item)
            except DecodeError as exc:
                self._drop(str(exc))
                self.in_doubt = True
                return None
            if message.engine_index not in self._engine_indexes:
                self._drop(f"outputs of engine {message.engine_index}, which is not ours")
                return None
            if message.utility_output is not None:  # with outputs, which it overrides: :meth:`sort` did not see it
                self.calls.finish(message.utility_output)
                return None
        for output in message.outputs:
            if output.finish_reason is not None:
                self.live.discard(output.request_id)
        return message

    def admit(self, request_id: str) -> None:
        """Note that a request is about to be sent.

        Raises:
            DuplicateRequestIdError: the id is in use.
        """
        if request_id in self.live:
            raise DuplicateRequestIdError(request_id)
        self.live.add(request_id)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Note that nothing more is expected for these requests."""
        self.live.difference_update(request_ids)

    def engine_died(self, death: EngineDeath) -> bool:
        """Keep the cause of death; ``False`` if one is known already."""
        if self.death is not None:
            return False
        self.death = death
        return True

    def _drop(self, what: str) -> None:
        self.dropped += 1
        logger.error("dropped %s", what)


def _failures(request_ids: Sequence[str], reason: str) -> EngineCoreOutputs:
    return ReceivedOutputs(
        outputs=[
            ReceivedOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
            for request_id in request_ids
        ]
    )
