"""From what a user passes to what an engine gets: prompts are tokenised, checked and made into requests.

Everything that can be refused is refused here, before anything is sent.
"""

from __future__ import annotations

import logging
import operator
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec

from enginewire.config import EngineConfig
from enginewire.engine.validate import check_prompt
from enginewire.errors import InvalidRequestError, ModelError
from enginewire.frontend.constraints import for_vllm
from enginewire.models import resolve_model
from enginewire.text.chat import Message
from enginewire.text.tokenizer import Tokenizer, load_tokenizer
from enginewire.wire.capabilities import EVERYTHING, check_sampling_params
from enginewire.wire.messages import EngineCoreRequest, LoRARequest
from enginewire.wire.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Sequence[Message]
"""Text; token ids; ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; or chat messages (``role`` and ``content``).

A map may carry ``cache_salt`` too, and with ``prompt_token_ids`` the ``prompt`` they were made of, for the output.
"""

MAX_COMPLETIONS: Final = 16_384
"""Bound of ``n``: each is a request of its own, and a number from a client of a server must not exhaust its memory."""

LONG_TEXT_CHARS: Final = 4096
"""Longer texts take more than about a millisecond to tokenise."""

_PROMPT_KEYS: Final = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
_INT64: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, ready to be sent.

    Attributes:
        request_id: the user's id; those of ``requests`` are unique, so that users may repeat theirs.
        prompt: the text, if there is one.
        prompt_token_ids: the prompt.
        params: with everything filled in, for all completions together.
        requests: one per completion.
        tokenizer: for the output's text and logprobs; ``None``: the output is token ids only.
        max_output_len: a completion that ends by length has exactly so many tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineCoreRequest]
    tokenizer: Tokenizer | None
    max_output_len: int


class InputProcessor:
    """Makes requests for one engine. May be used by several threads.

    Args:
        config: the client's, with what the engine reported.
        tokenizer: one, or the model to take it from; default: that of ``config.model``. It is loaded when it is needed.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | str | Path | None = None) -> None:
        self._config = config
        self._tokenizer_model: str | Path = config.model
        self._tokenizer: Tokenizer | None = None
        if isinstance(tokenizer, Tokenizer):
            self._tokenizer = tokenizer
        elif tokenizer is not None:
            self._tokenizer_model = tokenizer
        self._loading = threading.Lock()  # loaded once, whoever comes first
        self._has_no_tokenizer = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use.

        Raises:
            ModelError: it cannot be.
        """
        if self._tokenizer is None:
            with self._loading:
                if self._tokenizer is None:
                    self._tokenizer = load_tokenizer(resolve_model(self._tokenizer_model))
        return self._tokenizer

    def is_slow(self, prompt: Prompt, params: SamplingParams | None) -> bool:
        """Tell whether :meth:`prepare` may take a millisecond or more: an event loop should not wait for that."""
        text = cast("Mapping[str, object]", prompt).get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT_CHARS:
            return True
        if is_conversation(prompt):  # the first one compiles the template
            return True
        return self._tokenizer is None and (isinstance(text, str) or self._needs_tokenizer(params or SamplingParams()))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **template_kwargs: object,
    ) -> dict[str, Any]:
        """Turn a conversation into a prompt with the model's chat template; see ``Tokenizer.apply_chat_template``."""
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )
        # The template has written the special tokens that a conversation begins with.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        data_parallel_rank: int | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> PreparedRequest:
        """Check a request and make it ready to be sent.

        Raises:
            InvalidRequestError: it asks for something that cannot be done.
            ModelError: text is to be read or written and there is no tokenizer for it.
        """
        params = self._checked_params(params)
        text, token_ids, cache_salt = self._parse(prompt)
        limit = self._config.max_model_len
        check_prompt(token_ids, max_model_len=limit or sys.maxsize, vocab_size=self._vocab_size)
        room = None if limit is None else limit - len(token_ids)
        tokenizer = self._tokenizer_for(params)
        params = self._filled_params(params, tokenizer, room)
        if lora_request is not None and not self._config.capabilities.lora:
            raise InvalidRequestError("this engine does not support lora_request", parameter="lora_request")
        unique = f"{request_id}-{secrets.token_hex(4)}"
        requests = [
            EngineCoreRequest(
                request_id=child_id,
                prompt_token_ids=token_ids,
                sampling_params=child_params,
                lora_request=lora_request,
                cache_salt=cache_salt,
                data_parallel_rank=data_parallel_rank,
                priority=priority,
                trace_headers=trace_headers,
                external_req_id=request_id,
            )
            for child_id, child_params in _fan_out(unique, params)
        ]
        max_tokens = cast("int", params.max_tokens)
        return PreparedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            requests=requests,
            tokenizer=tokenizer if params.detokenize else None,
            max_output_len=max_tokens if room is None else min(max_tokens, room),
        )

    # The prompt.

    def _parse(self, prompt: object) -> tuple[str | None, list[int], str | None]:
        """Return the prompt's text, token ids and cache salt."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt), None
        if isinstance(prompt, Mapping):
            return self._parse_map(cast("Mapping[str, object]", prompt))
        if is_conversation(prompt):
            return self._parse_map(self.render_chat(cast("Sequence[Message]", prompt)))
        return None, _token_ids(prompt), None

    def _parse_map(self, prompt: Mapping[str, object]) -> tuple[str | None, list[int], str | None]:
        if unknown := sorted(map(str, set(prompt) - _PROMPT_KEYS)):
            raise _bad_prompt(f"has unknown key {', '.join(unknown)}; known: {', '.join(sorted(_PROMPT_KEYS))}")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if text is not None and not isinstance(text, str):
            raise _bad_prompt(f"must have a string as 'prompt', got {type(text).__name__}")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise _bad_prompt(f"must have a non-empty string as 'cache_salt', got {type(salt).__name__}")
        if ids is not None:
            return text, _token_ids(ids), salt
        if text is None:
            raise _bad_prompt("needs one of 'prompt' and 'prompt_token_ids'")
        return text, self.tokenizer.encode(text), salt

    @property
    def _vocab_size(self) -> int | None:
        if self._config.vocab_size is not None:
            return self._config.vocab_size
        return None if self._tokenizer is None else self._tokenizer.vocab_size

    # The sampling parameters.

    def _checked_params(self, params: object) -> SamplingParams:
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", parameter="sampling_params"
            )
        if not 1 <= params.n <= MAX_COMPLETIONS:
            raise InvalidRequestError(f"n must be 1 to {MAX_COMPLETIONS}, got {params.n}", parameter="n")
        if params.output_kind not in set(RequestOutputKind):
            raise InvalidRequestError(
                f"output_kind must be a RequestOutputKind, got {params.output_kind!r}", parameter="output_kind"
            )
        if params.stop and not params.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True: they are found in the text", parameter="stop")
        check_sampling_params(params, self._config.capabilities)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            self._check_vocabulary(name, getattr(params, name) or ())
        return params

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        limit = self._vocab_size
        for token_id in token_ids:
            if limit is not None and token_id >= limit:
                raise InvalidRequestError(
                    f"{name} has token id {token_id}; token ids must be less than {limit}", parameter=name
                )

    def _tokenizer_for(self, params: SamplingParams) -> Tokenizer | None:
        """Return the tokenizer if the request needs one.

        Text needs it, and so does EOS. An engine whose model has no tokenizer here still serves token ids, without EOS.
        """
        if not self._needs_tokenizer(params):
            return None
        if params.detokenize or params.bad_words:
            return self.tokenizer
        try:
            return self.tokenizer
        except ModelError as exc:
            self._has_no_tokenizer = True
            logger.warning("requests with detokenize=False do not stop at EOS, which is not known: %s", exc)
            return None

    def _needs_tokenizer(self, params: SamplingParams) -> bool:
        wants_eos = not (params.ignore_eos or self._has_no_tokenizer)
        return params.detokenize or bool(params.bad_words) or wants_eos

    def _filled_params(self, params: SamplingParams, tokenizer: Tokenizer | None, room: int | None) -> SamplingParams:
        """Return a copy with what only a frontend knows. The ranges are checked again: users may have set fields."""
        max_tokens = params.max_tokens
        if max_tokens is None:
            if room is None:
                raise InvalidRequestError(
                    "max_tokens must be given: this engine did not report its max_model_len", parameter="max_tokens"
                )
            max_tokens = room
        eos_token_id = None
        stop_token_ids = list(params.stop_token_ids or ())
        if tokenizer is not None and not params.ignore_eos:
            eos_token_id = tokenizer.eos_token_id
            stop_token_ids += sorted(tokenizer.eos_token_ids - {eos_token_id} - set(stop_token_ids))
        all_stop_token_ids = set(stop_token_ids)
        if eos_token_id is not None:
            all_stop_token_ids.add(eos_token_id)
        return msgspec.structs.replace(
            params,
            output_kind=RequestOutputKind(params.output_kind),
            max_tokens=max_tokens,
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            all_stop_token_ids=all_stop_token_ids,
            bad_words_token_ids=_bad_words(params.bad_words or (), tokenizer) if tokenizer is not None else None,
            structured_outputs=self._constraint(params.structured_outputs),
        )

    def _constraint(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        if constraint is None or self._config.capabilities != EVERYTHING:
            return constraint
        return for_vllm(constraint)


def is_conversation(prompt: object) -> bool:
    """Tell whether something is a list of chat messages."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)) or not prompt:
        return False
    return all(isinstance(item, Mapping) and "role" in item for item in cast("Sequence[object]", prompt))


def is_single_prompt(prompts: object) -> bool:
    """Tell one prompt from a list of prompts. What is neither is one, and will be refused as one."""
    if isinstance(prompts, (str, Mapping)) or is_conversation(prompts):
        return True
    if not isinstance(prompts, Iterable) or not isinstance(prompts, Sized):
        return True
    items = cast("Iterable[object]", prompts)
    return len(prompts) > 0 and not isinstance(next(iter(items)), Iterable)  # arrays count as lists


def _token_ids(value: object) -> list[int]:
    """Return token ids as a list of our own; numpy's integers are welcome, booleans and text are not."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _bad_prompt(
            "must be text, a list of token ids, a map with 'prompt' or 'prompt_token_ids', or a list of chat messages; "
            f"got {type(value).__name__}"
        )
    items: list[Any] = list(value)  # an open edge: whatever the user has
    if set(map(type, items)) <= {int}:
        return items
    try:
        if any(isinstance(item, bool) for item in items):
            raise TypeError("a boolean")
        return [operator.index(item) for item in items]
    except TypeError as exc:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise _bad_prompt(f"must be a list of integers if it is a list of token ids, got one of {kinds}") from exc


def _bad_prompt(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the prompt {problem}", parameter="prompt")


def _fan_out(unique_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """Return id and parameters of each completion: engines know one completion per request."""
    if params.n == 1:
        return [(unique_id, params)]
    children: list[tuple[str, SamplingParams]] = []
    for index in range(params.n):
        seed = None if params.seed is None else (params.seed + index + _INT64 // 2) % _INT64 - _INT64 // 2
        children.append((f"{index}_{unique_id}", msgspec.structs.replace(params, n=1, seed=seed)))
    return children


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]] | None:
    """Return the token sequences that spell each word, at the beginning of a text and behind a space."""
    sequences: list[list[int]] = []
    for word in words:
        if not word.strip():
            raise InvalidRequestError("bad_words must not be empty", parameter="bad_words")
        for spelling in (word, " " + word.lstrip()):
            token_ids = tokenizer.encode(spelling, add_special_tokens=False)
            if token_ids and token_ids not in sequences:
                sequences.append(token_ids)
    return sequences or None
