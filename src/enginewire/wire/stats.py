"""What an engine reports about itself: statistics per step, milestones per request. Plain maps on the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from msgspec import Struct, field


class EngineCoreEventType(IntEnum):
    """Milestones of a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(Struct):
    """A milestone with the engine's monotonic clock in seconds."""

    type: EngineCoreEventType
    timestamp: float


class PrefillStats(Struct, kw_only=True):
    """Tokens of a prompt: ``computed + cached = prompt``, ``local + external = cached``. Source: protocol D.9."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class PrefixCacheStats(Struct, kw_only=True):
    """Changes since the last report; queries and hits count tokens."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class KVCacheEvictionEvent(Struct, kw_only=True):
    """Life of an evicted cache block."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: list[float]


class SpecDecodingStats(Struct, kw_only=True):
    """Speculative decoding since the last report."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)


class CUDAGraphStats(Struct, kw_only=True):
    """What a captured graph padded."""

    num_unpadded_tokens: int
    num_padded_tokens: int
    num_paddings: int
    runtime_mode: str


class PerfStats(Struct, kw_only=True):
    """Work per GPU since the last report."""

    num_flops_per_gpu: int = 0
    num_read_bytes_per_gpu: int = 0
    num_write_bytes_per_gpu: int = 0
    debug_stats: dict[str, Any] | None = None


class SchedulerStats(Struct, kw_only=True):
    """State of an engine's scheduler after a step. Source: protocol D.10.

    Attributes:
        num_running_reqs: requests in the executor.
        num_waiting_reqs: requests in the admission queue.
        kv_cache_usage: share of the KV blocks in use, 0 … 1.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = field(default_factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: CUDAGraphStats | None = None
    perf_stats: PerfStats | None = None
