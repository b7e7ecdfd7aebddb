"""The fake engine does on the wire what an engine does, and what a test tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from enginewire.errors import DecodeError
from enginewire.testing import MockEngine, Received, free_tcp_port, mock_ready, wait_until
from enginewire.wire.capabilities import EngineInfo
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder, OutputsDecoder
from enginewire.wire.frames import ABORT, ADD, ENGINE_CORE_DEAD, UTILITY
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, UtilityCall, utility_result
from enginewire.wire.sampling import SamplingParams

REQUEST = EngineCoreRequest("a", [1, 2], sampling_params=SamplingParams(), arrival_time=1.0)


class BareFrontend:
    """The frontend's sockets and nothing else."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.handshake = self.context.socket(zmq.ROUTER)
        self.input = self.context.socket(zmq.ROUTER)
        self.output = self.context.socket(zmq.PULL)
        self.input_address, self.output_address = map(self.bind, (self.input, self.output))
        self.address = f"tcp://127.0.0.1:{free_tcp_port()}"
        for socket in (self.handshake, self.input, self.output):
            socket.rcvtimeo = 5000
        self.encoder = MsgpackEncoder()

    @staticmethod
    def bind(socket: zmq.Socket[bytes]) -> str:
        socket.bind("tcp://127.0.0.1:0")
        return socket.last_endpoint.decode()

    def status(self) -> tuple[bytes, Any]:
        identity, payload = self.handshake.recv_multipart()
        return identity, msgspec.msgpack.decode(payload)

    def send_init(self, identity: bytes) -> None:
        addresses = {"inputs": [self.input_address], "outputs": [self.output_address]}
        payload = msgspec.msgpack.encode({"addresses": addresses, "parallel_config": {}})
        self.handshake.send_multipart([identity, payload])

    def start(self) -> bytes:
        """Go through the whole start-up; return the engine's identity."""
        self.handshake.bind(self.address)
        identity, hello = self.status()
        assert hello == {"status": "HELLO", "local": False, "headless": True}
        self.send_init(identity)
        assert self.input.recv_multipart()[0] == identity
        assert self.status() == (identity, {"status": "READY", "local": False, "headless": True})
        return identity

    def send(self, identity: bytes, kind: bytes, message: object) -> None:
        self.input.send_multipart([identity, kind, *self.encoder.encode(message)])

    def outputs(self) -> Any:
        return OutputsDecoder().decode(self.output.recv_multipart())


@pytest.fixture
def frontend() -> Iterator[BareFrontend]:
    bare = BareFrontend()
    yield bare
    bare.context.destroy(linger=0)


def test_it_starts_records_and_answers(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address, engine_index=3) as engine:
        identity = frontend.start()
        engine.wait_started()
        assert identity == b"\3\0"

        frontend.send(identity, ADD, REQUEST)
        frontend.send(identity, UTILITY, UtilityCall(0, 2**63, "sleep", [1]))
        frontend.send(identity, UTILITY, UtilityCall(0, 8, "is_sleeping", []))
        frontend.send(identity, ABORT, ["a"])
        probe, sleep = engine.expect_utility("is_sleeping"), engine.expect_utility()
        assert engine.expect_add() == REQUEST
        assert engine.expect_abort() == ["a"]
        assert (probe.method, sleep.args) == ("is_sleeping", [1])
        assert [it.kind for it in engine.received] == ["ADD", "UTILITY", "UTILITY", "ABORT"]

        engine.send_outputs([EngineCoreOutput("a", [7])], finished_requests=["a"])
        message = frontend.outputs()
        assert (message.engine_index, message.outputs[0].new_token_ids, message.finished_requests) == (3, [7], ["a"])
        engine.answer_utility(probe, True)
        assert utility_result(frontend.outputs().utility_output) is True
        engine.fail_utility(sleep, "no")
        answer = frontend.outputs().utility_output
        assert (answer.call_id, answer.failure_message) == (2**63, "no")
        engine.send_raw([b"any", b"thing"])
        assert frontend.output.recv_multipart() == [b"any", b"thing"]


def test_its_ready_response_can_be_chosen_sent_twice_and_surrounded_by_garbage(frontend: BareFrontend) -> None:
    def startup(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.send_raw([b"?"], to="handshake")
        engine.connect()
        engine.send_ready()
        engine.send_ready_response(mock_ready(block_size=32, enginewire=EngineInfo(version="1")))
        engine.send_raw([b"\xc1"], to="input")
        engine.send_ready_response({"max_model_len": 5})

    with MockEngine(frontend.address, identity=b"odd", startup=startup) as engine:
        frontend.handshake.bind(frontend.address)
        frontend.send_init(frontend.status()[0])
        assert frontend.handshake.recv_multipart() == [b"odd", b"?"]
        assert frontend.status()[1]["status"] == "READY"
        first, garbage, second = (frontend.input.recv_multipart() for _ in range(3))
        assert [it[0] for it in (first, garbage, second)] == [b"odd"] * 3
        assert MsgpackDecoder(EngineCoreReadyResponse).decode(first[1:]).block_size == 32
        assert garbage[1] == b"\xc1"
        assert msgspec.msgpack.decode(second[1]) == {"max_model_len": 5}
        engine.wait_started()


def test_a_half_handshake_ends_with_the_context(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address):
        frontend.handshake.bind(frontend.address)
        assert frontend.status()[1]["status"] == "HELLO"  # and INIT never comes


def test_its_last_word_arrives_although_it_is_closed_at_once(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address) as engine:
        frontend.start()
        engine.wait_started()
        engine.send_outputs([EngineCoreOutput("a", [7])])
        engine.die()
    assert frontend.outputs().outputs[0].new_token_ids == [7]
    assert frontend.output.recv_multipart() == [ENGINE_CORE_DEAD]


def test_it_vanishes_without_a_word(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address) as engine:
        frontend.start()
        engine.wait_started()
        monitor = frontend.output.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.rcvtimeo = 5000
        engine.vanish()
        assert monitor.recv_multipart()
        frontend.output.disable_monitor()
        monitor.close()
        assert not frontend.output.poll(0)
        with pytest.raises(RuntimeError, match="no output socket for client 0"):
            engine.send_outputs([])


def test_it_can_answer_by_itself(frontend: BareFrontend) -> None:
    def answer(engine: MockEngine, received: Received) -> None:
        if received.kind == "UTILITY":
            engine.answer_utility(received.message, received.message.method)

    with MockEngine(frontend.address, on_message=answer) as engine:
        frontend.send(frontend.start(), UTILITY, UtilityCall(0, 1, "ping", []))
        assert utility_result(frontend.outputs().utility_output) == "ping"
        assert engine.expect_utility("ping").call_id == 1


def test_a_message_that_does_not_come_is_named_with_those_that_did(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address) as engine:
        frontend.send(frontend.start(), ABORT, ["a"])
        wait_until(lambda: engine.received, 5, "arrival of the ABORT")
        with pytest.raises(TimeoutError, match=r"mock engine 0 waited 0\.01 s; no ADD came, unclaimed: ABORT"):
            engine.expect_add(timeout_s=0.01)


def test_an_undecodable_message_fails_the_test(frontend: BareFrontend) -> None:
    engine = MockEngine(frontend.address)
    with pytest.raises(DecodeError), engine:
        frontend.send(frontend.start(), ADD, ["a"])
        with pytest.raises(DecodeError, match="at least 9"):
            engine.expect_add()


def test_an_exception_of_the_script_reaches_the_test(frontend: BareFrontend) -> None:
    def startup(engine: MockEngine) -> None:
        raise RuntimeError("scripted")

    engine = MockEngine(frontend.address, startup=startup)
    with pytest.raises(RuntimeError, match="scripted"), engine:
        engine.wait_started()


def test_closing_twice_is_harmless_and_later_use_is_refused(frontend: BareFrontend) -> None:
    with MockEngine(frontend.address) as engine:
        frontend.start()
        engine.wait_started()
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="is closed"):
            engine.send_raw([b"x"])
        with pytest.raises(TimeoutError, match="was closed; no ADD came"):
            engine.expect_add()


def test_waiting_gives_the_value_or_says_what_did_not_happen() -> None:
    values = iter([0, None, "", 7])
    assert wait_until(lambda: next(values), 5, "a number") == 7
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s: the miracle did not happen"):
        wait_until(lambda: False, 0.01, "the miracle")
