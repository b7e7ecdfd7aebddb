"""A small GGUF writer and a tiny byte-level vocabulary."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hypothesis
import pytest

from enginewire.models import resolve_model
from enginewire.text.tokenizer import Tokenizer, load_tokenizer

# A busy machine may take long over one example; what takes long in total, pytest's own time-out catches.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

WriteGGUF = Callable[..., Path]

_INTEGER, _FLOAT, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: object) -> tuple[int, bytes]:
    """Return the type and the bytes of a value; ``(type, bytes)`` is taken as it is."""
    match value:
        case (int(kind), bytes(data)):
            return kind, data
        case bool():
            return _BOOL, struct.pack("<?", value)
        case int():
            return _INTEGER, struct.pack("<I", value)
        case float():
            return _FLOAT, struct.pack("<f", value)
        case str():
            return _STRING, gguf_string(value)
        case list():
            encoded = [gguf_value(item) for item in value]
            kind = encoded[0][0] if encoded else _INTEGER
            return _ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(data for _, data in encoded)
    raise TypeError(f"no GGUF form for {value!r}")


def gguf_bytes(
    values: Mapping[str, object], *, version: int = 3, tensors: Sequence[tuple[str, int, int]] = ()
) -> bytes:
    """Build a file; a tensor is (name, elements, ggml type F32 = 0 or Q4_0 = 2), its data zeros."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, value in values.items():
        kind, data = gguf_value(value)
        header += gguf_string(key) + struct.pack("<I", kind) + data
    offset = 0
    for name, elements, kind in tensors:
        header += gguf_string(name) + struct.pack("<IQIQ", 1, elements, kind, offset)
        offset += elements * 4 if kind == 0 else elements // 32 * 18
    padding = -len(header) % 32 if tensors else 0
    return header + bytes(padding + offset)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Give a function that writes a GGUF file and returns its path."""

    def write(values: Mapping[str, object], **options: object) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf_bytes(values, **options))  # type: ignore[arg-type]  # passed through
        return path

    return write


def byte_characters() -> list[str]:
    """Return the 256 characters of the byte-level alphabet in the order of the bytes, written down anew."""
    characters: list[str] = []
    moved = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + moved))
            moved += 1
    return characters


@pytest.fixture
def tiny_bpe() -> dict[str, object]:
    """Give the metadata of a tiny model: ids 0 to 255 are the bytes, then merges, then special tokens."""
    tokens = [*byte_characters(), "th", "the", "Ġt", "Ġthe", "<|end|>", "<|turn|>", "<tool é>"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 3, 4],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ t", "Ġ the"],
        "tokenizer.ggml.bos_token_id": 261,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.eot_token_id": 261,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """Give the real model's tokenizer."""
    return load_tokenizer(resolve_model("smollm2-135m"))
