"""A message that nobody can read may have been the last that a request was to hear: nobody waits for ever (C-27)."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
import zmq

from client_harness import MP_FACES, PATIENCE_S, echo_face, mock_face, mp_client, output, request
from enginewire import FinishReason
from enginewire.client.mp import MPClient
from enginewire.testing import wait_until
from enginewire.wire.frames import ABORT

UNREADABLE = [b"\xc1\xc1\xc1"]


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_request_whose_last_output_was_unreadable_fails_and_says_why(kind: str) -> None:
    """C-27, defect 19: the engine is asked which requests it knows; those it does not know have ended."""
    with mock_face(kind) as (face, engine):
        for request_id in ("ended", "running"):
            face.add_request(request(request_id))
            engine.expect_add()
        engine.send_raw([UNREADABLE[0]])
        answer = face.start("get_output")
        engine.answer_utility(engine.expect_utility("get_request_ids"), ["running"])
        (failed,) = answer.result(PATIENCE_S).outputs
        assert (failed.request_id, failed.finish_reason) == ("ended", FinishReason.ERROR)
        assert "could not be decoded" in failed.stop_reason
        assert mp_client(face).inbox.live == {"running"}
        engine.send_outputs([output("running", [5], finished=True)])
        assert face.outputs(1)[0].new_token_ids == [5]


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_request_that_ended_well_meanwhile_is_not_failed(kind: str) -> None:
    """What was on its way before the answer comes first, and settles it."""
    with mock_face(kind) as (face, engine):
        face.add_request(request("quick"))
        engine.expect_add()
        engine.send_raw([UNREADABLE[0]])
        first = face.start("get_output")
        call = engine.expect_utility("get_request_ids")
        engine.send_outputs([output("quick", [9], finished=True)])
        engine.answer_utility(call, [])
        assert first.result(PATIENCE_S).outputs[0].new_token_ids == [9]
        face.add_request(request("next"))
        engine.expect_add()
        later = face.start("get_output")
        engine.send_outputs([output("next", [1], finished=True)])
        # Either the answer's message, which holds nothing, or the next request's: never a failure of "quick".
        got = later.result(PATIENCE_S).outputs or face.get_output().outputs
        assert [each.request_id for each in got] == ["next"]


@pytest.mark.parametrize("kind", MP_FACES)
@pytest.mark.parametrize("is_last_word", [False, True], ids=["lost", "dead"])
def test_what_comes_while_the_receiver_looks_comes_before_the_loss(
    kind: str, is_last_word: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-27: an engine sends its last outputs and leaves between the last message taken in and the look at it."""
    settings: dict[str, Any] = {"engine_return_timeout_s": 0} if is_last_word else {}
    with mock_face(kind, settings=settings) as (face, engine):
        face.add_request(request("a"))
        engine.expect_add()
        client = mp_client(face)
        look_at_connections = client.lookout._look_at_connections

        def look_late(now: float) -> None:
            monkeypatch.undo()
            engine.send_outputs([output("a", [1])])
            engine.send_outputs([output("a", [2], finished=True)])
            engine.leave()
            wait_until(client.engines[0].link.has_ended, PATIENCE_S, "the loss")
            look_at_connections(now)

        monkeypatch.setattr(client.lookout, "_look_at_connections", look_late)
        first, last = face.outputs(2)
        assert (first.new_token_ids, last.new_token_ids) == ([1], [2])
        assert last.finish_reason is FinishReason.LENGTH


def test_a_stranger_on_a_real_engines_socket_harms_no_request() -> None:
    """The other direction of a frame that cannot be decoded: requests go on and end as ever."""
    with echo_face("sync", executor_options={"step_time_s": 0.01}) as face:
        face.add_request(request("r", max_tokens=300))
        address = mp_client(face).engines[0].link.output_address
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(address)
            stranger.send(UNREADABLE[0])
            stranger.send(os.urandom(64))
            outputs = face.outputs(300)
        assert [each.finish_reason for each in outputs][-1] is FinishReason.LENGTH
        assert sum(len(each.new_token_ids) for each in outputs) == 300
        assert mp_client(face).inbox.dropped == 2
        assert face.pending_calls() == 0


@pytest.mark.parametrize("kind", MP_FACES)
def test_the_last_outputs_of_an_engine_that_leaves_are_no_loss(kind: str) -> None:
    """Defect 37: it hears nothing any more, and still has to say how its requests ended."""
    with mock_face(kind) as (face, engine):
        face.add_request(request("last"))
        engine.expect_add()
        got = face.start("get_output")
        engine.stop_listening()
        wait_until(lambda: is_unreachable(mp_client(face)), PATIENCE_S, "the connection is known to be gone")
        engine.send_outputs([output("last", [7], finished=True)])
        assert got.result(PATIENCE_S).outputs[0].new_token_ids == [7]
        wait_until(lambda: mp_client(face).engine_statuses()[0].state == "lost", PATIENCE_S, "then it is gone")


def is_unreachable(client: MPClient) -> bool:
    """Whether ZeroMQ knows that there is no connection to send on."""
    engine = client.engines[0]
    try:
        with client.resources.send_lock:
            engine.link.input_socket.send_multipart([engine.identity, ABORT, msgspec.msgpack.encode([])])
    except zmq.ZMQError:
        return True
    return False
