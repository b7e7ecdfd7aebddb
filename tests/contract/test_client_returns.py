"""Remote engines that are lost and come back: over the link they had, or restarted on the handshake socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from client_harness import (
    MP_FACES,
    PATIENCE_S,
    Face,
    assert_serves,
    make_client,
    mock_config,
    mock_face,
    mock_faces,
    mp_client,
    output,
    request,
    wait_state,
)
from enginewire import EngineDeadError, EngineUnavailableError, FinishReason, UtilityCallError
from enginewire.testing import MockEngine, free_tcp_port, mock_ready, wait_until
from enginewire.wire.profile import V0_32

pytestmark = pytest.mark.usefixtures("quick_looks")


@pytest.fixture(params=MP_FACES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, MockEngine]]:
    with mock_face(request.param) as pair:
        yield pair


def restart(engine: MockEngine) -> None:
    """Have an engine that vanished start again, as a new process would."""
    engine.init = None
    engine.start_up()


# The link restored.


def test_a_link_that_comes_back_is_an_engine_that_comes_back(pair: tuple[Face, MockEngine]) -> None:
    """Remote engines, way 1: no HELLO, no ready; its sockets reconnect, and a ping is answered."""
    face, engine = pair
    for request_id in ("a", "b"):
        face.add_request(request(request_id))
        engine.expect_add()
    engine.vanish()
    assert {it.request_id for it in face.outputs(2)} == {"a", "b"}
    wait_state(face, "lost")
    engine.connect()
    wait_state(face, "ready")
    assert sorted(engine.expect_abort()) == ["a", "b"]
    assert engine.num_pings >= 1  # one that goes into the old connection is lost with it, and repeated
    status = face.client.engine_statuses()[0]
    assert (status.num_deaths, status.is_awaited, status.num_in_flight) == (1, False, 0)
    assert status.death is not None
    assert_serves(face, engine)


def test_what_an_engine_still_runs_is_aborted_once_it_answers_and_before_it_takes_requests(
    pair: tuple[Face, MockEngine],
) -> None:
    """An ABORT that is sent while one connection takes another's place may be lost, and the ping behind it not."""
    face, engine = pair
    face.add_request(request("a"))
    engine.expect_add()
    engine.vanish()
    assert face.outputs(1)[0].finish_reason is FinishReason.ERROR
    engine.answers_pings = False
    engine.connect()
    wait_until(lambda: engine.num_pings, PATIENCE_S, "a ping")
    assert [it.kind for it in engine.received] == ["ADD"]
    engine.answers_pings = True  # the next one, a second later
    wait_state(face, "ready")
    assert [it.message for it in engine.received if it.kind == "ABORT"] == [["a"]]
    assert_serves(face, engine, "a")


def test_late_outputs_of_what_failed_with_the_link_are_discarded(pair: tuple[Face, MockEngine]) -> None:
    """Remote engines: it went on generating meanwhile, and a request that was never answered arrives as a ghost."""
    face, engine = pair
    face.add_request(request("old"))
    engine.expect_add()
    engine.vanish()
    assert face.outputs(1)[0].finish_reason is FinishReason.ERROR
    engine.connect()
    engine.send_outputs([output("old", [1, 2, 3])])
    wait_state(face, "ready")
    assert engine.expect_abort() == ["old"]
    engine.send_outputs([output("old", [4]), output("ghost", [5])])
    face.add_request(request("new"))
    engine.expect_add()
    engine.send_outputs([output("new", [6], finished=True), output("old", [7], finished=True)])
    assert [(it.request_id, it.new_token_ids) for it in face.outputs(1)] == [("new", [6])]
    aborted = set()
    while "ghost" not in aborted:
        aborted |= set(engine.expect_abort())
    wait_until(lambda: not mp_client(face).engines[0].stale, PATIENCE_S, "the end of the ghosts")
    assert mp_client(face).inbox.live == set()


def test_outputs_that_came_before_the_loss_are_delivered(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    for request_id in ("ended", "running"):
        face.add_request(request(request_id))
        engine.expect_add()
    for i in range(50):
        engine.send_outputs([output("running", [i])])
    engine.send_outputs([output("ended", [9], finished=True)])
    wait_until(lambda: len(mp_client(face).inbox.live) == 2, PATIENCE_S, "both")
    engine.leave()
    outputs = face.outputs(52)
    assert [it.new_token_ids for it in outputs[:50]] == [[i] for i in range(50)]
    ends = {it.request_id: it.finish_reason for it in outputs if it.finish_reason is not None}
    assert ends == {"ended": FinishReason.LENGTH, "running": FinishReason.ERROR}


def test_an_engine_that_reconnects_and_does_not_answer_stays_lost(pair: tuple[Face, MockEngine]) -> None:
    """A ping has to be answered: a connection alone says little."""
    face, engine = pair
    engine.vanish()
    wait_state(face, "lost")
    engine.answers_pings = False
    engine.connect()
    wait_until(lambda: engine.num_pings, PATIENCE_S, "a ping")
    assert face.client.engine_statuses()[0].state == "lost"
    with pytest.raises(EngineUnavailableError):
        face.add_request(request("a"))


def test_a_link_may_be_lost_again_and_again(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    for i in range(3):
        face.add_request(request(f"r{i}"))
        engine.expect_add()
        engine.vanish()
        assert face.outputs(1)[0].finish_reason is FinishReason.ERROR
        engine.connect()
        wait_state(face, "ready")
    assert face.client.engine_statuses()[0].num_deaths == 3
    assert_serves(face, engine)


# Restarted.


def test_an_engine_that_is_restarted_says_hello_and_serves(pair: tuple[Face, MockEngine]) -> None:
    """Remote engines, way 2; defect 21: the handshake socket stays open, and the new incarnation has a new link."""
    face, engine = pair
    face.add_request(request("a"))
    engine.expect_add()
    call = face.start("call_utility", "is_sleeping")
    engine.expect_utility()
    first = engine.init
    engine.vanish()
    assert face.outputs(1)[0].finish_reason is FinishReason.ERROR
    with pytest.raises(UtilityCallError, match="the engine was lost meanwhile"):
        call.result(PATIENCE_S)

    def bigger(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        engine.send_ready_response(mock_ready(num_gpu_blocks=55, max_model_len=77))
        engine.send_ready()

    engine.init = None
    bigger(engine)
    wait_state(face, "ready")
    assert first is not None
    assert engine.init is not None
    assert engine.init.addresses.inputs != first.addresses.inputs
    assert (face.config.num_gpu_blocks, face.config.max_model_len) == (55, 77)  # replaced, not added
    assert len(mp_client(face).inbox.links) == 1
    assert_serves(face, engine, "a")


def test_an_engine_may_come_back_as_another_version(pair: tuple[Face, MockEngine]) -> None:
    """Protocol M.1: the layout belongs to the incarnation."""
    face, engine = pair
    engine.vanish()
    wait_state(face, "lost")
    with MockEngine(engine._handshake_address, profile=V0_32) as newer:
        newer.wait_started()
        wait_state(face, "ready")
        assert_serves(face, newer)


def test_one_that_dies_while_it_loads_may_be_started_once_more(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    engine.vanish()
    wait_state(face, "lost")
    engine.init = None
    engine.send_hello()
    engine.expect_init()
    engine.vanish()
    wait_state(face, "starting")
    assert face.client.engine_statuses()[0].is_awaited
    restart(engine)
    wait_state(face, "ready")
    assert_serves(face, engine)


def test_one_of_several_comes_back_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """C-55."""
    with mock_faces("asyncio") as (face, engines):
        engines[1].vanish()
        wait_state(face, "lost", 1)
        restart(engines[1])
        wait_state(face, "ready", 1)
        for i in range(10):
            face.add_request(request(f"r{i}"))
        for engine in engines:
            for _ in range(5):
                engine.expect_add()
    assert "engine=1 is lost" in caplog.text
    assert "engine=1 is back" in caplog.text


def say_hello(engine: MockEngine) -> None:
    engine.send_hello()


def test_a_rank_that_is_started_twice_is_refused_loudly(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Remote engines: the one that is here answers, so the newcomer gets no INIT, and it goes on."""
    face, engine = pair
    face.add_request(request("a"))
    engine.expect_add()
    with MockEngine(engine._handshake_address, startup=say_hello) as twin:
        wait_until(lambda: "engine=0 was started twice" in caplog.text, PATIENCE_S, "the refusal")
        assert twin.init is None
        engine.send_outputs([output("a", [4], finished=True)])
        assert face.outputs(1)[0].new_token_ids == [4]
        assert_serves(face, engine, "b")
    assert face.client.engine_statuses()[0].num_deaths == 0


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_newcomer_takes_the_place_of_one_that_does_not_answer(kind: str) -> None:
    """Remote engines: a host that is silent and whose engine was started elsewhere."""
    with mock_face(kind, settings={"heartbeat_timeout_s": 0.3}) as (face, engine):
        face.add_request(request("a"))
        engine.expect_add()
        engine.answers_pings = False
        with MockEngine(engine._handshake_address) as newcomer:
            (failed,) = face.outputs(1)
            assert str(failed.stop_reason).startswith("engine_lost: engine 0: another process says HELLO for its rank")
            newcomer.wait_started()
            wait_state(face, "ready")
            assert_serves(face, newcomer)


def test_a_newcomer_of_another_deployment_is_not_taken(
    pair: tuple[Face, MockEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Protocol B.1."""
    face, engine = pair
    engine.vanish()
    wait_state(face, "lost")
    with MockEngine(engine._handshake_address, startup=say_hello, local=True, headless=False) as stranger:
        wait_until(lambda: "HELLO is refused: engine 0 says local=True" in caplog.text, PATIENCE_S, "a word")
        assert stranger.init is None
    restart(engine)
    wait_state(face, "ready")
    assert_serves(face, engine)


def wait_dropped(face: Face, count: int) -> None:
    """Wait until so many messages were dropped."""
    wait_until(lambda: mp_client(face).inbox.dropped >= count, PATIENCE_S, f"{count} dropped messages")


def test_garbage_on_the_handshake_socket_ends_nothing(pair: tuple[Face, MockEngine]) -> None:
    face, engine = pair
    before = mp_client(face).inbox.dropped

    def speak(stranger: MockEngine) -> None:
        stranger.send_hello()
        for frames in ([b"\xc1"], [b""], [b"a", b"b"], [b"\x80"]):
            stranger.send_raw(frames, to="handshake")

    for rank in (0, 9):
        with MockEngine(engine._handshake_address, engine_index=rank, startup=speak) as stranger:
            stranger.wait_started()
            wait_dropped(face, before + 4)
            before = mp_client(face).inbox.dropped
    assert_serves(face, engine)


# For how long.


@pytest.mark.parametrize("kind", MP_FACES)
def test_an_engine_that_does_not_return_in_time_is_dead(kind: str) -> None:
    """C-27: everybody who waits hears of it, and why."""
    with mock_face(kind, settings={"engine_return_timeout_s": 0.2}) as (face, engine):
        waiting = face.start("get_output")
        engine.vanish()
        with pytest.raises(EngineDeadError, match=r"the connection to it was lost.*it did not return within 0\.2 s"):
            waiting.result(PATIENCE_S)
        assert face.client.engine_statuses()[0].state == "dead"
        assert not face.client.engine_statuses()[0].is_awaited
        with pytest.raises(EngineDeadError):
            face.add_request(request("a"))


def test_a_dead_engine_may_be_started_again_while_others_serve() -> None:
    """Remote engines: a way from DEAD to STARTING, by a new HELLO."""
    with mock_faces("sync", settings={"engine_return_timeout_s": 0}) as (face, engines):
        engines[1].vanish()
        wait_state(face, "dead", 1)
        restart(engines[1])
        wait_state(face, "ready", 1)
        assert face.client.engine_statuses()[1].num_deaths == 1
        face.add_request(request("a"))
        face.add_request(request("b"))
        for engine in engines:
            engine.expect_add()


def test_requests_wait_for_nobody_while_an_engine_starts_anew(pair: tuple[Face, MockEngine]) -> None:
    """It has said HELLO and is loading: not the time to send it anything."""
    face, engine = pair
    engine.vanish()
    wait_state(face, "lost")
    engine.init = None
    engine.send_hello()
    engine.expect_init()
    wait_state(face, "starting")
    with pytest.raises(EngineUnavailableError, match="the connection to it was lost"):
        face.add_request(request("a"))
    engine.connect()
    engine.send_ready_response()
    engine.send_ready()
    wait_state(face, "ready")
    assert_serves(face, engine)


def test_shutdown_while_an_engine_is_away_or_coming_back_leaves_nothing() -> None:
    """C-22: the leak check around every test is the proof."""
    steps: list[Callable[[MockEngine], None]] = [lambda _: None, MockEngine.send_hello, restart]
    for kind in MP_FACES:
        for step in steps:
            with mock_face(kind) as (face, engine):
                engine.vanish()
                wait_state(face, "lost")
                engine.init = None
                step(engine)
                face.client.shutdown()


def test_a_silent_host_is_noticed_within_the_heartbeats_time() -> None:
    """Defect 22: nothing is closed, nothing comes. The settings reach the sockets."""
    import zmq

    with mock_face("sync", settings={"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 1.5}) as (face, _):
        link = mp_client(face).engines[0].link
        for socket in (link.input_socket, link.output_socket):
            assert (socket.getsockopt(zmq.HEARTBEAT_IVL), socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)) == (250, 1500)


def test_another_client_cannot_take_the_port_of_one_that_serves() -> None:
    port = free_tcp_port()
    with (
        MockEngine(f"tcp://127.0.0.1:{port}"),
        make_client("sync", mock_config(port)),
        pytest.raises(OSError, match=f"cannot bind tcp://127.0.0.1:{port}"),
    ):
        make_client("sync", mock_config(port))
