"""The relay between real sockets: everything arrives, unchanged and in order, and each side notices the other's end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zmq
from relaying import PATIENCE_S, RawFrontend, Relayed, receive

from client_harness import Face, make_client, mock_config, output, request
from enginewire.errors import EngineClientError
from enginewire.recorder.kinds import type_of
from enginewire.recorder.pair import Taps
from enginewire.recorder.relay import Relay
from enginewire.testing import MockEngine, free_tcp_port
from enginewire.wire.arrays import LogprobsLists
from enginewire.wire.frames import engine_identity

ZERO, ONE = engine_identity(0), engine_identity(1)


def test_a_client_and_an_engine_talk_through_it_and_every_message_is_seen() -> None:
    port = free_tcp_port()
    with Relayed(port) as relayed, MockEngine(relayed.address) as engine:
        face = Face("sync", lambda: make_client("sync", mock_config(port)))
        try:
            face.add_request(request("r1", prompt=list(range(5000))))
            assert engine.expect_add().prompt_token_ids == list(range(5000))
            logprobs = LogprobsLists(np.zeros((1, 200), "<i4"), np.ones((1, 200), "<f4"), np.ones(1, "<i8"))
            answer = output("r1", [42], finished=True)
            answer.new_logprobs = logprobs
            engine.send_outputs([answer])
            (got,) = face.outputs(1)
            assert np.array_equal(got.new_logprobs.logprobs, logprobs.logprobs)
            call = face.start("call_utility", "is_sleeping")
            engine.answer_utility(engine.expect_utility("is_sleeping"), False)
            assert call.result(PATIENCE_S) is False
            face.abort_requests(["gone"])
            engine.expect("ABORT")
        finally:
            face.close()
        expected = ["ADD", "OUTPUTS", "UTILITY", "UTILITY_OUTPUT", "ABORT"]
        relayed.wait_for(lambda: relayed.types("engine0.frontend0")[1:6] == expected, "passing of everything")
        assert sorted(relayed.types("engine0")[:4]) == ["HELLO", "INIT", "READY", "READY_RESPONSE"]
        add = next(entry for entry in relayed.entries if type_of(entry) == "ADD")
        assert add.frames == [ZERO, *engine.received[0].frames]
        outputs = next(entry for entry in relayed.entries if type_of(entry) == "OUTPUTS")
        assert [len(frame) for frame in outputs.frames[1:]] == [800, 800]


def test_init_differs_in_its_addresses_and_in_nothing_else() -> None:
    with RawFrontend(2) as frontend, Relayed(frontend.ports[0]) as relayed:
        with MockEngine(relayed.address, engine_index=1, startup=MockEngine.send_hello) as engine:
            assert frontend.welcome() == ONE
            init = engine.expect_init()
        own = init.addresses.inputs + init.addresses.outputs
        theirs = frontend.init["addresses"]["inputs"] + frontend.init["addresses"]["outputs"]
        assert len(set(own) | set(theirs)) == 8
        assert init.parallel_config == {"unknown": 1}
        assert init.addresses.coordinator_input is None
        relayed.wait_for(lambda: "INIT" in relayed.types(), "recording")
        recorded = next(entry for entry in relayed.entries if type_of(entry) == "INIT")
        assert msgspec.msgpack.decode(recorded.frames[1]) == frontend.init, "what the frontend sent is recorded"


def test_several_engines_and_frontends_each_get_what_is_theirs_in_order() -> None:
    count = 300
    with RawFrontend(2) as frontend, Relayed(frontend.ports[0]) as relayed:
        with MockEngine(relayed.address) as zero, MockEngine(relayed.address, engine_index=1) as one:
            assert {frontend.welcome(), frontend.welcome()} == {ZERO, ONE}
            for client in (0, 1):
                assert {receive(frontend.inputs[client])[0] for _ in range(2)} == {ZERO, ONE}
            for n in range(count):
                for client in (0, 1):
                    for identity in (ZERO, ONE):
                        frontend.send(identity, b"\1", msgspec.msgpack.encode([f"{client}-{n}"]), client=client)
            for engine in (zero, one):
                for n in range(count):
                    for client in (0, 1):
                        engine.send_raw(
                            [b"payload", b"%d-%d-%d" % (engine.engine_index, client, n)], client_index=client
                        )
            for engine in (zero, one):
                aborts = [engine.expect("ABORT") for _ in range(2 * count)]
                for client in (0, 1):
                    ids = [it.message[0] for it in aborts if it.client_index == client]
                    assert ids == [f"{client}-{n}" for n in range(count)]
            for client in (0, 1):
                came = [receive(frontend.outputs[client])[1] for _ in range(2 * count)]
                for index in (b"0", b"1"):
                    of_engine = [it for it in came if it.startswith(index + b"-")]
                    assert of_engine == [b"%b-%d-%d" % (index, client, n) for n in range(count)]
        assert {entry.group for entry in relayed.entries} == {
            "engine0", "engine1", "engine0.frontend0", "engine0.frontend1", "engine1.frontend0", "engine1.frontend1",
        }  # fmt: skip


def test_a_restarted_engine_is_relayed_again_under_its_identity() -> None:
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed:
        for group in ("engine0", "engine0-2"):
            with MockEngine(relayed.address) as engine:
                assert frontend.welcome() == ZERO
                assert receive(frontend.inputs[0])[0] == ZERO
                frontend.send(ZERO, b"\1", msgspec.msgpack.encode([group]))
                assert engine.expect_abort() == [group]
                engine.send_raw([b"hello from", group.encode()])
                assert receive(frontend.outputs[0]) == [b"hello from", group.encode()]
                relayed.wait_for(lambda of=group: "ABORT" in relayed.types(f"{of}.frontend0"), "recording")


def test_an_engine_that_is_started_twice_does_not_disturb_the_first_unless_it_is_welcomed() -> None:
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed, MockEngine(relayed.address) as first:
        frontend.welcome()
        receive(frontend.inputs[0])
        receive(frontend.handshake)
        with MockEngine(relayed.address, startup=MockEngine.send_hello):
            assert receive(frontend.handshake)[0] == ZERO
            frontend.send(ZERO, b"\1", msgspec.msgpack.encode(["r"]))
            assert first.expect_abort() == ["r"]
            first.send_raw([b"still here"])
            assert receive(frontend.outputs[0]) == [b"still here"]


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_client_notices_an_engines_end_as_it_would_without(kind: str) -> None:
    """Defect 22."""
    port = free_tcp_port()
    with Relayed(port) as relayed, MockEngine(relayed.address) as engine:
        face = Face(kind, lambda: make_client(kind, mock_config(port, engine_return_timeout_s=0)))
        try:
            face.add_request(request("r"))
            engine.expect_add()
            engine.vanish()
            with pytest.raises(EngineClientError):
                while True:
                    face.get_output()
        finally:
            face.close()
        relayed.wait_for(lambda: any("left by the engine" in it for it in relayed.notices), "a notice")


def test_the_last_words_of_an_engine_arrive_before_its_end_is_noticed() -> None:
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed, MockEngine(relayed.address) as engine:
        frontend.welcome()
        receive(frontend.inputs[0])
        for n in range(500):
            engine.send_raw([b"%d" % n])
        engine.die()
        came = [receive(frontend.outputs[0]) for _ in range(501)]
        assert came == [[b"%d" % n] for n in range(500)] + [[b"ENGINE_CORE_DEAD"]]
        relayed.wait_for(lambda: "ENGINE_CORE_DEAD" in relayed.types(), "recording")


def test_a_frontend_that_is_restarted_on_its_ports_finds_its_engine_again() -> None:
    with RawFrontend() as first, Relayed(first.ports[0]) as relayed, MockEngine(relayed.address) as engine:
        first.welcome()
        receive(first.inputs[0])
        engine.send_raw([b"here"])
        assert receive(first.outputs[0]) == [b"here"]
        ports = first.ports
        first.context.destroy(linger=0)
        relayed.wait_for(lambda: sum("is gone" in it for it in relayed.notices) == 2, "notice of both connections")
        with RawFrontend(ports=ports) as second:
            second.send(ZERO, b"\1", msgspec.msgpack.encode(["r"]))
            assert engine.expect_abort() == ["r"]
            engine.send_raw([b"still here"])
            assert receive(second.outputs[0]) == [b"still here"]


def test_an_engine_notices_a_frontends_end_as_it_would_without() -> None:
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed, zmq.Context() as context:
        dealer, input_ = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        with dealer, input_:
            for socket in (dealer, input_):
                socket.linger = 0
                socket.setsockopt(zmq.IDENTITY, ZERO)
            monitor = input_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            dealer.connect(relayed.address)
            dealer.send(msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True}))
            frontend.welcome()
            init = msgspec.msgpack.decode(receive(dealer)[0])
            input_.connect(init["addresses"]["inputs"][0])
            input_.send(b"ready")
            assert receive(frontend.inputs[0]) == [ZERO, b"ready"]
            receive(monitor)
            frontend.context.destroy(linger=0)
            assert int.from_bytes(receive(monitor)[0][:2], "little") == zmq.EVENT_DISCONNECTED
            input_.disable_monitor()
            monitor.close(0)


def test_a_coordinators_sockets_are_relayed_too() -> None:
    with RawFrontend(coordinator=True) as frontend, Relayed(frontend.ports[0]) as relayed, zmq.Context() as context:
        dealer, xsub, push = (context.socket(kind) for kind in (zmq.DEALER, zmq.XSUB, zmq.PUSH))
        for socket in (dealer, xsub, push):
            socket.linger = 0
            socket.setsockopt(zmq.IDENTITY, ONE)
        dealer.connect(relayed.address)
        dealer.send(msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True}))
        frontend.welcome()
        addresses = msgspec.msgpack.decode(receive(dealer)[0])["addresses"]
        xsub.connect(addresses["coordinator_input"])
        push.connect(addresses["coordinator_output"])
        xsub.send(b"\1")
        assert receive(frontend.xpub) == [b"\1"]
        wave = [b"\2", msgspec.msgpack.encode([1, None])]
        for message in ([b"READY"], wave):
            frontend.xpub.send_multipart(message)
            assert receive(xsub) == message
        push.send(msgspec.msgpack.encode([1, [], None, 1.0, None, None, 3, None]))
        assert msgspec.msgpack.decode(receive(frontend.reports)[0])[6] == 3
        expected = {"SUBSCRIBE", "COORDINATOR_READY", "START_DP_WAVE", "REPORT"}
        relayed.wait_for(lambda: expected <= set(relayed.types("engine1")), "recording")
        for socket in (dealer, xsub, push):
            socket.close()


def test_what_a_coordinator_tells_frontends_is_heard_and_its_address_left_as_it_is() -> None:
    """Frontends compare the address with their own (protocol B.4)."""
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed:
        stats = f"tcp://127.0.0.1:{frontend.ports[-2]}"
        frontend.init["addresses"]["frontend_stats_publish_address"] = stats
        with MockEngine(relayed.address, startup=MockEngine.send_hello) as engine:
            frontend.welcome()
            assert engine.expect_init().addresses.frontend_stats_publish_address == stats
            assert receive(frontend.xpub) == [b"\1"]
            frontend.xpub.send(msgspec.msgpack.encode([[[1, 2]], 0, False]))
            relayed.wait_for(lambda: "STATS" in relayed.types("coordinator"), "recording")


def test_a_stranger_on_an_engines_socket_is_not_relayed() -> None:
    with RawFrontend() as frontend, Relayed(frontend.ports[0]) as relayed, MockEngine(relayed.address) as engine:
        frontend.welcome()
        receive(frontend.inputs[0])
        assert engine.init is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.setsockopt(zmq.IDENTITY, b"stranger")
            stranger.connect(engine.init.addresses.inputs[0])
            stranger.send(b"let me in")
            relayed.wait_for(lambda: any("stranger" in it for it in relayed.notices), "a notice")
        frontend.send(ZERO, b"\1", msgspec.msgpack.encode(["r"]))
        assert engine.expect_abort() == ["r"]
        assert not frontend.inputs[0].poll(0)


def test_an_address_that_cannot_be_bound_is_said() -> None:
    taps = Taps(lambda entry: None, lambda text: None)
    with RawFrontend() as frontend, pytest.raises(OSError, match="cannot bind"):
        Relay(f"tcp://127.0.0.1:{frontend.ports[0]}", "tcp://127.0.0.1:1", taps)
    with pytest.raises(OSError, match="cannot connect to nonsense"):
        Relay(f"tcp://127.0.0.1:{free_tcp_port()}", "nonsense", taps)
