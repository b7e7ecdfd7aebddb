"""Every vector that the reference's own encoder made decodes to its value and encodes to the same bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from golden import NEW, OLD, Vector, as_json, by_name, load, same_bytes, schemaless
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire import v0_32
from enginewire.wire.arrays import fill_in_frames, ndarray_from_wire, tensor_from_wire
from enginewire.wire.codec import (
    MsgpackDecoder,
    MsgpackEncoder,
    OutputsDecoder,
    RequestDecoder,
    UtilityCallDecoder,
)
from enginewire.wire.frames import ALL_ENGINES_LISTEN, SUBSCRIBE_ALL, is_death_marker
from enginewire.wire.handshake import EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    ReconfigureDistributedRequest,
    utility_result,
)
from enginewire.wire.profile import PROFILES, decode_ready, profile_of_request

REQUESTS, OUTPUTS, UTILITY, ARRAYS = map(by_name, ("requests", "outputs", "utility", "arrays"))


def ids(vectors: list[Vector]) -> dict[str, Any]:
    return {"argvalues": vectors, "ids": list(map(str, vectors))}


def outputs_decoder(vector: Vector) -> OutputsDecoder:
    return OutputsDecoder(vector.profile.received_outputs)


def read_arrays(message: EngineCoreOutputs) -> None:
    """Convert every array of a message, so that encoding starts from numpy and not from the received bytes."""
    for output in message.outputs:
        for name in output.__struct_fields__:
            getattr(output, name)


@pytest.mark.parametrize("vector", **ids([v for v in load("requests") if "ADD" in v.direction]))
def test_a_request_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    message = RequestDecoder(vector.profile.request).decode(vector.frames)
    frames = MsgpackEncoder().encode(message)
    assert schemaless(frames[0]) == vector.value
    assert same_bytes(frames, vector)


@pytest.mark.parametrize("vector", **ids([v for v in load("outputs") if v.name != "engine_core_dead"]))
def test_outputs_decode_and_encode_to_the_same_bytes(vector: Vector) -> None:
    message = outputs_decoder(vector).decode(vector.frames)
    read_arrays(message)
    frames = MsgpackEncoder().encode(message)
    assert schemaless(frames[0]) == vector.value
    assert same_bytes(frames, vector)


@pytest.mark.parametrize("vector", **ids([v for v in load("outputs") if len(v.frames) == 1 and v.value is not None]))
def test_outputs_whose_arrays_nobody_read_encode_to_the_same_bytes(vector: Vector) -> None:
    """A relay need not look at what it passes on."""
    if vector.name == "engine_core_dead":
        assert is_death_marker(vector.frames)
        return
    assert same_bytes(MsgpackEncoder().encode(outputs_decoder(vector).decode(vector.frames)), vector)


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


@pytest.mark.parametrize("vector", **ids([v for v in load("utility") if v.name.startswith("call_")]))
def test_a_utility_call_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    call = UtilityCallDecoder().decode(vector.frames)
    assert [call.client_index, call.call_id, call.method] == vector.value[:3]
    assert MsgpackEncoder().encode(call) == vector.frames


@pytest.mark.parametrize(
    ("version", "name", "struct"),
    [
        (OLD, "call_add_lora", LoRARequest),
        (NEW, "call_add_lora", v0_32.LoRARequest),
        (OLD, "call_reinitialize_distributed", ReconfigureDistributedRequest),
        (NEW, "call_reinitialize_distributed", ReconfigureDistributedRequest),
    ],
)
def test_arguments_of_struct_type_convert_from_their_wire_form(version: str, name: str, struct: type) -> None:
    (argument,) = UtilityCallDecoder().decode(by_name("utility", version)[name].frames).args
    assert msgspec.to_builtins(msgspec.convert(argument, struct)) == argument


@pytest.mark.parametrize("vector", **ids([v for v in load("utility") if v.name.startswith("result_")]))
def test_a_utility_result_decodes_to_its_value(vector: Vector) -> None:
    output = outputs_decoder(vector).decode(vector.frames).utility_output
    assert output is not None
    value = utility_result(output)
    if "tensor" in vector.name:
        triple = value["t"] if isinstance(value, dict) else value[0]
        tensor = tensor_from_wire(triple).numpy()
        assert tensor.tolist() == np.arange(tensor.size).tolist()
    else:
        assert value == vector.value[4][2][1]


@pytest.mark.parametrize("vector", **ids([v for v in load("utility") if not v.name.startswith("call_")]))
def test_a_utility_answer_encodes_to_the_same_bytes(vector: Vector) -> None:
    frames = MsgpackEncoder().encode(outputs_decoder(vector).decode(vector.frames))
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
    **ids([v for v in load("utility") if v.name.startswith("insecure_") and v.name != "insecure_result_none"]),
)
def test_a_result_with_type_information_is_refused_unless_pickle_is_on(vector: Vector) -> None:
    """Defect 19: the call fails, the message is sound."""
    output = outputs_decoder(vector).decode(vector.frames).utility_output
    assert output is not None
    with pytest.raises(DecodeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        utility_result(output)
    utility_result(output, allow_pickle=True)


OUTPUTS_OF_REQUESTS = [v for v in load("outputs") if isinstance(v.value, list) and v.value[1]]


@pytest.mark.parametrize("vector", **ids(OUTPUTS_OF_REQUESTS))
def test_an_output_read_with_the_wrong_table_is_an_error_that_says_so(vector: Vector) -> None:
    """Protocol M.1: positions moved; nothing may be read at the wrong one."""
    (other,) = set(PROFILES) - {vector.profile}
    message = OutputsDecoder(other.received_outputs).decode(vector.frames)
    assert [output.request_id for output in message.outputs] == [value[0] for value in vector.value[1]]
    lengths = "13 elements, not 18" if vector.version == OLD else "18 elements, not 13"
    for output in message.outputs:
        assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ERROR)
        assert str(output.stop_reason).endswith(f"it has {lengths}: an engine of another version of vLLM")


@pytest.mark.parametrize("vector", **ids([v for v in load("requests") if "ADD" in v.direction]))
def test_a_request_read_with_the_wrong_table_means_the_same_or_is_refused(vector: Vector) -> None:
    """Protocol M.1: only adapters moved positions; the length tells the versions apart."""
    (other,) = set(PROFILES) - {vector.profile}
    decoder = RequestDecoder(other.request)
    if vector.value[6] is not None:
        with pytest.raises(DecodeError, match=r"\$\[6\]\[4\]"):
            decoder.decode(vector.frames)
    else:
        wrong, right = decoder.decode(vector.frames), RequestDecoder(vector.profile.request).decode(vector.frames)
        for name in EngineCoreRequest.__struct_fields__:
            if name not in ("sampling_params", "prompt_embeds", "mm_features"):  # maps and arrays did not move
                assert getattr(wrong, name) == getattr(right, name), name
    assert profile_of_request(vector.frames[0]) is vector.profile


@pytest.mark.parametrize("vector", **ids([v for v in load("handshake") if v.name.startswith("ready_response")]))
def test_a_ready_response_read_with_the_wrong_table_is_refused_or_means_the_same(vector: Vector) -> None:
    (other,) = set(PROFILES) - {vector.profile}
    if vector.version == OLD:
        with pytest.raises(DecodeError, match="missing required field `tensor_parallel_size`"):
            MsgpackDecoder(other.ready).decode(vector.frames)
    else:
        response = MsgpackDecoder(other.ready).decode(vector.frames)
        assert {name: vector.value[name] for name in vector.value if hasattr(response, name)} == {
            name: value for name, value in msgspec.to_builtins(response).items() if name in vector.value
        }


def test_values_of_a_0_32_output_with_everything() -> None:
    """Protocol M.2."""
    vector = by_name("outputs", NEW)["all_output_fields"]
    message = outputs_decoder(vector).decode(vector.frames)
    (output,) = message.outputs
    assert isinstance(output, v0_32.ReceivedOutput)
    assert (output.finish_reason, output.stop_reason, output.finished) == (FinishReason.LENGTH, "s", True)
    assert output.kv_transfer_params == {"remote_block_ids": [1, 2], "host": "h"}
    assert (output.ec_transfer_params, output.trace_headers) == ({"x": 1}, {"a": "b"})
    assert isinstance(output.prefill_stats, v0_32.PrefillStats)
    assert (output.prefill_stats.num_prompt_tokens, output.prefill_stats.num_cache_creation_tokens) == (10, 0)
    assert (output.num_nans_in_logits, output.mm_cache_miss_hashes) == (3, ["h1"])
    assert output.new_sampling_mask is not None
    assert output.new_sampling_mask.token_ids.tolist() == [1, 2, 3]
    assert output.spec_decode_metrics == v0_32.SpecDecodeMetrics(
        num_spec_tokens=2, histogram=[1, 2, 3], num_draft_tokens=6
    )
    assert output.prompt_token_id_logprobs is not None
    assert output.prompt_token_id_logprobs.numpy().tolist() == [[-1.0, -2.0]]
    assert output.new_prompt_logprobs_tensors is not None
    assert len(output.new_prompt_logprobs_tensors) == 5
    assert output.new_prompt_logprobs_tensors.selected_token_ranks.numpy().tolist() == [1, 2]
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[5, 6, 7]]


def test_values_that_0_32_added_elsewhere() -> None:
    """Protocol M.2."""
    outputs = by_name("outputs", NEW)
    decoder = OutputsDecoder(v0_32.ReceivedOutputs)
    assert getattr(decoder.decode(outputs["weight_version"].frames), "weight_version") == "default"  # noqa: B009
    stats = decoder.decode(outputs["full_stats"].frames).scheduler_stats
    assert isinstance(stats, v0_32.SchedulerStats)
    assert stats.num_kv_fetch_reqs_by_stage == {"waiting_to_start": 1}
    assert stats.iteration_details is not None
    assert (stats.iteration_details.iteration_index, stats.iteration_details.elapsed_ms) == (5, 3.5)
    assert stats.ec_connector_stats == {"b": 2}
    assert isinstance(stats.prefix_cache_stats, v0_32.PrefixCacheStats)
    vector = by_name("requests", NEW)["all_sampling_fields"]
    params = RequestDecoder(v0_32.EngineCoreRequest).decode(vector.frames).sampling_params
    assert isinstance(params, v0_32.SamplingParams)
    assert (params.watermarking, params.stream_interval, params.prompt_logprob_start) == (True, 4, 1)
    assert ndarray_from_wire(params.prompt_logprob_token_ids).tolist() == [[1, 2], [3, -1]]
    _, ready = decode_ready(by_name("handshake", NEW)["ready_response_full"].frames)
    assert isinstance(ready, v0_32.EngineCoreReadyResponse)
    assert ready.kv_events_config == v0_32.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    assert (ready.max_num_seqs, ready.kv_cache_max_concurrency) == (8, 5.6875)


HANDSHAKE_TYPES = {
    "hello": HandshakeMessage,
    "init": EngineHandshakeMetadata,
    "ready": HandshakeMessage,
}


@pytest.mark.parametrize(
    "vector", **ids([v for v in load("handshake") if v.name.startswith(("hello", "init", "ready"))])
)
def test_handshake_messages_decode_and_encode_to_the_same_bytes(vector: Vector) -> None:
    if vector.name.startswith("ready_response"):
        profile, message = decode_ready(vector.frames)
        assert profile is vector.profile
    else:
        message = MsgpackDecoder(HANDSHAKE_TYPES[vector.name.partition("_")[0]]).decode(vector.frames)
    assert same_bytes(MsgpackEncoder().encode(message), vector)


ARRAY_VECTORS = [v for v in load("arrays") if v.error is None and not v.name.startswith(("insecure", "slice", "oob"))]


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


PLAIN: dict[str, Any] = {
    "abort_list": list[str],
    "start_dp_wave": tuple[int, int | bytes | None],
    "start_dp_wave_all": tuple[int, int | bytes | None],
    "coord_first_req": tuple[int | bytes, int],
    "coord_first_req_inproc": tuple[str, int | bytes],  # inside one process; never on a socket
    "coord_scale": tuple[str, int],
    "coord_stats": tuple[list[list[int | float]] | None, int, bool],
    "coord_wave_change": tuple[list[list[int | float]] | None, int, bool],
}
"""Messages that are plain arrays, by name."""


@pytest.mark.parametrize("vector", **ids([v for v in load("requests", "handshake") if v.name in PLAIN]))
def test_a_plain_array_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    """Protocol C.1, J."""
    message = MsgpackDecoder(PLAIN[vector.name]).decode(vector.frames)
    assert as_json(list(message)) == vector.value
    assert MsgpackEncoder().encode(message) == vector.frames


def test_a_coordinators_raw_frames_are_known() -> None:
    """Protocol C.2."""
    for version in (OLD, NEW):
        handshake = by_name("handshake", version)
        assert handshake["subscribe"].frames == [SUBSCRIBE_ALL]
        assert handshake["coord_ready"].frames == [ALL_ENGINES_LISTEN]


def test_the_remaining_vectors_are_known_by_name() -> None:
    """Nothing is left out above."""
    rest = {v.name for v in load("requests") if "ADD" not in v.direction}
    rest |= {v.name for v in load("handshake") if not v.name.startswith(("hello", "init", "ready"))}
    assert rest == {*PLAIN, "subscribe", "coord_ready"}


def test_every_file_is_complete() -> None:
    files = ("requests", "outputs", "utility", "handshake", "arrays")
    assert len(load(*files, versions=[OLD])) == 31 + 30 + 31 + 16 + 51
    assert len(load(*files, versions=[NEW])) == 31 + 31 + 32 + 16 + 51
