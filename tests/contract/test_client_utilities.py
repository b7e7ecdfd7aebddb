"""Utility calls of the clients of another process: one registry, answers sound, unsound, late and missing."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from client_harness import MP_FACES, PATIENCE_S, Face, assert_serves, mock_face, mp_client, output, request
from enginewire import ClientClosedError, EngineCoreOutputs, UtilityCallError
from enginewire.errors import EncodeError, UtilityTimeoutError
from enginewire.testing import MockEngine, Received, wait_until
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.messages import UtilityOutput


@pytest.fixture(params=MP_FACES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, MockEngine]]:
    with mock_face(request.param) as pair:
        yield pair


def test_answers_may_come_in_any_order(pair: tuple[Face, MockEngine]) -> None:
    """C-30: one registry, by call id."""
    face, engine = pair
    calls = {i: face.start("call_utility", "echo", i) for i in range(5)}
    asked = [engine.expect_utility("echo") for _ in calls]
    assert len({call.call_id for call in asked}) == 5
    assert all(call.client_index == 0 for call in asked)
    for call in reversed(asked):
        engine.answer_utility(call, call.args[0] * 10)
    assert {i: future.result(PATIENCE_S) for i, future in calls.items()} == {i: i * 10 for i in range(5)}
    assert face.pending_calls() == 0


def test_a_failure_carries_the_engines_message(pair: tuple[Face, MockEngine]) -> None:
    """C-31; C-33 with one engine: its failure is raised."""
    face, engine = pair
    call = face.start("call_utility", "profile", True)
    engine.fail_utility(engine.expect_utility(), "Call to profile method failed: no profiler")
    with pytest.raises(UtilityCallError, match="Call to profile method failed: no profiler") as it:
        call.result(PATIENCE_S)
    assert it.value.method == "profile"


def test_a_call_without_an_answer_times_out_and_leaves_nothing(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """C-32; defect 25. The late answer is dropped (C-31)."""
    face, engine = pair
    with pytest.raises(UtilityTimeoutError, match=r"is_sleeping was not answered within 0\.05 s") as it:
        face.call_utility("is_sleeping", timeout=0.05)
    assert isinstance(it.value, TimeoutError)
    assert isinstance(it.value, UtilityCallError)
    assert face.pending_calls() == 0
    engine.answer_utility(engine.expect_utility(), True)
    assert_serves(face, engine)
    assert "no waiting call" in caplog.text


def test_collective_rpc_carries_its_timeout_to_both_ends(pair: tuple[Face, MockEngine]) -> None:
    """Defect 25."""
    face, engine = pair
    with pytest.raises(UtilityTimeoutError):
        face.collective_rpc("method", timeout=0.05, args=(1,), kwargs={"a": 2})
    assert engine.expect_utility("collective_rpc").args == ["method", 0.05, [1], {"a": 2}]


def test_arguments_that_cannot_be_encoded_leave_nothing(pair: tuple[Face, MockEngine]) -> None:
    """C-32."""
    face, engine = pair
    with pytest.raises(EncodeError, match="has no form on the wire"):
        face.call_utility("collective_rpc", object())
    with pytest.raises(EncodeError):
        face.call_utility("collective_rpc", 1 << 70)
    assert face.pending_calls() == 0
    assert engine.received == []
    assert_serves(face, engine)


@pytest.mark.parametrize("kind", MP_FACES)
@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ([["builtins", "bool"], True], "VLLM_ALLOW_INSECURE_SERIALIZATION"),
        ([None, msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'true'\ntR.")], "VLLM_ALLOW_INSECURE_SERIALIZATION"),
        ("not a pair", r"must be \[typeinfo, value\]"),
        ([None, 1, 2], r"must be \[typeinfo, value\]"),
    ],
)
def test_a_result_that_cannot_be_had_fails_its_call_only(kind: str, result: Any, complaint: str) -> None:
    """Defect 19: typeinfo while the switch is off, a pickle, another shape."""
    with mock_face(kind) as (face, engine):
        call = face.start("call_utility", "is_sleeping")
        asked = engine.expect_utility()
        engine.send_outputs([], utility_output=UtilityOutput(asked.call_id, None, result))
        with pytest.raises(UtilityCallError, match=complaint):
            call.result(PATIENCE_S)
        assert_serves(face, engine)


def test_an_answer_that_is_damaged_fails_its_call_only(pair: tuple[Face, MockEngine]) -> None:
    """Defect 19."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping")
    asked = engine.expect_utility()
    engine.send_raw([msgspec.msgpack.encode([0, [], None, 1.0, [asked.call_id, 3, True]])])
    with pytest.raises(UtilityCallError, match="cannot be decoded"):
        call.result(PATIENCE_S)


def test_an_answer_that_comes_twice_is_taken_once(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """C-31; defect 17."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping")
    asked = engine.expect_utility()
    engine.answer_utility(asked, 1)
    engine.answer_utility(asked, 2)
    assert call.result(PATIENCE_S) == 1
    assert_serves(face, engine)
    assert "no waiting call" in caplog.text


def test_an_answer_to_a_cancelled_call_is_dropped(pair: tuple[Face, MockEngine]) -> None:
    """Defect 18: a thread gives up, a task on a loop is cancelled."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping", **({"timeout": 0.1} if face.loop is None else {}))
    asked = engine.expect_utility()
    if face.loop is None:
        with pytest.raises(UtilityTimeoutError):
            call.result(PATIENCE_S)
    else:
        call.cancel()
    wait_until(lambda: not face.pending_calls(), PATIENCE_S, "the cancelled call to leave the registry")
    engine.answer_utility(asked, True)
    assert_serves(face, engine)
    assert face.pending_calls() == 0


def test_shutdown_fails_the_calls_in_flight(pair: tuple[Face, MockEngine]) -> None:
    """C-32, C-22: safe while another call is waiting."""
    face, engine = pair
    waiting = [face.start("get_output"), face.start("call_utility", "a"), face.start("call_utility", "b")]
    engine.expect_utility()
    engine.expect_utility()
    face.client.shutdown()
    for future in waiting:
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE_S)


@pytest.mark.parametrize("kind", MP_FACES)
@pytest.mark.parametrize("attempt", range(4))
def test_shutdown_in_the_middle_of_traffic_gives_one_kind_of_error(kind: str, attempt: int) -> None:
    """C-22, C-23: nobody finds a closed socket under his hands."""

    def answer(engine: MockEngine, received: Received) -> None:
        if received.kind == "ADD":
            engine.send_outputs([output(received.message.request_id, finished=True)])
        elif received.kind == "UTILITY":
            engine.answer_utility(received.message)

    with mock_face(kind, on_message=answer) as (face, engine):

        def work(step: int) -> None:
            for i in range(100_000):
                if step:
                    face.add_request(request(f"{step}-{i}"))
                else:
                    face.call_utility("is_sleeping")
                face.get_output() if step == 1 else None

        def outcome(step: int) -> BaseException | None:
            try:
                work(step)
            except BaseException as exc:
                return exc
            return None

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(outcome, step) for step in range(3)]
            wait_until(lambda: len(engine.received) > 20 * (attempt + 1), PATIENCE_S, "traffic")
            face.client.shutdown()
            errors = [worker.result(PATIENCE_S) for worker in workers]
        assert [type(error) for error in errors] == [ClientClosedError] * 3, errors


def test_utilities_are_answered_while_ten_thousand_outputs_wait(pair: tuple[Face, MockEngine]) -> None:
    """C-40: a slow consumer holds nobody else up, and nothing is decoded before it asks."""
    face, engine = pair
    client = mp_client(face)
    decoded: list[Any] = []
    decoder = client.engines[0].link.decoders[0]
    real = decoder.decode
    decoder.decode = lambda frames: decoded.append(1) or real(frames)  # type: ignore[method-assign,func-returns-value]
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output()]))

    def flood() -> None:
        for _ in range(10_000):
            engine._outputs[0].send_multipart(frames)

    engine._on_io_thread(flood)
    call = face.start("call_utility", "is_sleeping")
    engine.answer_utility(engine.expect_utility(), False)
    assert call.result(PATIENCE_S) is False
    assert decoded == []
    assert len(face.outputs(10_000)) == 10_000
