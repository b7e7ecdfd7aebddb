"""``OpenVINOOptions``: what ``executor_options`` can hold for the ``openvino`` executor."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct, field

from enginewire.errors import ConfigError

_DETERMINISTIC: Final = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


class OpenVINOOptions(Struct, kw_only=True, frozen=True):
    """``executor_options`` of the ``openvino`` executor.

    Attributes:
        kv_cache_bytes: memory for keys and values. Default: 512 MiB, or what one sequence of the longest length takes
            if that is more, at most half of the available memory.
        num_kv_blocks: the same as a number of blocks of 32 tokens.
        max_num_batched_tokens: most tokens that one step computes; a longer prompt is computed in pieces, beside the
            others' next tokens. Aborts, new requests and the other requests' tokens wait for the step in progress:
            0.14 s with 128, 0.25 s with 256, 1.1 s with 1,024 (SmolLM2-135M, 2 cores), while throughput rises by 0 to
            12 %. Raise it when more than 64 requests run at once: their next tokens come out of it first.
            See docs/decisions/0003-prefill-chunk.md.
        enable_prefix_caching: prompts that start alike are computed once.
        deterministic: greedy requests give the same text whatever ran before and whatever runs beside them: arithmetic
            and KV cache in float32; 2 to 5 times slower, 3.4 times the memory per token. Otherwise texts may part where
            two tokens are almost equally likely: in another batch, and alone after a request that left its last,
            half-filled block to the prefix cache (the same prompt with one token of output).
        num_threads: threads for computing. Default: OpenVINO's choice, the physical cores.
        properties: further properties of OpenVINO's CPU plugin, e.g. ``{"KV_CACHE_PRECISION": "bf16"}``.
    """

    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    max_num_batched_tokens: int = 128
    enable_prefix_caching: bool = True
    deterministic: bool = False
    num_threads: int | None = None
    properties: dict[str, str | int | float | bool] = field(default_factory=dict)

    def plugin_properties(self) -> dict[str, Any]:
        """Put together the properties of the CPU plugin.

        Raises:
            ConfigError: two options contradict each other.
        """
        chosen: dict[str, Any] = dict(_DETERMINISTIC) if self.deterministic else {}
        if self.num_threads is not None:
            chosen["INFERENCE_NUM_THREADS"] = self.num_threads
        for name, value in self.properties.items():
            if chosen.setdefault(name, value) != value:
                raise ConfigError(f"properties sets {name} to {value!r}, another option to {chosen[name]!r}")
        return chosen

    def __post_init__(self) -> None:
        for name in ("kv_cache_bytes", "num_kv_blocks", "max_num_batched_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"executor option {name} must be at least 1, got {value}")
