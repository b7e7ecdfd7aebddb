"""One engine process and frontends of both versions of the wire, as raw sockets see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError
from enginewire.testing.mock_frontend import MockFrontend, UtilityFailed
from enginewire.wire import v0_32
from enginewire.wire.codec import MsgpackDecoder, array_length
from enginewire.wire.frames import ADD, UTILITY
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import EngineCoreRequest, FinishReason, LoRARequest
from enginewire.wire.profile import PROFILES, V0_25, V0_32, WireProfile, decode_ready
from enginewire.wire.sampling import SamplingParams

SUPPORT = str(Path(__file__).parents[1] / "support")

OLD, NEW = 0, 1
"""The two frontends, by client index."""

LENGTHS = {V0_25: (8, 13), V0_32: (9, 18)}
"""Elements of a message and of an output in it (protocol D.5, D.6, M.2)."""

REQUIRED_KEYS = set(EngineCoreReadyResponse.__struct_fields__) | {
    "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_rank",
    "max_num_seqs", "max_num_batched_tokens", "instance_id", "supports_lora", "max_loras",
}  # fmt: skip
"""Of a ready response of 0.32 (protocol M.2), and ours."""


def config(**settings: Any) -> EngineConfig:
    settings.setdefault("executor_options", {"step_time_s": 0.002})
    return EngineConfig.create("echo", **settings)


@pytest.fixture(scope="module")
def shared() -> Iterator[MockFrontend]:
    with MockFrontend(num_clients=2, profiles=PROFILES) as frontend:
        frontend.launch(config())
        frontend.shake_hands()
        for client_index in (OLD, NEW):  # now every connection is made, and none looks like a test's leak
            frontend.wait_answer(frontend.call("is_sleeping", client_index=client_index), client_index=client_index)
        yield frontend


@pytest.fixture
def frontend(shared: MockFrontend) -> MockFrontend:
    shared.forget()
    return shared


def lengths(frontend: MockFrontend, client_index: int) -> tuple[set[int], set[int]]:
    """Return the lengths of the messages that a client has received, and of the outputs in them."""
    payloads = frontend.payloads[client_index]
    outputs = [output for payload in payloads for output in msgspec.msgpack.decode(payload)[1]]
    return set(map(array_length, payloads)), set(map(len, outputs))


# Start-up.


def test_an_engine_that_follows_its_frontends_says_all_that_either_version_needs_to_hear(
    frontend: MockFrontend,
) -> None:
    """Protocol B.4, M.1, M.2."""
    for ready_map in frontend.ready_maps:
        assert set(ready_map) >= REQUIRED_KEYS
        assert MsgpackDecoder(v0_32.EngineCoreReadyResponse).decode([msgspec.msgpack.encode(ready_map)])
        assert ready_map["data_parallel_rank"] == 0
        assert ready_map["enginewire"]["wire_version"] is None
        profile, response = decode_ready([msgspec.msgpack.encode(ready_map)])
        assert profile is V0_25, "our own clients speak it to an engine that speaks both"
        assert response.max_model_len == ready_map["max_model_len"]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_an_engine_that_was_told_a_version_says_what_that_version_says(profile: WireProfile) -> None:
    """Protocol M.1: the version by configuration."""
    with MockFrontend(profiles=[profile], engine_index=5) as frontend:
        frontend.launch(config(wire_version=profile.vllm_version, max_num_seqs=7))
        frontend.shake_hands()
        (ready_map,) = frontend.ready_maps
        assert (NEW_KEYS & set(ready_map) == NEW_KEYS) is (profile is V0_32)
        assert ready_map["vllm_version"] == profile.vllm_version
        assert ready_map["enginewire"]["wire_version"] == profile.vllm_version
        if profile is V0_32:
            assert (ready_map["data_parallel_rank"], ready_map["max_num_seqs"]) == (5, 7)
        assert decode_ready([msgspec.msgpack.encode(ready_map)])[0] is profile
        # A request that is too short to tell its version is taken for the one that was told.
        frontend.send(ADD, msgspec.msgpack.encode(["a", [1], None, {"max_tokens": 2}, None, 0.0, None, None, None]))
        frontend.wait_finished("a")
        (message,), (output,) = lengths(frontend, 0)
        assert (message, output) == LENGTHS[profile]


NEW_KEYS = REQUIRED_KEYS - set(EngineCoreReadyResponse.__struct_fields__)


@pytest.mark.parametrize("version", ["0.31.0", "1", "", "newest", 0.25])
def test_a_version_that_nobody_knows_is_refused_at_once(version: Any) -> None:
    with pytest.raises(ConfigError, match=r"wire_version must be .* 0.25.1 or 0.32.0; got"):
        config(wire_version=version)


# Outputs.


@pytest.mark.parametrize("client_index", [OLD, NEW])
def test_each_frontend_gets_its_own_layout(frontend: MockFrontend, client_index: int) -> None:
    """Protocol M.1, M.2: with everything in it that an output can hold here."""
    prompt = list(range(100, 200))
    params = {"max_tokens": 3, "logprobs": 20, "prompt_logprobs": 3}
    frontend.add("a", prompt, client_index=client_index, **params)
    assert frontend.wait_finished("a", client_index=client_index).finish_reason is FinishReason.LENGTH
    assert frontend.token_ids("a", client_index=client_index) == [100, 101, 102]
    first = frontend.outputs_of("a", client_index=client_index)[0]
    assert first.new_logprobs is not None
    assert first.new_logprobs.logprob_token_ids.shape == (1, 21)
    assert first.new_prompt_logprobs_tensors is not None
    assert first.new_prompt_logprobs_tensors.logprobs.numpy().shape == (99, 4)
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_prompt_tokens == 100
    assert first.events is not None
    messages, outputs = lengths(frontend, client_index)
    assert (messages, outputs) == tuple({length} for length in LENGTHS[PROFILES[client_index]])


def test_frontends_of_two_versions_are_served_in_the_same_steps(frontend: MockFrontend) -> None:
    frontend.add("new", [1, 2], client_index=NEW, max_tokens=40)
    frontend.add("old", [3, 4], client_index=OLD, max_tokens=40)
    for client_index, request_id in ((OLD, "old"), (NEW, "new")):
        frontend.wait_finished(request_id, client_index=client_index)
        assert len(frontend.token_ids(request_id, client_index=client_index)) == 40
        assert lengths(frontend, client_index)[1] == {LENGTHS[PROFILES[client_index]][1]}


def test_what_a_step_made_bears_the_weights_version_and_what_none_made_does_not(frontend: MockFrontend) -> None:
    """Protocol M.2: EngineCoreOutputs, element 8."""
    frontend.add("a", [1], client_index=NEW, max_tokens=2)
    frontend.wait_finished("a", client_index=NEW)
    frontend.add("empty", [], client_index=NEW)
    frontend.wait_finished("empty", client_index=NEW)
    versions = {
        bool(message[1]) and message[1][0][0]: message[8]
        for message in map(msgspec.msgpack.decode, frontend.payloads[NEW])
    }
    assert versions["a"] == "default"
    assert versions["empty"] is None


@pytest.mark.parametrize("client_index", [OLD, NEW])
def test_a_refusal_is_in_the_layout_of_whom_it_refuses(frontend: MockFrontend, client_index: int) -> None:
    """Defects 1 and 8."""
    frontend.add("empty", [], client_index=client_index)
    assert "the prompt is empty" in str(frontend.wait_finished("empty", client_index=client_index).stop_reason)
    payload = [None] * (20, 22)[client_index]
    payload[0], payload[1], payload[11] = "bad", "no prompt", client_index
    frontend.send(ADD, msgspec.msgpack.encode(payload), client_index=client_index)
    assert "Expected `array | null`" in str(frontend.wait_finished("bad", client_index=client_index).stop_reason)
    assert lengths(frontend, client_index)[1] == {LENGTHS[PROFILES[client_index]][1]}


def test_a_frontend_that_changes_its_layout_is_refused_and_goes_on_in_the_first(frontend: MockFrontend) -> None:
    """An incompatible layout is refused, never decoded wrongly."""
    for client_index in (OLD, NEW):
        frontend.add("first", [1], client_index=client_index, max_tokens=1)
        frontend.wait_finished("first", client_index=client_index)
        other = PROFILES[1 - client_index]
        request = EngineCoreRequest("other", [1], sampling_params=SamplingParams(), client_index=client_index)
        frontend.send(ADD, msgspec.msgpack.encode(other.request_of(request)), client_index=client_index)
        reason = str(frontend.wait_finished("other", client_index=client_index).stop_reason)
        mine = PROFILES[client_index]
        assert reason == (
            f"invalid_request: the request is in the layout of {other}, and earlier ones were of {mine} (wire_version)"
        )
        frontend.add("after", [1], client_index=client_index, max_tokens=1)
        frontend.wait_finished("after", client_index=client_index)
        assert lengths(frontend, client_index)[1] == {LENGTHS[mine][1]}


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_a_frontend_of_another_version_than_was_told_is_refused_in_words_it_can_read(profile: WireProfile) -> None:
    (told,) = set(PROFILES) - {profile}
    with MockFrontend(profiles=[profile]) as frontend:
        frontend.launch(config(wire_version=told.vllm_version))
        frontend.shake_hands()
        for request_id in ("a", "b"):
            frontend.add(request_id, [1], max_tokens=1)
            output = frontend.wait_finished(request_id)
            assert output.finish_reason is FinishReason.ERROR
            assert f"in the layout of {profile}, and this engine was told to speak {told}" in str(output.stop_reason)
            assert lengths(frontend, 0)[1] == {LENGTHS[profile][1]}


# What only 0.32 can ask for.


def add_new(frontend: MockFrontend, params: dict[str, Any], **fields: Any) -> Any:
    """Send a request in 0.32's layout and return its last output."""
    sampling_params = v0_32.SamplingParams(max_tokens=2, **params)
    request = v0_32.EngineCoreRequest("a", [1, 2], sampling_params=sampling_params, client_index=NEW, **fields)
    frontend.add_request(request, client_index=NEW)
    return frontend.wait_finished("a", client_index=NEW)


@pytest.mark.parametrize(
    ("params", "fields", "name"),
    [
        ({"watermarking": True}, {}, "watermarking"),
        (
            {"prompt_logprob_token_ids": ["<i8", [1, 1], msgspec.msgpack.Ext(3, bytes(8))]},
            {},
            "prompt_logprob_token_ids",
        ),
        ({"prompt_logprob_start": 1}, {}, "prompt_logprob_start"),
        ({"trace_decode_token_ids": [5]}, {}, "trace_decode_token_ids"),
        ({}, {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": []}}, "kv_hints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_this_engine_cannot_do_for_a_request_is_named(
    frontend: MockFrontend, params: dict[str, Any], fields: dict[str, Any], name: str
) -> None:
    """Protocol M.2."""
    output = add_new(frontend, params, **fields)
    assert output.stop_reason == f"invalid_request: {name} is not supported by this engine"


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"watermarking": False, "stream_interval": None}, {}),
        ({"prompt_logprob_start": 0, "stream_interval": 4, "watermarking_skipped": True}, {}),
        ({}, {"session_id": "s"}),
    ],
    ids=str,
)
def test_what_asks_for_nothing_special_is_served(
    frontend: MockFrontend, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Protocol M.2: frontends say ``watermarking: false`` explicitly."""
    assert add_new(frontend, params, **fields).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("executor", ["echo", "stub_executors:HoldsGil"])
def test_an_adapter_of_either_layout_is_an_adapter(executor: str) -> None:
    """Protocol M.2: positions 4 and 5 moved. With the executor in a child too, which is told in one layout."""
    with MockFrontend(num_clients=2, profiles=PROFILES) as frontend:
        frontend.launch(config(executor=executor), sys_path=[SUPPORT])
        frontend.shake_hands()
        adapter = LoRARequest("name", 3, "/path", load_inplace=True)
        for client_index in (OLD, NEW):
            request = EngineCoreRequest(
                "a", [1], sampling_params=SamplingParams(max_tokens=1), lora_request=adapter, client_index=client_index
            )
            frontend.add_request(request, client_index=client_index)
            output = frontend.wait_finished("a", client_index=client_index)
            assert output.finish_reason is FinishReason.LENGTH, output.stop_reason
        assert frontend.utility("add_lora", ["one", 1, "/path", None, None, True, False]) is True
        assert frontend.utility("add_lora", ["two", 2, "/path", None, True, False]) is True
        assert frontend.utility("list_loras") == [1, 2]


@pytest.mark.parametrize(
    ("method", "args", "value"),
    [
        ("profile", [True, None, None, None], None),
        ("profile", [False, "prefix", 0, 0], None),
        ("wake_up", [None], True),
        ("wake_up", [["scheduling"]], True),
        ("get_weight_version", [], "default"),
    ],
)
def test_calls_of_0_32_are_answered(frontend: MockFrontend, method: str, args: list[Any], value: object) -> None:
    """Protocol M.3."""
    assert frontend.utility(method, *args) == value


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("profile", [True, None, 5, None], "this engine profiles from call to call"),
        ("set_weight_version", ["2"], "this engine's weights cannot be replaced, so their version stays 'default'"),
        ("release_kv_cache_memory", [], "this engine does not offer release_kv_cache_memory"),
        ("compute_weight_checksums", [], "this engine does not offer compute_weight_checksums"),
        ("commit_prepared_elastic_ep", [], "no attribute 'commit_prepared_elastic_ep'"),
        ("handle_fault_tolerance", [{"instruction": "pause", "params": {}}], "no attribute 'handle_fault_tolerance'"),
    ],
)
def test_calls_of_0_32_that_have_no_answer_fail_in_words(
    frontend: MockFrontend, method: str, args: list[Any], text: str
) -> None:
    """Protocol M.3."""
    with pytest.raises(UtilityFailed) as caught:
        frontend.utility(method, *args)
    assert text in str(caught.value)


def test_waking_up_in_parts_says_when_it_is_done(frontend: MockFrontend) -> None:
    """Protocol M.3: ``wake_up`` returns whether the engine is fully awake."""
    frontend.utility("sleep", 1, "abort")
    assert frontend.utility("wake_up", ["weights"]) is False
    assert frontend.utility("is_sleeping") is True
    assert frontend.utility("wake_up", ["kv_cache"]) is True
    assert frontend.utility("is_sleeping") is False


def test_answers_before_the_first_request_can_be_read_by_both_versions() -> None:
    """Nothing has told the engine which version a frontend is: an answer is alike in both."""
    with MockFrontend(profiles=[V0_32]) as frontend:
        frontend.launch(config())
        frontend.shake_hands()
        frontend.send(UTILITY, msgspec.msgpack.encode([0, 7, "get_supported_tasks", []]))
        frontend.wait_answer(7)
        for profile in PROFILES:
            message = MsgpackDecoder(profile.received_outputs).decode(frontend.payloads[0])
            assert message.utility_output is not None
            assert message.utility_output.result == [None, ["generate"]]
        frontend.add("a", [1], max_tokens=1)
        frontend.wait_finished("a")
