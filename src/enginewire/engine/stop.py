"""When a request ends: the stop rules, written once, pure.

Per token, in this order (protocol D.6): below ``min_tokens`` never; the end-of-sequence token; a stop token; the
length limit; repetition.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from enginewire.wire.messages import FinishReason
from enginewire.wire.sampling import RepetitionDetectionParams, SamplingParams

REPETITION_DETECTED: Final = "repetition_detected"


class Stop(NamedTuple):
    """A request ends.

    Attributes:
        num_tokens: how many of the tokens just seen belong to it; the rest is dropped.
        reason: why.
        stop_reason: the stop token's id, ``"repetition_detected"``, or ``None``.
    """

    num_tokens: int
    reason: FinishReason
    stop_reason: int | str | None = None


class StopRules:
    """The rules for one request, and the little they remember of its output.

    Args:
        params: what was asked for; ``max_tokens`` is set.
        num_prompt_tokens: length of its prompt.
        max_model_len: bound of prompt and output together; output is capped to what it leaves.
    """

    __slots__ = ("_eos", "_limit", "_min_tokens", "_repetition", "_stops", "num_output_tokens")

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> None:
        room = max_model_len - num_prompt_tokens
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._min_tokens = min(params.min_tokens, self._limit)
        self._eos = params.eos_token_id
        self._stops = frozenset(params.stop_token_ids or ())
        if self._eos is not None:
            self._stops |= {self._eos}
        detection = params.repetition_detection
        self._repetition = None
        if detection is not None and detection.max_pattern_size > 0:
            self._repetition = _Repetition(detection, self._limit)
        self.num_output_tokens = 0

    def advance(self, token_ids: list[int]) -> Stop | None:
        """Take in new tokens of the output; say whether and where it ends."""
        if len(token_ids) == 1 and self._repetition is None:  # nearly always: worth its own two lines
            self.num_output_tokens += 1
            if self.num_output_tokens < self._limit and token_ids[0] not in self._stops:
                return None
            return self._stop_at(token_ids[0], 1)
        for seen, token_id in enumerate(token_ids, start=1):
            self.num_output_tokens += 1
            if (stop := self._stop_at(token_id, seen)) is not None:
                return stop
        return None

    def _stop_at(self, token_id: int, seen: int) -> Stop | None:
        repeats = self._repetition is not None and self._repetition.advance(token_id)
        if self.num_output_tokens < self._min_tokens:
            return None
        if token_id in self._stops:
            return Stop(seen, FinishReason.STOP, None if token_id == self._eos else token_id)
        if self.num_output_tokens >= self._limit:
            return Stop(seen, FinishReason.LENGTH)
        if repeats:
            return Stop(seen, FinishReason.REPETITION, REPETITION_DETECTED)
        return None


class _Repetition:
    """Counts, for each pattern size, how long the output has been repeating itself at that distance.

    A pattern of ``size`` tokens has occurred ``n`` times in a row when the last ``size * (n - 1)`` tokens each equal
    the one ``size`` before them.
    """

    __slots__ = ("_min_count", "_recent", "_runs", "_sizes")

    def __init__(self, params: RepetitionDetectionParams, num_tokens: int) -> None:
        # What occurs min_count times in the whole output is no longer than this, whatever a request says.
        longest = min(params.max_pattern_size, num_tokens // params.min_count)
        self._sizes = range(max(params.min_pattern_size, 1), longest + 1)
        self._min_count = params.min_count
        self._recent: list[int] = []
        self._runs = dict.fromkeys(self._sizes, 0)

    def advance(self, token_id: int) -> bool:
        """Take in a token; return whether some pattern has now occurred often enough."""
        recent, runs, repeats = self._recent, self._runs, False
        for size in self._sizes:
            if size <= len(recent) and recent[-size] == token_id:
                runs[size] += 1
                repeats = repeats or runs[size] >= size * (self._min_count - 1)
            else:
                runs[size] = 0
        recent.append(token_id)
        if len(recent) >= 2 * self._sizes.stop:
            del recent[: self._sizes.stop]
        return repeats
