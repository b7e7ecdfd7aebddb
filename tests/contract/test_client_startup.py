"""Start-up of the clients against an engine that a test controls: in order, out of order, half, wrong, never."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from client_harness import PATIENCE_S, make_client, mock_config, mock_face, output, request
from enginewire import EngineConfig, EngineCoreClient
from enginewire.client.sync_mp import SyncMPClient
from enginewire.errors import EngineStartupError
from enginewire.testing import MockEngine, free_tcp_port, mock_ready, wait_until
from enginewire.wire.capabilities import Capabilities, EngineInfo


def ready_first(engine: MockEngine) -> None:
    engine.send_hello()
    engine.expect_init()
    engine.connect()
    engine.send_ready()
    engine.send_ready_response()


def ready_response_twice(engine: MockEngine) -> None:
    engine.send_hello()
    engine.expect_init()
    engine.connect()
    engine.send_ready_response(mock_ready(num_gpu_blocks=1))
    engine.send_ready_response(mock_ready(num_gpu_blocks=2))
    engine.send_ready()


def hello_after_garbage(engine: MockEngine) -> None:
    engine.send_hello()
    for frames in ([b""], [b"\xc1"], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"status": "GOODBYE"})]):
        engine.send_raw(frames, to="handshake")
    engine.expect_init()
    engine.connect()
    engine.send_raw([b"\xc1\xc1"], to="output")
    engine.send_ready_response()
    engine.send_ready()


def strangers_first(engine: MockEngine) -> None:
    engine.send_hello()
    init = engine.expect_init()
    with zmq.Context() as context:
        for identity in (b"\x05\x00", b"\x00", b"\x00\x00\x00", b"not an engine"):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.IDENTITY, identity)
                dealer.setsockopt(zmq.LINGER, 1000)
                dealer.connect(init.addresses.inputs[0])
                dealer.send(msgspec.msgpack.encode(mock_ready()))
                dealer.send_multipart([b"", b"", b""])
    engine.connect()
    engine.send_ready_response()
    engine.send_ready()


@pytest.mark.parametrize("startup", [MockEngine.start_up, ready_first, hello_after_garbage, strangers_first])
def test_start_up_succeeds_however_its_messages_come(startup: Callable[[MockEngine], None]) -> None:
    """C-24; defect 20; READY and the ready response travel on different sockets (protocol B.3)."""
    with mock_face("sync", startup=startup) as (face, engine):
        face.add_request(request())
        engine.expect_add()
        engine.send_outputs([output()])
        assert len(face.outputs(1)) == 1


def test_a_second_ready_response_replaces_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """Defect 20."""
    with mock_face("sync", startup=ready_response_twice) as (face, _):
        wait_until(lambda: face.config.num_gpu_blocks == 2, PATIENCE_S, "the second response")
    assert "second ready response" in caplog.text or "says ready again" in caplog.text


def test_init_has_every_key() -> None:
    """Protocol B.2."""
    with mock_face("sync") as (_, engine):
        init = engine.init
        assert init is not None
        assert (len(init.addresses.inputs), len(init.addresses.outputs)) == (1, 1)
        assert all(address.startswith("tcp://127.0.0.1:") for address in init.addresses.inputs + init.addresses.outputs)
        assert not any(address.endswith((":0", ":*")) for address in init.addresses.inputs + init.addresses.outputs)
        assert init.parallel_config == {}


def test_the_ready_response_flows_into_a_copy_of_the_configuration() -> None:
    """C-25."""

    def start_up(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        capabilities = Capabilities(max_logprobs=3)
        info = EngineInfo(version="9", vocab_size=777, capabilities=capabilities)
        engine.send_ready_response(mock_ready(max_model_len=512, block_size=32, dtype="bfloat16", enginewire=info))
        engine.send_ready()

    for asked, got in ((None, 512), (100, 100), (4096, 512)):
        with mock_face("sync", settings={"max_model_len": asked}, startup=start_up) as (face, _):
            config = face.config
            assert (config.max_model_len, config.num_gpu_blocks, config.block_size) == (got, 100, 32)
            assert (config.kv_cache_size_tokens, config.kv_cache_max_concurrency) == (1600, 1.5625)
            assert (config.dtype, config.vocab_size, config.capabilities.max_logprobs) == ("bfloat16", 777, 3)


def test_a_vllm_engine_announces_nothing_and_is_trusted() -> None:
    """Section 11: no ``enginewire`` key, everything on."""
    with mock_face("sync") as (face, _):
        assert face.config.capabilities.max_logprobs == -1
        assert face.config.vocab_size is None


@contextlib.contextmanager
def failing_start(
    startup: Callable[[MockEngine], None], *, settings: dict[str, Any] | None = None, **mock_options: Any
) -> Iterator[pytest.ExceptionInfo[EngineStartupError]]:
    """Start a client, which fails; yields its error."""
    port = free_tcp_port()
    with MockEngine(f"tcp://127.0.0.1:{port}", startup=startup, **mock_options) as engine:
        with pytest.raises(EngineStartupError) as caught:
            make_client("sync", mock_config(port, **(settings or {})))
        engine._failure = None
        yield caught


def test_hello_then_silence_times_out_and_says_who_and_what_raises_the_limit() -> None:
    """C-24; defect 23."""

    def hello_only(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()

    with failing_start(hello_only, settings={"ready_timeout_s": 0.4}) as caught:
        error = caught.value
        assert isinstance(error, TimeoutError)
        for part in (
            "within 0.4 s",
            "engine 0 has said HELLO and is not ready",
            "loading of weights",
            "ready_timeout_s",
            "VLLM_ENGINE_READY_TIMEOUT_S",
        ):
            assert part in str(error)


def test_an_engine_that_never_comes_is_named() -> None:
    """C-24."""
    config = mock_config(free_tcp_port(), ready_timeout_s=0.2)
    with pytest.raises(TimeoutError, match="engine 0 has not said HELLO"):
        make_client("sync", config)


def test_no_message_restarts_the_deadline() -> None:
    """C-24; defect 23: the reference's limit starts anew at each message."""
    done = threading.Event()

    def chatter(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        while not done.wait(0.01):
            engine.send_ready_response()
            engine.send_raw([b"noise"], to="handshake")

    began = time.monotonic()
    try:
        with failing_start(chatter, settings={"ready_timeout_s": 0.5}) as caught:
            took = time.monotonic() - began
            done.set()
            assert isinstance(caught.value, TimeoutError)
            assert 0.5 <= took < 5
    finally:
        done.set()


def test_the_environments_limit_is_honoured_and_the_configuration_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-24."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.15")
    assert EngineConfig.create("echo").ready_timeout_s == 0.15
    assert EngineConfig.create("echo", ready_timeout_s=7).ready_timeout_s == 7
    with pytest.raises(TimeoutError, match=r"within 0\.15 s"):
        EngineCoreClient.make_client(
            True,
            False,
            EngineConfig.create("echo", data_parallel_size_local=0, data_parallel_rpc_port=free_tcp_port()),
        )


def test_an_engine_of_another_deployment_is_refused() -> None:
    """Protocol B.1: local and headless must be what was agreed."""
    with failing_start(MockEngine.send_hello, local=True, headless=False) as caught:
        assert "says local=True, headless=False, expected local=False, headless=True" in str(caught.value)
        assert caught.value.engine_index == 0


def test_an_engine_of_another_rank_is_reported_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """C-24."""
    with failing_start(MockEngine.send_hello, settings={"ready_timeout_s": 0.4}, engine_index=3) as caught:
        assert "engine 0 has not said HELLO; came and is not expected here: rank 3." in str(caught.value)
    assert "ignored a handshake message of unexpected rank 3; expected: 0" in caplog.text


def test_hello_twice_means_two_engines() -> None:
    """Protocol B.1: HELLO only when new."""

    def twice(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.send_hello()

    with failing_start(twice) as caught:
        assert "unexpected HELLO from engine 0" in str(caught.value)


def test_ready_before_hello_is_refused() -> None:
    """Protocol B.1: READY only when connected."""
    with failing_start(lambda engine: engine._send_status("READY")) as caught:
        assert "unexpected READY from engine 0, which has not said HELLO" in str(caught.value)


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode({"max_model_len": "many"}), b"\x90"])
def test_a_ready_response_that_is_none_fails_at_once_and_says_why(payload: bytes) -> None:
    def start_up(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        engine.send_raw([payload], to="input")

    with failing_start(start_up) as caught:
        assert "engine 0: not a valid EngineCoreReadyResponse" in str(caught.value)
        assert caught.value.stage == "ready"


def test_an_engine_that_vanishes_between_hello_and_init_is_not_an_error_of_zeromq(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake socket is mandatory too: INIT to nobody raised a bare ZMQError."""
    from enginewire.client import startup as module

    gone = threading.Event()

    def hello_and_goodbye(engine: MockEngine) -> None:
        engine.send_hello()
        wait_until(lambda: engine.init or gone.is_set(), PATIENCE_S, "the end")

    def send_message(socket: zmq.Socket[bytes], frames: Any) -> None:
        gone.set()
        raise zmq.ZMQError(zmq.EHOSTUNREACH)

    monkeypatch.setattr(module, "send_message", send_message)
    with failing_start(hello_and_goodbye, settings={"ready_timeout_s": 0.4}) as caught:
        assert isinstance(caught.value, TimeoutError)
    assert "engine 0 is gone since its HELLO" in caplog.text


def test_a_port_that_is_taken_is_said_and_nothing_is_left() -> None:
    port = free_tcp_port()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(OSError, match=f"cannot bind tcp://127.0.0.1:{port}"):
            make_client("sync", mock_config(port))


def test_somebody_else_may_do_the_handshake() -> None:
    """C-02, K: addresses to bind are given; only ready responses are awaited."""
    context: zmq.Context[Any] = zmq.Context()
    ports = free_tcp_port(), free_tcp_port()
    addresses = {
        "input_address": f"tcp://127.0.0.1:{ports[0]}",
        "output_address": f"tcp://127.0.0.1:{ports[1]}",
    }
    with context, context.socket(zmq.DEALER) as dealer, context.socket(zmq.PUSH) as push:
        dealer.setsockopt(zmq.IDENTITY, b"\x00\x00")
        dealer.connect(addresses["input_address"])
        dealer.send(msgspec.msgpack.encode(mock_ready()))
        push.connect(addresses["output_address"])
        client = SyncMPClient(EngineConfig.create("echo"), client_addresses=addresses, client_count=3, client_index=2)
        with client:
            client.add_request(request())
            message = dealer.recv_multipart()
            assert msgspec.msgpack.decode(message[1])[11] == 2  # C-42
            dealer.close(linger=0)
            push.close(linger=0)


def test_two_clients_in_one_process_do_not_meet() -> None:
    with mock_face("sync") as (one, engine_one), mock_face("asyncio") as (two, engine_two):
        one.add_request(request("a"))
        two.add_request(request("a"))
        engine_one.send_outputs([output("a", [1])])
        engine_two.send_outputs([output("a", [2])])
        assert one.outputs(1)[0].new_token_ids == [1]
        assert two.outputs(1)[0].new_token_ids == [2]
        one.client.shutdown()
        engine_two.send_outputs([output("a", [3])])
        assert two.outputs(1)[0].new_token_ids == [3]


def test_a_failed_constructor_leaves_a_repr_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 10 of the style guide: a repr never raises; debuggers and pytest show half-made objects."""
    seen: list[str] = []

    def broken(self: SyncMPClient, *args: Any) -> None:
        seen.append(repr(self))
        raise ZeroDivisionError

    monkeypatch.setattr(SyncMPClient, "_start", broken)
    with pytest.raises(ZeroDivisionError):
        make_client("sync", EngineConfig.create("echo"))
    assert seen == ["<SyncMPClient engine=0 ready live=0>"]
