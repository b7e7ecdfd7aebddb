"""Which version a peer speaks: told from what it sends, assumed aloud, or refused."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from enginewire.errors import DecodeError
from enginewire.wire import v0_32
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import LoRARequest
from enginewire.wire.profile import (
    PROFILES,
    V0_25,
    V0_32,
    WireProfile,
    adapter_from_wire,
    decode_ready,
    profile_named,
    profile_of_ready,
    profile_of_request,
)

OLD: dict[str, Any] = {
    "max_model_len": 1024, "num_gpu_blocks": 10, "block_size": 16, "dtype": "float32", "vllm_version": "0.25.1",
}  # fmt: skip
NEW: dict[str, Any] = OLD | {
    "vllm_version": "0.32.0", "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1, "data_parallel_rank": 0, "max_num_seqs": 8, "max_num_batched_tokens": 2048,
    "instance_id": "x", "supports_lora": False, "max_loras": 0,
}  # fmt: skip


def test_a_profile_names_the_layout_tables_of_one_version() -> None:
    assert PROFILES == (V0_25, V0_32)
    assert [str(profile) for profile in PROFILES] == ["vLLM 0.25.1", "vLLM 0.32.0"]
    for profile in PROFILES:
        assert issubclass(profile.received_outputs, profile.outputs)
    lengths = [[len(s.__struct_fields__) for s in (p.request, p.outputs, p.received_outputs.OUTPUT)] for p in PROFILES]
    assert lengths == [[20, 8, 13], [22, 9, 18]]


@pytest.mark.parametrize(
    ("response", "profile"),
    [
        (OLD, V0_25),
        (OLD | {"vllm_version": "0.25.0rc1+cpu"}, V0_25),
        (NEW, V0_32),
        (NEW | {"vllm_version": "0.32.7.dev3"}, V0_32),
        (EngineCoreReadyResponse(**OLD), V0_25),
        (v0_32.EngineCoreReadyResponse(**NEW), V0_32),
    ],
)
def test_a_known_version_is_told_from_the_ready_response(
    response: Any, profile: WireProfile, caplog: pytest.LogCaptureFixture
) -> None:
    """Protocol M.1."""
    assert profile_of_ready(response) is profile
    assert not caplog.records


@pytest.mark.parametrize(
    ("response", "profile"),
    [
        (NEW | {"vllm_version": "0.33.0"}, V0_32),
        (NEW | {"vllm_version": "1.0"}, V0_32),
        (NEW | {"vllm_version": "0.29.1"}, V0_32),
        (NEW | {"vllm_version": "dev"}, V0_32),
        (NEW | {"vllm_version": 7}, V0_32),
        (OLD | {"vllm_version": "0.1.dev1+g0123abc"}, V0_25),
        (OLD | {"vllm_version": "0.27.0"}, V0_25),
        ({}, V0_25),
    ],
)
def test_an_unknown_version_gets_a_warning_that_says_what_is_assumed(
    response: dict[str, Any], profile: WireProfile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert profile_of_ready(response) is profile
    (record,) = caplog.records
    assert repr(response.get("vllm_version")) in record.message
    assert f"so the layout of {profile} is assumed" in record.message


@pytest.mark.parametrize("version", ["0.32.0", "0.40.1", "1.0.0"])
def test_a_new_version_without_the_new_keys_is_refused(version: str) -> None:
    with pytest.raises(
        DecodeError, match=f"states version '{version}'.*no tensor_parallel_size.*use an engine of vLLM"
    ):
        profile_of_ready(OLD | {"vllm_version": version})


def test_a_ready_response_is_decoded_by_its_own_layout() -> None:
    for fields, profile in ((OLD, V0_25), (NEW, V0_32)):
        found, response = decode_ready([msgspec.msgpack.encode(fields)])
        assert found is profile
        assert response == profile.ready(**fields)


@pytest.mark.parametrize("name", sorted(set(NEW) - {"tensor_parallel_size"}))
def test_every_key_that_0_32_requires_is_required(name: str) -> None:
    """Protocol M.2."""
    with pytest.raises(DecodeError, match=f"EngineCoreReadyResponse.*{name}"):
        decode_ready([msgspec.msgpack.encode({key: NEW[key] for key in NEW if key != name})])


@pytest.mark.parametrize("payload", [b"", b"\x90", b"\xc1", b"\x81\xa1"], ids=bytes.hex)
def test_what_is_no_ready_response_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="not a valid EngineCoreReadyResponse"):
        decode_ready([payload])


@pytest.mark.parametrize("length", range(9, 23))
def test_the_length_of_a_request_tells_its_version(length: int, caplog: pytest.LogCaptureFixture) -> None:
    """Protocol M.1."""
    payload = msgspec.msgpack.encode([None] * length)
    if length == 21:
        with pytest.raises(DecodeError, match=r"20 elements \(vLLM 0.25.1; at least 9\) or 22 .*, got an array of 21"):
            profile_of_request(payload)
    else:
        assert profile_of_request(payload) is (V0_32 if length == 22 else V0_25)
    assert not caplog.records


def test_a_longer_request_is_taken_for_the_newest_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert profile_of_request(msgspec.msgpack.encode([None] * 25)) is V0_32
    assert "requests of 25 elements" in caplog.text
    assert "the layout of vLLM 0.32.0 is assumed" in caplog.text


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xa1a", b"\x98", b"\xdc"], ids=bytes.hex)
def test_what_is_no_request_has_no_version(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="not an EngineCoreRequest of a known version"):
        profile_of_request(payload)


OURS = {"version": "1.0", "executor": "E", "capabilities": {}}


@pytest.mark.parametrize(
    ("wire_version", "profile"), [(None, V0_25), ("0.25.1", V0_25), ("0.32.0", V0_32), ("0.32.7", V0_32)]
)
@pytest.mark.parametrize("keys", [OLD, NEW], ids=["old keys", "all keys"])
def test_an_engine_of_ours_says_which_layout_it_speaks_whatever_its_other_keys(
    keys: dict[str, Any], wire_version: str | None, profile: WireProfile, caplog: pytest.LogCaptureFixture
) -> None:
    """With none, it follows its frontend; then 0.25's is spoken."""
    response = keys | {"enginewire": OURS | {"wire_version": wire_version}, "vllm_version": "7"}
    assert profile_of_ready(response) is profile
    if profile is V0_25 or keys is NEW:
        found, decoded = decode_ready([msgspec.msgpack.encode(response)])
        assert found is profile
        assert type(decoded) is profile.ready
        assert profile_of_ready(decoded) is profile
    assert not caplog.records


def test_an_engine_of_ours_that_does_not_say_follows() -> None:
    assert profile_of_ready(OLD | {"enginewire": OURS}) is V0_25


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (OURS | {"wire_version": "0.40.1"}, "speaks the layout of vLLM '0.40.1', which is not known here"),
        (OURS | {"wire_version": "x" * 999}, "wire_version: 0.25.1 or 0.32.0"),
        (7, "the ready response's enginewire: Expected `object`, got `int`"),
    ],
)
def test_what_an_engine_of_ours_speaks_and_nobody_here_knows_is_refused(info: object, text: str) -> None:
    with pytest.raises(DecodeError) as caught:
        profile_of_ready(NEW | {"enginewire": info})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("version", "profile"),
    [("0.25.1", V0_25), ("0.25", V0_25), ("0.32.0", V0_32), ("0.32.9+cpu", V0_32), ("0.26", None), ("new", None)],
)
def test_a_version_is_found_by_its_release(version: str, profile: WireProfile | None) -> None:
    assert profile_named(version) is profile


def test_an_adapter_is_read_in_either_layout() -> None:
    """Protocol M.2."""
    mine = LoRARequest("n", 1, "/p", "base", None, True, False)
    for profile in PROFILES:
        assert adapter_from_wire(msgspec.to_builtins(profile.lora_of(mine))) == mine
    assert adapter_from_wire(["n", 1, "/p"]) == LoRARequest("n", 1, "/p")
    for value in (None, [], ["n", 1, ""], ["n", 1, "/p", None, 3], {}):
        with pytest.raises(ValueError, match=r"Expected|lora_path"):
            adapter_from_wire(value)
