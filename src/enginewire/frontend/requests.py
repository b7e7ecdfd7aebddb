"""One request in flight on the frontend's side: its tokens as they come, its text when somebody takes it.

What piled up while the reader was busy is detokenised and delivered in one go. Only with stop strings is each token
looked at as it comes: the engine has to be told.
"""

from __future__ import annotations

from typing import Any, Protocol

from enginewire.errors import EngineClientError
from enginewire.frontend.inputs import PreparedRequest
from enginewire.frontend.logprobs import TokenLogprobs, TokenText, prompt_logprobs, sampled_logprobs
from enginewire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from enginewire.frontend.stats import FinishedRequestStats
from enginewire.text.detokenizer import IncrementalDetokenizer
from enginewire.wire.arrays import LogprobsLists, LogprobsTensors
from enginewire.wire.messages import EngineCoreOutput, FinishReason
from enginewire.wire.sampling import RequestOutputKind

DELTA = RequestOutputKind.DELTA
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class CompletionState:
    """One completion: what the engine knows as one request."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "end_taken",
        "engine_id",
        "engine_index",
        "finish_reason",
        "first_token_ts",
        "has_stop_strings",
        "index",
        "last_token_ts",
        "logprobs",
        "num_taken",
        "prefill_time",
        "queued_time",
        "raw_logprobs",
        "request",
        "stop_reason",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(self, request: RequestState, index: int, engine_id: str, detokenizer: IncrementalDetokenizer | None):
        self.request = request
        self.index = index
        self.engine_id = engine_id
        self.engine_index: int | None = None  # nobody has it yet
        self.detokenizer = detokenizer
        self.first_token_ts = self.last_token_ts = 0.0  # monotonic seconds; 0: none yet
        self.queued_time: float | None = None  # in the engine; the engine said nothing
        self.prefill_time: float | None = None
        self.has_stop_strings = detokenizer is not None and bool(request.params.stop)
        self.wants_logprobs = request.params.logprobs is not None
        self.token_ids: list[int] = []
        self.num_taken = 0
        self.end_taken = False
        self.raw_logprobs: list[LogprobsLists] = []  # not converted yet
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, output: EngineCoreOutput, now: float) -> None:
        """Take a step's tokens. ``now`` is monotonic seconds."""
        reason = output.finish_reason
        stop_string = None
        if new := output.new_token_ids:
            if self.has_stop_strings:
                stop_string = self._append_until_stop(new, reason)
            else:
                self.token_ids.extend(new)
            if self.wants_logprobs and output.new_logprobs is not None:
                self.raw_logprobs.append(output.new_logprobs)
            if not self.last_token_ts:
                self.first_token_ts = now
            self.last_token_ts = now
        if stop_string is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
        elif reason is not None:
            self.finish_reason, self.stop_reason = reason, output.stop_reason

    def take(self) -> CompletionOutput:
        """Return what the reader has not had, or everything, as the request's kind says."""
        request, token_ids, reason = self.request, self.token_ids, self.finish_reason
        start = self.num_taken
        new = token_ids[start:]
        self.num_taken = len(token_ids)
        if self.raw_logprobs:
            self._convert_logprobs()
        text, logprobs = "", self.logprobs
        if (detokenizer := self.detokenizer) is not None:
            if self.has_stop_strings:
                text = detokenizer.take_delta(reason is not None)
            else:
                has_end = reason is not None and bool(new) and self._ends_without_text
                text = detokenizer.append_and_take(new[:-1] if has_end else new, reason is not None)
            if request.kind is not DELTA:
                text = detokenizer.taken_text
        if request.kind is DELTA:
            token_ids, logprobs = new, logprobs[start:]
        elif reason is None:  # a snapshot: ours go on growing
            token_ids, logprobs = token_ids.copy(), logprobs.copy()
        self.end_taken = reason is not None
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob if self.wants_logprobs else None,
            logprobs if self.wants_logprobs else None,
            None if reason is None else str(reason),
            self.stop_reason,
            self.engine_index,
        )

    def take_text(self) -> str | None:
        """Take what is new, as a delta, if that is text alone, and return it; ``None``: there is more to take."""
        if self.finish_reason is not None or self.raw_logprobs or self.detokenizer is None:
            return None
        start, self.num_taken = self.num_taken, len(self.token_ids)
        if self.has_stop_strings:
            return self.detokenizer.take_delta(False)
        return self.detokenizer.append_and_take(self.token_ids[start:], False)

    def finished_stats(self, now: float) -> FinishedRequestStats:
        """Sum up a completion that has ended."""
        assert self.finish_reason is not None
        request = self.request
        return FinishedRequestStats(
            self.finish_reason,
            len(request.prompt_token_ids),
            len(self.token_ids),
            request.max_output_len,
            now - request.arrival_ts,
            self.queued_time,
            self.prefill_time,
            self.last_token_ts - self.first_token_ts,
        )

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would bring tokens, or the end, for the first time."""
        return self.num_taken < len(self.token_ids) or (self.finish_reason is not None and not self.end_taken)

    @property
    def _ends_without_text(self) -> bool:
        """Whether the last token is one that ended the completion and is not part of its text."""
        if self.finish_reason is not FinishReason.STOP or not self.token_ids:
            return False
        params = self.request.params
        return not params.include_stop_str_in_output and self.token_ids[-1] in params.all_stop_token_ids

    def _append_until_stop(self, new: list[int], reason: FinishReason | None) -> str | None:
        """Add and detokenise tokens one by one, so that a stop string ends them exactly; return it."""
        assert self.detokenizer is not None
        last = len(new) - 1
        for position, token_id in enumerate(new):
            self.token_ids.append(token_id)
            if position == last and reason is FinishReason.STOP:
                self.finish_reason = reason
                if self._ends_without_text:
                    return None
            if (stop_string := self.detokenizer.append((token_id,))) is not None:
                return stop_string
        return None

    def _convert_logprobs(self) -> None:
        if not self.raw_logprobs:
            return
        has_ranks = self.request.params.logprob_token_ids is None
        for lists in self.raw_logprobs:
            rows = sampled_logprobs(lists, self.request.token_text, has_ranks=has_ranks)
            # A stop string may have cut tokens off.
            for row in rows[: len(self.token_ids) - len(self.logprobs)]:
                self.logprobs.append(row)
                self.cumulative_logprob += next(iter(row.values())).logprob
        self.raw_logprobs.clear()


class Listener(Protocol):
    """Who takes a request's outputs."""

    def hear(self, request: RequestState) -> None:
        """Take note that the request has something to take."""


class RequestState:
    """A user's request in flight: one or several completions.

    Attributes:
        request_id: the user's id.
        listener: is told when there is something to take.
        position: the listener's: which of its requests this is.
        error: why it failed. Nothing else comes then.
        arrival_ts: when it came, monotonic seconds.
        num_cached_tokens: prompt tokens that the engine did not have to compute; ``None`` before the first token.
    """

    __slots__ = (
        "_arrival_time",
        "_kv_transfer_params",
        "_prompt_logprobs",
        "_raw_prompt_logprobs",
        "arrival_ts",
        "completions",
        "error",
        "kind",
        "listener",
        "max_output_len",
        "num_cached_tokens",
        "num_running",
        "params",
        "position",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "token_text",
        "wants_prompt_logprobs",
    )

    def __init__(self, prepared: PreparedRequest, now: float) -> None:
        self.request_id = prepared.request_id
        self.prompt = prepared.prompt
        self.prompt_token_ids = prepared.prompt_token_ids
        self.params = prepared.params
        self.kind = prepared.params.output_kind
        self.wants_prompt_logprobs = prepared.params.prompt_logprobs is not None
        self.max_output_len = prepared.max_output_len
        self.token_text: TokenText | None = None if prepared.tokenizer is None else prepared.tokenizer.token_text
        self.listener: Listener | None = None
        self.position = 0
        self.error: EngineClientError | None = None
        self.arrival_ts = now
        self.completions = [
            CompletionState(self, index, request.request_id, _detokenizer(prepared))
            for index, request in enumerate(prepared.requests)
        ]
        self.num_running = len(self.completions)
        self._arrival_time = prepared.requests[0].arrival_time
        self.num_cached_tokens: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._raw_prompt_logprobs: LogprobsTensors | None = None
        self._kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come from the engine."""
        return self.num_running == 0 or self.error is not None

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` has something: news, the end, or an error to raise."""
        if self.error is not None:
            return True
        if self.kind is FINAL_ONLY and self.num_running:
            return False
        return any(completion.has_news for completion in self.completions)

    def take(self) -> RequestOutput | None:
        """Return everything since the last call as one output; ``None`` if there is nothing yet.

        Raises:
            EngineClientError: the request failed.
        """
        news = self.take_news()
        return self.output_of(news) if news else None

    def take_news(self) -> list[CompletionOutput]:
        """Take what there is since the last call, as the request's kind says; empty if there is nothing yet.

        Raises:
            EngineClientError: the request failed.
        """
        if self.error is not None:
            raise self.error
        if self.kind is DELTA:
            return [completion.take() for completion in self.completions if completion.has_news]
        return [completion.take() for completion in self.completions] if self.is_ready else []

    def take_failed(self, error: EngineClientError) -> RequestOutput:
        """Return what there is of a request that failed."""
        output = self.output_of([completion.take() for completion in self.completions])
        output.error, output.finished = error, True
        for completion in output.outputs:
            completion.finish_reason = completion.finish_reason or str(FinishReason.ERROR)
        return output

    def wake(self) -> None:
        """Tell whoever takes the outputs that there is something to take."""
        if self.listener is not None:
            self.listener.hear(self)

    def note(self, output: EngineCoreOutput) -> None:
        """Take in what concerns the request as a whole."""
        if output.prefill_stats is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if self.wants_prompt_logprobs and output.new_prompt_logprobs_tensors is not None:
            self._raw_prompt_logprobs = output.new_prompt_logprobs_tensors

    def output_of(self, news: list[CompletionOutput]) -> RequestOutput:
        """Make the output of what was taken."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            news,
            self.num_running == 0,
            RequestMetrics(
                self._arrival_time,
                self.arrival_ts,
                min((each.first_token_ts for each in self.completions if each.first_token_ts), default=None),
                max(each.last_token_ts for each in self.completions) or None,
                sum([len(completion.token_ids) for completion in self.completions]),
            ),
            self._take_prompt_logprobs(),
            self.num_cached_tokens,
            self._kv_transfer_params,
        )

    def _take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self._raw_prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(self._raw_prompt_logprobs, self.token_text)
            self._raw_prompt_logprobs = None
        taken = self._prompt_logprobs
        if self.kind is DELTA:
            self._prompt_logprobs = None
        return taken


def _detokenizer(prepared: PreparedRequest) -> IncrementalDetokenizer | None:
    params = prepared.params
    if prepared.tokenizer is None or not params.detokenize:
        return None
    return IncrementalDetokenizer(
        prepared.tokenizer,
        prompt_token_ids=prepared.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        stop=params.stop or (),
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        keeps_text=params.output_kind is not DELTA,
    )
