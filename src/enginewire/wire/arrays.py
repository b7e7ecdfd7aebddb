"""Arrays on the wire: ``[dtype, shape, data]``, where data is inline or the number of an auxiliary frame.

numpy is imported when an array is made or read, not before. Source: protocol section E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire.frames import Buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAW_VIEW: Final = 3
"""Extension code of inline array bytes. 1 and 2 are pickles, see the codec."""

MAX_DIMENSIONS: Final = 32

TENSOR_ITEM_SIZES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Bytes per element of the bare dtype names that tensor fields use."""


class Tensor:
    """A tensor field's value: bytes in C order with a torch-style dtype name. Holds ``data`` without copying.

    A plain class: msgspec would encode a struct or dataclass by itself, past the codec's hook.

    Args:
        dtype: bare name, e.g. ``"bfloat16"``, ``"float32"``.
        shape: sizes per dimension, ``()`` for a scalar.
        data: the bytes, ``prod(shape) * itemsize`` of them.

    Raises:
        ValueError: unknown dtype, or the bytes do not fit the shape.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        item_size = TENSOR_ITEM_SIZES.get(dtype)
        if item_size is None:
            raise ValueError(f"unknown tensor dtype {dtype[:40]!r}; known: {', '.join(sorted(TENSOR_ITEM_SIZES))}")
        _check_size(dtype, shape, item_size, nbytes(data))
        self.dtype = dtype
        self.shape = shape
        self.data = data

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Tensor:
        """Wrap an array, without a copy if it is contiguous and little endian.

        Raises:
            EncodeError: its dtype has no tensor name (object, string, date).
        """
        import numpy as np

        if array.dtype.name not in TENSOR_ITEM_SIZES:
            raise EncodeError(f"an array of dtype {array.dtype} cannot be a tensor on the wire")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(array.dtype.name, array.shape, little.reshape(-1).view(np.uint8).data if little.size else b"")

    def numpy(self) -> NDArray[Any]:
        """View as numpy, without a copy; bfloat16 is widened to float32, as numpy has no such type.

        Raises:
            TypeError: an 8-bit float, which numpy cannot hold.
        """
        import numpy as np

        if self.dtype == "bfloat16":
            upper_halves = np.frombuffer(self.data, dtype="<u2").astype("<u4")
            return (upper_halves << 16).view("<f4").reshape(self.shape)
        if self.dtype.startswith("float8"):
            raise TypeError(f"numpy has no {self.dtype}; the bytes are in .data")
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class LogprobsLists(NamedTuple):
    """Log probabilities of the new tokens of one request in one step.

    Attributes:
        logprob_token_ids: ``[n, k + 1]``; column 0 is the sampled token, then the k likeliest.
        logprobs: ``[n, k + 1]`` float32, natural logarithm.
        sampled_token_ranks: ``[n]``; 1 is the likeliest.
        cu_num_generated_tokens: ``None`` once sliced per request.
    """

    logprob_token_ids: NDArray[Any]
    logprobs: NDArray[Any]
    sampled_token_ranks: NDArray[Any]
    cu_num_generated_tokens: list[int] | None = None


class LogprobsTensors(NamedTuple):
    """Log probabilities of a prompt's tokens, from its second token on: ``p`` = prompt length - 1.

    Attributes:
        logprob_token_ids: ``[p, k + 1]``; column 0 is the prompt's own token.
        logprobs: ``[p, k + 1]`` float32.
        selected_token_ranks: ``[p]``.
    """

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int] | None = None


def ndarray_from_wire(value: object, frames: Sequence[Buffer] = ()) -> np.ndarray[Any, Any]:
    """Read a numpy field's triple.

    Raises:
        DecodeError: it is no such triple, or its parts do not fit together.
    """
    import numpy as np

    dtype_name, shape, data = _triple(value, frames)
    try:
        dtype = np.dtype(dtype_name)
    except TypeError as exc:
        raise DecodeError(f"unknown array dtype {dtype_name[:40]!r}") from exc
    if dtype.hasobject or dtype.kind in "OV":
        raise DecodeError(f"arrays of dtype {dtype_name!r} are not accepted: they would need pickle")
    _fits(dtype_name, shape, dtype.itemsize, data)
    return np.frombuffer(data, dtype=dtype).reshape(shape) if nbytes(data) else np.zeros(shape, dtype=dtype)


def tensor_from_wire(value: object, frames: Sequence[Buffer] = ()) -> Tensor:
    """Read a tensor field's triple.

    Raises:
        DecodeError: it is no such triple, or its parts do not fit together.
    """
    dtype, shape, data = _triple(value, frames)
    try:
        return Tensor(dtype, shape, data)
    except ValueError as exc:
        raise DecodeError(str(exc)) from exc


def logprobs_lists_from_wire(value: object) -> LogprobsLists:
    """Read ``new_logprobs``. Raises :class:`DecodeError`."""
    ids, logprobs, ranks, cumulative = _four(value, "LogprobsLists")
    arrays = (ndarray_from_wire(ids), ndarray_from_wire(logprobs), ndarray_from_wire(ranks))
    return LogprobsLists(*arrays, cumulative)


def logprobs_tensors_from_wire(value: object) -> LogprobsTensors:
    """Read ``new_prompt_logprobs_tensors``. Raises :class:`DecodeError`."""
    ids, logprobs, ranks, cumulative = _four(value, "LogprobsTensors")
    return LogprobsTensors(tensor_from_wire(ids), tensor_from_wire(logprobs), tensor_from_wire(ranks), cumulative)


def fill_in_frames(value: object, frames: Sequence[Buffer]) -> None:
    """Replace frame numbers in the array triples inside ``value`` by the frames themselves, in place.

    A number that names no frame stays, and reading that array fails: one bad array spoils nothing else.
    """
    if not isinstance(value, list):
        return
    if len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list):
        if type(value[2]) is int and 0 < value[2] < len(frames):
            value[2] = frames[value[2]]
        return
    for item in value:
        fill_in_frames(item, frames)


def _four(value: object, what: str) -> tuple[object, object, object, list[int] | None]:
    """Split a named tuple of three arrays and a list; a missing tail is its default, a longer one is ignored."""
    if not isinstance(value, list) or len(value) < 3:
        raise DecodeError(f"{what} must be an array of three arrays and a list, got {type(value).__name__}")
    return value[0], value[1], value[2], value[3] if len(value) > 3 else None


def _triple(value: object, frames: Sequence[Buffer]) -> tuple[str, tuple[int, ...], Buffer]:
    match value:
        case [str(dtype), list(shape), data] if len(shape) <= MAX_DIMENSIONS:
            pass
        case _:
            raise DecodeError(f"an array must be [dtype, shape, data], got {_preview(value)}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise DecodeError(f"an array's shape must be non-negative integers, got {_preview(shape)}")
    match data:
        case Ext():
            if data.code != RAW_VIEW:
                raise DecodeError(f"extension code {data.code} where an array's bytes (code {RAW_VIEW}) belong")
            return dtype, tuple(shape), memoryview(data.data)
        case bytes() | bytearray() | memoryview():
            return dtype, tuple(shape), data
        case int() if 0 < data < len(frames):
            return dtype, tuple(shape), frames[data]
        case int():
            raise DecodeError(f"an array refers to frame {data} of a message of {len(frames)} frames")
        case dict():
            raise DecodeError("out-of-band tensors need a queue shared with the sender; there is none")
        case _:
            raise DecodeError(f"an array's bytes must be inline or a frame number, got {type(data).__name__}")


def _fits(dtype: str, shape: tuple[int, ...], item_size: int, data: Buffer) -> None:
    try:
        _check_size(dtype, shape, item_size, nbytes(data))
    except ValueError as exc:
        raise DecodeError(str(exc)) from exc


def _check_size(dtype: str, shape: tuple[int, ...], item_size: int, got: int) -> None:
    if math.prod(shape) * item_size != got:
        raise ValueError(f"{dtype} of shape {list(shape)} takes {math.prod(shape) * item_size} bytes, got {got}")


def nbytes(data: Buffer) -> int:
    """Return a buffer's size in bytes (``len`` of a memoryview counts its items)."""
    return data.nbytes if isinstance(data, memoryview) else len(data)


def _preview(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
