"""KV-cache arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginewire.errors import ConfigError, ModelError
from enginewire.executors.openvino_memory import (
    DEFAULT_KV_CACHE_BYTES,
    KVPlan,
    ModelGeometry,
    available_memory,
    plan_kv_cache,
)

SMOLLM2 = ModelGeometry(
    num_layers=30, num_kv_heads=3, key_size=64, value_size=64, context_length=8192, vocab_size=49152
)


@pytest.mark.parametrize(
    ("precision", "expected"), [("u8", 437_760), ("f32", 1_474_560), ("bf16", 737_280), ("f16", 737_280)]
)
def test_bytes_per_block_are_those_that_openvino_reports(precision: str, expected: int) -> None:
    """Measured with PipelineMetrics.kv_cache_size_in_bytes; the model tests measure again."""
    assert SMOLLM2.bytes_per_block(precision) == expected


def plan(**changes: Any) -> KVPlan:
    arguments: dict[str, Any] = {
        "max_model_len": None, "num_kv_blocks": None, "kv_cache_bytes": None, "available_bytes": 64 << 30,
    }  # fmt: skip
    return plan_kv_cache(SMOLLM2, 437_760, **(arguments | changes))


def test_by_default_the_cache_has_the_default_size_and_the_model_its_whole_context() -> None:
    assert plan() == KVPlan(DEFAULT_KV_CACHE_BYTES // 437_760, 8192)


def test_the_default_grows_to_hold_one_sequence_of_the_wanted_length() -> None:
    deep = ModelGeometry(30, 30, 640, 640, 8192, 49152)
    got = plan_kv_cache(
        deep, 43_776_000, max_model_len=None, num_kv_blocks=None, kv_cache_bytes=None, available_bytes=64 << 30
    )
    assert got == KVPlan(256, 8192)


def test_the_default_leaves_half_of_the_memory_and_shortens_the_context() -> None:
    assert plan(available_bytes=20 * 437_760) == KVPlan(10, 320)


def test_unknown_memory_means_the_default() -> None:
    assert plan(available_bytes=None).num_blocks == DEFAULT_KV_CACHE_BYTES // 437_760


def test_a_byte_budget_is_divided_into_whole_blocks() -> None:
    assert plan(kv_cache_bytes=10 * 437_760 + 437_759) == KVPlan(10, 320)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan(num_kv_blocks=300) == KVPlan(300, 8192)


def test_a_shorter_max_model_len_is_kept() -> None:
    assert plan(max_model_len=100) == KVPlan(DEFAULT_KV_CACHE_BYTES // 437_760, 100)


def test_a_max_model_len_beyond_the_model_is_refused_with_what_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 9000 is more than the 8192 tokens .* at most 8192"):
        plan(max_model_len=9000)


def test_a_max_model_len_beyond_the_budget_is_refused_with_the_budget_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes to at least 4815360, or max_model_len to at most 320"):
        plan(max_model_len=321, kv_cache_bytes=10 * 437_760)
    assert plan(max_model_len=321, kv_cache_bytes=4_815_360) == KVPlan(11, 321)


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="one block of 32 tokens takes 437760"):
        plan(kv_cache_bytes=437_759)


def test_blocks_and_bytes_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        plan(kv_cache_bytes=1 << 30, num_kv_blocks=10)


def folder(path: Path, config: object) -> Path:
    (path / "openvino_model.xml").write_text("<net/>")
    (path / "config.json").write_text(json.dumps(config))
    return path


CONFIG = {
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64,
    "max_position_embeddings": 512, "vocab_size": 100,
}  # fmt: skip


def test_a_folders_sizes_are_read_from_its_config(tmp_path: Path) -> None:
    assert ModelGeometry.read(folder(tmp_path, CONFIG)) == ModelGeometry(2, 4, 8, 8, 512, 100)


def test_a_folders_config_may_give_the_head_size_itself(tmp_path: Path) -> None:
    assert ModelGeometry.read(folder(tmp_path, CONFIG | {"head_dim": 16})).key_size == 16


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no openvino_model\.xml"):
        ModelGeometry.read(tmp_path)


@pytest.mark.parametrize("value", [None, "many", 0, True])
def test_a_folders_config_that_lacks_a_size_is_refused_by_its_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        ModelGeometry.read(folder(tmp_path, CONFIG | {"num_hidden_layers": value}))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_folders_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelGeometry.read(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ModelGeometry.read(tmp_path / "none.gguf")


def test_available_memory_is_a_plausible_number_of_bytes() -> None:
    available = available_memory()
    assert available is None or 1 << 20 < available < 1 << 50
