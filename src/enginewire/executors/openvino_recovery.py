"""What to do with the requests of a pipeline that raised: who is to blame, and who can go on. Pure.

OpenVINO does not say which request it stumbled over. One that has produced a token has passed every check it makes;
so suspicion falls on those that have not, and on the one with a grammar if there is only one. Several suspects are put
on trial: they are run again one at a time, each beside the requests that are beyond suspicion, until its first token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from enginewire.executors.openvino_pipeline import Handle
from enginewire.wire.messages import EngineCoreRequest
from enginewire.wire.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Live:
    """A request that the executor has taken in.

    Attributes:
        request: as it came.
        params: its sampling parameters.
        rank: reported with every sampled token: 1 where it is known to be the likeliest, else 0, for unknown.
        handle: the request inside OpenVINO, ``None`` while it is in no pipeline.
        delivered: the tokens of its output so far.
        max_delivered: as many as end it.
        last_tokens: those that end it.
        starved: it had a token before, and the last step brought none.
        on_trial: it may be the one that makes the pipeline raise.
    """

    request: EngineCoreRequest
    params: SamplingParams
    rank: int
    handle: Handle | None = None
    delivered: list[int] = field(default_factory=list)
    max_delivered: int = 0
    last_tokens: Collection[int] = ()
    starved: bool = False
    on_trial: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether its text follows a grammar."""
        return self.params.structured_outputs is not None

    @property
    def can_have_ended(self) -> bool:
        """Whether its last token may have been the end. To ask OpenVINO for each costs a step 15 to 80 µs."""
        delivered = self.delivered
        return len(delivered) >= self.max_delivered or delivered[-1] in self.last_tokens or self.is_constrained


class Verdict(NamedTuple):
    """Who made the pipeline raise.

    Attributes:
        guilty: the one, ``None`` if it is not known.
        suspects: to be put on trial.
        innocent: the others.
    """

    guilty: Live | None
    suspects: list[Live]
    innocent: list[Live]


def judge(running: Sequence[Live]) -> Verdict:
    """Find out which request made the pipeline raise, as far as can be told."""
    suspects = [live for live in running if live.on_trial] or [live for live in running if not live.delivered]
    if not suspects:
        suspects = list(running)
    if len(suspects) > 1:
        constrained = [live for live in suspects if live.is_constrained]
        if len(constrained) == 1:
            suspects = constrained
    if len(suspects) == 1:
        return Verdict(suspects[0], [], [live for live in running if live is not suspects[0]])
    return Verdict(None, suspects, [live for live in running if live not in suspects])


def why_not_resumable(live: Live) -> str | None:
    """Return why a request cannot go on from the tokens delivered so far, or ``None`` if it can.

    It would be added again with these tokens as part of its prompt, and must stay a sample of what was asked for.
    """
    if not live.delivered:
        return None
    if live.is_constrained:
        return "its grammar cannot be taken up in mid-text"
    if live.params.presence_penalty or live.params.frequency_penalty:
        return "its presence and frequency penalties would not count the tokens so far"
    if live.params.seed is not None and not live.params.is_greedy:
        return "its seed cannot be taken up in mid-text"
    return None
