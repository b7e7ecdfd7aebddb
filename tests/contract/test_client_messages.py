"""What the clients of another process do with messages, sound and unsound, of an engine that a test controls."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from client_harness import (
    MP_FACES,
    PATIENCE_S,
    Face,
    assert_serves,
    mock_face,
    mp_client,
    output,
    request,
    status_of,
    wait_state,
)
from enginewire import EngineCoreOutputs, EngineDeadError, FinishReason, UtilityCallError
from enginewire.errors import DuplicateRequestIdError, EncodeError
from enginewire.testing import MockEngine, mock_ready, wait_until
from enginewire.transport import sockets
from enginewire.wire.arrays import LogprobsLists, Tensor
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ENGINE_CORE_DEAD
from enginewire.wire.messages import utility_output

GARBAGE = {
    "no message at all": [b""],
    "not msgpack": [b"\xc1\xc1\xc1"],
    "another type": [msgspec.msgpack.encode({"a": 1})],
    "a number": [b"\x07"],
    "cut off": [MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))[0][:-4]],
    "nested deeper than any stack": [b"\x91" * 100_000],
    "half a death marker": [ENGINE_CORE_DEAD[:8]],
    "a death marker with something behind it": [ENGINE_CORE_DEAD, b"x"],
    "outputs of an engine that is not ours": MsgpackEncoder().encode(
        EngineCoreOutputs(engine_index=3, outputs=[output()])
    ),
    "outputs of an engine with a long index": MsgpackEncoder().encode(
        EngineCoreOutputs(engine_index=1 << 40, outputs=[output()])
    ),
    "a negative engine": MsgpackEncoder().encode(EngineCoreOutputs(engine_index=-1, outputs=[output()])),
    "random bytes": [np.random.default_rng(0).bytes(500)],
    "an answer nobody asked for": MsgpackEncoder().encode(
        EngineCoreOutputs(utility_output=utility_output(1 << 63, "?"))
    ),
    "a notification": MsgpackEncoder().encode(EngineCoreOutputs(utility_output=utility_output(-1, ["X", 0]))),
    "an answer that is none": [msgspec.msgpack.encode([0, [], None, 1.0, ["id", 5]])],
}


pytestmark = pytest.mark.usefixtures("quick_looks")


@pytest.fixture(params=MP_FACES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, MockEngine]]:
    with mock_face(request.param) as pair:
        yield pair


@pytest.fixture(params=MP_FACES)
def mortal(request: pytest.FixtureRequest) -> Iterator[tuple[Face, MockEngine]]:
    """A pair whose engine is dead as soon as it is lost: nobody awaits its return."""
    with mock_face(request.param, settings={"engine_return_timeout_s": 0}) as pair:
        yield pair


# Requests.


def test_a_request_carries_the_clients_index(pair: tuple[Face, MockEngine]) -> None:
    """C-42."""
    face, engine = pair
    mine = request()
    mine.client_index = 77
    face.add_request(mine)
    assert engine.expect_add().client_index == 0


def test_an_abort_of_nothing_is_not_sent(pair: tuple[Face, MockEngine]) -> None:
    """C-42."""
    face, engine = pair
    face.abort_requests([])
    face.abort_requests(["a", "b"])
    assert engine.expect_abort() == ["a", "b"]
    assert len(engine.received) == 1


def test_a_live_id_is_refused_before_anything_is_sent(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    face.add_request(request("a"))
    with pytest.raises(DuplicateRequestIdError):
        face.add_request(request("a"))
    engine.expect_add()
    engine.send_outputs([output("a", finished=True)])
    face.outputs(1)
    face.add_request(request("a"))
    engine.expect_add()
    assert len(engine.received) == 2


def test_a_request_that_cannot_be_encoded_leaves_nothing(pair: tuple[Face, MockEngine]) -> None:
    """C-32 for requests: the id is free again and the connection sound."""
    face, engine = pair
    bad = request("a")
    bad.trace_headers = {"x": object()}  # type: ignore[dict-item]
    with pytest.raises(EncodeError, match="object has no form on the wire"):
        face.add_request(bad)
    assert_serves(face, engine, "a")


def test_a_message_cut_off_in_the_middle_does_not_run_into_the_next(
    pair: tuple[Face, MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two frames: what is sent next would have become further frames of the message that was begun."""
    face, engine = pair
    client = mp_client(face)
    send, calls, ours = sockets._send, itertools.count(1), client.engines[0].link.input_socket

    def interrupted(socket: Any, frame: Any, flags: int) -> Any:
        if socket is ours and next(calls) == 3:
            raise KeyboardInterrupt
        return send(socket, frame, flags)

    with monkeypatch.context() as patches:
        patches.setattr(sockets, "_send", interrupted)
        if face.loop is None:
            with pytest.raises(KeyboardInterrupt):
                face.add_request(request("cut"))
        else:

            async def add() -> None:
                with pytest.raises(KeyboardInterrupt):
                    await face.client.add_request_async(request("cut"))

            face.loop.run(add())
    assert not client.inbox.live
    # The fake engine is stricter than a real one, which drops the half message with a log line.
    wait_until(lambda: engine._failure, PATIENCE_S, "the half message")
    engine._failure = None
    assert_serves(face, engine)


# Death and absence.


def test_the_death_marker_of_an_engine_started_elsewhere_ends_everybody_who_waits(
    mortal: tuple[Face, MockEngine],
) -> None:
    """C-27; defect 16."""
    face, engine = mortal
    waiting = [face.start("get_output"), face.start("get_output")]
    calls = [face.start("call_utility", "is_sleeping") for _ in range(3)]
    for _ in calls:
        engine.expect_utility()
    engine.die()
    for future in [*waiting, *calls]:
        with pytest.raises(EngineDeadError, match=r"engine 0 is dead: .*its log is on (its|that) host"):
            future.result(PATIENCE_S)
    assert len({id(future.exception()) for future in [*waiting, *calls]}) == 5
    assert face.pending_calls() == 0
    for operation in ("add_request", "call_utility", "get_output"):
        with pytest.raises(EngineDeadError):
            getattr(face, operation)(*{"add_request": [request()], "call_utility": ["x"]}.get(operation, []))
    face.abort_requests(["r"])
    assert face.client.engine_dead
    assert "dead" in repr(face.client)


def test_outputs_before_the_marker_are_delivered_first(mortal: tuple[Face, MockEngine]) -> None:
    face, engine = mortal
    for i in range(100):
        engine.send_outputs([output("r", [i])])
    engine.die()
    assert [it.new_token_ids for it in face.outputs(100)] == [[i] for i in range(100)]
    with pytest.raises(EngineDeadError):
        face.get_output()


def test_sending_to_an_engine_that_has_vanished_says_so(mortal: tuple[Face, MockEngine]) -> None:
    """C-27; defect 36: the ROUTER is mandatory."""
    face, engine = mortal
    engine.vanish()

    def refused() -> bool:
        face.abort_requests(["r"])  # says nothing, whatever is known by now (C-42)
        try:
            face.add_request(request(f"r{time.monotonic_ns()}"))
        except EngineDeadError:
            return True
        return False

    wait_until(refused, PATIENCE_S, "a refusal")
    live = set(mp_client(face).inbox.live)
    with pytest.raises(EngineDeadError, match="connection"):
        face.call_utility("is_sleeping")
    assert face.pending_calls() == 0
    with pytest.raises(EngineDeadError):
        face.add_request(request("another"))
    assert mp_client(face).inbox.live == live


def test_the_loss_of_a_remote_engine_ends_everybody_who_waits(mortal: tuple[Face, MockEngine]) -> None:
    """Defect 22: no marker, no process to watch; the connection is gone."""
    face, engine = mortal
    waiting = [face.start("get_output"), face.start("call_utility", "is_sleeping")]
    engine.expect_utility()
    engine.vanish()
    for future in waiting:
        with pytest.raises(EngineDeadError, match="engine 0 is dead: the connection to it was lost"):
            future.result(PATIENCE_S)
    assert face.pending_calls() == 0


def test_an_engine_that_says_ready_again_is_registered_anew_and_what_it_forgot_fails(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Defect 21; C-20."""
    face, engine = pair
    for request_id in ("a", "b"):
        face.add_request(request(request_id))
        engine.expect_add()
    call = face.start("call_utility", "is_sleeping")
    engine.expect_utility()
    engine.vanish()
    assert engine.init is not None
    engine.connect()
    engine.send_ready_response(mock_ready(num_gpu_blocks=55))
    failed = {it.request_id: it for it in face.outputs(2)}
    assert failed.keys() == {"a", "b"}
    assert all(it.finish_reason is FinishReason.ERROR for it in failed.values())
    # Whichever is seen first: that its connection is gone, or that it is back.
    assert str(failed["a"].stop_reason).startswith("engine_lost: engine 0: ")
    with pytest.raises(UtilityCallError, match="the engine was lost meanwhile"):
        call.result(PATIENCE_S)
    wait_until(lambda: face.client.config.num_gpu_blocks == 55, PATIENCE_S, "its being registered")
    wait_state(face, "ready")
    assert "it says ready again" in caplog.text
    assert status_of(face).num_deaths == 1
    assert_serves(face, engine, "a")


# Unsound messages.


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_garbage_on_the_output_socket_ends_nothing(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """C-31; defects 17 and 19."""
    with mock_face(kind) as (face, engine):
        waiting = face.start("get_output")
        engine.send_raw(GARBAGE[what])
        engine.send_outputs([output("r", [1])])
        assert waiting.result(PATIENCE_S).outputs[0].new_token_ids == [1]
        assert "dropped" in caplog.text
        assert_serves(face, engine)


def test_garbage_on_the_input_socket_after_start_up_ends_nothing(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Defects 20 and 21: somebody still reads it."""
    face, engine = pair
    for frames in ([b"\xc1"], [b""], [b"", b"", b""], [msgspec.msgpack.encode({"max_model_len": "many"})]):
        engine.send_raw(frames, to="input")
    wait_until(lambda: mp_client(face).inbox.dropped >= 4, PATIENCE_S, "four dropped messages")
    assert_serves(face, engine)


def test_a_stranger_on_the_sockets_is_reported_and_ignored(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """C-24, defect 20, after start-up."""
    face, engine = pair
    assert engine.init is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, context.socket(zmq.PUSH) as push:
        dealer.setsockopt(zmq.IDENTITY, b"\x07\x00")
        dealer.connect(engine.init.addresses.inputs[0])
        dealer.send(msgspec.msgpack.encode(mock_ready()))
        push.connect(engine.init.addresses.outputs[0])
        push.send(b"hello there")
        wait_until(lambda: "a message of unexpected rank 7 on an input socket" in caplog.text, PATIENCE_S, "a report")
        assert_serves(face, engine)
    assert "b'\\x07" not in caplog.text


def test_one_bad_output_among_good_ones_fails_alone(pair: tuple[Face, MockEngine]) -> None:
    """Defect 19: contained to the request it concerns."""
    face, engine = pair
    good = [["a", [1]], ["c", [3]]]
    engine.send_raw([msgspec.msgpack.encode([0, [good[0], ["b", "not tokens"], good[1]], None, 1.0])])
    outputs = {it.request_id: it for it in face.get_output().outputs}
    assert outputs["a"].new_token_ids == [1]
    assert outputs["c"].new_token_ids == [3]
    assert outputs["b"].finish_reason is FinishReason.ERROR
    assert "cannot be decoded" in str(outputs["b"].stop_reason)


def test_too_many_frames_are_dropped() -> None:
    with mock_face("sync", settings={"max_frames": 4}) as (face, engine):
        frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))
        engine.send_raw([*frames, b"", b"", b"", b""])
        wait_until(lambda: mp_client(face).inbox.dropped == 1, PATIENCE_S, "a dropped message")
        engine.send_raw([*frames, b"", b"", b""])
        assert len(face.outputs(1)) == 1


def test_an_oversize_frame_ends_the_connection_and_those_who_wait_hear_of_it() -> None:
    """ZeroMQ refuses such a frame by dropping the connection. What was in it is lost, so nobody may go on waiting."""
    for kind in MP_FACES:
        with mock_face(kind, settings={"max_frame_bytes": 100_000, "engine_return_timeout_s": 0}) as (face, engine):
            engine.send_raw([bytes(200_000)])
            with pytest.raises(EngineDeadError, match="connection to it was lost"):
                face.get_output()


def test_an_answer_with_outputs_beside_it_is_an_answer(pair: tuple[Face, MockEngine]) -> None:
    """Protocol D.5: a set utility_output overrides everything else."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping")
    asked = engine.expect_utility()
    engine.send_outputs([output("r")], utility_output=utility_output(asked.call_id, True))
    engine.send_outputs([output("r", [5])])
    assert face.get_output().outputs[0].new_token_ids == [5]
    assert call.result(PATIENCE_S) is True


# Arrays.


def test_a_large_tensor_is_sent_without_a_copy_and_let_go_afterwards(pair: tuple[Face, MockEngine]) -> None:
    """C-28."""
    face, engine = pair

    class Tracked(np.ndarray):
        pass

    array = np.arange(4 << 20, dtype="<i4").view(Tracked)  # 16 MiB
    alive = weakref.ref(array)
    face.add_request(request("small"))
    assert not mp_client(face).outbox.pending
    big = request("big")
    big.prompt_embeds = Tensor("int32", (4 << 20,), memoryview(array).cast("B"))
    engine._on_io_thread(lambda: None)
    face.add_request(big)
    del array, big
    received = engine.expect("ADD", matches=lambda it: it.message.request_id == "big")
    assert len(received.frames) == 3
    assert received.frames[2] == np.arange(4 << 20, dtype="<i4").tobytes()

    def released() -> bool:
        gc.collect()
        return not mp_client(face).outbox.pending and alive() is None

    wait_until(released, PATIENCE_S, "the release of the tensor")


def test_a_message_is_pending_while_the_engine_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-28: the object is kept alive until ZeroMQ is done with it."""
    gate = threading.Event()
    with mock_face("sync", on_message=lambda *_: gate.wait(PATIENCE_S)) as (face, engine):
        face.add_request(request("stop"))  # the engine reads this and stands still
        wait_until(lambda: engine.received, PATIENCE_S, "the engine to stand still")
        for i in range(8):  # more than kernel buffers hold
            big = request(f"big{i}")
            big.prompt_embeds = Tensor("uint8", (16 << 20,), bytes(16 << 20))
            face.add_request(big)
        pending = mp_client(face).outbox.pending
        assert pending
        assert not pending[-1][0].done
        assert pending[-1][1].request_id == "big7"  # type: ignore[attr-defined]
        gate.set()
        wait_until(lambda: not pending, PATIENCE_S, "the release of the messages")


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_any_threshold_for_frames_of_their_own_is_understood(kind: str) -> None:
    """Defect 35: with 0 even empty arrays get a frame, in either direction."""
    with mock_face(kind, settings={"zero_copy_threshold": 0}, zero_copy_threshold=0) as (face, engine):
        for shape, data in (((0,), b""), ((2,), b"abcd")):
            mine = request(f"r{len(data)}")
            mine.prompt_embeds = Tensor("int16", shape, data)
            face.add_request(mine)
            received = engine.expect("ADD")
            assert len(received.frames) == 3
            assert bytes(received.message.prompt_embeds.data) == data
        one = output("r0")
        one.new_logprobs = LogprobsLists(np.empty((0, 3), "<i4"), np.empty((0, 3), "<f4"), np.empty(0, "<i8"))
        engine.send_outputs([one])
        (got,) = face.outputs(1)
        assert got.new_logprobs is not None
        assert got.new_logprobs.logprobs.shape == (0, 3)


def test_logprobs_in_frames_of_their_own_arrive(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    one = output("r")
    ids = np.arange(200, dtype="<i4").reshape(1, 200)
    one.new_logprobs = LogprobsLists(ids, -ids.astype("<f4"), np.ones(1, "<i8"))
    engine.send_outputs([one])
    (got,) = face.outputs(1)
    assert got.new_logprobs is not None
    np.testing.assert_array_equal(got.new_logprobs.logprob_token_ids, ids)


def test_nothing_is_logged_for_ordinary_traffic(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Section 10 of the style guide: no line per token or request at INFO."""
    caplog.set_level(logging.INFO)
    face, engine = pair
    caplog.clear()
    assert_serves(face, engine)
    assert caplog.text == ""
