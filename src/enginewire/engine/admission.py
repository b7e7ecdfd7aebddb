"""Live requests, and the queue in which they wait for their turn. Pure but for the clock of their statistics."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator

from enginewire.config import SchedulingPolicy
from enginewire.engine.stop import StopRules
from enginewire.wire.messages import EngineCoreRequest
from enginewire.wire.sampling import RequestOutputKind


class Request:
    """A live request: what was asked for and how far it is."""

    __slots__ = (
        "can_wait",
        "client_index",
        "core_request",
        "held_token_ids",
        "input_number",
        "is_new",
        "queued_at",
        "request_id",
        "scheduled_at",
        "stop_rules",
    )

    def __init__(self, core_request: EngineCoreRequest, max_model_len: int) -> None:
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.client_index = core_request.client_index
        params = core_request.sampling_params  # without them (pooling) the executor alone says when it is done
        prompt_len = len(core_request.prompt_token_ids or ())
        self.stop_rules = None if params is None else StopRules(params, prompt_len, max_model_len)
        self.queued_at = time.monotonic()
        self.scheduled_at = 0.0
        self.input_number = 0
        """Of the step input with which the executor gets it."""
        self.is_new = True
        """No output yet."""
        self.can_wait = (
            params is not None
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and not params.stop  # strings that the frontend looks for
            and params.logprobs is None
        )
        """Nobody looks at its tokens before the last: they may come together."""
        self.held_token_ids: list[int] = []


class AdmissionQueue:
    """Requests that wait, in order of arrival, or of priority (lower first), then arrival time, then arrival here."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[int, float, int, Request]] = []
        self._live: dict[str, Request] = {}
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def push(self, request: Request) -> None:
        """Enqueue."""
        core = request.core_request
        key = (core.priority, core.arrival_time) if self._by_priority else (0, 0.0)
        # Requests themselves are never compared: the sequence number differs.
        heapq.heappush(self._heap, (*key, next(self._sequence), request))  # pyright: ignore[reportArgumentType]
        self._live[request.request_id] = request

    def pop(self) -> Request:
        """Dequeue the first. Raises :class:`IndexError` if there is none."""
        while True:
            request = heapq.heappop(self._heap)[3]
            # What was removed stays in the heap until its turn; its id may have come back since.
            if self._live.get(request.request_id) is request:
                del self._live[request.request_id]
                return request

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it is; ``None`` if it is not here."""
        request = self._live.pop(request_id, None)
        if len(self._heap) > 2 * len(self._live) + 64:  # mostly removed ones: let go of their prompts
            self._heap = [entry for entry in self._heap if self._live.get(entry[3].request_id) is entry[3]]
            heapq.heapify(self._heap)
        return request

    def get(self, request_id: str) -> Request | None:
        """Look a waiting request up."""
        return self._live.get(request_id)
