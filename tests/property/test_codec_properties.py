"""Whatever is sent comes back; whatever comes, nothing but ``DecodeError`` is raised."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis import given, settings

from enginewire.errors import DecodeError
from enginewire.wire.arrays import (
    TENSOR_ITEM_SIZES,
    LogprobsLists,
    Tensor,
    fill_in_frames,
    ndarray_from_wire,
    tensor_from_wire,
)
from enginewire.wire.codec import (
    MsgpackDecoder,
    MsgpackEncoder,
    OutputsDecoder,
    RequestDecoder,
    UtilityCallDecoder,
)
from enginewire.wire.frames import is_death_marker, may_hold_utility_output
from enginewire.wire.handshake import EngineCoreReadyResponse, EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    PoolingParams,
    PrefillStats,
    SchedulerStats,
    utility_output,
    utility_result,
)
from enginewire.wire.sampling import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

text = st.text(max_size=12)
tokens = st.integers(0, 2**32)
counts = st.integers(0, 2**63 - 1)
thresholds = st.sampled_from([0, 1, 16, 256, 1 << 30])
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        text,
        st.binary(max_size=8),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
maps = st.dictionaries(text, plain, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


numpy_dtypes = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?"),
    arrays.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    arrays.byte_string_dtypes(min_len=1),
    arrays.unicode_string_dtypes(min_len=1),
)
numpy_arrays = numpy_dtypes.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(TENSOR_ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    size = int(np.prod(shape)) * TENSOR_ITEM_SIZES[dtype]
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


structured_outputs = st.one_of(
    st.builds(StructuredOutputsParams, json=text | maps),
    st.builds(StructuredOutputsParams, regex=text, backend=maybe(text), backend_was_auto=st.booleans()),
    st.builds(StructuredOutputsParams, choice=st.lists(text, max_size=3), disable_any_whitespace=st.booleans()),
)
sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2) | st.integers(-2, 2),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    temperature=st.floats(0, 2) | st.integers(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    seed=maybe(st.integers(-(2**63), 2**63 - 1)),
    stop=maybe(st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=3)),
    stop_token_ids=maybe(st.lists(tokens, max_size=3)),
    ignore_eos=st.booleans(),
    max_tokens=maybe(st.integers(8, 2**40)),
    min_tokens=st.integers(0, 8),
    logprobs=maybe(st.integers(-1, 20)),
    prompt_logprobs=maybe(st.integers(-1, 20)),
    output_kind=st.sampled_from(RequestOutputKind),
    eos_token_id=maybe(tokens),
    all_stop_token_ids=st.sets(tokens, max_size=3),
    structured_outputs=maybe(structured_outputs),
    logit_bias=maybe(st.dictionaries(tokens, st.floats(-100, 100), max_size=3)),
    allowed_token_ids=maybe(st.lists(tokens, min_size=1, max_size=3)),
    extra_args=maybe(maps),
    bad_words=maybe(st.lists(text, max_size=2)),
    bad_words_token_ids=maybe(st.lists(st.lists(tokens, max_size=2), max_size=2)),
)
requests = st.builds(
    EngineCoreRequest,
    request_id=text,
    prompt_token_ids=maybe(st.lists(tokens, max_size=40)),
    sampling_params=maybe(sampling_params),
    pooling_params=maybe(st.builds(PoolingParams, task=maybe(text), dimensions=maybe(counts))),
    arrival_time=st.floats(0, 2e9),
    lora_request=maybe(st.builds(LoRARequest, text, st.integers(1, 100), st.text(min_size=1, max_size=5))),
    cache_salt=maybe(text),
    data_parallel_rank=maybe(st.integers(0, 65535)),
    prompt_is_token_ids=maybe(st.lists(st.booleans(), max_size=4)),
    client_index=st.integers(0, 100),
    priority=st.integers(-(2**63), 2**63 - 1),
    trace_headers=maybe(st.dictionaries(text, text, max_size=2)),
    resumable=st.booleans(),
    external_req_id=maybe(text),
    reasoning_parser_kwargs=maybe(maps),
)
events = st.builds(EngineCoreEvent, st.sampled_from(EngineCoreEventType), st.floats(0, 1e9))
outputs = st.builds(
    EngineCoreOutput,
    request_id=text,
    new_token_ids=st.lists(tokens, max_size=5),
    finish_reason=maybe(st.sampled_from(FinishReason)),
    stop_reason=maybe(st.integers(0, 2**40) | text),
    events=maybe(st.lists(events, max_size=2)),
    kv_transfer_params=maybe(maps),
    prefill_stats=maybe(st.builds(PrefillStats, num_prompt_tokens=counts, num_cached_tokens=counts)),
    num_nans_in_logits=counts,
)


def as_received(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@given(requests, thresholds)
def test_requests_survive_the_wire(request: EngineCoreRequest, threshold: int) -> None:
    frames = as_received(MsgpackEncoder(zero_copy_threshold=threshold).encode(request))
    assert RequestDecoder().decode(frames) == request
    assert RequestDecoder().sender(frames) == (request.request_id, request.client_index)


@given(requests, tensors(), thresholds)
def test_embeddings_survive_the_wire(request: EngineCoreRequest, embeds: Tensor, threshold: int) -> None:
    request.prompt_embeds = embeds
    frames = as_received(MsgpackEncoder(zero_copy_threshold=threshold).encode(request))
    got = RequestDecoder().decode(frames).prompt_embeds
    assert got is not None
    assert (got.dtype, got.shape, bytes(got.data)) == (embeds.dtype, embeds.shape, embeds.data)


@given(
    st.lists(outputs, max_size=5), st.integers(0, 65535), st.none() | st.builds(SchedulerStats, num_running_reqs=counts)
)
def test_outputs_survive_the_wire(sent: list[EngineCoreOutput], index: int, stats: SchedulerStats | None) -> None:
    message = EngineCoreOutputs(engine_index=index, outputs=sent, scheduler_stats=stats, timestamp=1.5)
    frames = as_received(MsgpackEncoder().encode(message))
    got = OutputsDecoder().decode(frames)
    assert may_hold_utility_output(frames[0]) is (not sent)
    assert not is_death_marker(frames)
    assert (got.engine_index, got.scheduler_stats, got.timestamp) == (index, stats, 1.5)
    assert [msgspec.to_builtins(output) for output in got.outputs] == [msgspec.to_builtins(output) for output in sent]


@given(st.lists(st.tuples(outputs, st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=4), thresholds)
def test_logprobs_survive_the_wire(sent: list[tuple[EngineCoreOutput, int, int]], threshold: int) -> None:
    rng = np.random.default_rng(0)
    for output, rows, k in sent:
        ids = rng.integers(0, 9, (rows, k + 1))
        output.new_logprobs = LogprobsLists(ids, ids.astype("<f4"), ids[:, 0], [0, rows])
    message = EngineCoreOutputs(outputs=[output for output, *_ in sent])
    got = OutputsDecoder().decode(as_received(MsgpackEncoder(zero_copy_threshold=threshold).encode(message)))
    for received, (output, *_) in zip(got.outputs, sent, strict=True):
        assert received.new_logprobs is not None
        assert output.new_logprobs is not None
        for mine, theirs in zip(received.new_logprobs[:3], output.new_logprobs[:3], strict=True):
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
        assert received.new_logprobs[3] == output.new_logprobs[3]


@given(numpy_arrays, thresholds)
def test_arrays_survive_the_wire_whatever_their_type_shape_and_threshold(array: np.ndarray, threshold: int) -> None:
    frames = as_received(MsgpackEncoder(zero_copy_threshold=threshold).encode(array))
    assert len(frames) == 1 + (array.nbytes >= threshold and array.ndim > 0)
    triple = msgspec.msgpack.decode(frames[0])
    fill_in_frames(triple, frames)
    got = ndarray_from_wire(triple)
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(arrays.arrays("<i4", (4, 5, 6)), st.permutations([0, 1, 2]), st.sampled_from([1, 2, -1]), thresholds)
def test_arrays_of_any_memory_order_survive_the_wire(
    array: np.ndarray, axes: list[int], stride: int, threshold: int
) -> None:
    view = array.transpose(axes)[::stride, :, ::stride]
    frames = as_received(MsgpackEncoder(zero_copy_threshold=threshold).encode(view))
    triple = msgspec.msgpack.decode(frames[0])
    fill_in_frames(triple, frames)
    assert np.array_equal(ndarray_from_wire(triple), view)


@given(arrays.arrays("<f4", st.integers(0, 50), elements=st.floats(width=32)))
def test_bfloat16_keeps_the_upper_half_of_every_float(values: np.ndarray) -> None:
    halves = (values.view("<u4") >> 16).astype("<u2")
    (payload,) = MsgpackEncoder().encode(Tensor("bfloat16", values.shape, halves.tobytes()))
    widened = tensor_from_wire(msgspec.msgpack.decode(payload)).numpy()
    assert np.array_equal(widened.view("<u4"), halves.astype("<u4") << 16)


@given(plain, st.integers(0, 2**64 - 1))
def test_utility_results_survive_the_wire(value: object, call_id: int) -> None:
    message = EngineCoreOutputs(utility_output=utility_output(call_id, value))
    frames = as_received(MsgpackEncoder().encode(message))
    assert may_hold_utility_output(frames[0])
    answer = OutputsDecoder().decode(frames).utility_output
    assert answer is not None
    assert (answer.call_id, utility_result(answer)) == (call_id, value)


@given(requests, st.integers(9, 20))
def test_shorter_requests_take_defaults(request: EngineCoreRequest, length: int) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(request))[:length]
    got = RequestDecoder().decode([msgspec.msgpack.encode(fields)])
    names = EngineCoreRequest.__struct_fields__
    default = EngineCoreRequest("", None)
    for position, name in enumerate(names):
        assert getattr(got, name) == getattr(request if position < length else default, name)


@given(outputs, st.integers(2, 13), st.lists(plain, max_size=3))
def test_outputs_of_any_length_are_accepted(output: EngineCoreOutput, length: int, tail: list[object]) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(output))
    (short,) = OutputsDecoder().decode([msgspec.msgpack.encode([0, [fields[:length]]])]).outputs
    (long,) = OutputsDecoder().decode([msgspec.msgpack.encode([0, [fields + tail]])]).outputs
    assert (short.request_id, short.new_token_ids) == (output.request_id, output.new_token_ids)
    assert msgspec.to_builtins(long) == msgspec.to_builtins(output)


DECODERS = [
    RequestDecoder(),
    OutputsDecoder(),
    UtilityCallDecoder(),
    *[MsgpackDecoder(it) for it in (list[str], HandshakeMessage, EngineHandshakeMetadata, EngineCoreReadyResponse)],
]


def decode_with_everything(frames: list[bytes]) -> None:
    """Decode frames in every way there is, and look at every array; only ``DecodeError`` may come out."""
    for decoder in DECODERS:
        try:
            message = decoder.decode(frames)
        except DecodeError:
            continue
        if isinstance(message, EngineCoreOutputs):
            read_everything(message)
    for decoder in DECODERS[0], DECODERS[2]:
        decoder.sender(frames)
    if frames:
        may_hold_utility_output(frames[0])
    is_death_marker(frames)


def read_everything(message: EngineCoreOutputs) -> None:
    for output in message.outputs:
        for name in ("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "routed_experts"):
            try:
                getattr(output, name)
            except DecodeError:
                continue
    if message.utility_output is not None:
        try:
            utility_result(message.utility_output)
        except DecodeError:
            return


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_random_bytes_raise_nothing_but_decode_errors(frames: list[bytes]) -> None:
    decode_with_everything(frames)


@given(st.lists(plain | st.lists(plain, min_size=2, max_size=22), max_size=22))
def test_random_messages_raise_nothing_but_decode_errors(value: object) -> None:
    decode_with_everything([msgspec.msgpack.encode(value), b"aux"])


@settings(max_examples=300)
@given(requests | st.builds(EngineCoreOutputs, outputs=st.lists(outputs, max_size=3)), st.data())
def test_damaged_messages_raise_nothing_but_decode_errors(message: object, data: st.DataObject) -> None:
    if isinstance(message, EngineCoreOutputs):
        for output in message.outputs:
            output.new_logprobs = LogprobsLists(*[np.arange(3)] * 3)
    payload = bytearray(MsgpackEncoder().encode(message)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(payload)) | st.integers(0, len(payload)))
    decode_with_everything([bytes(payload[:cut]), b"aux"])


wire_shapes = st.lists(st.integers(-3, 2**65) | plain, max_size=4) | plain
wire_data = plain | st.integers(-2, 4) | st.builds(msgspec.msgpack.Ext, st.integers(0, 4), st.binary(max_size=16))
wire_dtypes = text | st.sampled_from(["<i4", "|b1", "|O", "int32", "bfloat16", "<U2", "|V8", "<M8[s]", "f4,f4", "S5"])


@given(st.tuples(wire_dtypes, wire_shapes, wire_data).map(list))
def test_malformed_arrays_raise_nothing_but_decode_errors(triple: list[Any]) -> None:
    fill_in_frames(triple, [b"payload", b"12345678", b""])
    for read in (ndarray_from_wire, tensor_from_wire):
        try:
            array = read(triple)
        except DecodeError:
            continue
        assert list(array.shape) == triple[1]


@given(sampling_params)
def test_sampling_params_are_the_same_after_a_second_reading(params: SamplingParams) -> None:
    (payload,) = MsgpackEncoder().encode(params)
    decoded = MsgpackDecoder(SamplingParams).decode([payload])
    assert decoded == params
    assert MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(decoded)) == decoded
