"""The reader of GGUF headers: what it reads, and that no file whatever gets it into trouble."""

from __future__ import annotations

import contextlib
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire.errors import ModelError
from enginewire.models import resolve_model
from enginewire.text.gguf import read_gguf

WriteGGUF = Callable[..., Path]


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(write_gguf: WriteGGUF, version: int) -> None:
    values = {
        "u8": (0, b"\xff"),
        "i8": (1, b"\xff"),
        "u16": (2, struct.pack("<H", 65535)),
        "i16": (3, struct.pack("<h", -2)),
        "u32": (4, struct.pack("<I", 1 << 31)),
        "i32": (5, struct.pack("<i", -3)),
        "f32": (6, struct.pack("<f", 0.5)),
        "bool": (7, b"\x01"),
        "string": "naïve 日本",
        "u64": (10, struct.pack("<Q", 1 << 63)),
        "i64": (11, struct.pack("<q", -4)),
        "f64": (12, struct.pack("<d", 0.1)),
        "strings": ["a", "", "é"],
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "nested": [[1, 2], [3]],
        "empty": [],
    }
    metadata = read_gguf(write_gguf(values, version=version))
    assert dict(metadata.values) == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 1 << 31,
        "i32": -3,
        "f32": 0.5,
        "bool": True,
        "string": "naïve 日本",
        "u64": 1 << 63,
        "i64": -4,
        "f64": 0.1,
        "strings": ["a", "", "é"],
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "nested": [[1, 2], [3]],
        "empty": [],
    }
    assert (metadata.version, metadata.tensor_count) == (version, 0)


def test_typed_access_gives_none_for_missing_keys_and_refuses_other_types(write_gguf: WriteGGUF) -> None:
    path = write_gguf(
        {"general.architecture": "qwen2", "general.name": "Tiny", "qwen2.context_length": 2048, "tags": ["a"]}
    )
    metadata = read_gguf(path)
    assert (metadata.architecture, metadata.name, metadata.context_length) == ("qwen2", "Tiny", 2048)
    assert metadata.string("no.such") is None
    assert metadata.strings("tags") == ["a"]
    assert metadata.get("no.such", 7) == 7
    assert "tags" in metadata
    with pytest.raises(ModelError, match="tags is list, expected an array of integers"):
        metadata.integers("tags")
    with pytest.raises(ModelError, match=r"general\.name is str, expected an integer"):
        metadata.integer("general.name")
    with pytest.raises(ModelError, match="expected a boolean"):
        metadata.boolean("qwen2.context_length")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 a zip file", r"it starts with b'PK\\x03\\x04'"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "GGUF version 1, expected 2 or 3"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"GGU", "expected b'GGUF'"),
        (b"GGUF\x03\x00\x00\x00", "cut or damaged"),
    ],
)
def test_what_is_no_gguf_file_is_refused_with_what_was_found(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused(write_gguf: WriteGGUF) -> None:
    path = write_gguf({"name": "x", "tokens": ["ab", "c"], "n": 5}, tensors=[("a", 8, 0), ("b", 64, 2)])
    whole = path.read_bytes()
    assert read_gguf(path).tensor_count == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_gguf(path)


def test_a_cut_file_is_told_by_its_size(write_gguf: WriteGGUF) -> None:
    path = write_gguf({"name": "x"}, tensors=[("a", 1000, 0)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        ModelError, match=rf"has {len(whole) - 1:,} bytes, its header describes at least {len(whole):,}"
    ):
        read_gguf(path)


@pytest.mark.parametrize(
    "value",
    [
        (8, struct.pack("<Q", 1 << 62)),
        (9, struct.pack("<IQ", 0, 1 << 40)),
        (9, struct.pack("<IQ", 8, 1 << 22)),
        (9, struct.pack("<IQ", 99, 2)),
        (9, struct.pack("<IQ", 9, 1) * 20),
        (13, bytes(8)),
        (8, struct.pack("<Q", 2) + b"\xff\xff"),
        (9, struct.pack("<IQQ", 8, 1, 2) + b"\xff\xff"),
    ],
    ids=[
        "long string",
        "long array",
        "many strings",
        "element type",
        "deep",
        "value type",
        "not UTF-8",
        "element not UTF-8",
    ],
)
def test_a_damaged_value_is_refused_without_reading_on(write_gguf: WriteGGUF, value: tuple[int, bytes]) -> None:
    with pytest.raises(ModelError, match="damaged"):
        read_gguf(write_gguf({"key": value}))


def test_an_array_that_fits_the_file_but_no_model_is_refused(write_gguf: WriteGGUF) -> None:
    count = (1 << 22) + 1
    with pytest.raises(ModelError, match="which no model needs"):
        read_gguf(write_gguf({"key": (9, struct.pack("<IQ", 0, count) + bytes(count))}))


@given(st.binary(max_size=400))
def test_random_bytes_behind_the_magic_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + tail)
    with contextlib.suppress(ModelError):
        assert read_gguf(path).path == path


def test_flipped_bytes_cost_neither_memory_nor_time(write_gguf: WriteGGUF) -> None:
    path = write_gguf({f"key.{i}": ["some", "words"] for i in range(20)}, tensors=[("a", 64, 0)])
    whole = path.read_bytes()
    rng = random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(500):
            damaged = bytearray(whole)
            for _ in range(3):
                damaged[rng.randrange(8, len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            with contextlib.suppress(ModelError):
                read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.model
def test_the_header_of_the_real_model_is_read_quickly() -> None:
    path = resolve_model("smollm2-135m")
    start = time.process_time()
    metadata = read_gguf(path)
    assert time.process_time() - start < 0.5  # measured: 0.03 s
    assert (metadata.architecture, metadata.context_length) == ("llama", 8192)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    assert tokens is not None
    assert len(tokens) == 49152
