"""What an engine can do, as it tells its frontends, and the check of a request against it.

The ready response carries an :class:`EngineInfo` under the key ``enginewire``. A vLLM engine sends none and can do
everything (:data:`EVERYTHING`). Frontends use the same check as the engine, so that a request that cannot run is
refused before it is sent.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from enginewire.errors import InvalidRequestError
from enginewire.wire.sampling import SamplingParams


class Capabilities(Struct, kw_only=True, frozen=True):
    """What an executor offers. The defaults are the least: a new executor announces what it adds.

    Attributes:
        tasks: what ``get_supported_tasks`` answers.
        max_logprobs: most ``logprobs`` besides the sampled token's; 0: the sampled token only; -1: no bound;
            ``None``: no logprobs at all.
        max_prompt_logprobs: the same for ``prompt_logprobs``.
        structured_outputs: kinds of constraint, e.g. ``("json", "regex")``.
        penalties: repetition, presence and frequency penalty.
        min_p, logit_bias, allowed_token_ids, bad_words, logprob_token_ids, thinking_token_budget, lora: the parameter
            works.
        stochastic: temperature above 0 samples; otherwise it is taken as greedy by design (echo).
        deterministic: equal requests give equal texts whatever else is in the batch.
        resume: the executor honours ``extra_args["resume_output_len"]``: how many trailing prompt tokens are output.
        sleep_levels: levels that ``sleep`` accepts beyond 0.
        prefix_caching: shared prompt prefixes are computed once.
    """

    tasks: tuple[str, ...] = ("generate",)
    max_logprobs: int | None = None
    max_prompt_logprobs: int | None = None
    structured_outputs: tuple[str, ...] = ()
    penalties: bool = False
    min_p: bool = False
    logit_bias: bool = False
    allowed_token_ids: bool = False
    bad_words: bool = False
    logprob_token_ids: bool = False
    thinking_token_budget: bool = False
    lora: bool = False
    stochastic: bool = True
    deterministic: bool = False
    resume: bool = False
    sleep_levels: tuple[int, ...] = ()
    prefix_caching: bool = False


EVERYTHING: Final = Capabilities(
    max_logprobs=-1,
    max_prompt_logprobs=-1,
    structured_outputs=("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    penalties=True,
    min_p=True,
    logit_bias=True,
    allowed_token_ids=True,
    bad_words=True,
    logprob_token_ids=True,
    thinking_token_budget=True,
    lora=True,
    sleep_levels=(1, 2),
)
"""A vLLM engine: it announces nothing and is trusted to refuse by itself what it cannot do."""


class EngineInfo(Struct, kw_only=True):
    """The value of the ready response's ``enginewire`` key.

    Attributes:
        version: of enginewire on the engine's side.
        executor: its class, for logs and pages.
        vocab_size: token ids are ``0 … vocab_size - 1``; ``None``: unknown.
        wire_version: the version of vLLM whose layout it speaks; ``None``: that of each frontend's first request.
    """

    version: str
    executor: str = ""
    vocab_size: int | None = None
    wire_version: str | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)


def check_sampling_params(params: SamplingParams, can: Capabilities) -> None:
    """Refuse what an engine of these capabilities cannot do.

    Raises:
        InvalidRequestError: ``parameter`` names the first parameter that cannot be honoured.
    """
    _check_logprobs("logprobs", params.logprobs, can.max_logprobs)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, can.max_prompt_logprobs)
    if (constraint := params.structured_outputs) is not None:
        for kind in constraint.kinds():
            if kind not in can.structured_outputs:
                offers = ", ".join(can.structured_outputs) or "none"
                raise _unsupported("structured_outputs", f"structured_outputs of kind {kind!r}; it offers {offers}")
    for name, used, offered in (
        ("presence_penalty", params.presence_penalty != 0, can.penalties),
        ("frequency_penalty", params.frequency_penalty != 0, can.penalties),
        ("repetition_penalty", params.repetition_penalty != 1, can.penalties),
        ("min_p", params.min_p != 0, can.min_p),
        ("logit_bias", bool(params.logit_bias), can.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids is not None, can.allowed_token_ids),
        ("bad_words", bool(params.bad_words or params.bad_words_token_ids), can.bad_words),
        ("logprob_token_ids", params.logprob_token_ids is not None, can.logprob_token_ids),
        ("thinking_token_budget", params.thinking_token_budget is not None, can.thinking_token_budget),
    ):
        if used and not offered:
            raise _unsupported(name, name)


def _check_logprobs(name: str, asked: int | None, limit: int | None) -> None:
    if asked is None or limit == -1:
        return
    if limit is None:
        raise _unsupported(name, name)
    if asked == -1 or asked > limit:
        most = "the sampled token's only (0)" if limit == 0 else f"at most {limit}"
        raise _unsupported(name, f"{name}={asked}; it offers {most}")


def _unsupported(parameter: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"this engine does not support {what}", parameter=parameter)
