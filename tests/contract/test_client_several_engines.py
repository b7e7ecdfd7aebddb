"""Clients of several engines that a test controls: routing, layouts, utilities, and the loss of one engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from client_harness import MP_FACES, PATIENCE_S, Face, make_client, mock_config, mock_faces, mp_client, output, request
from enginewire import (
    EngineConfig,
    EngineDeadError,
    EngineStartupError,
    EngineUnavailableError,
    FinishReason,
    InvalidRequestError,
    UtilityCallError,
)
from enginewire.client.dp import DPAsyncMPClient, DPLBAsyncMPClient
from enginewire.client.status import EngineStatus
from enginewire.client.sync_mp import SyncMPClient
from enginewire.errors import DuplicateRequestIdError
from enginewire.testing import MockEngine, free_tcp_port, mock_ready, wait_until
from enginewire.wire.frames import ENGINE_CORE_DEAD
from enginewire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses
from enginewire.wire.messages import LoRARequest
from enginewire.wire.profile import V0_25, V0_32

Faces = tuple[Face, list[MockEngine]]


pytestmark = pytest.mark.usefixtures("quick_looks")


@pytest.fixture(params=MP_FACES)
def pair(request: pytest.FixtureRequest) -> Iterator[Faces]:
    with mock_faces(request.param) as faces:
        yield faces


@pytest.fixture(params=MP_FACES)
def mortal(request: pytest.FixtureRequest) -> Iterator[Faces]:
    """Engines that are dead as soon as they are lost."""
    with mock_faces(request.param, settings={"engine_return_timeout_s": 0}) as faces:
        yield faces


def add_to(face: Face, engines: list[MockEngine], rank: int, request_id: str) -> None:
    """Send a request to one engine and have it arrive there."""
    one = request(request_id)
    one.data_parallel_rank = rank
    face.add_request(one)
    assert engines[rank].expect_add().request_id == request_id


def states(face: Face) -> list[str]:
    """Return the engines' states, by rank."""
    return [status.state for status in face.client.engine_statuses()]


# Start-up.


def test_each_engine_has_sockets_of_its_own_and_all_are_summed_up(pair: Faces) -> None:
    """C-25; remote engines: INIT is per engine, so a loss is attributable."""
    face, engines = pair
    told = [engine.init.addresses for engine in engines if engine.init is not None]
    assert len({address for one in told for address in one.inputs + one.outputs}) == 4
    assert face.config.num_gpu_blocks == 200
    assert [(it.index, it.state, it.num_deaths, it.is_awaited) for it in face.client.engine_statuses()] == [
        (0, "ready", 0, False),
        (1, "ready", 0, False),
    ]
    assert all(it.ready == mock_ready() for it in face.client.engine_statuses())


def test_a_missing_engine_is_named() -> None:
    """C-24: which engines are missing."""
    port = free_tcp_port()
    with (
        MockEngine(f"tcp://127.0.0.1:{port}", engine_index=1),
        pytest.raises(TimeoutError, match=r"not ready within 0\.5 s: engine 0 has not said HELLO; engine 2 has not"),
    ):
        make_client("sync", mock_config(port, data_parallel_size=3, ready_timeout_s=0.5))


def test_one_of_another_deployment_fails_the_start_and_is_named() -> None:
    port = free_tcp_port()
    with MockEngine(f"tcp://127.0.0.1:{port}", engine_index=1, local=True, headless=False) as engine:
        with pytest.raises(EngineStartupError, match="engine 1 says local=True") as caught:
            make_client("sync", mock_config(port, data_parallel_size=2))
        assert caught.value.engine_index == 1
        engine._failure = None


def test_external_load_balancing_manages_the_one_rank() -> None:
    """C-02, C-53; protocol A.4."""
    port = free_tcp_port()
    config = EngineConfig.create(
        "echo",
        data_parallel_size=4,
        data_parallel_size_local=0,
        data_parallel_external_lb=True,
        data_parallel_rank=2,
        data_parallel_rpc_port=port,
    )
    with MockEngine(f"tcp://127.0.0.1:{port}", engine_index=2) as engine:
        face = Face("asyncio", lambda: make_client("asyncio", config))
        try:
            assert isinstance(face.client, DPAsyncMPClient)
            assert not isinstance(face.client, DPLBAsyncMPClient)
            engine.wait_started()
            face.add_request(request("a"))
            engine.expect_add()
            engine.send_outputs([output("a", [1], finished=True)])
            assert face.outputs(1)[0].new_token_ids == [1]
        finally:
            face.close()


def test_addresses_that_somebody_else_chose_are_shared_by_all_engines() -> None:
    """C-52, K: the frontend slot gives one pair of sockets for all engines."""
    ports = free_tcp_port(), free_tcp_port()
    addresses = {
        "input_address": f"tcp://127.0.0.1:{ports[0]}",
        "output_address": f"tcp://127.0.0.1:{ports[1]}",
    }

    def connect_and_say_ready(engine: MockEngine) -> None:
        engine.init = EngineHandshakeMetadata(
            addresses=EngineZmqAddresses(inputs=[addresses["input_address"]], outputs=[addresses["output_address"]]),
            parallel_config={},
        )
        engine.connect()
        engine.send_ready_response()

    with (
        MockEngine("", engine_index=0, startup=connect_and_say_ready) as zero,
        MockEngine("", engine_index=1, startup=connect_and_say_ready, profile=V0_32) as one,
        SyncMPClient(EngineConfig.create("echo", data_parallel_size=2), client_addresses=addresses) as client,
    ):
        for rank, engine in enumerate((zero, one)):
            mine = request(f"r{rank}")
            mine.data_parallel_rank = rank
            client.add_request(mine)
            assert engine.expect_add().request_id == f"r{rank}"
            engine.send_outputs([output(f"r{rank}", [rank])])
            message = client.get_output(timeout=PATIENCE_S)
            assert (message.engine_index, message.outputs[0].new_token_ids) == (rank, [rank])
        one.vanish()  # whose connection it was is found out by asking
        (failed,) = client.get_output(timeout=PATIENCE_S).outputs
        assert failed.request_id == "r1"
        assert [status.state for status in client.engine_statuses()] == ["ready", "lost"]


# Routing.


def test_a_burst_of_equal_requests_splits_evenly(pair: Faces) -> None:
    """C-51: own additions count at once."""
    face, engines = pair
    for i in range(20):
        face.add_request(request(f"r{i}"))
    for _, engine in itertools.product(range(10), engines):
        engine.expect_add()
    assert [status.num_in_flight for status in face.client.engine_statuses()] == [10, 10]


def test_a_forced_rank_wins_and_an_unknown_one_is_refused(pair: Faces) -> None:
    """C-51."""
    face, engines = pair
    for i in range(5):
        add_to(face, engines, 1, f"r{i}")
    unknown = request("x")
    unknown.data_parallel_rank = 2
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 2, and this client has engines 0, 1") as it:
        face.add_request(unknown)
    assert it.value.parameter == "data_parallel_rank"
    assert engines[0].received == []


def test_an_abort_reaches_the_engine_that_has_the_request_and_unknown_ids_reach_all(pair: Faces) -> None:
    """C-51; defect 27."""
    face, engines = pair
    add_to(face, engines, 0, "zero")
    add_to(face, engines, 1, "one")
    face.abort_requests(["one", "unknown"])
    assert engines[0].expect_abort() == ["unknown"]
    assert engines[1].expect_abort() == ["one", "unknown"]
    face.abort_requests(["zero"])
    assert engines[0].expect_abort() == ["zero"]
    assert [status.num_in_flight for status in face.client.engine_statuses()] == [0, 0]
    assert [it.kind for it in engines[1].received] == ["ADD", "ABORT"]


def test_an_id_is_unique_over_all_engines(pair: Faces) -> None:
    face, engines = pair
    add_to(face, engines, 0, "a")
    again = request("a")
    again.data_parallel_rank = 1
    with pytest.raises(DuplicateRequestIdError):
        face.add_request(again)


def test_what_a_balancer_sees_is_exact(pair: Faces) -> None:
    """C-51: counted when sent, and when ended, however it ended."""
    face, engines = pair
    for i in range(4):
        add_to(face, engines, i % 2, f"r{i}")
    engines[0].send_outputs([output("r0", finished=True)])
    face.outputs(1)
    face.abort_requests(["r1"])
    assert [status.num_in_flight for status in face.client.engine_statuses()] == [1, 1]


# Two versions.


@pytest.mark.parametrize("kind", MP_FACES)
def test_engines_of_two_versions_serve_one_client(kind: str) -> None:
    """Protocol M: requests, adapters and outputs are laid out for each."""
    with mock_faces(kind, profiles=(V0_25, V0_32)) as (face, engines):
        for rank, elements in enumerate((20, 22)):
            mine = request(f"r{rank}")
            mine.data_parallel_rank = rank
            mine.lora_request = LoRARequest("adapter", 3, "/path")
            face.add_request(mine)
            received = engines[rank].expect("ADD")
            assert received.message.lora_request.lora_path == "/path"
            assert len(received.message.__struct_fields__) == elements
            one = output(f"r{rank}", [5], finished=True)
            one.trace_headers = {"a": "b"}
            engines[rank].send_outputs([one])
            (got,) = face.outputs(1)
            assert (got.new_token_ids, got.trace_headers) == ([5], {"a": "b"})
        call = face.start("add_lora", LoRARequest("adapter", 3, "/path", "base"))
        asked = [engine.expect_utility("add_lora") for engine in engines]
        assert [each.args for each in asked] == [
            [["adapter", 3, "/path", "base", None, False, False]],
            [["adapter", 3, "/path", "base", False, False]],
        ]
        for engine, each in zip(engines, asked, strict=True):
            engine.answer_utility(each, True)
        assert call.result(PATIENCE_S) is True


# Utilities.


def test_a_utility_call_goes_to_every_engine_and_waits_for_all(pair: Faces) -> None:
    """C-33; protocol F: a fresh call id for each."""
    face, engines = pair
    call = face.start("list_loras")
    asked = [engine.expect_utility("list_loras") for engine in engines]
    assert asked[0].call_id != asked[1].call_id
    engines[1].answer_utility(asked[1], [2])
    assert not call.done()
    engines[0].answer_utility(asked[0], [1])
    assert call.result(PATIENCE_S) == {1}
    assert face.pending_calls() == 0


def test_a_refusal_is_reported_with_the_engines_index(pair: Faces) -> None:
    """C-33; issue 5: a pause, sleep or cache reset that one engine refuses."""
    face, engines = pair
    call = face.start("pause_scheduler")
    for rank, engine in enumerate(engines):
        asked = engine.expect_utility("pause_scheduler")
        engine.answer_utility(asked) if rank == 0 else engine.fail_utility(asked, "not now")
    with pytest.raises(UtilityCallError, match="engine 1: not now") as caught:
        call.result(PATIENCE_S)
    assert (caught.value.engine_index, caught.value.method) == (1, "pause_scheduler")


def test_a_cache_reset_is_done_when_every_engine_has_done_it(pair: Faces) -> None:
    """Protocol M.3: the AND of all."""
    face, engines = pair
    call = face.start("reset_prefix_cache")
    for engine, answer in zip(engines, (True, False), strict=True):
        engine.answer_utility(engine.expect_utility(), answer)
    assert call.result(PATIENCE_S) is False


def test_a_call_of_all_workers_brings_the_results_of_all_engines_by_rank(pair: Faces) -> None:
    """Defect 24: the reference returns the first engine's alone."""
    face, engines = pair
    call = face.start("collective_rpc", "describe", 5.0)
    for rank in (1, 0):
        asked = engines[rank].expect_utility("collective_rpc")
        engines[rank].answer_utility(asked, [f"{rank}a", f"{rank}b"])
    assert call.result(PATIENCE_S) == ["0a", "0b", "1a", "1b"]


def test_engines_that_disagree_are_an_error(pair: Faces) -> None:
    face, engines = pair
    call = face.start("is_sleeping")
    for engine, answer in zip(engines, (True, False), strict=True):
        engine.answer_utility(engine.expect_utility(), answer)
    with pytest.raises(UtilityCallError, match="disagree on is_sleeping"):
        call.result(PATIENCE_S)


def test_a_time_limit_holds_for_all_engines_together(pair: Faces) -> None:
    """C-32: a timed-out call leaves nothing behind."""
    face, engines = pair
    call = face.start("call_utility", "slow", timeout=0.2)
    engines[0].answer_utility(engines[0].expect_utility("slow"), 1)
    with pytest.raises(TimeoutError, match=r"slow was not answered within 0\.2 s"):
        call.result(PATIENCE_S)
    assert face.pending_calls() == 0
    engines[1].answer_utility(engines[1].expect_utility("slow"), 2)
    add_to(face, engines, 1, "afterwards")


# One engine's loss.


def test_the_loss_of_an_engine_costs_only_what_ran_there(pair: Faces) -> None:
    """C-55: its requests fail with the cause, its calls too; the others notice nothing, and the client goes on."""
    face, engines = pair
    for rank, request_id in ((0, "kept"), (1, "lost"), (1, "lost too")):
        add_to(face, engines, rank, request_id)
    call = face.start("call_utility", "slow")
    engines[0].answer_utility(engines[0].expect_utility("slow"), 1)
    engines[1].expect_utility("slow")
    engines[1].vanish()
    failed = face.outputs(2)
    assert {it.request_id for it in failed} == {"lost", "lost too"}
    assert all(it.finish_reason is FinishReason.ERROR for it in failed)
    assert str(failed[0].stop_reason).startswith("engine_lost: engine 1: the connection to it was lost")
    with pytest.raises(UtilityCallError, match="engine 1: the engine was lost meanwhile: the connection") as caught:
        call.result(PATIENCE_S)
    assert caught.value.engine_index == 1
    assert states(face) == ["ready", "lost"]
    assert mp_client(face).inbox.live == {"kept"}
    for i in range(4):
        face.add_request(request(f"next{i}"))
        engines[0].expect_add()
    engines[0].send_outputs([output("kept", [3], finished=True)])
    assert face.outputs(1)[0].new_token_ids == [3]
    later = face.start("list_loras")
    engines[0].answer_utility(engines[0].expect_utility("list_loras"), [])
    assert later.result(PATIENCE_S) == set()


def test_a_dead_engine_is_not_the_death_of_the_client_until_the_last(mortal: Faces) -> None:
    """C-55, C-27: every waiter hears of the last one's death."""
    face, engines = mortal
    seen: list[EngineStatus] = []
    face.client.on_engine_change = seen.append
    add_to(face, engines, 0, "a")
    waiting = face.start("get_output")
    engines[1].vanish()
    wait_until(lambda: states(face) == ["ready", "dead"], PATIENCE_S, "the death of engine 1")
    assert not face.client.engine_dead
    named = request("b")
    named.data_parallel_rank = 1
    with pytest.raises(EngineUnavailableError, match="engine 1 is not available: the connection to it was lost"):
        face.add_request(named)
    engines[0].vanish()
    with pytest.raises(EngineDeadError, match="engine 0 is dead: the connection to it was lost"):
        waiting.result(PATIENCE_S)
    with pytest.raises(EngineDeadError):
        face.call_utility("is_sleeping")
    assert states(face) == ["dead", "dead"]
    assert [(it.index, it.state, it.num_deaths) for it in seen] == [(1, "dead", 1), (0, "dead", 1)]


def test_while_no_engine_is_there_and_one_is_awaited_new_work_is_refused(pair: Faces) -> None:
    """Not dead: frontends answer "try again later"."""
    face, engines = pair
    for engine in engines:
        engine.vanish()
    wait_until(lambda: states(face) == ["lost", "lost"], PATIENCE_S, "both losses")
    assert all(status.is_awaited for status in face.client.engine_statuses())
    with pytest.raises(EngineUnavailableError, match="engine 0 is not available: the connection to it was lost"):
        face.add_request(request("a"))
    with pytest.raises(EngineUnavailableError):
        face.call_utility("is_sleeping")
    face.abort_requests(["a"])
    assert not face.client.engine_dead
    face.ensure_alive()


def test_a_request_that_meets_a_dead_connection_goes_to_another_engine(pair: Faces) -> None:
    """Defect 36: nothing was sent, so nothing is lost."""
    face, engines = pair
    engines[1].vanish()
    for i in range(20):  # some of them before anybody has looked
        face.add_request(request(f"r{i}"))
    wait_until(lambda: states(face) == ["ready", "lost"], PATIENCE_S, "the loss")
    failed = {it.request_id for it in (face.get_output().outputs if mp_client(face).engines[1].live else [])}
    kept = {engines[0].expect_add().request_id for _ in range(20 - len(failed))}
    assert kept | failed == {f"r{i}" for i in range(20)}


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_strangers_death_marker_is_checked_and_kills_nobody(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Remote engines: on tcp the marker alone is a hint."""
    with mock_faces(kind) as (face, engines):
        add_to(face, engines, 1, "a")
        engines[1].send_raw([ENGINE_CORE_DEAD])
        wait_until(lambda: "answers, although it seemed that it reported" in caplog.text, PATIENCE_S, "the check")
        assert engines[1].num_pings == 1
        assert states(face) == ["ready", "ready"]
        engines[1].send_outputs([output("a", [4], finished=True)])
        assert face.outputs(1)[0].new_token_ids == [4]


@pytest.mark.parametrize("kind", MP_FACES)
def test_an_engine_that_says_it_dies_and_does_not_answer_is_lost(kind: str) -> None:
    """Remote engines: no answer within a second is a death."""
    with mock_faces(kind) as (face, engines):
        add_to(face, engines, 1, "a")
        engines[1].answers_pings = False
        engines[1].send_raw([ENGINE_CORE_DEAD])
        (failed,) = face.outputs(1)
        assert str(failed.stop_reason).startswith("engine_lost: engine 1: it reported a fatal error; its log is on")
        assert states(face) == ["ready", "lost"]
