"""How to choose the next token: ``SamplingParams`` and the maps inside it.

Field order is the order in which the reference writes the map's keys (0.25.1); a decoder does not care, golden
vectors do. Ranges are the reference's, and they hold on construction and on decoding alike: a value that is out
of range never becomes an object.
"""

from __future__ import annotations

import reprlib
import sys
from enum import IntEnum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, field

from enginewire.errors import InvalidRequestError

T = TypeVar("T")

MIN_TEMPERATURE: Final = 0.01
"""Smaller positive temperatures overflow the division of logits; they are raised to this."""

MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Upper bound of ``logprob_token_ids``, as in the reference."""

LARGEST: Final = sys.float_info.max
"""Bound of what is unbounded but finite."""

MAX_INT: Final = 2**63 - 1
"""Bound of integers without one of their own: what a signed integer on the wire can hold."""


class RequestOutputKind(IntEnum):
    """What a stream of outputs holds: everything so far, only what is new, or one final output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(Struct, kw_only=True):
    """A constraint on the text. Exactly one of the first five and ``structural_tag`` is set.

    Attributes:
        json: a JSON schema, as text or as a map.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: an EBNF grammar whose start rule is ``root``.
        json_object: any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = field(default=None, name="_backend")
    backend_was_auto: bool = field(default=False, name="_backend_was_auto")

    KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def __post_init__(self) -> None:
        chosen = self.kinds()
        if len(chosen) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(self.KINDS)}; got {', '.join(chosen) or 'none'}",
                parameter="structured_outputs",
            )

    def kinds(self) -> list[str]:
        """Return the names of the constraints that are set; one, once constructed."""
        return [kind for kind in self.KINDS if getattr(self, kind) is not None]


class RepetitionDetectionParams(Struct, kw_only=True):
    """End a request that repeats a pattern of ``min…max_pattern_size`` tokens ``min_count`` times; 0 is off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise InvalidRequestError(
                f"repetition_detection.min_count must be at least 2, got {self.min_count}",
                parameter="repetition_detection",
            )
        if not 0 <= self.min_pattern_size <= max(self.max_pattern_size, 0):
            raise InvalidRequestError(
                "repetition_detection.min_pattern_size must be between 0 and max_pattern_size "
                f"({self.max_pattern_size}), got {self.min_pattern_size}",
                parameter="repetition_detection",
            )


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """How one request is sampled, and when it ends.

    Args:
        n: how many completions of the prompt; a frontend fans them out, an engine sees 1.
        presence_penalty: -2 … 2, on tokens that occurred in the output.
        frequency_penalty: -2 … 2, times how often they occurred.
        repetition_penalty: > 0, on tokens of prompt and output; 1 is off.
        temperature: 0 … 2; 0 is greedy. Between 0 and 0.01 means 0.01.
        top_p: (0, 1]; keep the most likely tokens of this total probability.
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: 0 … 1; drop tokens less likely than this share of the likeliest.
        seed: int64; reproduces a request that runs alone (in a batch: on a ``deterministic`` engine). -1 is none.
        stop: strings that end the text; found by the frontend, across token boundaries.
        stop_token_ids: tokens that end it; found by the engine.
        ignore_eos: go on past the end-of-sequence token.
        max_tokens: at most this many new tokens; ``None``: as many as the context holds.
        min_tokens: at least this many before any stop.
        logprobs: log probabilities of this many likeliest tokens besides the sampled one; -1: all.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: ``False``: no text, token ids only.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        output_kind: what a stream yields, see :class:`RequestOutputKind`.
        structured_outputs: a grammar the text follows.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: only these can be sampled.
        bad_words: never these.
        extra_args: handed to the executor as they are.

    Raises:
        InvalidRequestError: a value is out of range (it is a ``ValueError`` too); ``parameter`` names it.

    Source: protocol section D.2 (mirrors ``vllm/sampling_params.py::SamplingParams``).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    eos_token_id: int | None = field(default=None, name="_eos_token_id")
    all_stop_token_ids: set[int] = field(default_factory=set, name="_all_stop_token_ids")
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = field(default=None, name="_bad_words_token_ids")
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lists()
        if self.stop and not self.include_stop_str_in_output and self.output_text_buffer_length == 0:
            # The frontend holds back this much text: it may be the beginning of a stop string.
            self.output_text_buffer_length = max(len(text) for text in self.stop) - 1
        if self.temperature == 0:  # greedy: what narrows a distribution has nothing to narrow
            if self.top_p != 1:
                self.top_p = 1.0
            if self.top_k != 0:
                self.top_k = 0
            if self.min_p != 0:
                self.min_p = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def _normalise(self) -> None:
        """Bring equivalent spellings to one, as the reference's constructor does."""
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.top_k == -1:
            self.top_k = 0
        if self.skip_reading_prefix_cache is None:
            # Prompt logprobs are computed only for tokens that are not read from the cache.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, low_is_open=True)
        _number("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        _number("top_p", self.top_p, 0, 1, low_is_open=True)
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_INT)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, -1)
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0)

    def _check_lists(self) -> None:
        _strings("stop", self.stop)
        if "" in (self.stop or ()):
            raise InvalidRequestError("stop strings must not be empty", parameter="stop")
        _strings("bad_words", self.bad_words)
        _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must not be empty", parameter="allowed_token_ids")
        if self.logprob_token_ids is not None:
            _token_ids("logprob_token_ids", self.logprob_token_ids)
            if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
                raise InvalidRequestError(
                    f"logprob_token_ids holds {len(self.logprob_token_ids)} ids, at most {MAX_LOGPROB_TOKEN_IDS}",
                    parameter="logprob_token_ids",
                )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise _refuse("logit_bias", self.logit_bias, "a map of token ids to numbers")
            for token_id, bias in self.logit_bias.items():
                _integer("logit_bias token id", token_id, 0, parameter="logit_bias")
                _number("logit_bias", bias, -LARGEST)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            self.structured_outputs = _from_map("structured_outputs", self.structured_outputs, StructuredOutputsParams)
        if self.repetition_detection is not None and not isinstance(
            self.repetition_detection, RepetitionDetectionParams
        ):
            self.repetition_detection = _from_map(
                "repetition_detection", self.repetition_detection, RepetitionDetectionParams
            )


def _from_map(name: str, value: object, kind: type[T]) -> T:
    """Accept the map form of nested parameters, as JSON gives it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"{name}: {exc}", parameter=name) from exc


def _refuse(name: str, value: object, expected: str, parameter: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {expected}, got {reprlib.repr(value)}", parameter=parameter or name)


def _number(name: str, value: float, low: float, high: float = LARGEST, *, low_is_open: bool = False) -> None:
    """Refuse what is not a finite number of ``low … high``."""
    is_number = isinstance(value, (float, int)) and not isinstance(value, bool)
    if is_number and low <= value <= high and not (low_is_open and value == low):  # NaN compares false
        return
    bounds = "a finite number"
    if low > -LARGEST:
        bounds += f" {'above' if low_is_open else 'of at least'} {low}"
    if high < LARGEST:
        bounds += f" and at most {high}"
    raise _refuse(name, value, bounds)


def _integer(name: str, value: int, low: int, high: int | None = None, *, parameter: str | None = None) -> None:
    """Refuse what is not an integer of ``low … high`` (``None``: as large as an integer on the wire can be)."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and low <= value <= (MAX_INT if high is None else min(high, MAX_INT)):
        return
    if high is None and is_integer and value > MAX_INT:
        high = MAX_INT
    bounds = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    raise _refuse(name, value, bounds, parameter)


def _strings(name: str, value: object) -> None:
    if not isinstance(value, list) or (value and not all(isinstance(text, str) for text in value)):
        raise _refuse(name, value, "a list of strings")


def _token_ids(name: str, value: object) -> None:
    if not isinstance(value, list) or (value and not all(type(token) is int and token >= 0 for token in value)):
        raise _refuse(name, value, "a list of non-negative token ids")
