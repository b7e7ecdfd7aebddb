"""The structs of the wire: requests, outputs, statistics and utility answers.

This module is the layout table of vLLM 0.25: for array structs, field order is the wire (protocol section D).
:mod:`enginewire.wire.v0_32` is a second such table; :mod:`enginewire.wire.profile` says which one a peer speaks.

Decoding leaves a step's arrays (logprobs, pooling results) as they came: turning them into numpy costs twelve times
what the rest of a message costs, and most consumers never look. ``ReceivedOutput`` converts on first read.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field
from msgspec.msgpack import Ext

from enginewire.wire.arrays import (
    LogprobsLists,
    LogprobsTensors,
    Tensor,
    logprobs_lists_from_wire,
    logprobs_tensors_from_wire,
    ndarray_from_wire,
    tensor_from_wire,
)
from enginewire.wire.sampling import SamplingParams
from enginewire.wire.stats import (
    CUDAGraphStats,
    EngineCoreEvent,
    EngineCoreEventType,
    KVCacheEvictionEvent,
    PerfStats,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)
from enginewire.wire.utility import (
    ReconfigureDistributedRequest,
    UtilityCall,
    UtilityOutput,
    utility_output,
    utility_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = [
    "CUDAGraphStats",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "FinishReason",
    "KVCacheEvictionEvent",
    "LateInteractionParams",
    "LoRARequest",
    "MultiModalFeatureSpec",
    "PerfStats",
    "PlaceholderRange",
    "PoolingParams",
    "PrefillStats",
    "PrefixCacheStats",
    "ReceivedOutput",
    "ReceivedOutputs",
    "ReconfigureDistributedRequest",
    "SchedulerStats",
    "SpecDecodingStats",
    "UtilityCall",
    "UtilityOutput",
    "check_adapter",
    "converted_on_read",
    "utility_output",
    "utility_result",
]


class ToldOnArrival:
    """What msgspec hands to a decoder's hook, which so hears of it without looking at every output of every step."""


class FinishReason(ToldOnArrival, IntEnum):
    """Why a request ended. ``str()`` gives the word that APIs use."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class LateInteractionParams(Struct, array_like=True):
    """``mode`` is ``cache_query`` or ``score_doc``."""

    mode: str
    query_key: str
    query_uses: int | None = None


class PoolingParams(Struct, array_like=True):
    """What a pooling request wants. Ours refuses them; vLLM engines serve them. Source: protocol D.3."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: int = 2


class LoRARequest(Struct, array_like=True):
    """An adapter to load or use. Source: protocol D.4."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        check_adapter(self.lora_int_id, self.lora_path)


def check_adapter(lora_int_id: int, lora_path: str) -> None:
    """Refuse an adapter that no engine takes. Raises :class:`ValueError`."""
    if lora_int_id < 1:
        raise ValueError(f"lora_int_id must be at least 1, got {lora_int_id}")
    if not lora_path:
        raise ValueError("lora_path must not be empty")


class PlaceholderRange(Struct, kw_only=True):
    """Where a multimodal item sits in the prompt; ``is_embed`` is a bool tensor ``[length]``."""

    offset: int
    length: int
    is_embed: Tensor | None = None


class MultiModalFeatureSpec(Struct, kw_only=True):
    """One multimodal item. ``data`` stays in wire form: nested maps and array triples. Source: protocol D.17."""

    data: dict[str, Any] | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


class EngineCoreRequest(Struct, array_like=True):
    """A request for an engine: array of 20. Source: protocol D.1.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt_token_ids: the prompt; ``None`` for pure embeddings.
        sampling_params: exactly one of this and ``pooling_params`` is set.
        arrival_time: wall-clock seconds.
        data_parallel_rank: forces an engine.
        prompt_embeds: float tensor ``[prompt_len, hidden_size]``.
        client_index: which frontend gets the outputs; stamped by the client.
        current_wave: lock-step engines: the wave the frontend believes current.
        priority: lower runs earlier, with the priority policy only.
        resumable: more requests with this id will follow.
        external_req_id: the user's own id.
        abort_immediately: take it in and abort it at once.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None = None
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = field(default_factory=time.time)
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Tensor | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False


class EngineCoreOutput(Struct, array_like=True, gc=False):
    """What one step brought for one request: array of 13. Source: protocol D.6.

    Attributes:
        new_token_ids: tokens of this step, possibly none.
        new_logprobs: their log probabilities, if asked for.
        new_prompt_logprobs_tensors: the prompt's, with the first token, if asked for.
        finish_reason: set on the last output of a request.
        stop_reason: the stop token's id; for ERROR our engine's explanation (``"invalid_request: …"``).
        events: milestones since the last output.
        prefill_stats: with the first output.
    """

    request_id: str
    new_token_ids: list[int]
    # Plain `Any` for msgspec (see the module's docstring), the real types for readers and type checkers.
    if TYPE_CHECKING:
        new_logprobs: LogprobsLists | None = None
        new_prompt_logprobs_tensors: LogprobsTensors | None = None
        pooling_output: Tensor | None = None
    else:
        new_logprobs: Any = None
        new_prompt_logprobs_tensors: Any = None
        pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    if TYPE_CHECKING:
        routed_experts: NDArray[Any] | None = None
    else:
        routed_experts: Any = None
    num_nans_in_logits: int = 0

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


_WIRE_TYPES = frozenset((list, dict, int, float, bool, str, bytes, Ext))
"""What a field decodes to before it is converted, sound (a list) or not. Nothing that is converted is one of them."""


def converted_on_read(struct: type[Struct], name: str, convert: Callable[[object], object]) -> Any:
    """Make a property over a struct's slot ``name`` that replaces a wire value by what it stands for."""
    slot = struct.__dict__[name]

    def read(self: Struct) -> object:
        value = slot.__get__(self)
        if type(value) in _WIRE_TYPES:  # still as it came
            value = convert(value)
            slot.__set__(self, value)
        return value

    return property(
        read, slot.__set__, doc=f"``{name}``, converted when first read. Raises DecodeError if it is malformed."
    )


class ReceivedOutput(EngineCoreOutput, array_like=True, gc=False):
    """An ``EngineCoreOutput`` that came over the wire; its arrays are converted when first read.

    Attributes:
        ARRAY_SLOTS: descriptors of the fields that may refer to auxiliary frames, past the properties.
    """

    ARRAY_SLOTS: ClassVar = tuple(
        EngineCoreOutput.__dict__[name]
        for name in ("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "routed_experts")
    )

    if not TYPE_CHECKING:
        finish_reason: ToldOnArrival | None = None
        new_logprobs = converted_on_read(EngineCoreOutput, "new_logprobs", logprobs_lists_from_wire)
        new_prompt_logprobs_tensors = converted_on_read(
            EngineCoreOutput, "new_prompt_logprobs_tensors", logprobs_tensors_from_wire
        )
        pooling_output = converted_on_read(EngineCoreOutput, "pooling_output", tensor_from_wire)
        routed_experts = converted_on_read(EngineCoreOutput, "routed_experts", ndarray_from_wire)


class EngineCoreOutputs(Struct, array_like=True):
    """One message from an engine: array of 8. Source: protocol D.5.

    Attributes:
        engine_index: rank of the sender.
        outputs: at most one per request.
        scheduler_stats: at most one client per step gets it, when statistics are on.
        timestamp: seconds, the engine's monotonic clock.
        utility_output: when set, the rest is ignored.
        finished_requests: ids that ended, for clients that keep track of engines' load.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = field(default_factory=time.monotonic)
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


class ReceivedOutputs(EngineCoreOutputs, array_like=True):
    """An ``EngineCoreOutputs`` that came over the wire, of outputs of type ``OUTPUT``."""

    OUTPUT: ClassVar[type[ReceivedOutput]] = ReceivedOutput

    if not TYPE_CHECKING:  # a list is invariant; for readers it stays a list of EngineCoreOutput
        outputs: list[ReceivedOutput] = field(default_factory=list)
