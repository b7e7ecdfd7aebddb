"""A frontend that is started again on the same handshake address finds the engines of the one before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_harness import (
    MP_FACES,
    PATIENCE_S,
    Face,
    assert_serves,
    echo_face,
    make_client,
    mock_config,
    mp_client,
    output,
    request,
)
from enginewire.client import launch
from enginewire.client.remembered import Memory
from enginewire.client.startup import given_up
from enginewire.errors import EngineStartupError
from enginewire.testing import MockEngine, free_tcp_port, mock_ready, wait_until
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.messages import EngineCoreOutputs, utility_output
from enginewire.wire.profile import V0_25, V0_32, WireProfile

pytestmark = pytest.mark.usefixtures("quick_looks")


class Site:
    """A handshake port, engines that know it, and frontends that come and go there."""

    def __init__(self, profiles: tuple[WireProfile, ...] = (V0_25,)) -> None:
        self.port = free_tcp_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.engines = [MockEngine(self.address, engine_index=i, profile=p) for i, p in enumerate(profiles)]
        self.file = Memory(self.address).path
        assert self.file is not None

    def start(self, kind: str = "sync", **settings: Any) -> Face:
        """Start a frontend."""
        config = mock_config(self.port, data_parallel_size=len(self.engines), **settings)
        return Face(kind, lambda: make_client(kind, config))

    def crash(self, face: Face) -> None:
        """End a frontend as SIGKILL would: no word to anybody, no file removed."""
        client = mp_client(face)
        client._memory = None
        face.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.engines[0]:
        yield site


@pytest.mark.parametrize("kind", MP_FACES)
def test_the_next_frontend_serves_at_once(site: Site, kind: str) -> None:
    """Issue 4: on fixed ports it finds its engines again without their restart; ready responses are remembered."""
    (engine,) = site.engines
    first = site.start(kind, heartbeat_timeout_s=7)
    engine.wait_started()
    ready = first.client.engine_statuses()[0].ready
    site.crash(first)
    second = site.start(kind)
    try:
        assert second.client.engine_statuses()[0].ready == ready == mock_ready()
        assert (second.config.num_gpu_blocks, second.config.max_model_len) == (100, 1024)
        assert_serves(second, engine)
    finally:
        second.close()


def test_engines_are_found_also_where_the_return_of_a_lost_one_is_not_awaited(site: Site) -> None:
    """With ``engine_return_timeout_s=0`` the newcomer gave them up before it had looked."""
    (engine,) = site.engines
    first = site.start(engine_return_timeout_s=0.0)
    engine.wait_started()
    site.crash(first)
    second = site.start(engine_return_timeout_s=0.0)
    try:
        assert_serves(second, engine)
    finally:
        second.close()


def test_what_the_dead_frontend_had_running_is_aborted(site: Site) -> None:
    """Issue 4: ABORT for every unknown id seen; seen with vLLM: 801 of 900 tokens reached the newcomer."""
    (engine,) = site.engines
    first = site.start()
    first.add_request(request("orphan"))
    engine.expect_add()
    site.crash(first)
    for i in range(5):
        engine.send_outputs([output("orphan", [i])])  # queued until somebody binds again
    second = site.start()
    try:
        second.add_request(request("mine"))
        assert engine.expect_add().request_id == "mine"
        engine.send_outputs([output("orphan", [7]), output("mine", [1], finished=True)])
        assert [(it.request_id, it.new_token_ids) for it in second.outputs(1)] == [("mine", [1])]
        assert engine.expect_abort() == ["orphan"]
        wait_until(lambda: not mp_client(second).engines[0].stale, PATIENCE_S, "the end of the orphan")
    finally:
        second.close()


def test_answers_to_the_dead_frontends_calls_fit_nobody(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Call ids begin at random."""
    (engine,) = site.engines
    first = site.start()
    call = first.start("call_utility", "slow")
    asked = engine.expect_utility("slow")
    site.crash(first)
    assert call.exception(PATIENCE_S) is not None
    second = site.start()
    try:
        pending = second.start("call_utility", "quick")
        mine = engine.expect_utility("quick")
        engine.answer_utility(asked, "not for you")
        engine.answer_utility(mine, "for you")
        assert pending.result(PATIENCE_S) == "for you"
        assert "no waiting call" in caplog.text
    finally:
        second.close()


def test_engines_of_two_versions_are_remembered_as_what_they_are() -> None:
    site = Site((V0_25, V0_32))
    with site.engines[0], site.engines[1]:
        first = site.start()
        site.crash(first)
        second = site.start()
        try:
            assert [engine.profile for engine in mp_client(second).engines] == [V0_25, V0_32]
            for rank, engine in enumerate(site.engines):
                mine = request(f"r{rank}")
                mine.data_parallel_rank = rank
                second.add_request(mine)
                engine.expect_add()
        finally:
            second.close()


def test_one_that_was_restarted_meanwhile_says_hello_as_ever() -> None:
    """The remembered addresses are only where to look first."""
    site = Site((V0_25, V0_25))
    with site.engines[0], site.engines[1]:
        first = site.start()
        site.crash(first)
        site.engines[1].vanish()
        site.engines[1].init = None
        with MockEngine(site.address, engine_index=1) as newer:
            second = site.start()
            try:
                newer.wait_started()
                for rank, engine in enumerate((site.engines[0], newer)):
                    mine = request(f"r{rank}")
                    mine.data_parallel_rank = rank
                    second.add_request(mine)
                    assert engine.expect_add().request_id == f"r{rank}"
            finally:
                second.close()


def test_an_engine_found_again_may_be_lost_and_found_like_any_other(site: Site) -> None:
    (engine,) = site.engines
    site.crash(site.start())
    second = site.start()
    try:
        engine.vanish()
        wait_until(lambda: second.client.engine_statuses()[0].state == "lost", PATIENCE_S, "the loss")
        engine.init = None
        engine.start_up()
        wait_until(lambda: second.client.engine_statuses()[0].state == "ready", PATIENCE_S, "the return")
        assert_serves(second, engine)
    finally:
        second.close()
    third = site.start()  # the new addresses were written down
    try:
        assert_serves(third, engine, "again")
    finally:
        third.close()


def test_the_file_is_private_and_small(site: Site) -> None:
    face = site.start()
    try:
        assert site.file is not None
        assert stat.S_IMODE(site.file.stat().st_mode) == 0o600
        assert stat.S_IMODE(site.file.parent.stat().st_mode) == 0o700
        assert set(json.loads(site.file.read_text())["engines"]["0"]) == {"input", "output", "ready"}
        assert [path.name for path in site.file.parent.iterdir() if path.stem == site.file.stem] == [site.file.name]
    finally:
        face.close()


def test_an_orderly_end_keeps_it_also_if_the_engines_seem_gone(site: Site) -> None:
    """A shutdown of the frontend is no shutdown of engines that others started, and they may only be cut off."""
    (engine,) = site.engines
    face = site.start(engine_return_timeout_s=0.0)
    engine.vanish()
    wait_until(lambda: face.client.engine_statuses()[0].state == "dead", PATIENCE_S, "the loss")
    face.close()
    engine.connect()
    with contextlib.closing(site.start()) as second:
        assert_serves(second, engine)


def test_waiting_for_engines_that_are_gone_can_be_given_up() -> None:
    """SIGTERM to a server whose remembered engines are gone: it waits for nothing that can come."""
    site = Site((V0_25,))
    with site.engines[0]:
        site.crash(site.start())
    unwanted = threading.Event()
    token = given_up.set(unwanted)
    unwanted.set()
    try:
        with pytest.raises(EngineStartupError, match="given up while waiting for the engines of an earlier frontend"):
            site.start()
    finally:
        given_up.reset(token)


def test_engines_that_were_all_started_anew_are_all_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of engines that ended meanwhile changes nothing."""
    monkeypatch.setattr(launch, "FIND_S", 0.1)
    site = Site((V0_25, V0_25))
    with site.engines[0], site.engines[1]:
        site.start().close()
        for engine in site.engines:
            engine.vanish()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            starting = pool.submit(site.start)
            with MockEngine(site.address, engine_index=0) as one:
                one.wait_started()
                with pytest.raises(TimeoutError):
                    starting.result(1.0)
                with MockEngine(site.address, engine_index=1), contextlib.closing(starting.result(60)) as second:
                    assert [status.state for status in second.client.engine_statuses()] == ["ready"] * 2


def test_nothing_is_remembered_of_engines_that_could_not_find_back(tmp_path: Path) -> None:
    """Our own end with us; a port that was found and not chosen is another one next time."""
    before = set(Path(os.environ["XDG_STATE_HOME"]).rglob("*.json"))
    with echo_face("sync"):
        pass
    assert set(Path(os.environ["XDG_STATE_HOME"]).rglob("*.json")) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 2, "engines": {}}', b'{"format": 1, "engines": {"x": 1}}', bytes(100)]
)
def test_a_file_that_makes_no_sense_is_not_used(site: Site, content: bytes) -> None:
    assert site.file is not None
    site.file.parent.mkdir(parents=True, exist_ok=True)
    site.file.write_bytes(content)
    face = site.start()
    try:
        assert_serves(face, site.engines[0])
    finally:
        face.close()


def test_a_remembered_port_that_is_taken_is_said(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Then the engine cannot be found, and is waited for like any other."""
    site.crash(site.start())
    assert site.file is not None
    remembered = json.loads(site.file.read_text())
    with MockEngine(site.address) as engine:
        other = free_tcp_port()
        remembered["engines"]["0"]["input"] = f"tcp://127.0.0.1:{other}"
        site.file.write_text(json.dumps(remembered))
        import zmq

        with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
            taken.bind(f"tcp://127.0.0.1:{other}")
            face = site.start()
            try:
                engine.wait_started()
                assert_serves(face, engine)
            finally:
                face.close()
    assert "engine 0 of an earlier frontend is not looked for: cannot bind" in caplog.text


def test_a_folder_that_cannot_be_written_to_harms_nobody(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    face = site.start()
    try:
        assert_serves(face, site.engines[0])
    finally:
        face.close()
    assert "will not survive a restart" in caplog.text


def test_a_strangers_answer_does_not_make_an_engine() -> None:
    """The answer has to fit the call, whose id nobody else knows."""
    site = Site()
    with site.engines[0] as engine:
        site.crash(site.start())
        engine.answers_pings = False
        frames = MsgpackEncoder().encode(EngineCoreOutputs(utility_output=utility_output(1, False)))
        engine.send_raw(frames)
        with pytest.raises(TimeoutError, match="none of the engines of an earlier frontend answered within"):
            site.start(ready_timeout_s=0.5)
        assert site.file is not None
        assert site.file.exists()  # a start that fails forgets nothing
