"""Messages that no sane frontend sends: the engine answers what it can, drops the rest, and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from enginewire.config import EngineConfig
from enginewire.testing.mock_frontend import MockFrontend
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ABORT, ADD, START_DP_WAVE, UTILITY
from enginewire.wire.messages import EngineCoreRequest, FinishReason, PoolingParams
from enginewire.wire.sampling import SamplingParams

SUPPORT = str(Path(__file__).parents[1] / "support")
TWENTY: list[object] = ["a", [1, 2], None, {}, None, 0.0, None, None, None]


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.fixture(scope="module")
def shared() -> Iterator[MockFrontend]:
    with MockFrontend(num_clients=2) as frontend:
        options = {"step_time_s": 0.002}  # slow enough for requests to be live while they are disturbed
        settings = {"log_stats": False, "max_frames": 8, "max_frame_bytes": 1 << 20}
        frontend.launch(EngineConfig.create("echo", executor_options=options, **settings))
        frontend.shake_hands()
        for client_index in (0, 1):  # now every connection is made, and none looks like a test's leak
            frontend.wait_answer(frontend.call("is_sleeping", client_index=client_index), client_index=client_index)
        yield frontend


@pytest.fixture
def frontend(shared: MockFrontend) -> Iterator[MockFrontend]:
    shared.forget()
    yield shared
    # Whatever was sent, everything still works: adds, aborts, utilities, for both clients.
    for client_index in (0, 1):
        shared.add("after", [7, 8], client_index=client_index, max_tokens=2)
        shared.wait_finished("after", client_index=client_index)
        assert shared.token_ids("after", client_index=client_index) == [7, 8]
        shared.wait_answer(shared.call("list_loras", client_index=client_index), client_index=client_index)


@pytest.mark.parametrize(
    ("sampling_params", "reason"),
    [
        ({"temperature": 5.0}, "temperature must be a finite number of at least 0 and at most 2, got 5.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "Expected `float`, got `str`"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs needs exactly one"),
    ],
    ids=str,
)
def test_an_add_that_does_not_decode_is_answered(
    frontend: MockFrontend, sampling_params: dict[str, object], reason: str
) -> None:
    """Defect 1: it killed the input thread, and the engine was deaf from then on."""
    request = [*TWENTY]
    request[3] = sampling_params
    frontend.send(ADD, packed(request))
    output = frontend.wait_finished("a")
    assert output.finish_reason is FinishReason.ERROR
    assert str(output.stop_reason).startswith("invalid_request: ")
    assert reason in str(output.stop_reason)
    assert frontend.messages[0][-1].finished_requests == ["a"]


def test_an_add_of_too_few_elements_is_answered(frontend: MockFrontend) -> None:
    """Defect 1."""
    frontend.send(ADD, packed(["a", [1, 2], None, {}]))
    assert "at least 9 elements" in str(frontend.wait_finished("a").stop_reason)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", packed({"request_id": "a"}), packed(None), packed([7])])
def test_an_add_without_a_readable_id_is_dropped(frontend: MockFrontend, payload: bytes) -> None:
    """Defect 1."""
    frontend.send(ADD, payload)


@pytest.mark.parametrize(
    "frames",
    [
        (b"\x07", packed(["a"])),
        (b"\x04", b""),
        (b"\x05", b""),
        (b"", b""),
        (b"\x00\x00", packed(TWENTY)),
        (ADD,),
        (UTILITY,),
        (START_DP_WAVE, packed([0, None])),
        (ADD, *[packed(TWENTY)] * 9),
    ],
    ids=str,
)
def test_messages_of_no_known_form_are_dropped(frontend: MockFrontend, frames: tuple[bytes, ...]) -> None:
    """Defect 2: an unknown type byte killed the input thread; 04 and 05 exist inside the reference only."""
    frontend.send(*frames)


@pytest.mark.parametrize("payload", [b"\xc1", packed(7), packed([1, 2]), packed({"a": 1}), packed(None)])
def test_an_abort_of_the_wrong_shape_is_dropped(frontend: MockFrontend, payload: bytes) -> None:
    """Defect 3: ABORT with an int killed the engine."""
    frontend.send(ABORT, payload)


def test_an_abort_of_one_bare_id_is_taken(frontend: MockFrontend) -> None:
    """Defect 3."""
    frontend.add("a", [1, 2], max_tokens=100_000)
    frontend.wait_tokens("a", 1)
    frontend.send(ABORT, packed("a"))
    frontend.utility("list_loras")
    frontend.utility("list_loras")
    so_far = len(frontend.token_ids("a"))
    frontend.utility("list_loras")
    assert len(frontend.token_ids("a")) == so_far


@pytest.mark.parametrize(
    "call",
    [[0, 77, "is_sleeping"], [0, 77, "is_sleeping", 5], [0, 77, 5, []], [0, 77]],
    ids=str,
)
def test_a_call_of_the_wrong_shape_is_answered_if_its_id_can_be_read(
    frontend: MockFrontend, call: list[object]
) -> None:
    """Defect 3: three elements instead of four killed the engine."""
    frontend.send(UTILITY, packed(call))
    assert "not a valid UtilityCall" in str(frontend.wait_answer(77).failure_message)


@pytest.mark.parametrize("payload", [b"\xc1", packed([]), packed(["x"]), packed(3)])
def test_a_call_without_a_readable_id_is_dropped(frontend: MockFrontend, payload: bytes) -> None:
    """Defect 3."""
    frontend.send(UTILITY, payload)


def test_a_second_live_request_of_one_id_is_dropped_and_the_first_goes_on(frontend: MockFrontend) -> None:
    """Defect 4: it killed the engine for everybody."""
    frontend.add("a", [1, 2, 3], max_tokens=20_000)
    frontend.wait_tokens("a", 1)
    frontend.add("a", [9, 9], max_tokens=2)
    frontend.utility("list_loras")
    frontend.add("a", [8, 8], client_index=1, max_tokens=2)
    told = frontend.wait_finished("a", client_index=1)
    assert told.finish_reason is FinishReason.ERROR
    assert "still in use" in str(told.stop_reason)
    assert not {8, 9} & set(frontend.token_ids("a"))
    assert not any(output.finished for output in frontend.outputs_of("a"))
    frontend.abort("a")


@pytest.mark.parametrize("client_index", [2, 99, -1])
def test_a_client_index_out_of_range_is_refused_on_the_socket_it_came_from(
    frontend: MockFrontend, client_index: int
) -> None:
    """Defect 5: it killed the output thread, and the engine went on mute; -1 would have gone to the coordinator."""
    request = EngineCoreRequest("a", [1], sampling_params=SamplingParams(), client_index=client_index)
    frontend.add_request(request, client_index=1)
    output = frontend.wait_finished("a", client_index=1)
    assert f"client_index must be below 2, got {client_index}" in str(output.stop_reason)
    frontend.send(UTILITY, packed([client_index, 5, "is_sleeping", []]), client_index=1)
    assert frontend.wait_answer(5, client_index=1).failure_message is None


def test_an_undecodable_request_of_a_client_out_of_range_is_answered_too(frontend: MockFrontend) -> None:
    """Defects 1 and 5."""
    request: list[object] = [*TWENTY, None, None, 99]
    request[3] = {"temperature": 5.0}
    frontend.send(ADD, packed(request), client_index=1)
    assert frontend.wait_finished("a", client_index=1).finish_reason is FinishReason.ERROR


def test_a_result_that_cannot_be_sent_is_a_failure(frontend: MockFrontend) -> None:
    """Defect 6: it killed the output thread."""
    answer = frontend.wait_answer(frontend.call("collective_rpc", "return_unserialisable"))
    assert answer.result is None
    assert "Call to collective_rpc method failed" in str(answer.failure_message)
    assert "builtins.object has no form on the wire" in str(answer.failure_message)


@pytest.mark.parametrize("method", ["shutdown", "_reset_caches", "__class__", "step", "add_request", "executor", ""])
def test_only_listed_methods_can_be_called(frontend: MockFrontend, method: str) -> None:
    """Defect 7: any attribute of the engine was callable."""
    answer = frontend.wait_answer(frontend.call(method))
    text = f"Call to {method} method failed: 'EngineCoreProc' object has no attribute {method!r}"
    assert answer.failure_message == text


@pytest.mark.parametrize(
    ("method", "args", "reason"),
    [
        ("is_sleeping", [1, 2], "TypeError: too many positional arguments"),
        ("collective_rpc", [], "TypeError: missing a required argument: 'method'"),
        ("collective_rpc", ["raise_error", None, [""], None], "RuntimeError"),
    ],
)
def test_a_failure_is_never_without_a_reason(
    frontend: MockFrontend, method: str, args: list[object], reason: str
) -> None:
    """Defect 14: the text after the colon was empty."""
    answer = frontend.wait_answer(frontend.call(method, *args))
    assert answer.failure_message == f"Call to {method} method failed: {reason}"


def test_requests_that_the_engine_cannot_run_are_answered(frontend: MockFrontend) -> None:
    """Defect 8: a pooling request to a generative model, and an empty prompt, killed the engine."""
    frontend.add_request(EngineCoreRequest("pool", [1], pooling_params=PoolingParams(task="embed")))
    frontend.add_request(EngineCoreRequest("none", [1]))
    frontend.add("empty", [])
    frontend.add_request(EngineCoreRequest("nil", None, sampling_params=SamplingParams()))
    frontend.add("long", [1] * 131_072)
    frontend.add("negative", [1, -1])
    frontend.add_request(EngineCoreRequest("more", [1], sampling_params=SamplingParams(), resumable=True))
    for request_id, reason in (
        ("pool", "pooling task 'embed' is not supported"),
        ("none", "neither sampling_params nor pooling_params"),
        ("empty", "the prompt is empty"),
        ("nil", "the prompt is empty"),
        ("long", "the prompt has 131072 tokens; at most 131071 leave room for an answer"),
        ("negative", "token id -1 is not in the vocabulary"),
        ("more", "streaming input (resumable) is not supported"),
    ):
        output = frontend.wait_finished(request_id)
        assert output.finish_reason is FinishReason.ERROR
        assert reason in str(output.stop_reason)


def test_a_pickle_is_never_loaded(frontend: MockFrontend) -> None:
    """E.6: codes 1 and 2 are refused."""
    bomb = msgspec.msgpack.Ext(1, b"cos\nabort\n(tR.")
    frontend.send(UTILITY, packed([0, 78, "collective_rpc", [bomb]]))
    assert frontend.wait_answer(78).failure_message is not None


def test_deeply_nested_arguments_do_not_end_the_reader(frontend: MockFrontend) -> None:
    frontend.send(UTILITY, b"\x94\x00\x4f\xa1x" + b"\x91" * 200_000 + b"\xc0")


@pytest.mark.parametrize("depth", [900, 200_000])
def test_deeply_nested_parameters_do_not_end_the_reader(frontend: MockFrontend, depth: int) -> None:
    """What can be read is answered, and what cannot, not even for its id, is dropped."""
    head, tail = packed(["a", [1], None]), packed([None, 0.0, None, None, None])
    params = b"\x82" + packed("max_tokens") + b"\x01" + packed("extra_args") + b"\x81\xa1k" + b"\x91" * depth + b"\xc0"
    frontend.send(ADD, b"\x99" + head[1:] + params + tail[1:])
    if depth == 900:
        assert frontend.wait_finished("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("threshold", [0, 16, 1 << 30])
def test_arrays_in_or_out_of_frames_of_their_own_mean_the_same(frontend: MockFrontend, threshold: int) -> None:
    """Defect 35: the sender's threshold is its own; with 0 even empty arrays come in frames."""
    import numpy as np

    arrays = [np.zeros(0, np.float32), np.arange(3, dtype=np.int64), np.arange(1000, dtype=np.uint8)]
    encoded = MsgpackEncoder(zero_copy_threshold=threshold).encode([0, 79, "collective_rpc", ["echo", None, arrays]])
    assert len(encoded) == {0: 4, 16: 3, 1 << 30: 1}[threshold]
    frontend.send(UTILITY, *encoded)
    answer = frontend.wait_answer(79)
    assert answer.failure_message is None
    returned = answer.result[1][0]["args"]
    assert [bytes(getattr(data, "data", data)) for _, _, data in returned] == [array.tobytes() for array in arrays]


def test_an_engine_listens_nowhere(frontend: MockFrontend) -> None:
    """Defect 34: nobody can connect to an engine; it is the engine that connects."""
    assert frontend.engine is not None
    inodes = set()
    for link in Path(f"/proc/{frontend.engine.pid}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:"):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    assert inodes
    listening = "0A"
    for table in ("tcp", "tcp6"):
        rows = [row.split() for row in Path(f"/proc/{frontend.engine.pid}/net/{table}").read_text().splitlines()[1:]]
        assert not inodes & {row[9] for row in rows if row[3] == listening}


@pytest.mark.parametrize("executor", ["stub_executors:Misbehaves"])
def test_what_an_executor_does_to_one_request_concerns_that_one_only(executor: str) -> None:
    """Defects 6 and 8: refused, broken, unsendable and lost requests fail with the reason; the engine lives."""
    with MockFrontend() as frontend:
        frontend.launch(EngineConfig.create("echo", executor=executor), sys_path=[SUPPORT])
        frontend.shake_hands()
        for request_id, token_id in (("refuse", 100), ("break", 101), ("garble", 102)):
            frontend.add(request_id, [token_id], max_tokens=5)
            assert frontend.wait_finished(request_id).finish_reason is FinishReason.ERROR
        assert frontend.wait_finished("refuse").stop_reason == "invalid_request: I do not like 100"
        assert frontend.wait_finished("break").stop_reason == "internal: KeyError: 'broken'"
        assert "has no form on the wire" in str(frontend.wait_finished("garble").stop_reason)
        frontend.add("lose", [103], max_tokens=5)
        assert "never finished this one" in str(frontend.wait_finished("lose").stop_reason)
        frontend.add("fine", [1], max_tokens=5)
        frontend.wait_finished("fine")
        assert frontend.token_ids("fine") == [1] * 5
        assert frontend.token_ids("garble") == []


def test_a_cache_that_cannot_be_reset_fails_the_call_and_not_the_engine() -> None:
    """Defect 10: at the end of a deferred pause it killed the engine, and the caller never got an answer."""
    with MockFrontend() as frontend:
        frontend.launch(EngineConfig.create("echo", executor="stub_executors:Misbehaves"), sys_path=[SUPPORT])
        frontend.shake_hands()
        frontend.add("a", [1], max_tokens=900)
        frontend.wait_tokens("a", 1)
        answer = frontend.wait_answer(frontend.call("pause_scheduler", "wait", True))
        assert (
            answer.failure_message == "Call to pause_scheduler method failed: RuntimeError: the cache cannot be reset"
        )
        frontend.utility("resume_scheduler")
        frontend.add("b", [1], max_tokens=1)
        frontend.wait_finished("b")


def test_arguments_in_frames_of_their_own_arrive(frontend: MockFrontend) -> None:
    """C.2: auxiliary frames of a utility call."""
    import numpy as np

    array = np.arange(100, dtype=np.int64)
    (returned,) = frontend.utility("collective_rpc", "echo", None, [array], None)
    dtype, shape, data = returned["args"][0]
    assert (dtype, shape) == ("<i8", [100])
    assert bytes(data.data) == array.tobytes()
    assert len(MsgpackEncoder().encode([array])) == 2
