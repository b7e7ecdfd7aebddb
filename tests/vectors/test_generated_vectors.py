"""Every vector that the reference's own encoder made decodes to its value and encodes to the same bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from golden import Vector, by_name, load, schemaless
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire.arrays import fill_in_frames, ndarray_from_wire, tensor_from_wire
from enginewire.wire.codec import (
    MsgpackDecoder,
    MsgpackEncoder,
    OutputsDecoder,
    RequestDecoder,
    UtilityCallDecoder,
)
from enginewire.wire.frames import is_death_marker
from enginewire.wire.handshake import EngineCoreReadyResponse, EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LoRARequest,
    ReconfigureDistributedRequest,
    utility_result,
)

REQUESTS, OUTPUTS, UTILITY, HANDSHAKE, ARRAYS = map(by_name, ("requests", "outputs", "utility", "handshake", "arrays"))


def ids(vectors: list[Vector]) -> dict[str, Any]:
    return {"argvalues": vectors, "ids": [vector.name for vector in vectors]}


def read_arrays(message: EngineCoreOutputs) -> None:
    """Convert every array of a message, so that encoding starts from numpy and not from the received bytes."""
    for output in message.outputs:
        _ = output.new_logprobs, output.new_prompt_logprobs_tensors, output.pooling_output, output.routed_experts


@pytest.mark.parametrize("vector", **ids([v for v in REQUESTS.values() if "ADD" in v.direction]))
def test_a_request_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    message = RequestDecoder().decode(vector.frames)
    frames = MsgpackEncoder().encode(message)
    assert schemaless(frames[0]) == vector.value
    assert [bytes(frame) for frame in frames] == vector.frames


@pytest.mark.parametrize("vector", **ids([v for v in OUTPUTS.values() if v.name != "engine_core_dead"]))
def test_outputs_decode_and_encode_to_the_same_bytes(vector: Vector) -> None:
    message = OutputsDecoder().decode(vector.frames)
    read_arrays(message)
    frames = MsgpackEncoder().encode(message)
    assert schemaless(frames[0]) == vector.value
    assert [bytes(frame) for frame in frames] == vector.frames


@pytest.mark.parametrize("vector", **ids([v for v in OUTPUTS.values() if len(v.frames) == 1 and v.value is not None]))
def test_outputs_whose_arrays_nobody_read_encode_to_the_same_bytes(vector: Vector) -> None:
    """A relay need not look at what it passes on."""
    if vector.name == "engine_core_dead":
        assert is_death_marker(vector.frames)
        return
    assert MsgpackEncoder().encode(OutputsDecoder().decode(vector.frames)) == vector.frames


def test_the_death_marker_is_recognised() -> None:
    assert is_death_marker(OUTPUTS["engine_core_dead"].frames)
    assert not is_death_marker(OUTPUTS["one_token"].frames)


def test_values_of_an_output_with_everything() -> None:
    output = OutputsDecoder().decode(OUTPUTS["all_output_fields"].frames).outputs[0]
    value = OUTPUTS["all_output_fields"].value[1][0]
    assert isinstance(output, EngineCoreOutput)
    assert output.request_id == value[0]
    assert output.new_token_ids == value[1]
    assert output.finish_reason is FinishReason(value[5])
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_prompt_tokens == value[10]["num_prompt_tokens"]
    assert output.num_nans_in_logits == value[12]


@pytest.mark.parametrize("name", ["logprobs_inline", "logprobs_aux", "logprobs_int64", "logprobs_empty"])
def test_logprobs_are_read_as_numpy(name: str) -> None:
    (output,) = OutputsDecoder().decode(OUTPUTS[name].frames).outputs
    assert output.new_logprobs is not None
    ids_, logprobs, ranks, cumulative = output.new_logprobs
    wire = OUTPUTS[name].value[1][0][2]
    assert [array.dtype.str for array in (ids_, logprobs, ranks)] == [triple[0] for triple in wire[:3]]
    assert [list(array.shape) for array in (ids_, logprobs, ranks)] == [triple[1] for triple in wire[:3]]
    assert cumulative == wire[3]
    assert output.new_logprobs is output.new_logprobs, "converted once"


def test_a_bfloat16_result_is_read_as_float32() -> None:
    (output,) = OutputsDecoder().decode(OUTPUTS["pooling_inline_bf16"].frames).outputs
    assert output.pooling_output is not None
    assert output.pooling_output.dtype == "bfloat16"
    assert output.pooling_output.numpy().dtype == np.float32


@pytest.mark.parametrize("vector", **ids([v for v in UTILITY.values() if v.name.startswith("call_")]))
def test_a_utility_call_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    call = UtilityCallDecoder().decode(vector.frames)
    assert [call.client_index, call.call_id, call.method] == vector.value[:3]
    assert MsgpackEncoder().encode(call) == vector.frames


@pytest.mark.parametrize(
    ("name", "struct"),
    [("call_add_lora", LoRARequest), ("call_reinitialize_distributed", ReconfigureDistributedRequest)],
)
def test_arguments_of_struct_type_convert_from_their_wire_form(name: str, struct: type) -> None:
    (argument,) = UtilityCallDecoder().decode(UTILITY[name].frames).args
    assert msgspec.to_builtins(msgspec.convert(argument, struct)) == argument


@pytest.mark.parametrize("vector", **ids([v for v in UTILITY.values() if v.name.startswith("result_")]))
def test_a_utility_result_decodes_to_its_value(vector: Vector) -> None:
    output = OutputsDecoder().decode(vector.frames).utility_output
    assert output is not None
    value = utility_result(output)
    if "tensor" in vector.name:
        triple = value["t"] if isinstance(value, dict) else value[0]
        tensor = tensor_from_wire(triple).numpy()
        assert tensor.tolist() == np.arange(tensor.size).tolist()
    else:
        assert value == vector.value[4][2][1]


@pytest.mark.parametrize("vector", **ids([v for v in UTILITY.values() if not v.name.startswith("call_")]))
def test_a_utility_answer_encodes_to_the_same_bytes(vector: Vector) -> None:
    frames = MsgpackEncoder().encode(OutputsDecoder().decode(vector.frames))
    if len(vector.frames) == 1:
        assert frames == vector.frames
    else:
        assert len(frames) == 1, "bytes that came in a frame of their own are inline now"


def test_a_failed_call_says_why() -> None:
    output = OutputsDecoder().decode(UTILITY["failure"].frames).utility_output
    assert output is not None
    assert output.failure_message == UTILITY["failure"].value[4][1]
    assert utility_result(output) is None


@pytest.mark.parametrize(
    "vector",
    **ids([v for v in UTILITY.values() if v.name.startswith("insecure_") and v.name != "insecure_result_none"]),
)
def test_a_result_with_type_information_is_refused_unless_pickle_is_on(vector: Vector) -> None:
    """Defect 19: the call fails, the message is sound."""
    output = OutputsDecoder().decode(vector.frames).utility_output
    assert output is not None
    with pytest.raises(DecodeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        utility_result(output)
    utility_result(output, allow_pickle=True)


HANDSHAKE_TYPES = {
    "hello": HandshakeMessage,
    "init": EngineHandshakeMetadata,
    "ready": HandshakeMessage,
    "ready_response": EngineCoreReadyResponse,
}


@pytest.mark.parametrize(
    "vector", **ids([v for v in HANDSHAKE.values() if v.name.startswith(("hello", "init", "ready"))])
)
def test_handshake_messages_decode_and_encode_to_the_same_bytes(vector: Vector) -> None:
    prefix = max((prefix for prefix in HANDSHAKE_TYPES if vector.name.startswith(prefix)), key=len)
    message = MsgpackDecoder(HANDSHAKE_TYPES[prefix]).decode(vector.frames)
    assert MsgpackEncoder().encode(message) == vector.frames


ARRAY_VECTORS = [v for v in ARRAYS.values() if v.error is None and not v.name.startswith(("insecure", "slice", "oob"))]


def threshold_of(vector: Vector) -> int:
    return {"threshold_0": 0, "threshold_big": 1 << 30}.get(vector.name, 256)


@pytest.mark.parametrize("vector", **ids([v for v in ARRAY_VECTORS if v.name != "two_aux_and_inline"]))
def test_an_array_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    triple = msgspec.msgpack.decode(vector.frames[0])
    fill_in_frames(triple, vector.frames)
    is_numpy = triple[0][0] in "<>|="
    array = ndarray_from_wire(triple) if is_numpy else tensor_from_wire(triple)
    assert list(array.shape) == vector.value[1]
    frames = MsgpackEncoder(zero_copy_threshold=threshold_of(vector)).encode(array)
    assert [bytes(frame) for frame in frames] == vector.frames


def test_arrays_of_one_message_are_numbered_in_order() -> None:
    vector = ARRAYS["two_aux_and_inline"]
    first, inline, tensor = msgspec.msgpack.decode(vector.frames[0])
    for triple in (first, inline, tensor):
        fill_in_frames(triple, vector.frames)
    message = [ndarray_from_wire(first), ndarray_from_wire(inline), tensor_from_wire(tensor)]
    assert [bytes(frame) for frame in MsgpackEncoder().encode(message)] == vector.frames


@pytest.mark.parametrize(("name", "value"), [("slice_full", slice(1, 5, 2)), ("slice_none", slice(None, 3, None))])
def test_slices_encode_as_three_numbers(name: str, value: slice) -> None:
    vector = ARRAYS[name]
    assert MsgpackEncoder().encode(value) == vector.frames


def test_an_out_of_band_tensor_is_refused() -> None:
    large, small = msgspec.msgpack.decode(ARRAYS["oob_tensor"].frames[0])
    with pytest.raises(DecodeError, match="out-of-band"):
        tensor_from_wire(large)
    assert tensor_from_wire(small).numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["insecure_object_array", "insecure_function"])
def test_pickles_are_refused_and_not_loaded(name: str) -> None:
    """Protocol E.6."""
    payload = ARRAYS[name].frames[0]
    assert isinstance(msgspec.msgpack.decode(payload), Ext)
    with pytest.raises(DecodeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        MsgpackDecoder(object).decode([payload])
    with pytest.raises(DecodeError):
        ndarray_from_wire(["<i4", [1], msgspec.msgpack.decode(payload)])


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.array([None, {}]),
        np.array([(1, 2.0)], "i4,f4"),
    ],
    ids=["datetime", "timedelta", "object", "structured"],
)
def test_arrays_that_the_reference_refuses_are_refused(array: np.ndarray) -> None:
    """arrays/np_datetime, np_object, np_structured."""
    assert all(ARRAYS[name].error for name in ("np_datetime", "np_object", "np_structured"))
    with pytest.raises(EncodeError, match="ndarray has no form on the wire"):
        MsgpackEncoder().encode(array)


def test_the_remaining_vectors_are_known_by_name() -> None:
    """Aborts and wave messages are plain arrays; nothing else is left out above."""
    untested = {v.name for v in REQUESTS.values() if "ADD" not in v.direction}
    assert untested == {"abort_list", "start_dp_wave", "start_dp_wave_all"}
    assert MsgpackDecoder(list[str]).decode(REQUESTS["abort_list"].frames) == REQUESTS["abort_list"].value
    assert {v.name for v in HANDSHAKE.values() if not v.name.startswith(("hello", "init", "ready"))} == {
        "coord_first_req_inproc", "coord_first_req", "coord_scale", "coord_stats", "coord_wave_change", "subscribe",
        "coord_ready",
    }  # fmt: skip


def test_every_file_is_complete() -> None:
    assert len(load("requests", "outputs", "utility", "handshake", "arrays")) == 31 + 30 + 31 + 16 + 51
