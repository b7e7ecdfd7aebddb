"""What vLLM 0.32 changed in the layout: a second table, with the attribute names of the first.

Structs that only gained fields at their end, or keys, are subclasses of 0.25's. Where positions moved (outputs,
adapters) the table is written out: a struct cannot reorder its base's fields. The two layouts are told apart by types
as well: at position 12 of an output one has an integer and the other none or an array, at position 4 of an adapter
one a map or none and the other a boolean. An output read with the wrong table is refused, never misread.

A 0.25 map (parameters, statistics) in a 0.32 message is sound: every key that was added has a default. A 0.25 output
or adapter is not; :func:`outputs_of`, :func:`request_of` and :func:`lora_of` bring them into this layout.
Source: protocol section M.2.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import astuple

from enginewire.errors import EncodeError
from enginewire.wire import arrays, handshake, messages, sampling, stats
from enginewire.wire.messages import converted_on_read

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginewire.wire.arrays import LogprobsLists, SamplingMaskLists, Tensor

    ReorderedOutput = messages.EngineCoreOutput  # what it is to its readers, by attribute names
    Experts = NDArray[Any]
    PromptLogprobs = arrays.LogprobsTensors
else:
    ReorderedOutput = Struct
    # What msgspec sees, as in 0.25's table: arrays stay in wire form until they are read. A list, and not anything:
    # the integer that 0.25 has where `routed_experts` stands here must be refused.
    LogprobsLists = PromptLogprobs = SamplingMaskLists = Tensor = Experts = list[Any]

INSERTED: Final = 9
"""Where an output got an element in the middle: ``ec_transfer_params``."""

DEFAULT_WEIGHT_VERSION: Final = "default"
"""Of weights that nobody has replaced; in every message that a step made."""


class SamplingParams(sampling.SamplingParams, kw_only=True, omit_defaults=True):
    """How one request is sampled, and when it ends: with what 0.32 can be asked for besides.

    Args:
        watermarking: mark the text; vLLM's frontends say ``False`` explicitly.
        prompt_logprob_token_ids: the prompt's log probabilities of these tokens: an array, or its wire form
            ``[dtype, shape, data]`` when it was received.
        prompt_logprob_start: first position of the prompt to report on.
        stream_interval: tokens between two outputs.
        trace_decode_token_ids: tokens to follow through decoding.
    """

    watermarking: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    stream_interval: int | None = None
    watermarking_skipped: bool = field(default=False, name="_watermarking_skipped")
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))


class LoRARequest(Struct, array_like=True):
    """An adapter to load or use: array of 6, without ``tensorizer_config_dict``."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        messages.check_adapter(self.lora_int_id, self.lora_path)


class EngineCoreRequest(messages.EngineCoreRequest, array_like=True):
    """A request for an engine: array of 22.

    Attributes:
        session_id: groups requests whose cache should be kept together.
        kv_hints: what the frontend advises about cached blocks, passed through.
    """

    if not TYPE_CHECKING:  # an attribute is invariant; the names are those of 0.25
        sampling_params: SamplingParams | None = None
        lora_request: LoRARequest | None = None
    session_id: str | None = None
    kv_hints: dict[str, Any] | None = None


class LogprobsTensors(NamedTuple):
    """Log probabilities of a prompt's tokens: array of 5, of which the last is nil on the wire."""

    logprob_token_ids: arrays.Tensor
    logprobs: arrays.Tensor
    selected_token_ranks: arrays.Tensor
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: arrays.Tensor | None = None


class SpecDecodeMetrics(Struct, kw_only=True):
    """Speculative decoding of one request."""

    num_spec_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)


class PrefillStats(stats.PrefillStats, kw_only=True):
    """Tokens of a prompt, and how many were put into the cache."""

    num_cache_creation_tokens: int = 0


class PrefixCacheStats(stats.PrefixCacheStats, kw_only=True):
    """Changes since the last report; sources are ``device``, ``host``, ``p2p``, ``disk``, ``external_unspecified``."""

    hits_by_source: dict[str, int] = field(default_factory=dict)


class IterationDetails(Struct, kw_only=True):
    """One step of the engine."""

    iteration_index: int
    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    num_encoder_inputs: int = 0
    num_encoder_output_tokens: int = 0
    is_dummy: bool = False


class SchedulerStats(stats.SchedulerStats, kw_only=True):
    """State of an engine's scheduler after a step.

    Attributes:
        num_kv_fetch_reqs_by_stage: ``waiting_to_start``, ``in_progress``, ``completed_waiting``.
    """

    if not TYPE_CHECKING:
        prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
        connector_prefix_cache_stats: PrefixCacheStats | None = None
    num_kv_fetch_reqs_by_stage: dict[str, int] = field(default_factory=dict)
    iteration_details: IterationDetails | None = None
    ec_connector_stats: dict[str, Any] | None = None


class EngineCoreOutput(ReorderedOutput, array_like=True, gc=False):
    """What one step brought for one request: array of 18.

    Attributes:
        ec_transfer_params: of the encoder cache's connector.
        mm_cache_miss_hashes: multimodal items that the engine no longer has; resend the request with their data.
        prompt_token_id_logprobs: of ``prompt_logprob_token_ids``.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: PromptLogprobs | None = None
    pooling_output: Tensor | None = None
    finish_reason: messages.FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[stats.EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    if not TYPE_CHECKING:  # narrower than in 0.25
        prefill_stats: PrefillStats | None = None
    routed_experts: Experts | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMaskLists | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    prompt_token_id_logprobs: Tensor | None = None

    if not TYPE_CHECKING:  # inherited, to a type checker
        finished = messages.EngineCoreOutput.finished


def logprobs_tensors_from_wire(value: object) -> LogprobsTensors:
    """Read ``new_prompt_logprobs_tensors``. Raises ``DecodeError``."""
    cumulative = value[4] if isinstance(value, list) and len(value) > 4 else None
    return LogprobsTensors(
        *arrays.logprobs_tensors_from_wire(value), None if cumulative is None else arrays.tensor_from_wire(cumulative)
    )


class ReceivedOutput(EngineCoreOutput, array_like=True, gc=False):
    """An ``EngineCoreOutput`` that came over the wire; its arrays are converted when first read."""

    ARRAY_SLOTS: ClassVar = tuple(
        EngineCoreOutput.__dict__[name]
        for name in (
            "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "routed_experts", "new_sampling_mask",
            "prompt_token_id_logprobs",
        )
    )  # fmt: skip

    if not TYPE_CHECKING:
        finish_reason: messages.ToldOnArrival | None = None
        new_logprobs = converted_on_read(EngineCoreOutput, "new_logprobs", arrays.logprobs_lists_from_wire)
        new_prompt_logprobs_tensors = converted_on_read(
            EngineCoreOutput, "new_prompt_logprobs_tensors", logprobs_tensors_from_wire
        )
        pooling_output = converted_on_read(EngineCoreOutput, "pooling_output", arrays.tensor_from_wire)
        routed_experts = converted_on_read(EngineCoreOutput, "routed_experts", arrays.ndarray_from_wire)
        new_sampling_mask = converted_on_read(EngineCoreOutput, "new_sampling_mask", arrays.sampling_mask_from_wire)
        prompt_token_id_logprobs = converted_on_read(
            EngineCoreOutput, "prompt_token_id_logprobs", arrays.tensor_from_wire
        )


class EngineCoreOutputs(messages.EngineCoreOutputs, array_like=True):
    """One message from an engine: array of 9. ``weight_version`` comes with the outputs of a step."""

    if not TYPE_CHECKING:
        outputs: list[EngineCoreOutput] = field(default_factory=list)
        scheduler_stats: SchedulerStats | None = None
    weight_version: str | None = None


class ReceivedOutputs(EngineCoreOutputs, messages.ReceivedOutputs, array_like=True):
    """An ``EngineCoreOutputs`` that came over the wire."""

    OUTPUT: ClassVar[Any] = ReceivedOutput

    if not TYPE_CHECKING:
        outputs: list[ReceivedOutput] = field(default_factory=list)


class KVEventsConfig(Struct, kw_only=True):
    """Where an engine publishes what enters and leaves its cache; ``publisher`` is ``null`` or ``zmq``."""

    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class EngineCoreReadyResponse(handshake.EngineCoreReadyResponse, kw_only=True):
    """What the engine turned out to be; vLLM 0.32's frontends insist on the keys without a default.

    Attributes:
        data_parallel_rank: the engine's index.
        max_num_batched_tokens: tokens that one step takes at most.
        instance_id: of this start of the engine.
        effective_attention_block_size: kept only if all engines agree.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_events_config: KVEventsConfig | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None


_HEAD, _TAIL = (
    attrgetter(*messages.EngineCoreOutput.__struct_fields__[part])
    for part in (slice(0, INSERTED), slice(INSERTED, None))
)


def lora_of(adapter: messages.LoRARequest | LoRARequest) -> LoRARequest:
    """Bring an adapter into this layout; one that has it is returned as it is.

    Raises:
        EncodeError: it has a ``tensorizer_config_dict``, for which there is no place.
    """
    if isinstance(adapter, LoRARequest):
        return adapter
    if adapter.tensorizer_config_dict is not None:
        raise EncodeError("vLLM 0.32 has no tensorizer_config_dict in an adapter; leave it out")
    return LoRARequest(*(getattr(adapter, name) for name in LoRARequest.__struct_fields__))


def lora_from(adapter: LoRARequest) -> messages.LoRARequest:
    """Bring an adapter from this layout into 0.25's, which the package works with."""
    name, number, path, base, load_inplace, is_3d = astuple(adapter)
    return messages.LoRARequest(name, number, path, base, None, load_inplace, is_3d)


def request_of(request: messages.EngineCoreRequest) -> EngineCoreRequest:
    """Bring a request into this layout; one that has it is returned as it is. Raises :class:`EncodeError`."""
    if isinstance(request, EngineCoreRequest):
        return request
    copy = EngineCoreRequest(*astuple(request))
    if request.lora_request is not None:
        copy.lora_request = lora_of(request.lora_request)  # type: ignore[assignment]  # an attribute is invariant
    return copy


def request_from(request: messages.EngineCoreRequest) -> messages.EngineCoreRequest:
    """Make a decoded request one that the package works with; its adapter is replaced in place."""
    adapter: Any = request.lora_request  # as decoded; type checkers know it by 0.25's table
    if isinstance(adapter, LoRARequest):
        request.lora_request = lora_from(adapter)
    return request


def outputs_of(message: messages.EngineCoreOutputs) -> EngineCoreOutputs:
    """Bring a message into this layout; one that has it is returned as it is."""
    if isinstance(message, EngineCoreOutputs):
        return message
    copy = EngineCoreOutputs(*astuple(message))
    new: Any = EngineCoreOutput  # type checkers know it by 0.25's order
    copy.outputs = [new(*_HEAD(output), None, *_TAIL(output)) for output in message.outputs]
    if copy.scheduler_stats is not None or any(output.new_token_ids for output in copy.outputs):
        copy.weight_version = DEFAULT_WEIGHT_VERSION  # what no step made has none
    return copy
