"""Reading a GGUF file's header: the key–value metadata, and how large the file must be.

No tensor is read. The layout (llama.cpp's GGUF, versions 2 and 3, little-endian)::

    "GGUF" u32 version  u64 tensor_count  u64 kv_count
    kv_count     × ( string key, u32 type, value )
    tensor_count × ( string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset )
    padding to general.alignment, then tensor data

    string = u64 length, UTF-8 bytes        array = u32 element type, u64 count, elements
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from enginewire.errors import ModelError

GGUFValue: TypeAlias = "bool | int | float | str | list[GGUFValue]"

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

# What damaged or hostile bytes may cost at most, far above any real model (a vocabulary of 300,000 tokens has about
# 1.2 million array elements): a few seconds and some 300 MB. Raise them when a real model is refused.
_MAX_STRING_BYTES: Final = 1 << 26
_MAX_ARRAY_ELEMENTS: Final = 1 << 22
_MAX_ARRAY_DEPTH: Final = 4
_MAX_DIMENSIONS: Final = 8

_TYPE_STRING: Final = 8
_TYPE_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)

# ggml tensor type -> (elements per block, bytes per block). An unlisted one only makes the size check weaker.
_TENSOR_BLOCKS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        **{0: (1, 4), 1: (1, 2), 30: (1, 2)},  # F32, F16, BF16
        **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)},  # Q4_0 … Q8_1
        **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)},  # K
        **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110)},  # IQ
        **{22: (256, 82), 23: (256, 136), 29: (256, 56)},
        **{24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8)},  # I8 … I64, F64
    }
)


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """The key–value part of a GGUF file.

    The typed getters return ``None`` for a missing key and raise ``ModelError`` for a value of another type.

    Attributes:
        path: where it was read.
        version: of the format, 2 or 3.
        tensor_count: number of tensors the file holds.
        values: every key with its value; arrays are lists.
    """

    path: Path
    version: int
    tensor_count: int
    values: Mapping[str, GGUFValue]

    @property
    def architecture(self) -> str | None:
        """The model family, which prefixes its own keys (``"llama"``: ``llama.context_length``)."""
        return self.string("general.architecture")

    @property
    def name(self) -> str | None:
        """The model's name for people."""
        return self.string("general.name")

    @property
    def context_length(self) -> int | None:
        """The longest sequence the model was made for, in tokens."""
        return self.integer(f"{self.architecture}.context_length")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: GGUFValue | None = None) -> GGUFValue | None:
        """Return the value of ``key`` whatever its type."""
        return self.values.get(key, default)

    def string(self, key: str) -> str | None:
        """Return the text under ``key``."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(key, "a string")

    def integer(self, key: str) -> int | None:
        """Return the integer under ``key``."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong_type(key, "an integer")

    def boolean(self, key: str) -> bool | None:
        """Return the truth value under ``key``."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_type(key, "a boolean")

    def strings(self, key: str) -> list[str] | None:
        """Return the array of texts under ``key``."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list):
            texts = [item for item in value if isinstance(item, str)]
            if len(texts) == len(value):
                return texts
        raise self._wrong_type(key, "an array of strings")

    def integers(self, key: str) -> list[int] | None:
        """Return the array of integers under ``key``."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, int)]
            if len(numbers) == len(value):
                return numbers
        raise self._wrong_type(key, "an array of integers")

    def floats(self, key: str) -> list[float] | None:
        """Return the array of numbers under ``key``."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, float)]
            if len(numbers) == len(value):
                return numbers
        raise self._wrong_type(key, "an array of floats")

    def _wrong_type(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {type(self.values[key]).__name__}, expected {expected}")


def read_gguf(path: str | Path) -> GGUFMetadata:
    """Read the metadata of the GGUF file at ``path`` and check that the file is whole.

    Raises:
        ModelError: there is no such file, it is not GGUF of a known version, it is damaged, or it ends before the
            tensors that its header describes.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            version = _check_start(path, start, size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size, version).read()
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read: {exc.strerror or exc}; expected a GGUF model file") from exc


def _check_start(path: Path, start: bytes, size: int) -> int:
    if start[:4] != MAGIC or len(start) < 8:
        found = f"starts with {start[:4]!r}" if start else "is empty"
        raise ModelError(f"{path}: not a GGUF file: it {found} ({size:,} bytes), expected {MAGIC!r} and a version")
    version = int.from_bytes(start[4:8], "little")
    if version in VERSIONS:
        return version
    known = " or ".join(map(str, VERSIONS))
    if int.from_bytes(start[4:8], "big") in VERSIONS:
        raise ModelError(f"{path}: a big-endian GGUF file; expected a little-endian one of version {known}")
    raise ModelError(f"{path}: GGUF version {version}, expected {known}; convert the model again")


class _Reader:
    """A position in the mapped file; every length is checked against what is left before it is used."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, version: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._version = version
        self._position = 8
        self._elements_left = _MAX_ARRAY_ELEMENTS

    def read(self) -> GGUFMetadata:
        (tensor_count, kv_count) = self._unpack("<QQ", "counts")
        # The smallest entry is an empty key with one byte of value, or a tensor with an empty name and no dimension.
        self._check_room(kv_count * 13 + tensor_count * 24, f"{kv_count:,} keys and {tensor_count:,} tensors")
        values: dict[str, GGUFValue] = {}
        for _ in range(kv_count):
            key = self._string("a key")
            values[key] = self._value(self._unpack("<I", key)[0], key, depth=0)
        self._check_whole(self._tensors_end(tensor_count), values)
        return GGUFMetadata(self._path, self._version, tensor_count, MappingProxyType(values))

    def _tensors_end(self, tensor_count: int) -> int:
        """Read the tensor descriptions; return where the last tensor ends, counted from the first one's start."""
        end = 0
        for _ in range(tensor_count):
            name = self._string("a tensor's name")
            (n_dims,) = self._unpack("<I", name)
            if n_dims > _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {name!r} has {n_dims:,} dimensions, expected at most {_MAX_DIMENSIONS}")
            *dims, kind, offset = self._unpack(f"<{n_dims}QIQ", name)
            elements_per_block, bytes_per_block = _TENSOR_BLOCKS.get(kind, (1, 0))
            end = max(end, offset + math.prod(dims) // elements_per_block * bytes_per_block)
        return end

    def _check_whole(self, tensors_end: int, values: Mapping[str, GGUFValue]) -> None:
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}, expected a positive integer")
        expected = math.ceil(self._position / alignment) * alignment + tensors_end if tensors_end else self._position
        if self._size < expected:
            raise ModelError(
                f"{self._path}: the file is cut: it has {self._size:,} bytes, its header describes at least "
                f"{expected:,}; fetch it again"
            )

    def _value(self, kind: int, key: str, depth: int) -> GGUFValue:
        if (code := _SCALARS.get(kind)) is not None:
            value: bool | int | float = self._unpack(f"<{code}", key)[0]
            return value
        if kind == _TYPE_STRING:
            return self._string(key)
        if kind == _TYPE_ARRAY:
            return self._array(key, depth)
        raise self._damaged(f"{key!r} has value type {kind}, expected 0 to 12")

    def _array(self, key: str, depth: int) -> list[GGUFValue]:
        kind, count = self._unpack("<IQ", key)
        if depth >= _MAX_ARRAY_DEPTH or count > self._elements_left:
            raise self._damaged(f"{key!r} is an array of {count:,} elements at depth {depth}, which no model needs")
        self._elements_left -= count
        if (code := _SCALARS.get(kind)) is not None:
            return list(self._unpack(f"<{count}{code}", key))
        if kind == _TYPE_STRING:
            self._check_room(count * 8, key)
            return self._strings(count, key)
        self._check_room(count * 12, key)
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[GGUFValue]:
        """Read an array of strings: :meth:`_string` unrolled, as vocabularies have 100,000 of them."""
        data, position, size = self._data, self._position, self._size
        length_of = struct.Struct("<Q").unpack_from
        texts: list[GGUFValue] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_of(data, position)[0]
                if position > size:
                    raise self._cut(key)
                texts.append(data[start:position].decode())
        except struct.error as exc:
            raise self._cut(key) from exc
        except UnicodeDecodeError as exc:
            raise self._damaged(f"{key!r}: element {len(texts):,} is not UTF-8") from exc
        self._position = position
        return texts

    def _string(self, what: str) -> str:
        (length,) = self._unpack("<Q", what)
        if length > _MAX_STRING_BYTES:
            raise self._damaged(f"{what} is a string of {length:,} bytes, which no model needs")
        self._check_room(length, what)
        start = self._position
        self._position += length
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError as exc:
            raise self._damaged(f"{what} is not UTF-8") from exc

    def _unpack(self, layout: str, what: str) -> tuple[int, ...]:
        """Read little-endian values; floats and booleans come out as such, which the annotation leaves out."""
        length = struct.calcsize(layout)
        self._check_room(length, what)
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += length
        return values

    def _check_room(self, length: int, what: str) -> None:
        if length > self._size - self._position:
            raise self._cut(what)

    def _cut(self, what: str) -> ModelError:
        return ModelError(
            f"{self._path}: the file is cut or damaged: its {self._size:,} bytes end inside {what!r} of the GGUF "
            f"header (at byte {self._position:,}); fetch it again"
        )

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: damaged GGUF header near byte {self._position:,}: {what}; fetch it again")
