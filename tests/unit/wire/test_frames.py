"""Multipart layouts and what can be told from a glance."""

from __future__ import annotations

import msgspec
import pytest

from enginewire.wire.frames import (
    ENGINE_CORE_DEAD,
    describe_identity,
    engine_identity,
    engine_index_of,
    heads_of_answers,
    heads_of_outputs,
    is_death_marker,
    may_hold_utility_output,
)
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, utility_output


@pytest.mark.parametrize(("index", "identity"), [(0, b"\0\0"), (1, b"\1\0"), (256, b"\0\1"), (65535, b"\xff\xff")])
def test_an_identity_is_the_rank_in_two_bytes_little_endian(index: int, identity: bytes) -> None:
    """Protocol A.2."""
    assert engine_identity(index) == identity
    assert engine_index_of(identity) == index
    assert describe_identity(identity) == f"rank {index}"


@pytest.mark.parametrize("identity", [b"", b"\0", b"\0\0\0", b"\0k\x8bEg"])
def test_other_identities_are_no_engines(identity: bytes) -> None:
    assert engine_index_of(identity) is None
    assert describe_identity(identity) == f"identity {identity!r}"


@pytest.mark.parametrize("index", [-1, 65536])
def test_a_rank_that_does_not_fit_has_no_identity(index: int) -> None:
    with pytest.raises(OverflowError):
        engine_identity(index)


def test_the_death_marker_is_one_frame_of_exactly_these_bytes() -> None:
    """Protocol C.2."""
    assert is_death_marker([ENGINE_CORE_DEAD])
    assert is_death_marker([memoryview(ENGINE_CORE_DEAD)])
    for frames in ([], [b""], [ENGINE_CORE_DEAD, b""], [ENGINE_CORE_DEAD + b"!"], [ENGINE_CORE_DEAD.lower()]):
        assert not is_death_marker(frames)


def wide_int(value: int, width: int, *, signed: bool) -> bytes:
    code = {1: 0xCC, 2: 0xCD, 4: 0xCE, 8: 0xCF}[width] + (4 if signed else 0)
    return bytes([code]) + value.to_bytes(width, "big", signed=signed)


ENGINE_INDICES = [
    b"\x00", b"\x7f", b"\xff",
    *[wide_int(7, width, signed=signed) for width in (1, 2, 4, 8) for signed in (False, True)],
]  # fmt: skip


@pytest.mark.parametrize("index", ENGINE_INDICES, ids=bytes.hex)
@pytest.mark.parametrize("header", [b"\x98", b"\xdc\x00\x08", b"\xdd\x00\x00\x00\x08"], ids=bytes.hex)
def test_an_empty_list_of_outputs_is_seen_behind_an_engine_index_of_any_width(header: bytes, index: bytes) -> None:
    """performance.md: a utility answer is decoded at once."""
    tail = b"\xc0\xcb" + bytes(8) + b"\xc0" * 4
    empty, full = header + index + b"\x90" + tail, header + index + b"\x91\x92\xa1a\x90" + tail
    assert msgspec.msgpack.decode(empty)[1] == []
    assert may_hold_utility_output(empty)
    assert may_hold_utility_output(memoryview(empty))
    assert not may_hold_utility_output(full)


@pytest.mark.parametrize("index", [0, 1, 127, 128, 255, 256, 65535])
def test_a_glance_agrees_with_what_is_encoded(index: int) -> None:
    answer = EngineCoreOutputs(engine_index=index, utility_output=utility_output(1, True))
    tokens = EngineCoreOutputs(engine_index=index, outputs=[EngineCoreOutput("a", [1])])
    assert may_hold_utility_output(msgspec.msgpack.encode(answer))
    assert not may_hold_utility_output(msgspec.msgpack.encode(tokens))


@pytest.mark.parametrize("index", [0, 1, 127, 128, 70_000])
def test_what_begins_like_outputs_has_some(index: int) -> None:
    """A receiver looks no further into such a message."""
    heads = heads_of_outputs(index)
    for count in (0, 1, 15, 16, 70_000):
        message = EngineCoreOutputs(index, [EngineCoreOutput("r", [1])] * count)
        head = msgspec.msgpack.encode(message)[:3]
        assert (head in heads) is (count > 0 and index < 128)
    answer = EngineCoreOutputs(index, utility_output=utility_output(1, None))
    assert msgspec.msgpack.encode(answer)[:3] not in heads
    assert (msgspec.msgpack.encode(answer)[:3] in heads_of_answers(index)) is (index < 128)
    assert not heads & heads_of_answers(index)
    assert ENGINE_CORE_DEAD[:3] not in heads


@pytest.mark.parametrize(
    "payload", [b"", b"\x98", b"\x98\x00", b"\x98\xcd\x00", b"\xdc\x00\x08", b"\xdd\x00\x00\x00", ENGINE_CORE_DEAD]
)
def test_a_glance_at_too_few_bytes_sees_nothing(payload: bytes) -> None:
    assert not may_hold_utility_output(payload)
