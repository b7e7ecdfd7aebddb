"""Encoding and decoding: layouts, strictness, limits, and damage contained to the request it concerns."""

from __future__ import annotations

import datetime
import logging
import pickle
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError, EncodeError
from enginewire.wire import v0_32
from enginewire.wire.arrays import LogprobsLists, LogprobsTensors, Tensor
from enginewire.wire.codec import (
    MsgpackDecoder,
    MsgpackEncoder,
    OutputsDecoder,
    RequestDecoder,
    UtilityCallDecoder,
    array_length,
)
from enginewire.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    ReceivedOutput,
    ReceivedOutputs,
    SchedulerStats,
    UtilityCall,
    utility_output,
    utility_result,
)
from enginewire.wire.sampling import SamplingParams

pack = msgspec.msgpack.encode

MINIMAL_REQUEST: list[Any] = ["a", [1, 2], None, {}, None, 1.0, None, None, None]
MINIMAL_OUTPUT: list[Any] = ["a", [7]]


def request_with(position: int, value: object) -> list[bytes]:
    """Return the frames of a sound request whose field ``position`` is replaced."""
    fields = [*MINIMAL_REQUEST, None, None, 0, 0, 0, None, False, None, None, None, False]
    fields[position] = value
    return [pack(fields)]


def decode_outputs(*outputs: object, **more: object) -> EngineCoreOutputs:
    return OutputsDecoder().decode([pack([0, list(outputs), None, 1.0, *more.values()])])


class Unknown:
    """A type that has no form on the wire."""


# Requests


def test_a_request_needs_nine_elements_and_no_more() -> None:
    """Protocol C.3."""
    for length in range(9):
        with pytest.raises(DecodeError, match=f"at least 9 elements was expected, got one of {length}$"):
            RequestDecoder().decode([pack(MINIMAL_REQUEST[:length])])
    request = RequestDecoder().decode([pack(MINIMAL_REQUEST)])
    assert request == EngineCoreRequest("a", [1, 2], sampling_params=SamplingParams(), arrival_time=1.0)


def test_a_longer_request_is_accepted() -> None:
    """Protocol C.3: what a newer peer appends is ignored."""
    fields = msgspec.msgpack.decode(request_with(0, "a")[0])
    assert RequestDecoder().decode([pack([*fields, "session", {"new": 1}])]).request_id == "a"


@pytest.mark.parametrize("payload", [b"", b"\x80", pack("a"), pack(5), b"\xdc", b"\xdd\x00", b"\xc1"], ids=bytes.hex)
def test_what_is_no_array_is_no_request(payload: bytes) -> None:
    with pytest.raises(DecodeError, match=r"EngineCoreRequest.*got something else"):
        RequestDecoder().decode([payload])


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"a"), (0, 5), (0, None), (1, [1.0]), (1, ["1"]), (1, [True]), (1, 5), (5, "now"), (5, True),
        (3, {"max_tokens": 8.0}), (3, {"max_tokens": True}), (3, {"logit_bias": {"5": 1.0}}), (3, {"output_kind": 3}),
        (3, {"stop": b"x"}), (3, {"ignore_eos": 1}), (3, {"temperature": "1"}), (3, []), (11, 0.0), (11, True),
        (11, None), (15, 1), (6, ["l", 0, "p"]), (6, ["l", 1, ""]), (9, ["float32", [2], 0]), (9, "x"), (14, {"a": 1}),
    ],
)  # fmt: skip
def test_types_are_checked_strictly(position: int, value: object) -> None:
    """Protocol C.3."""
    with pytest.raises(DecodeError):
        RequestDecoder().decode(request_with(position, value))


def test_an_int_passes_for_a_float() -> None:
    """Protocol C.3."""
    request = RequestDecoder().decode(request_with(3, {"temperature": 0, "top_p": 1, "logit_bias": {5: -100}}))
    assert request.sampling_params == SamplingParams(temperature=0.0, logit_bias={5: -100.0})
    assert RequestDecoder().decode(request_with(5, 1795956317)).arrival_time == 1795956317.0


def test_unknown_sampling_parameters_are_ignored() -> None:
    """Protocol C.3: a 0.32 frontend sends ``watermarking``."""
    request = RequestDecoder().decode(request_with(3, {"watermarking": False, "max_tokens": 3}))
    assert request.sampling_params == SamplingParams(max_tokens=3)


@pytest.mark.parametrize("token", [2**31, 2**63, 2**64 - 1])
def test_integers_may_take_the_full_width(token: int) -> None:
    assert RequestDecoder().decode(request_with(1, [token])).prompt_token_ids == [token]


def test_the_sender_of_a_refused_request_is_recovered() -> None:
    """Defect 1: whom to tell."""
    decoder = RequestDecoder()
    assert decoder.sender([pack(MINIMAL_REQUEST)]) == ("a", 0)
    assert decoder.sender([pack(["a"])]) == ("a", 0)
    assert decoder.sender(request_with(11, 3)) == ("a", 3)
    frames = request_with(3, {"temperature": 5.0})
    with pytest.raises(DecodeError, match=r"^temperature must be"):
        decoder.decode(frames)
    assert decoder.sender(frames) == ("a", 0)


@pytest.mark.parametrize(
    "frames", [[], [b""], [pack([])], [pack(5)], [pack([5])], [b"\x99\xa1"], request_with(11, "x")]
)
def test_there_may_be_nobody_to_tell(frames: list[bytes]) -> None:
    assert RequestDecoder().sender(frames) is None


def test_prompt_embeddings_travel_in_a_frame_of_their_own() -> None:
    embeds = Tensor.from_numpy(np.arange(128, dtype="<f4").reshape(2, 64))
    request = EngineCoreRequest("a", None, sampling_params=SamplingParams(), prompt_embeds=embeds)
    frames = MsgpackEncoder().encode(request)
    assert len(frames) == 2
    decoded = RequestDecoder().decode(list(map(bytes, frames)))
    assert decoded.prompt_embeds is not None
    assert np.array_equal(decoded.prompt_embeds.numpy(), embeds.numpy())


def test_multimodal_data_gets_its_frames() -> None:
    """Protocol D.17."""
    pixels = np.arange(256, dtype="<f4")
    feature = MultiModalFeatureSpec(
        data={"pixels": {"data": Tensor.from_numpy(pixels), "field": ["batched", {}]}, "none": None},
        modality="image",
        identifier="x",
        mm_position=PlaceholderRange(offset=0, length=1),
    )
    cached = MultiModalFeatureSpec(
        data=None, modality="image", identifier="y", mm_position=PlaceholderRange(offset=1, length=1)
    )
    request = EngineCoreRequest("a", [1, 2], mm_features=[feature, cached], sampling_params=SamplingParams())
    decoded = RequestDecoder().decode(list(map(bytes, MsgpackEncoder().encode(request))))
    assert decoded.mm_features is not None
    assert decoded.mm_features[0].data is not None
    assert decoded.mm_features[0].data["pixels"]["data"] == ["float32", [256], Ext(3, pixels.tobytes())]
    assert decoded.mm_features[1].data is None


# Outputs


def test_short_outputs_take_defaults_and_long_ones_are_accepted() -> None:
    """Protocol C.3."""
    message = OutputsDecoder().decode([pack([3, [MINIMAL_OUTPUT]])])
    assert (message.engine_index, message.scheduler_stats, message.utility_output) == (3, None, None)
    assert message.outputs == [ReceivedOutput("a", [7])]
    assert OutputsDecoder().decode([pack([])]).outputs == []
    full = ["a", [7], None, None, None, 1, None, None, None, None, None, None, 0]
    (output,) = OutputsDecoder().decode([pack([0, [[*full, "new"]], *[None] * 6, "default"])]).outputs
    assert output.finish_reason is FinishReason.LENGTH
    assert output.finished


def test_a_time_stamp_of_zero_means_now() -> None:
    """Protocol D.5."""
    assert OutputsDecoder().decode([pack([0, []])]).timestamp > 0
    assert OutputsDecoder().decode([pack([0, [], None, 0.0])]).timestamp > 0
    assert OutputsDecoder().decode([pack([0, [], None, 5.0])]).timestamp == 5.0


def test_finish_reasons_have_the_words_of_the_apis() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]


@pytest.mark.parametrize("bad", [["bad", [1.5]], ["bad"], ["bad", [7], None, None, None, 9], ["bad", "text"]], ids=repr)
def test_a_malformed_output_is_an_error_of_its_request_alone(bad: object, caplog: pytest.LogCaptureFixture) -> None:
    """Defect 19: contain damage."""
    with caplog.at_level(logging.WARNING):
        message = decode_outputs(["first", [1]], bad, ["last", [2]])
    first, error, last = message.outputs
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("first", [1], None)
    assert (last.request_id, last.new_token_ids, last.finish_reason) == ("last", [2], None)
    assert (error.request_id, error.new_token_ids, error.finish_reason) == ("bad", [], FinishReason.ERROR)
    assert str(error.stop_reason).startswith("internal: its output cannot be decoded: ")
    assert "engine_index=0: damaged outputs" in caplog.text


@pytest.mark.parametrize(
    ("last", "is_told"),
    [
        (["b", [2]], False),
        (["b", [2], *[None] * 9], False),
        (["b", [2], None, None, None, 0], True),
        (["b", [], None, None, None, 3, "internal: x"], True),
        (["b", ["damaged"]], True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("outputs_type", [ReceivedOutputs, v0_32.ReceivedOutputs])
def test_a_decoder_tells_of_every_message_that_ends_a_request(
    last: list[object], is_told: bool, outputs_type: type[ReceivedOutputs]
) -> None:
    """Whoever keeps track of live requests looks into no other message."""
    decoder = OutputsDecoder(outputs_type)
    for _ in range(3):
        before = decoder.last_end
        message = decoder.decode([pack([0, [["a", [1]], last]])])
        assert (decoder.last_end is not before) is is_told
        assert [output.finished for output in message.outputs] == [False, is_told]


@pytest.mark.parametrize("bad", [7, -1, "x", True, 1.0, [1]], ids=repr)
def test_a_malformed_finish_reason_says_where_it_is(bad: object) -> None:
    (output,) = decode_outputs(["a", [7], None, None, None, bad]).outputs
    assert str(output.stop_reason).endswith("`$[5]`")


@pytest.mark.parametrize("bad", [5, None, [], [5, [7]], {"a": 1}], ids=repr)
def test_an_output_of_nobody_is_left_out_and_the_others_are_delivered(bad: object) -> None:
    assert [output.request_id for output in decode_outputs(["a", [1]], bad, ["b", [2]]).outputs] == ["a", "b"]


def test_damage_outside_the_outputs_does_not_cost_them() -> None:
    payload = pack([2, [["a", [1]]], {"num_running_reqs": "many"}, "late", [5, None, [None, True]], ["z"], "x", "y"])
    message = OutputsDecoder().decode([payload])
    assert message.engine_index == 2
    assert message.outputs == [ReceivedOutput("a", [1])]
    assert message.scheduler_stats is None
    assert message.finished_requests == ["z"]
    assert message.utility_output is not None
    assert utility_result(message.utility_output) is True


def test_a_malformed_utility_answer_fails_its_call() -> None:
    """Defect 19."""
    message = OutputsDecoder().decode([pack([0, [], None, 1.0, [2**63, 5, None]])])
    assert message.utility_output is not None
    assert message.utility_output.call_id == 2**63
    assert "its answer cannot be decoded" in str(message.utility_output.failure_message)


@pytest.mark.parametrize(
    "value",
    [5, "x", {}, ["x", "y"], [0, 5], [0, [5]], [0, [[5]]], [0, [], None, 1.0, 5], [0, [], None, 1.0, ["x"]],
     [0, [], {"num_running_reqs": "x"}], [0, [], None, "x"], [0, [], None, 1.0, None, 5]],
    ids=repr,
)  # fmt: skip
def test_a_message_of_which_nothing_can_be_made_is_refused(value: object) -> None:
    with pytest.raises(DecodeError, match="not a valid ReceivedOutputs"):
        OutputsDecoder().decode([pack(value)])


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x98\x00\x91"]])
def test_bytes_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        OutputsDecoder().decode(frames)


def logprobs_of(rows: int, k: int = 5) -> LogprobsLists:
    rng = np.random.default_rng(rows)
    shape = (rows, k + 1)
    return LogprobsLists(
        rng.integers(0, 100, shape).astype("<i4"), rng.random(shape).astype("<f4"), np.ones(rows, "<i8"), None
    )


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_logprobs_survive_the_wire_inline_and_in_frames(rows: int) -> None:
    sent = logprobs_of(rows)
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], new_logprobs=sent)]))
    assert len(frames) == (4 if rows == 40 else 1)
    (output,) = OutputsDecoder().decode(list(map(bytes, frames))).outputs
    assert output.new_logprobs is not None
    for got, want in zip(output.new_logprobs[:3], sent[:3], strict=True):
        assert np.array_equal(got, want)
        assert got.dtype == want.dtype


def test_every_array_of_an_output_survives_the_wire_in_frames() -> None:
    tensors = LogprobsTensors(*[Tensor.from_numpy(array) for array in logprobs_of(40)[:3]])
    sent = EngineCoreOutput(
        "a",
        [1],
        new_prompt_logprobs_tensors=tensors,
        pooling_output=Tensor.from_numpy(np.ones(100)),
        routed_experts=np.arange(300, dtype="<i2"),
    )
    frames = list(map(bytes, MsgpackEncoder().encode(EngineCoreOutputs(outputs=[sent]))))
    assert len(frames) == 6
    (output,) = OutputsDecoder().decode(frames).outputs
    assert output.new_prompt_logprobs_tensors is not None
    for got, want in zip(output.new_prompt_logprobs_tensors[:3], tensors[:3], strict=True):
        assert np.array_equal(got.numpy(), want.numpy())
    assert output.pooling_output is not None
    assert output.pooling_output.numpy().tolist() == [1.0] * 100
    assert np.array_equal(output.routed_experts, np.arange(300))


def test_reading_a_malformed_array_fails_and_nothing_else_does() -> None:
    message = decode_outputs(["a", [1], [1, 2, 3]], ["b", [2], [["<i4", [70], 5], ["<f4", [0], 1], ["<i8", [0], 2]]])
    assert [output.new_token_ids for output in message.outputs] == [[1], [2]]
    for output in message.outputs:
        with pytest.raises(DecodeError):
            _ = output.new_logprobs


def test_an_array_field_can_be_overwritten() -> None:
    (output,) = decode_outputs(["a", [1], [1, 2, 3]]).outputs
    output.new_logprobs = None
    assert output.new_logprobs is None


# Utility calls


def test_a_call_needs_four_elements() -> None:
    """Defect 3."""
    decoder = UtilityCallDecoder()
    assert decoder.decode([pack([1, 2**64 - 1, "sleep", [1, "abort"]])]) == UtilityCall(
        1, 2**64 - 1, "sleep", [1, "abort"]
    )
    assert decoder.decode([pack([0, 1, "sleep", [], "new"])]).args == []
    for value in ([], [0, 1], [0, 1, "sleep"], [0, 1, b"sleep", []], [0, 1.0, "sleep", []], [0, 1, "sleep", {}], 5):
        with pytest.raises(DecodeError, match="UtilityCall"):
            decoder.decode([pack(value)])


def test_the_caller_of_a_refused_call_is_recovered() -> None:
    decoder = UtilityCallDecoder()
    assert decoder.sender([pack([1, 5, "collective_rpc", [Ext(2, b"x")]])]) == (1, 5)
    for frames in ([], [b""], [pack([1])], [pack(["x", 1])], [pack(5)]):
        assert decoder.sender(frames) is None


def test_arrays_among_the_arguments_get_their_frames() -> None:
    frames = MsgpackEncoder().encode(UtilityCall(0, 1, "collective_rpc", [Tensor.from_numpy(np.ones(100))]))
    call = UtilityCallDecoder().decode(list(map(bytes, frames)))
    assert call.args == [["float64", [100], Ext(3, np.ones(100).tobytes())]]


@pytest.mark.parametrize("value", [None, True, 5, "x", [1, [2]], {"a": {"b": None}}])
def test_a_result_survives_the_wire(value: object) -> None:
    frames = MsgpackEncoder().encode(EngineCoreOutputs(utility_output=utility_output(9, value)))
    answer = OutputsDecoder().decode(frames).utility_output
    assert answer is not None
    assert (answer.call_id, utility_result(answer)) == (9, value)


def test_a_result_without_a_value_is_two_nils() -> None:
    """Protocol D.12."""
    assert msgspec.msgpack.decode(pack(utility_output(9))) == [9, None, [None, None]]
    assert msgspec.msgpack.decode(pack(utility_output(9, failure_message="no"))) == [9, "no", None]


@pytest.mark.parametrize("result", [5, [], [1], [None, 1, 2], {"a": 1}], ids=repr)
def test_a_result_that_is_no_pair_is_refused(result: object) -> None:
    answer = utility_output(1)
    answer.result = result
    with pytest.raises(DecodeError, match="typeinfo, value"):
        utility_result(answer)


def test_pickles_anywhere_in_a_result_are_refused_or_loaded() -> None:
    """Protocol E.6."""
    pickled = Ext(1, pickle.dumps({"a": (1, 2)}))
    for value, loaded in [
        (pickled, {"a": (1, 2)}),
        ([1, [pickled]], [1, [{"a": (1, 2)}]]),
        ({"x": {"y": pickled}}, {"x": {"y": {"a": (1, 2)}}}),
    ]:
        frames = [pack([0, [], None, 1.0, [1, None, [None, value]]])]
        with pytest.raises(DecodeError, match="Python objects"):
            utility_result(OutputsDecoder().decode(frames).utility_output)  # type: ignore[arg-type]
        assert utility_result(OutputsDecoder().decode(frames).utility_output, allow_pickle=True) == loaded  # type: ignore[arg-type]


def test_a_broken_pickle_is_a_decode_error_even_where_pickle_is_allowed() -> None:
    with pytest.raises(DecodeError, match="cannot unpickle"):
        MsgpackDecoder(Any, allow_pickle=True).decode([pack(Ext(1, b"\x80\x05"))])


def test_pickles_among_arguments_are_refused_or_loaded() -> None:
    frames = [pack([0, 1, "collective_rpc", [Ext(2, pickle.dumps(5))]])]
    with pytest.raises(DecodeError, match="Python objects"):
        UtilityCallDecoder().decode(frames)
    assert UtilityCallDecoder(allow_pickle=True).decode(frames).args == [5]


def test_pickles_in_a_request_are_refused() -> None:
    with pytest.raises(DecodeError, match="Python objects"):
        RequestDecoder().decode(request_with(3, {"extra_args": {"x": Ext(1, b"")}}))


@pytest.mark.parametrize("payload", [b"\xc1", b"\x93\x01", b"\x81\x01\x02"])
def test_a_message_that_has_two_forms_and_is_in_neither_is_refused(payload: bytes) -> None:
    decoder = MsgpackDecoder[object](list[str] | str)  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match=r"not a valid list\[str\] \| str"):
        decoder.decode([payload])


def test_other_extensions_are_passed_on() -> None:
    request = RequestDecoder().decode(request_with(3, {"extra_args": {"x": Ext(42, b"ab")}}))
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {"x": Ext(42, b"ab")}


# Encoding


@pytest.mark.parametrize("value", [Unknown(), object, print, 1j, np.array([None]), np.datetime64("2020")], ids=type)
def test_a_value_without_a_form_on_the_wire_is_refused_by_its_type(value: object) -> None:
    """Defect 6."""
    with pytest.raises(EncodeError, match=type(value).__qualname__):
        MsgpackEncoder().encode({"deep": [value]})


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {1: "\ud800"}])
def test_a_value_that_does_not_fit_is_refused(value: object) -> None:
    with pytest.raises(EncodeError, match="cannot encode list"):
        MsgpackEncoder().encode([value])


def test_a_value_is_no_array_where_numpy_was_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(EncodeError, match="Unknown"):
        MsgpackEncoder().encode(Unknown())


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(EncodeError, match="recursion"):
        MsgpackEncoder().encode(endless)


def test_an_encoder_is_sound_after_a_refusal() -> None:
    encoder = MsgpackEncoder(zero_copy_threshold=0)
    with pytest.raises(EncodeError):
        encoder.encode([np.ones(3), Unknown()])
    frames = encoder.encode([np.ones(3)])
    assert msgspec.msgpack.decode(frames[0]) == [["<f8", [3], 1]]
    assert len(frames) == 2


def test_what_has_no_form_is_pickled_only_on_request() -> None:
    (payload,) = MsgpackEncoder(allow_pickle=True).encode([{1j}])
    assert MsgpackDecoder(Any, allow_pickle=True).decode([payload]) == [[1j]]


def test_numpy_scalars_are_plain_numbers() -> None:
    values = [np.int64(5), np.float32(0.5), np.bool_(True), np.uint8(7)]
    assert msgspec.msgpack.decode(MsgpackEncoder().encode(values)[0]) == [5, 0.5, True, 7]


@pytest.mark.parametrize(("size", "num_frames"), [(255, 1), (256, 2)])
@pytest.mark.parametrize("make", [lambda n: np.ones(n, "|u1"), lambda n: Tensor("uint8", (n,), bytes(n))])
def test_arrays_below_the_threshold_are_inline(size: int, num_frames: int, make: Any) -> None:
    """Protocol E.1: strictly below."""
    assert len(MsgpackEncoder().encode(make(size))) == num_frames


def test_a_large_array_is_not_copied() -> None:
    """C-28."""
    array = np.zeros(1000, "<f4")
    frames = MsgpackEncoder().encode(array)
    array[0] = 1
    assert np.frombuffer(frames[1], "<f4")[0] == 1


def test_statistics_survive_the_wire() -> None:
    stats = SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5, waiting_lora_adapters={"x": 1})
    message = OutputsDecoder().decode(MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats)))
    assert message.scheduler_stats == stats


@pytest.mark.parametrize(("lora_int_id", "lora_path"), [(0, "p"), (-1, "p"), (1, "")])
def test_an_adapter_needs_an_id_and_a_path(lora_int_id: int, lora_path: str) -> None:
    """Protocol D.4."""
    with pytest.raises(ValueError, match="lora_"):
        LoRARequest("name", lora_int_id, lora_path)


# Limits


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff\x01", b"\xdf\xff\xff\xff\xff\x01", b"\xdb\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x03\x01", b"\x98\x00\xdd\xff\xff\xff\xff\x92",
        b"\x98\x00\x91\x92\xa1a\xdd\xff\xff\xff\xff", b"\x98\x00\x91\x93\xa1a\x90\xc9\xff\xff\xff\xff\x03",
    ],
    ids=bytes.hex,
)  # fmt: skip
@pytest.mark.parametrize("decoder", [RequestDecoder(), OutputsDecoder(), UtilityCallDecoder(), MsgpackDecoder(Any)])
def test_absurd_sizes_cost_no_memory(payload: bytes, decoder: Any) -> None:
    with pytest.raises(DecodeError):
        decoder.decode([payload])


@pytest.mark.parametrize("depth", [500, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_absurd_nesting_is_survived(depth: int, opening: bytes) -> None:
    """remote-engines.md: what a hostile peer may send."""
    nested = opening * depth + b"\xc0"
    for decoder, head, tail in [
        (RequestDecoder(), b"\x99\xa1a\x91\x01\xc0\x81\xaaextra_args\x81\xa1x", b"\xc0\xcb" + bytes(8) + b"\xc0" * 3),
        (UtilityCallDecoder(), b"\x94\x00\x01\xa1x\x91", b""),
        (MsgpackDecoder(Any), b"", b""),
    ]:
        frames = [head + nested + tail, b"aux"]
        if depth == 500:
            decoder.decode(frames)
        else:
            with pytest.raises(DecodeError, match="recursion"):
                decoder.decode(frames)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_absurd_nesting_in_outputs_is_survived(opening: bytes) -> None:
    def frames_of(depth: int) -> tuple[list[bytes], list[bytes]]:
        nested = opening * depth + b"\xc0"
        logprobs = b"\x92\x00\x91\x93\xa1a\x90" + nested
        answer = b"\x95\x00\x90\xc0\xcb" + bytes(8) + b"\x93\x01\xc0\x92\xc0" + nested
        return [logprobs, b"aux"], [answer, b"aux"]

    logprobs, answer = frames_of(500)
    (output,) = OutputsDecoder().decode(logprobs).outputs
    with pytest.raises(DecodeError):
        _ = output.new_logprobs
    utility = OutputsDecoder().decode(answer).utility_output
    assert utility is not None
    assert utility_result(utility)
    for frames in frames_of(100_000):
        with pytest.raises(DecodeError, match="recursion"):
            OutputsDecoder().decode(frames)


@pytest.mark.parametrize(
    ("payload", "length"),
    [(b"", -1), (b"\x90", 0), (b"\x9f", 15), (b"\xdc\x01\x00", 256), (b"\xdd\x00\x01\x00\x00", 65536),
     (b"\xdc\x01", -1), (b"\xdd\x00", -1), (b"\x80", -1), (b"\xc0", -1)],
    ids=str,
)  # fmt: skip
def test_an_array_states_its_length_in_its_header(payload: bytes, length: int) -> None:
    assert array_length(payload) == length
    assert array_length(memoryview(payload)) == length


def test_dates_are_not_part_of_the_protocol_but_harmless() -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert MsgpackDecoder(Any).decode([pack(now)]) == now
