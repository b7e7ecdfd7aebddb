"""Failover: requests whose engine is gone go on at another one, from their prompt and the tokens already delivered.

A loss travels through the consumer's queue behind all that the engine sent before, so what has been delivered when it
is taken is all that ever will be. Then each request is either sent to another engine as a new *attempt*, under an id of
its own (``<id>~2``), or fails with the cause. Whoever consumes sees one request: ids are mapped back, and what comes
with every first token comes once.

What may go on is decided by :func:`why_not_resumed` alone. docs/failover.md says it for users.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from msgspec.structs import replace

from enginewire.client.balancer import LoadBalancer
from enginewire.client.engines import Engine, Engines
from enginewire.client.outbox import Outbox
from enginewire.config import Failover as Mode
from enginewire.errors import EngineClientError
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, ReceivedOutput

logger = logging.getLogger(__name__)

MOST_DEATHS: Final = 3
"""A request that ran on so many engines when they ended is not sent to another: it may be why they ended."""

SETTLE_S: Final = 0.05
"""How long a dead engine's requests wait: of engines that end together others may be about to, and would count as
deaths of a request that they never saw."""

RESUME_OUTPUT_LEN: Final = "resume_output_len"
"""Key of ``extra_args``: how many trailing tokens of the prompt are output (capability ``resume``)."""


def why_not_resumed(request: EngineCoreRequest, num_delivered: int, mode: Mode, can: Capabilities) -> str | None:
    """Say why a request cannot go on from its prompt and the tokens already delivered; ``None``: it can.

    Args:
        request: as the frontend sent it.
        num_delivered: tokens; with none, it begins anew, and nobody could tell.
        mode: ``resume`` or ``exact``.
        can: of the engine in question: the one that is gone, or the one that is to go on.

    Source: "Resuming" in the decisions about the client layer.
    """
    if request.resumable:
        return "more of its prompt was to follow"
    if not num_delivered:
        return None
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt is not made of tokens alone"
    if request.mm_features or request.prompt_is_token_ids is not None:
        return "its prompt is not made of tokens alone"
    has_output_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0
    for reason, applies in (
        ("seed: the random numbers begin anew", params.seed is not None and not params.is_greedy),
        ("structured_outputs: the grammar would begin anew", params.structured_outputs is not None),
        ("bad_words: what was delivered would not count", bool(params.bad_words or params.bad_words_token_ids)),
        ("thinking_token_budget: it would begin anew", params.thinking_token_budget is not None),
        ("repetition_detection: it would begin anew", params.repetition_detection is not None),
        (
            "presence_penalty, frequency_penalty: this engine cannot be told which tokens are output",
            has_output_penalty and not can.resume,
        ),
        ("extra_args: what they mean is not known here", bool((params.extra_args or {}).keys() - {RESUME_OUTPUT_LEN})),
    ):
        if applies:
            return reason
    if mode == "exact" and not params.is_greedy:
        return "temperature: what is sampled is not the same twice, and failover is exact"
    if mode == "exact" and has_output_penalty:
        return "presence_penalty, frequency_penalty: failover is exact"
    if mode == "exact" and not can.deterministic:
        return "this engine is not deterministic, and failover is exact"
    return None


def next_attempt(
    request: EngineCoreRequest, attempt_id: str, token_ids: Sequence[int], can: Capabilities
) -> EngineCoreRequest:
    """Make the request that goes on where ``token_ids`` end; the rank that it named may be gone.

    Args:
        request: as the frontend sent it.
        attempt_id: an id that is not in use.
        token_ids: delivered so far.
        can: of the engine that gets it.
    """
    attempt = replace(request, request_id=attempt_id, data_parallel_rank=None)
    params = request.sampling_params
    if not token_ids:
        return attempt
    assert params is not None
    assert request.prompt_token_ids is not None
    count = len(token_ids)
    changes: dict[str, Any] = {"min_tokens": max(params.min_tokens - count, 0), "prompt_logprobs": None}
    if params.max_tokens is not None:
        changes["max_tokens"] = params.max_tokens - count
    if can.resume:
        extra_args = params.extra_args or {}
        changes["extra_args"] = {**extra_args, RESUME_OUTPUT_LEN: extra_args.get(RESUME_OUTPUT_LEN, 0) + count}
    attempt.prompt_token_ids = [*request.prompt_token_ids, *token_ids]
    attempt.sampling_params = replace(params, **changes)
    return attempt


@dataclass(slots=True, eq=False)
class _Flight:
    """A request, on whichever engine it is.

    Attributes:
        request: as the frontend sent it.
        engine: that has it, or had it last.
        attempt_id: under which that engine knows it.
        token_ids: delivered so far.
        num_resumed_from: how many of them its current attempt began with.
        num_attempts: so far.
        num_deaths: of engines that had it.
        cause: of the last of them.
        deadline: by when it is to be on another engine.
        not_before: when it may be sent.
    """

    request: EngineCoreRequest
    engine: Engine
    attempt_id: str
    token_ids: list[int] = field(default_factory=list)
    num_resumed_from: int = 0
    num_attempts: int = 1
    num_deaths: int = 0
    cause: str = ""
    deadline: float = 0.0
    not_before: float = 0.0


class Failover:
    """Moves the requests of one client.

    Args:
        mode, timeout_s: see ``EngineConfig``.
        engines: of the client; ``owners`` follows the requests.
        outbox: to send.
        balancer: to choose.
        send_lock: held while anything is sent, and while a request changes hands.
    """

    def __init__(
        self,
        mode: Mode,
        timeout_s: float,
        engines: Engines,
        outbox: Outbox,
        balancer: LoadBalancer,
        send_lock: threading.RLock,
    ) -> None:
        self._mode: Mode = mode
        self._timeout_s = timeout_s
        self._engines = engines
        self._outbox = outbox
        self._balancer = balancer
        self._send_lock = send_lock
        self._flights: dict[str, _Flight] = {}
        """By the frontend's id."""
        self._attempts: dict[str, _Flight] = {}
        """By the id that the engine knows; those that wait are in none."""
        self._waiting: deque[_Flight] = deque()

    def begins(self, engine: Engine, request: EngineCoreRequest) -> None:
        """Follow a request that is about to be sent."""
        flight = _Flight(request, engine, request.request_id)
        self._flights[request.request_id] = self._attempts[request.request_id] = flight

    def forget(self, request_id: str) -> str:
        """Follow a request no longer; return the id under which an engine knows it, if one does."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return request_id
        self._attempts.pop(flight.attempt_id, None)
        return flight.attempt_id

    def delivered(self, engine: Engine, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Note what the consumer gets of an engine, and make it the request's; leave out what belongs to nobody."""
        ours: list[EngineCoreOutput] = []
        for output in outputs:
            flight = self._attempts.get(output.request_id)
            if flight is None:
                continue
            if output.finish_reason is not None:
                engine.live.pop(flight.attempt_id, None)
                self.forget(flight.request.request_id)
            if flight.num_attempts > 1:
                output.request_id = flight.request.request_id
                if flight.num_resumed_from:
                    output.events = output.prefill_stats = output.new_prompt_logprobs_tensors = None
            flight.token_ids += output.new_token_ids
            ours.append(output)
        return ours

    def lost(
        self, engine: Engine, attempt_ids: Iterable[str], cause: str, *, is_death: bool = True
    ) -> list[ReceivedOutput]:
        """Have the requests of an engine that is gone go on elsewhere. Called by the consumer.

        Args:
            cause: of the loss, as a ``stop_reason``.
            is_death: the engine ended, and any of these requests may be why.

        Returns:
            the ends of those that fail.
        """
        failed: list[ReceivedOutput] = []
        now = time.monotonic()
        with self._send_lock:
            for attempt_id in attempt_ids:
                if (flight := self._attempts.pop(attempt_id, None)) is None:
                    continue
                flight.num_deaths += is_death
                flight.cause = cause
                if (reason := self._why_not(flight, engine)) is not None:
                    failed.append(self._fail(flight, reason))
                else:
                    flight.deadline = now + self._timeout_s
                    flight.not_before = now + SETTLE_S if is_death else now
                    self._waiting.append(flight)
            return failed + [output for _, output in self.send_waiting(now)]

    def fail(self, attempt_ids: Iterable[str], cause: str) -> list[ReceivedOutput]:
        """Fail requests that are lost for another reason."""
        flights = [flight for attempt_id in attempt_ids if (flight := self._attempts.get(attempt_id)) is not None]
        return [self._end(flight, cause) for flight in flights]

    def send_waiting(self, now: float) -> list[tuple[Engine, ReceivedOutput]]:
        """Send what waits for an engine, as far as there is one; return the ends of requests that found none in time.

        Called under the send lock.
        """
        failed: list[tuple[Engine, ReceivedOutput]] = []
        waiting, self._waiting = self._waiting, deque()
        for flight in waiting:
            if self._flights.get(flight.request.request_id) is not flight:
                continue  # aborted meanwhile
            if now < flight.not_before:
                self._waiting.append(flight)
                continue
            able, reason = self._able(flight)
            if reason is None:
                try:
                    if self._send(flight, able):
                        continue
                except EngineClientError as exc:  # in this engine's layout there is no such request
                    reason = str(exc)
            if reason is None and now >= flight.deadline:
                reason = f"no engine took it over within {self._timeout_s:g} s"
            if reason is None:
                self._waiting.append(flight)
            else:
                failed.append((flight.engine, self._fail(flight, reason)))
        return failed

    def _why_not(self, flight: _Flight, engine: Engine) -> str | None:
        if flight.num_deaths >= MOST_DEATHS:
            return f"it ran on {MOST_DEATHS} engines when they ended, and may be why"
        return why_not_resumed(flight.request, len(flight.token_ids), self._mode, engine.capabilities)

    def _able(self, flight: _Flight) -> tuple[list[Engine], str | None]:
        """Return the engines that could take a request now, or why none of those that are ready can."""
        ready = self._engines.ready
        reasons = [self._why_not(flight, engine) for engine in ready]
        able = [engine for engine, reason in zip(ready, reasons, strict=True) if reason is None]
        return able, reasons[0] if reasons and not able else None

    def _send(self, flight: _Flight, able: list[Engine]) -> bool:
        """Send the next attempt to one of these engines; ``False``: none of them is there any longer."""
        request, former = flight.request, flight.engine
        while able:
            engine = self._engines.pick(request, self._balancer, able)
            flight.attempt_id = self._attempt_id(flight)
            flight.num_attempts += 1
            flight.num_resumed_from = len(flight.token_ids)
            attempt = next_attempt(request, flight.attempt_id, flight.token_ids, engine.capabilities)
            # Before it is sent: another thread may take its outputs before we are back.
            flight.engine = self._engines.owners[request.request_id] = engine
            self._attempts[flight.attempt_id] = flight
            try:
                self._outbox.add(engine, attempt)
            except (zmq.ZMQError, EngineClientError) as exc:
                del self._attempts[flight.attempt_id]
                flight.engine = former
                if isinstance(exc, EngineClientError):
                    raise
                able.remove(engine)  # it is going, too, as will be noticed soon
                continue
            former.num_moved += 1
            logger.info(
                "request_id=%s goes on at engine=%d attempt=%d num_tokens=%d",
                request.request_id,
                engine.index,
                flight.num_attempts,
                flight.num_resumed_from,
            )
            return True
        return False

    def _attempt_id(self, flight: _Flight) -> str:
        number = flight.num_attempts + 1
        while (attempt_id := f"{flight.request.request_id}~{number}") in self._flights:
            number += 1  # a frontend may have chosen such an id
        return attempt_id

    def _fail(self, flight: _Flight, reason: str) -> ReceivedOutput:
        flight.engine.num_lost += 1
        return self._end(flight, f"{flight.cause}; it does not go on elsewhere: {reason}")

    def _end(self, flight: _Flight, stop_reason: str) -> ReceivedOutput:
        request_id = flight.request.request_id
        self.forget(request_id)
        self._engines.owners.pop(request_id, None)
        return ReceivedOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=stop_reason)
