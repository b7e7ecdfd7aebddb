"""The layout of vLLM 0.32: what moved, what was added, and how 0.25's structs are brought into it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from enginewire.errors import DecodeError, EncodeError, InvalidRequestError
from enginewire.wire import messages, sampling, v0_32
from enginewire.wire.arrays import LogprobsLists, SamplingMaskLists, Tensor
from enginewire.wire.codec import MsgpackEncoder, OutputsDecoder, RequestDecoder
from enginewire.wire.profile import PROFILES, V0_25, V0_32

pack = msgspec.msgpack.encode


def encoded(message: object) -> Any:
    return msgspec.msgpack.decode(MsgpackEncoder().encode(message)[0])


def received(*output: object) -> v0_32.ReceivedOutput:
    (only,) = OutputsDecoder(v0_32.ReceivedOutputs).decode([pack([0, [output]])]).outputs
    assert isinstance(only, v0_32.ReceivedOutput)
    return only


def test_code_that_reads_attributes_works_with_either_table() -> None:
    for profile in PROFILES:
        output = profile.received_outputs.OUTPUT
        (read,) = (
            OutputsDecoder(profile.received_outputs).decode([pack([0, [["a", [7], None, None, None, 1]]])]).outputs
        )
        assert type(read) is output
        assert (read.request_id, read.new_token_ids, str(read.finish_reason)) == ("a", [7], "length")
        assert read.finished
        assert set(messages.EngineCoreOutput.__struct_fields__) <= set(output.__struct_fields__)


def test_an_adapter_has_six_elements() -> None:
    """Protocol M.2."""
    old = messages.LoRARequest("l", 1, "/l", "base", None, True, True)
    new = v0_32.lora_of(old)
    assert encoded(new) == ["l", 1, "/l", "base", True, True]
    assert v0_32.lora_of(new) is new
    old.tensorizer_config_dict = {"x": 1}
    with pytest.raises(EncodeError, match="no tensorizer_config_dict"):
        v0_32.lora_of(old)
    with pytest.raises(ValueError, match="lora_path"):
        v0_32.LoRARequest("l", 1, "")


def test_a_request_is_brought_into_the_layout_with_its_adapter() -> None:
    lora = messages.LoRARequest("l", 1, "/l")
    request = messages.EngineCoreRequest(
        "a", [1, 2], sampling_params=sampling.SamplingParams(seed=5), arrival_time=1.0, lora_request=lora, priority=3
    )
    assert V0_25.request_of(request) is request
    new = V0_32.request_of(request)
    assert V0_32.request_of(new) is new
    assert len(encoded(new)) == 22
    decoded = RequestDecoder(V0_32.request).decode(MsgpackEncoder().encode(new))
    assert (decoded.request_id, decoded.priority, decoded.arrival_time) == ("a", 3, 1.0)
    assert decoded.sampling_params == v0_32.SamplingParams(seed=5)
    assert decoded.lora_request == v0_32.LoRARequest("l", 1, "/l")
    assert request.lora_request is lora


def test_outputs_are_brought_into_the_layout() -> None:
    rng = np.random.default_rng(0)
    output = messages.EngineCoreOutput(
        "a",
        [1],
        new_logprobs=LogprobsLists(np.ones((1, 2), "<i4"), rng.random((1, 2)).astype("<f4"), np.ones(1, "<i8")),
        finish_reason=messages.FinishReason.STOP,
        stop_reason=7,
        kv_transfer_params={"k": 1},
        trace_headers={"t": "x"},
        prefill_stats=messages.PrefillStats(num_prompt_tokens=4),
        routed_experts=np.arange(300, dtype="<i2"),
        num_nans_in_logits=2,
    )
    stats = messages.SchedulerStats(num_running_reqs=2)
    message = messages.EngineCoreOutputs(1, [output], stats, 5.0, finished_requests=["a"])
    assert V0_25.outputs_of(message) is message
    new = V0_32.outputs_of(message)
    assert V0_32.outputs_of(new) is new
    frames = list(map(bytes, MsgpackEncoder().encode(new)))
    decoded = OutputsDecoder(V0_32.received_outputs).decode(frames)
    assert V0_32.outputs_of(decoded) is decoded, "a relay passes on what it received"
    assert (decoded.engine_index, decoded.timestamp, decoded.finished_requests) == (1, 5.0, ["a"])
    assert decoded.scheduler_stats == v0_32.SchedulerStats(num_running_reqs=2)
    (read,) = decoded.outputs
    for name in ("request_id", "new_token_ids", "finish_reason", "stop_reason", "kv_transfer_params", "trace_headers"):
        assert getattr(read, name) == getattr(output, name)
    assert read.prefill_stats == v0_32.PrefillStats(num_prompt_tokens=4)
    assert np.array_equal(read.routed_experts, np.arange(300))
    assert read.num_nans_in_logits == 2
    assert read.new_logprobs is not None
    assert read.new_logprobs.sampled_token_ranks.tolist() == [1]


def test_arrays_that_0_32_added_survive_the_wire_in_frames() -> None:
    sent = v0_32.EngineCoreOutput(
        "a",
        [1],
        new_sampling_mask=SamplingMaskLists(np.arange(100, dtype="<i4"), np.arange(101, dtype="<i4"), [0, 1]),
        prompt_token_id_logprobs=Tensor.from_numpy(np.ones(100, "<f4")),
    )
    frames = list(map(bytes, MsgpackEncoder().encode(v0_32.EngineCoreOutputs(outputs=[sent]))))
    assert len(frames) == 4
    (output,) = OutputsDecoder(v0_32.ReceivedOutputs).decode(frames).outputs
    assert isinstance(output, v0_32.ReceivedOutput)
    assert output.new_sampling_mask is not None
    token_ids, offsets, cumulative = output.new_sampling_mask
    assert offsets is not None
    assert (token_ids.tolist(), offsets.tolist(), cumulative) == ([*range(100)], [*range(101)], [0, 1])
    assert output.prompt_token_id_logprobs is not None
    assert output.prompt_token_id_logprobs.numpy().tolist() == [1.0] * 100


def test_a_tensor_of_cumulative_counts_is_read_if_it_is_there() -> None:
    """Protocol M.2: nil on the wire so far."""
    tensor = Tensor.from_numpy(np.arange(2, dtype="<i4"))
    sent = v0_32.EngineCoreOutput("a", [1])
    sent.new_prompt_logprobs_tensors = v0_32.LogprobsTensors(tensor, tensor, tensor, None, tensor)  # type: ignore[assignment]
    (payload,) = MsgpackEncoder().encode(v0_32.EngineCoreOutputs(outputs=[sent]))
    (output,) = OutputsDecoder(v0_32.ReceivedOutputs).decode([payload]).outputs
    read: Any = output.new_prompt_logprobs_tensors
    assert read.cu_num_generated_tokens_tensor.numpy().tolist() == [0, 1]


@pytest.mark.parametrize("mask", [[], [5], [["<i4", [1], 5]], [["<i4", [0], msgspec.msgpack.Ext(3, b"")], None, 5]])
def test_a_malformed_sampling_mask_fails_when_it_is_read(mask: list[object]) -> None:
    output = received("a", [1], *[None] * 11, 0, None, mask)
    assert output.new_token_ids == [1]
    with pytest.raises(DecodeError):
        _ = output.new_sampling_mask


def test_token_ids_of_prompt_logprobs_get_their_frame() -> None:
    wanted = np.arange(64, dtype="<i8")
    params = v0_32.SamplingParams(prompt_logprob_token_ids=wanted)
    frames = MsgpackEncoder().encode(v0_32.EngineCoreRequest("a", [1], sampling_params=params))
    assert len(frames) == 2
    read = RequestDecoder(v0_32.EngineCoreRequest).decode(list(map(bytes, frames))).sampling_params
    assert isinstance(read, v0_32.SamplingParams)
    assert read.prompt_logprob_token_ids == ["<i8", [64], msgspec.msgpack.Ext(3, wanted.tobytes())]


def test_parameters_are_those_of_0_25_and_more() -> None:
    """Protocol M.2: stop tokens and bad words are de-duplicated; defaults are left out."""
    params = v0_32.SamplingParams(stop_token_ids=[5, 3, 5], bad_words=["b", "a", "b"])
    assert (params.stop_token_ids, params.bad_words) == ([5, 3], ["b", "a"])
    assert encoded(v0_32.SamplingParams()) == encoded(sampling.SamplingParams())
    assert encoded(v0_32.SamplingParams(watermarking=False))["watermarking"] is False
    with pytest.raises(InvalidRequestError, match="temperature"):
        v0_32.SamplingParams(temperature=5.0)


def test_an_output_of_another_length_is_told_from_one_that_is_damaged() -> None:
    """An output of 0.25 has an integer where 0.32 has arrays of experts, and the other way around none."""
    old = ["a", [1], *[None] * 10, 0]
    error = received(*old)
    assert str(error.stop_reason).endswith("it has 13 elements, not 18: an engine of another version of vLLM")
    damaged = received("a", ["x"])
    assert "another version" not in str(damaged.stop_reason)
