"""Arrays on the wire: ``[dtype, shape, data]``, where data is inline or the number of an auxiliary frame.

numpy is imported when an array is made or read, not before. Source: protocol section E.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire.extensions import RAW_VIEW
from enginewire.wire.frames import Buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
            raise ValueError(f"unknown tensor dtype {reprlib.repr(dtype)}; known: {', '.join(TENSOR_ITEM_SIZES)}")
        if math.prod(shape) * item_size != nbytes(data):
            raise ValueError(_misfit(dtype, shape, data))
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


class SamplingMaskLists(NamedTuple):
    """Which tokens could be sampled (vLLM 0.32).

    Attributes:
        token_ids: the tokens of all positions, one after the other.
        offsets: where each position's tokens begin.
    """

    token_ids: NDArray[Any]
    offsets: NDArray[Any] | None = None
    cu_num_generated_tokens: list[int] | None = None


def ndarray_from_wire(value: object) -> np.ndarray[Any, Any]:
    """Read a numpy field's triple, without a copy: the array is read-only.

    Raises:
        DecodeError: it is no such triple, or its parts do not fit together.
    """
    parts: Any = value  # what it may not be is found out by trying: hundreds of arrays come with a step with logprobs
    try:
        dtype_name, shape, data = parts
        content = data.data
        ndarray, dtype = _NUMPY_DTYPES[dtype_name]
        array = ndarray(shape, dtype, content)
        is_whole = type(content) is bytes and array.nbytes == len(content)
        if is_whole and data.code == RAW_VIEW and type(shape) is list and len(shape) <= MAX_DIMENSIONS:
            return array
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
        pass
    return _ndarray_or_error(value)


def _ndarray_or_error(value: object) -> np.ndarray[Any, Any]:
    """Do the same for a value that is unusual, or say what is wrong with it."""
    dtype_name, shape, content = _triple(value)
    ndarray, dtype = _numpy_dtype(dtype_name)
    try:
        array = ndarray(shape, dtype, content)
    except (TypeError, ValueError, OverflowError) as exc:
        raise DecodeError(_misfit(dtype_name, shape, content)) from exc
    if array.nbytes != nbytes(content):
        raise DecodeError(_misfit(dtype_name, shape, content))
    return array


def tensor_from_wire(value: object, frames: Sequence[Buffer] = ()) -> Tensor:
    """Read a tensor field's triple; ``frames`` is its message.

    Raises:
        DecodeError: it is no such triple, or its parts do not fit together.
    """
    fill_in_frames(value, frames)
    dtype, shape, data = _triple(value)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise DecodeError(f"a tensor's shape must be sizes, got {reprlib.repr(shape)}")
    try:
        return Tensor(dtype, tuple(shape), data)
    except ValueError as exc:
        raise DecodeError(str(exc)) from exc


def logprobs_lists_from_wire(value: object) -> LogprobsLists:
    """Read ``new_logprobs``. Raises :class:`DecodeError`."""
    if type(value) is list and len(value) == 4 and value[3] is None:  # as nearly always
        ids, logprobs, ranks, cumulative = value
    else:
        ids, logprobs, ranks, cumulative = _four(value, "LogprobsLists")
    # Without the named tuple's own constructor, a Python function that takes as long as making an array.
    return tuple.__new__(
        LogprobsLists, (ndarray_from_wire(ids), ndarray_from_wire(logprobs), ndarray_from_wire(ranks), cumulative)
    )


def logprobs_tensors_from_wire(value: object) -> LogprobsTensors:
    """Read ``new_prompt_logprobs_tensors``. Raises :class:`DecodeError`."""
    ids, logprobs, ranks, cumulative = _four(value, "LogprobsTensors")
    return LogprobsTensors(tensor_from_wire(ids), tensor_from_wire(logprobs), tensor_from_wire(ranks), cumulative)


def sampling_mask_from_wire(value: object) -> SamplingMaskLists:
    """Read ``new_sampling_mask``. Raises :class:`DecodeError`."""
    if not isinstance(value, list) or not value:
        raise DecodeError(f"SamplingMaskLists must be an array of two arrays and a list, got {reprlib.repr(value)}")
    token_ids, offsets, cumulative, *_ = [*value, None, None]
    if cumulative is not None and not isinstance(cumulative, list):
        raise DecodeError(f"SamplingMaskLists.cu_num_generated_tokens must be a list, got {reprlib.repr(cumulative)}")
    return SamplingMaskLists(
        ndarray_from_wire(token_ids), None if offsets is None else ndarray_from_wire(offsets), cumulative
    )


def fill_in_frames(value: object, frames: Sequence[Buffer]) -> None:
    """Replace frame numbers in the array triples inside ``value`` by those frames' bytes, in place and not copied.

    A number that names no frame stays, and reading that array fails: one bad array spoils nothing else.
    """
    pending = [value]  # not recursive: a peer chooses how deep it nests
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            if len(item) == 3 and type(item[2]) is int and isinstance(item[0], str) and isinstance(item[1], list):
                if 0 < item[2] < len(frames):
                    item[2] = Ext(RAW_VIEW, frames[item[2]])
            else:
                pending.extend(item)


def nbytes(data: Buffer) -> int:
    """Return a buffer's size in bytes (``len`` of a memoryview counts its items)."""
    return data.nbytes if isinstance(data, memoryview) else len(data)


_NUMPY_DTYPE: Final = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,5})")
"""The dtype strings that are taken. Objects, structures and dates would need pickle; the reference refuses them too."""


_NUMPY_DTYPES: Final[dict[str, tuple[type[np.ndarray[Any, Any]], np.dtype[Any]]]] = {}
"""The array type and a dtype, by the dtype's name: an import statement per array would cost as much as the array."""

MOST_DTYPES: Final = 64
"""So many are remembered: a peer chooses the names."""


def _numpy_dtype(name: str) -> tuple[type[np.ndarray[Any, Any]], np.dtype[Any]]:
    import numpy as np

    if not _NUMPY_DTYPE.fullmatch(name):
        raise DecodeError(f"arrays of dtype {reprlib.repr(name)} are not accepted")
    entry = np.ndarray, np.dtype(name)
    if len(_NUMPY_DTYPES) < MOST_DTYPES:
        _NUMPY_DTYPES[name] = entry
    return entry


def _four(value: object, what: str) -> tuple[Any, Any, Any, list[int] | None]:
    """Split a named tuple of three arrays and a list; a missing tail is its default, a longer one is ignored."""
    if not isinstance(value, list) or len(value) < 3:
        raise DecodeError(f"{what} must be an array of three arrays and a list, got {reprlib.repr(value)}")
    cumulative = value[3] if len(value) > 3 else None
    if cumulative is not None and not isinstance(cumulative, list):
        raise DecodeError(f"{what}.cu_num_generated_tokens must be a list, got {reprlib.repr(cumulative)}")
    return value[0], value[1], value[2], cumulative


def _triple(value: object) -> tuple[str, list[int], Buffer]:
    """Check an array's outer form: a dtype's name, sizes and bytes."""
    # Plain tests, not a match statement: it would be the slowest part of reading logprobs.
    if not isinstance(value, list) or len(value) != 3:
        raise DecodeError(f"an array must be [dtype, shape, data], got {reprlib.repr(value)}")
    dtype, shape, data = value
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"an array must be [dtype, shape, data], got {reprlib.repr(value)}")
    if isinstance(data, Ext) and data.code == RAW_VIEW:
        return dtype, shape, data.data  # type: ignore[return-value]  # typed as any buffer; the decoder makes bytes
    raise DecodeError(_not_bytes(data))


def _not_bytes(data: object) -> str:
    """Say what is wrong with what stands where an array's bytes belong."""
    match data:
        case Ext(code=code):
            return f"extension code {code} where an array's bytes (code {RAW_VIEW}) belong"
        case int(number):
            return f"an array refers to frame {number}, which its message does not have"
        case dict():
            return "an out-of-band tensor needs a queue shared with the sender; there is none"
        case _:
            return f"an array's bytes must be inline or a frame's number, got {reprlib.repr(data)}"


def _misfit(dtype: str, shape: Sequence[int], data: Buffer) -> str:
    return f"{nbytes(data)} bytes are not {dtype} of shape {reprlib.repr(list(shape))}"
