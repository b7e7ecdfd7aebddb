"""How much KV cache a model needs and how much it gets. Pure, apart from reading the model's description.

OpenVINO's CPU plugin keeps keys and values in blocks of 32 tokens. Its scheduler is always told their number, because
only then is the number that is reported the number that exists.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from enginewire.errors import ConfigError, ModelError
from enginewire.text.gguf import GGUFMetadata, read_gguf

BLOCK_SIZE: Final = 32
"""Tokens per block; fixed by OpenVINO's CPU plugin."""

DEFAULT_KV_CACHE_BYTES: Final = 512 << 20
"""What the KV cache gets unless told otherwise: for SmolLM2-135M 39,000 tokens (float32: 11,600). It becomes resident
only as blocks are used, and stays so, because old blocks are kept as prefix cache."""

_QUANTISATION_BYTES: Final = 8
"""A float32 scale and a float32 zero point: one pair per token for values, per channel and block for keys."""

_ELEMENT_BYTES: Final[Mapping[str, int]] = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a model that decide about memory.

    Attributes:
        num_layers: layers with attention.
        num_kv_heads: heads of keys and values per layer.
        key_size, value_size: numbers per head and token.
        context_length: longest sequence the model was made for, in tokens.
        vocab_size: token ids are ``0 … vocab_size - 1``.
    """

    num_layers: int
    num_kv_heads: int
    key_size: int
    value_size: int
    context_length: int
    vocab_size: int

    @classmethod
    def read(cls, model: Path) -> ModelGeometry:
        """Read it from a .gguf file's header or from a model folder's ``config.json``.

        Raises:
            ModelError: the file is missing, damaged or cut, or does not say.
        """
        if model.is_dir():
            return cls._from_folder(model)
        return cls._from_gguf(read_gguf(model))

    @classmethod
    def _from_gguf(cls, metadata: GGUFMetadata) -> ModelGeometry:
        prefix = metadata.architecture

        def number(key: str, default: int | None = None) -> int:
            value = metadata.integer(f"{prefix}.{key}")
            return _required(metadata.path, f"{prefix}.{key}", default if value is None else value)

        heads = number("attention.head_count")
        head_size = number("embedding_length") // heads
        tokens = metadata.get("tokenizer.ggml.tokens")
        return cls(
            num_layers=number("block_count"),
            num_kv_heads=number("attention.head_count_kv", heads),
            key_size=number("attention.key_length", head_size),
            value_size=number("attention.value_length", head_size),
            context_length=number("context_length"),
            vocab_size=number("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> ModelGeometry:
        if not (folder / "openvino_model.xml").is_file():
            raise ModelError(
                f"{folder}: no openvino_model.xml in it; expected a .gguf file or an OpenVINO model folder"
            )
        path = folder / "config.json"
        try:
            config: Any = json.loads(path.read_bytes())
        except (OSError, ValueError) as exc:
            raise ModelError(f"{path}: cannot be read: {exc}; an OpenVINO model folder needs it") from exc
        if not isinstance(config, dict):
            raise ModelError(f"{path}: expected a JSON object")

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key)
            return _required(path, key, default if value is None else value)

        heads = number("num_attention_heads")
        head_size = number("head_dim", number("hidden_size") // heads)
        return cls(
            num_layers=number("num_hidden_layers"),
            num_kv_heads=number("num_key_value_heads", heads),
            key_size=head_size,
            value_size=head_size,
            context_length=number("max_position_embeddings"),
            vocab_size=number("vocab_size"),
        )

    def bytes_per_block(self, precision: str) -> int:
        """Compute the bytes of one block of 32 tokens over all layers.

        Args:
            precision: OpenVINO's name of the cache's element type. Anything smaller than ``u8`` is counted as ``u8``,
                an upper bound.

        Checked against ``PipelineMetrics.kv_cache_size_in_bytes`` for u8, bf16 and f32.
        """
        size = _ELEMENT_BYTES.get(precision)
        if size is not None:
            per_head = BLOCK_SIZE * (self.key_size + self.value_size) * size
        else:
            keys = self.key_size * (BLOCK_SIZE + _QUANTISATION_BYTES)
            values = BLOCK_SIZE * (self.value_size + _QUANTISATION_BYTES)
            per_head = keys + values
        return self.num_layers * self.num_kv_heads * per_head


class KVPlan(NamedTuple):
    """What the KV cache will be.

    Attributes:
        num_blocks: blocks of 32 tokens.
        max_model_len: most tokens of prompt and output together.
    """

    num_blocks: int
    max_model_len: int


def plan_kv_cache(
    geometry: ModelGeometry,
    bytes_per_block: int,
    *,
    max_model_len: int | None,
    num_kv_blocks: int | None,
    kv_cache_bytes: int | None,
    available_bytes: int | None,
) -> KVPlan:
    """Decide how many blocks there are, and the longest sequence they and the model allow.

    Args:
        max_model_len: the length asked for; ``None``: what is possible.
        num_kv_blocks: number of blocks asked for.
        kv_cache_bytes: bytes asked for; without this and ``num_kv_blocks``: the default, more if one sequence of the
            wanted length needs it, at most half of the memory that is available.
        available_bytes: memory that is free for use; ``None``: unknown.

    Raises:
        ConfigError: the length is more than the model or the cache allows, or the cache is too small for one block.
    """
    wanted = geometry.context_length if max_model_len is None else max_model_len
    if wanted > geometry.context_length:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {geometry.context_length} tokens the model was made for; "
            f"set max_model_len to at most {geometry.context_length}"
        )
    if num_kv_blocks is not None and kv_cache_bytes is not None:
        raise ConfigError("num_kv_blocks and kv_cache_bytes both set the size of the KV cache; give one of them")
    needed = -(-wanted // BLOCK_SIZE) * bytes_per_block
    if num_kv_blocks is None:
        if kv_cache_bytes is None:
            kv_cache_bytes = max(DEFAULT_KV_CACHE_BYTES, needed)
            if available_bytes is not None:
                kv_cache_bytes = min(kv_cache_bytes, available_bytes // 2)
        num_kv_blocks = kv_cache_bytes // bytes_per_block
    if num_kv_blocks < 1:
        raise ConfigError(
            f"the KV cache gets {kv_cache_bytes} bytes, one block of {BLOCK_SIZE} tokens takes {bytes_per_block}; "
            "set kv_cache_bytes or num_kv_blocks"
        )
    holds = num_kv_blocks * BLOCK_SIZE
    if max_model_len is not None and max_model_len > holds:
        raise ConfigError(
            f"max_model_len {max_model_len} needs {needed:,} bytes of KV cache, which has "
            f"{num_kv_blocks * bytes_per_block:,}; set kv_cache_bytes to at least {needed}, or max_model_len to at "
            f"most {holds}"
        )
    return KVPlan(num_kv_blocks, min(wanted, holds))


def available_memory() -> int | None:
    """Return the bytes this process could still use, by the system's and its control group's count."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(max(limit - int((group / "memory.current").read_text()), 0))
    return min(found, default=None)


def _required(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} is {value!r}, expected a positive integer")
    return value
