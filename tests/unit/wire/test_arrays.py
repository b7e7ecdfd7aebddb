"""Arrays and tensors: what is read, how, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire.arrays import (
    Tensor,
    fill_in_frames,
    logprobs_lists_from_wire,
    logprobs_tensors_from_wire,
    nbytes,
    ndarray_from_wire,
    tensor_from_wire,
)
from enginewire.wire.codec import MsgpackEncoder

EIGHT = Ext(3, bytes(range(8)))


def test_an_array_is_a_view_of_the_received_bytes() -> None:
    array = ndarray_from_wire(["<i4", [2], EIGHT])
    assert array.tolist() == [0x03020100, 0x07060504]
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("triple", "reason"),
    [
        (5, "must be"),
        ([], "must be"),
        (["<i4", [2]], "must be"),
        (["<i4", [2], EIGHT, 1], "must be"),
        ([4, [2], EIGHT], "must be"),
        (["<i4", 2, EIGHT], "must be"),
        (["<i4", [1] * 33, EIGHT], "must be"),
        (["<i4", [3], EIGHT], "8 bytes are not <i4"),
        (["<i4", [1], EIGHT], "8 bytes are not <i4"),
        (["<i4", [-2], EIGHT], "8 bytes are not <i4"),
        (["<i4", [-1, -2], EIGHT], "8 bytes are not <i4"),
        (["<i4", [2.0], EIGHT], "8 bytes are not <i4"),
        (["<i4", ["2"], EIGHT], "8 bytes are not <i4"),
        (["<i4", [None], EIGHT], "8 bytes are not <i4"),
        (["<i4", [2**70], EIGHT], "8 bytes are not <i4"),
        (["<i4", [0, 2**62, 2**62], Ext(3, b"")], "0 bytes are not <i4"),
        (["|O", [1], EIGHT], "not accepted"),
        (["O", [1], EIGHT], "not accepted"),
        (["|V8", [1], EIGHT], "not accepted"),
        (["<M8[s]", [1], EIGHT], "not accepted"),
        (["i4,i4", [1], EIGHT], "not accepted"),
        (["(2,)i4", [1], EIGHT], "not accepted"),
        (["", [1], EIGHT], "not accepted"),
        (["<U0", [1], EIGHT], "not accepted"),
        (["a8", [1], EIGHT], "not accepted"),
        (["<i4\n", [2], EIGHT], "not accepted"),
        (["x" * 10_000, [1], EIGHT], "not accepted"),
        (["<i4", [2], Ext(1, bytes(8))], "extension code 1"),
        (["<i4", [2], Ext(2, bytes(8))], "extension code 2"),
        (["<i4", [2], Ext(42, bytes(8))], "extension code 42"),
        (["<i4", [2], 1], "refers to frame 1"),
        (["<i4", [2], -1], "refers to frame -1"),
        (["<i4", [2], {"sender_id": "a", "message_id": 0, "tensor_id": 0}], "out-of-band"),
        (["<i4", [2], None], "must be inline or a frame"),
        (["<i4", [2], bytes(8)], "must be inline or a frame"),
        (["<i4", [2], "x" * 10_000], "must be inline or a frame"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_malformed_array_is_refused_with_a_short_reason(triple: object, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        ndarray_from_wire(triple)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "triple",
    [
        ["int32", [3], EIGHT],
        ["int32", [-2], EIGHT],
        ["int32", [-1, -2], EIGHT],
        ["int32", [2.0], EIGHT],
        ["int32", [True, 2], EIGHT],
        ["int32", ["a", 2**40], EIGHT],
        ["<i4", [2], EIGHT],
        ["object", [1], EIGHT],
        ["int32", [2], 3],
        ["int32", [2], {}],
        None,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_malformed_tensor_is_refused(triple: object) -> None:
    with pytest.raises(DecodeError):
        tensor_from_wire(triple)


def test_a_tensor_takes_its_bytes_from_a_frame_of_its_message() -> None:
    frames = [b"payload", bytes(8), np.arange(2, dtype="<f4").tobytes()]
    assert tensor_from_wire(["float32", [2], 2], frames).numpy().tolist() == [0.0, 1.0]
    for number in (0, 3, -1, 2**64):
        with pytest.raises(DecodeError, match=f"refers to frame {number}"):
            tensor_from_wire(["float32", [2], number], frames)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float32", "int64", "complex128", ">i4"])
def test_a_numpy_array_becomes_a_tensor_and_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    tensor = Tensor.from_numpy(array)
    assert tensor.shape == shape
    assert nbytes(tensor.data) == array.nbytes
    assert np.array_equal(tensor.numpy(), array)


def test_a_transposed_array_becomes_a_tensor_in_c_order() -> None:
    array = np.arange(6, dtype="<i4").reshape(2, 3)
    assert np.array_equal(Tensor.from_numpy(array.T).numpy(), array.T)


def test_a_contiguous_array_is_not_copied() -> None:
    array = np.zeros(4, dtype="<f4")
    tensor = Tensor.from_numpy(array)
    array[0] = 7
    assert tensor.numpy()[0] == 7


def test_an_array_without_a_tensor_name_is_refused() -> None:
    with pytest.raises(EncodeError, match="cannot be a tensor"):
        Tensor.from_numpy(np.array(["a"]))


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    """Protocol E.2."""
    tensor = Tensor("bfloat16", (2,), bytes.fromhex("003f80bf"))
    assert tensor.numpy().tolist() == [0.5, -1.0]
    assert repr(tensor) == "Tensor(bfloat16, [2])"


def test_an_eight_bit_float_has_bytes_but_no_numpy_form() -> None:
    tensor = Tensor("float8_e4m3fn", (2,), b"ab")
    assert tensor.data == b"ab"
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        tensor.numpy()


@pytest.mark.parametrize(("dtype", "shape"), [("float31", (1,)), ("float32", (1,)), ("x" * 9999, (1,))])
def test_a_tensor_that_does_not_fit_together_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        Tensor(dtype, shape, bytes(8))
    assert len(str(caught.value)) < 400


def test_frames_are_filled_in_wherever_arrays_are() -> None:
    frames = [b"", b"one", b"two"]
    value: Any = [["a", [3], 1], {"x": [["b", [3], 2], 1]}, ["c", [3], 3], ["d", [3], True], ["e", 3, 1], 2]
    fill_in_frames(value, frames)
    assert value[0][2] == Ext(3, b"one")
    assert value[1]["x"] == [["b", [3], Ext(3, b"two")], 1]
    assert value[2:] == [["c", [3], 3], ["d", [3], True], ["e", 3, 1], 2]


def test_filling_in_frames_survives_any_depth() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    fill_in_frames(value, [b"", b""])
    while value:  # freeing it all at once would recurse in the interpreter
        value = value.pop()


def test_logprobs_may_lack_their_tail_or_have_a_longer_one() -> None:
    """Protocol C.3: named tuples."""
    ids, logprobs, ranks = ["<i4", [1, 2], EIGHT], ["<f4", [1, 2], EIGHT], ["<i8", [1], EIGHT]
    assert logprobs_lists_from_wire([ids, logprobs, ranks]).cu_num_generated_tokens is None
    assert logprobs_lists_from_wire([ids, logprobs, ranks, [0, 1]]).cu_num_generated_tokens == [0, 1]
    assert logprobs_lists_from_wire([ids, logprobs, ranks, None, "new"]).sampled_token_ranks.shape == (1,)
    tensors = [["int32", [1, 2], EIGHT], ["float32", [1, 2], EIGHT], ["int64", [1], EIGHT]]
    assert logprobs_tensors_from_wire([*tensors, None, None]).selected_token_ranks.shape == (1,)


@pytest.mark.parametrize("value", [None, 5, [], [1, 2], {"a": 1}, [1, 2, 3], [1, 2, 3, 4]], ids=repr)
def test_what_are_no_logprobs_is_refused(value: object) -> None:
    for read in (logprobs_lists_from_wire, logprobs_tensors_from_wire):
        with pytest.raises(DecodeError):
            read(value)


def test_the_data_of_a_relayed_array_stays_an_extension() -> None:
    """An auxiliary frame that was filled in is encoded inline, not as plain binary."""
    value = ["<i4", [2], 1]
    fill_in_frames(value, [b"", bytes(8)])
    (payload,) = MsgpackEncoder().encode(value)
    assert msgspec.msgpack.decode(payload) == ["<i4", [2], Ext(3, bytes(8))]
