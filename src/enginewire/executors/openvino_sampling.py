"""From ``SamplingParams`` to the fields of OpenVINO GenAI's ``GenerationConfig``. Pure; the library is not needed.

OpenVINO raises on some values that are legal on the wire and takes others differently; each is dealt with here:

- ``min_p`` 1 and temperature 0 with sampling raise. Both mean greedy.
- Numbers are float32 there: what would round to 0, 1 or infinity is kept off that edge.
- ``ignore_eos`` there also switches the stop tokens off, and an unset end-of-sequence id is filled in from the model.
  So the tokens that end a request are always listed, and a request that none can end gets ``ignore_eos``.
- ``rng_seed`` is 0 unless set, so that all unseeded samples of a prompt would be the same. It counts modulo 2^32.
- A stop id outside the vocabulary would be written to when ``min_tokens`` masks it: those are left out.
"""

from __future__ import annotations

from typing import Any, Final

from enginewire.wire.sampling import SamplingParams

_LARGEST_MIN_P: Final = 1 - 2**-24
"""The largest float32 below 1."""

_TINY: Final = 1e-30
_HUGE: Final = 1e30


def generation_settings(
    params: SamplingParams,
    *,
    num_delivered: int,
    max_new_tokens: int,
    random_seed: int,
    model_eos: int,
    vocab_size: int,
) -> dict[str, Any]:
    """Map one request's parameters, all but its grammar.

    Args:
        num_delivered: tokens of its output that are part of the prompt by now, because it was interrupted.
        max_new_tokens: most tokens still to come.
        random_seed: used if the request has none, ``0 … 2^32 - 1``.
        model_eos: the model's own end-of-sequence token, which ends a grammar's text.
        vocab_size: token ids are ``0 … vocab_size - 1``.

    Returns:
        Values of ``GenerationConfig``'s attributes, by name.
    """
    constrained = params.structured_outputs is not None
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if params.logprobs is not None:
        settings["logprobs"] = 1

    eos = params.eos_token_id
    stops = {token for token in (*(params.stop_token_ids or ()), eos) if token is not None and 0 <= token < vocab_size}
    if constrained and eos is None:
        stops.add(model_eos)  # the only token left once the grammar is complete
    if stops:
        settings["stop_token_ids"] = stops
        settings["eos_token_id"] = eos if eos in stops else min(stops)
        # Masking the end of a completed grammar would leave no token at all, and garbage is sampled: the grammar wins.
        min_new_tokens = min(params.min_tokens - num_delivered, max_new_tokens)
        if min_new_tokens > 0 and not constrained:
            settings["min_new_tokens"] = min_new_tokens
    else:
        settings["ignore_eos"] = True

    settings["repetition_penalty"] = min(max(params.repetition_penalty, _TINY), _HUGE)
    settings["presence_penalty"] = params.presence_penalty
    settings["frequency_penalty"] = params.frequency_penalty
    if takes_likeliest(params):
        return settings
    settings["do_sample"] = True
    settings["temperature"] = params.temperature
    settings["top_p"] = max(params.top_p, _TINY)
    settings["min_p"] = params.min_p
    settings["rng_seed"] = (random_seed if params.seed is None else params.seed) % 2**32
    if 0 < params.top_k < vocab_size:
        settings["top_k"] = params.top_k
    return settings


def takes_likeliest(params: SamplingParams) -> bool:
    """Return whether nothing is left to chance: temperature 0, or a ``min_p`` that keeps only the likeliest token."""
    return params.is_greedy or params.min_p > _LARGEST_MIN_P


def has_plain_choice(params: SamplingParams) -> bool:
    """Return whether the sampled token is the one of the highest raw probability: greedy, and nothing adjusts it."""
    return (
        takes_likeliest(params)
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.min_tokens == 0
        and params.structured_outputs is None
    )
