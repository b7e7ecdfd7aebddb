"""The frontend's end of the coordinator: loads, waves, first requests, against a coordinator of raw sockets."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from client_harness import MP_FACES, PATIENCE_S, Face, make_client, mp_client, output, request
from enginewire import EngineConfig, EngineCoreClient
from enginewire.client import coordination
from enginewire.errors import EngineStartupError
from enginewire.testing import MockEngine, free_tcp_port, mock_ready, wait_until
from enginewire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses

VECTORS = Path(__file__).parents[1] / "vectors" / "data"


def recorded(file: str, name: str) -> list[bytes]:
    """Return the frames of recorded messages of this name."""
    entries = json.loads((VECTORS / f"{file}.json").read_text())
    return [bytes.fromhex(entry["frames"][0]) for entry in entries if entry["name"] == name]


class Front:
    """What a frontend sees of a coordinator: an XPUB."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.address = f"tcp://127.0.0.1:{free_tcp_port()}"
        self._socket = self.bind()

    def bind(self) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(self.address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def restart(self) -> None:
        self._socket.close()

        def bound() -> zmq.Socket[Any] | None:
            try:
                return self.bind()
            except zmq.ZMQError:  # ZeroMQ lets go of the address a moment later
                return None

        self._socket = wait_until(bound, PATIENCE_S, "the address to be free")

    def expect(self) -> bytes:
        """Return the next message from a frontend."""
        assert self._socket.poll(int(PATIENCE_S * 1000)), "nothing came"
        message: bytes = self._socket.recv()
        return message

    def has_message(self) -> bool:
        return bool(self._socket.poll(0))

    def publish(self, *what: Any) -> None:
        self._socket.send(what[0] if isinstance(what[0], bytes) else msgspec.msgpack.encode(what))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Scene:
    """A coordinator, two engines, and the face of a client between them."""

    def __init__(self, front: Front, engines: list[MockEngine], face: Face) -> None:
        self.front, self.engines, self.face = front, engines, face
        self.coordination = mp_client(face).lookout.coordination
        assert self.coordination is not None
        self._serial = itertools.count(100)

    def publish(self, wave: int, *, running: bool, counts: Any = ((0, 0), (0, 0))) -> None:
        """Publish and wait until the client knows."""
        self.front.publish(counts, wave, running)
        serial = next(self._serial)  # what is published may be what is known already, so something else follows it
        self.front.publish([*counts[:1], [serial, *counts[1][1:]]], wave, running)
        load = mp_client(self.face).engines[1].load
        wait_until(lambda: load.waiting == serial, PATIENCE_S, "the news")
        self.front.publish(counts, wave, running)
        wait_until(lambda: load.waiting == counts[1][0], PATIENCE_S, "the news")

    def add(self, request_id: str, rank: int = 0) -> Any:
        """Send a request and return what the engine got."""
        mine = request(request_id)
        mine.data_parallel_rank = rank
        self.face.add_request(mine)
        return self.engines[rank].expect_add()


@contextlib.contextmanager
def scene(kind: str, *, lock_step: bool = True, **ready: Any) -> Iterator[Scene]:
    """Start it all as one of several server processes is started: with addresses that somebody else chose."""
    front = Front()
    folder = [f"tcp://127.0.0.1:{free_tcp_port()}" for _ in range(4)]
    addresses = {"inputs": folder[:2], "outputs": folder[2:], "stats_update_address": front.address}

    def start_up(engine: MockEngine) -> None:
        rank = engine.engine_index
        own = EngineZmqAddresses(inputs=[folder[rank]], outputs=[folder[2 + rank]])
        engine.init = EngineHandshakeMetadata(addresses=own, parallel_config={})
        engine.connect()
        engine.send_ready_response(mock_ready(data_parallel_size=2 if lock_step else 1, **ready))

    config = EngineConfig.create("echo", data_parallel_size=2, ready_timeout_s=20.0)
    with contextlib.ExitStack() as stack:
        stack.callback(front.close)
        engines = [stack.enter_context(MockEngine("", engine_index=i, startup=start_up)) for i in range(2)]

        def make() -> EngineCoreClient:
            if kind == "sync":
                from enginewire.client.sync_mp import SyncMPClient

                return SyncMPClient(config, client_addresses=addresses)
            return EngineCoreClient.make_async_mp_client(config, client_addresses=addresses)

        face = Face(kind, make)
        stack.callback(face.close)
        assert front.expect() == b"\x01"  # the subscription
        yield Scene(front, engines, face)


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_request_sent_while_the_engines_rest_wakes_them_all(kind: str) -> None:
    """C-50; protocol J.4: once, with the rank as a number (defect 9), and the wave that is believed current."""
    with scene(kind) as it:
        assert it.face.client.dp_engines_running() is False
        it.publish(3, running=False)
        assert it.add("a", 1).current_wave == 3
        assert msgspec.msgpack.decode(it.front.expect()) == [1, 3]
        assert it.face.client.dp_engines_running() is True
        it.publish(3, running=True)
        assert it.add("b").current_wave == 3
        time_to_be_sure(it)
        assert not it.front.has_message()


def time_to_be_sure(it: Scene) -> None:
    """Let something make the whole way that a message which must not come would have made."""
    it.publish(9, running=True)


@pytest.mark.parametrize("kind", MP_FACES)
def test_after_a_wave_the_next_request_wakes_them_again(kind: str) -> None:
    with scene(kind) as it:
        it.publish(0, running=False)
        it.add("a")
        assert msgspec.msgpack.decode(it.front.expect()) == [0, 0]
        it.publish(0, running=True)
        it.engines[0].send_outputs([output("a", finished=True)])
        it.face.outputs(1)
        it.publish(1, running=False)
        assert it.add("b", 1).current_wave == 1
        assert msgspec.msgpack.decode(it.front.expect()) == [1, 1]


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0"])
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_counts_as_either_version_publishes_them_become_loads(kind: str, version: str) -> None:
    """C-50, C-51; recorded from real coordinators: 0.32 adds the share of the cache in use."""
    with scene(kind) as it:
        (first, _) = recorded(f"coordinator-{version}", "counts_step23.frontend")
        it.front.publish(first)
        loads = [engine.load for engine in mp_client(it.face).engines]
        wait_until(lambda: (loads[0].running, loads[1].waiting) == (5, 3), PATIENCE_S, "the counts")
        assert loads[0].kv_cache_usage == (0.5 if version == "0.32.0" else 0.0)
        (wave,) = recorded(f"coordinator-{version}", "wave_complete.frontend")
        it.front.publish(wave)
        wait_until(lambda: it.coordination.wave == 1, PATIENCE_S, "the next wave")
        assert (loads[0].running, loads[1].waiting) == (5, 3)  # nil: counts are as they were


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_request_goes_where_the_published_load_is_least(kind: str) -> None:
    """C-51: other frontends' requests count, too."""
    with scene(kind) as it:
        it.publish(0, running=True, counts=[[9, 9], [0, 0]])
        for i in range(4):
            it.face.add_request(request(f"r{i}"))
            it.engines[1].expect_add()
        assert it.engines[0].received == []


@pytest.mark.parametrize(
    "broken",
    [b"", b"\xc1", b"READY", msgspec.msgpack.encode([None, "x", True]), msgspec.msgpack.encode([[[1]], 0, True])],
)
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_broken_message_ends_nothing(kind: str, broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Defect 26: the reference's task ends silently, and paused engines are never woken again."""
    with scene(kind) as it:
        it.front.publish(broken)
        it.publish(4, running=False)
        it.add("a")
        assert msgspec.msgpack.decode(it.front.expect()) == [0, 4]
    assert any("dropped a message of the coordinator" in record.message for record in caplog.records)


def test_a_coordinator_that_is_started_again_is_asked_again_for_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 26: what was asked of the one before is lost with it."""
    monkeypatch.setattr(coordination, "ASK_AGAIN_S", 0.0)
    with scene("sync") as it:
        it.publish(2, running=False)
        it.add("a", 1)
        assert msgspec.msgpack.decode(it.front.expect()) == [1, 2]
        it.front.restart()
        assert it.front.expect() == b"\x01"  # ZeroMQ repeats the subscription
        it.front.publish(None, 0, False)
        assert msgspec.msgpack.decode(it.front.expect()) == [1, 0]


def test_engines_that_are_not_in_lock_step_need_not_be_woken() -> None:
    """Protocol J.4: with a dense model there are no waves, only counts."""
    with scene("sync", lock_step=False) as it:
        it.publish(0, running=False, counts=[[1, 2], [3, 4]])
        it.add("a")
        it.add("b", 1)
        time_to_be_sure(it)
        assert not it.front.has_message()


def test_engines_that_tell_of_another_coordinator_are_refused() -> None:
    """Protocol B.4: the address has to be equal."""
    with (
        pytest.raises(EngineStartupError, match="engine 0 says that its coordinator publishes at tcp://elsewhere:1"),
        scene("sync", dp_stats_address="tcp://elsewhere:1"),
    ):
        pass


def test_the_address_may_come_from_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    """Protocol B.4: external load balancing, a rank above 0."""
    caplog.set_level(logging.INFO)
    front = Front()
    port = free_tcp_port()

    def start_up(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        engine.send_ready_response(mock_ready(dp_stats_address=front.address, data_parallel_size=2))
        engine.send_ready()

    config = EngineConfig.create(
        "echo",
        data_parallel_size=2,
        data_parallel_size_local=0,
        data_parallel_rank=1,
        data_parallel_external_lb=True,
        data_parallel_rpc_port=port,
    )
    try:
        with (
            MockEngine(f"tcp://127.0.0.1:{port}", engine_index=1, startup=start_up) as engine,
            make_client("sync", config) as client,
        ):
            assert front.expect() == b"\x01"
            client.add_request(request("a"))
            engine.expect_add()
            assert msgspec.msgpack.decode(front.expect()) == [1, 0]
    finally:
        front.close()
