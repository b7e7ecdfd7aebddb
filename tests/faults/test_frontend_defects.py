"""The frontend's defects of the reference, one by one, tried against our clients from bare sockets.

Protocol section L, defects 16 to 28, 36 and 37. The engines here are ZeroMQ sockets and msgpack values.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from raw_engine import ABORT, ADD, READY_0_25, UTILITY, RawEngine, pack, receive, unpack
from tcp_proxy import TcpProxy

from client_harness import PATIENCE_S, Face, make_client, mock_config, mp_client, request
from enginewire import LLM, EngineDeadError, EngineGenerateError, FinishReason, SamplingParams
from enginewire.errors import EngineClientError, EngineStartupTimeout, EngineUnavailableError, UtilityCallError
from enginewire.testing import free_tcp_port, wait_until

KINDS = ("sync", "asyncio")


@contextlib.contextmanager
def talking(
    kind: str, count: int = 1, through: Callable[[str], str] = lambda address: address, **settings: Any
) -> Iterator[tuple[Face, list[RawEngine]]]:
    """Put raw engines behind a client."""
    port = free_tcp_port()
    if count > 1:
        settings["data_parallel_size"] = count
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(RawEngine(port, index, through)) for index in range(count)]
        threads = [threading.Thread(target=engine.start, name="raw-engine") for engine in engines]
        for thread in threads:
            thread.start()
        face = Face(kind, lambda: make_client(kind, mock_config(port, **settings)))
        stack.callback(face.close)
        for thread in threads:
            thread.join()
        yield face, engines


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, RawEngine]]:
    """A client and a raw engine."""
    with talking(request.param) as (face, (engine,)):
        yield face, engine


def assert_serves(face: Face, engine: RawEngine, request_id: str = "proof") -> None:
    """Show that a request and a call still go through."""
    face.add_request(request(request_id, max_tokens=1))
    assert engine.next(ADD)[0] == request_id
    engine.token(request_id, 42, finish_reason=1)
    (got,) = face.outputs(1)
    assert (got.request_id, got.new_token_ids) == (request_id, [42])
    call = face.start("call_utility", "is_sleeping")
    engine.answer(engine.next(UTILITY, method="is_sleeping"), False)
    assert call.result(PATIENCE_S) is False


def answer_pings_until_ready(face: Face, engine: RawEngine) -> None:
    """Have an engine that is back show that it is there."""

    def is_ready() -> bool:
        while engine.input.poll(0):
            kind, payload = receive(engine.input)
            if kind == UTILITY:
                engine.answer(unpack(payload), False)
        return is_serving(face)

    wait_until(is_ready, PATIENCE_S, "return")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_wait_when_the_engine_goes_are_failed_and_new_ones_refused(kind: str) -> None:
    """Defect 16: the reference's callers wait for ever."""
    with talking(kind, engine_return_timeout_s=0) as (face, (engine,)):
        call = face.start("call_utility", "is_sleeping")
        engine.next(UTILITY, method="is_sleeping")
        engine.disconnect()
        with pytest.raises(EngineClientError, match="connection"):
            call.result(PATIENCE_S)
        with pytest.raises(EngineDeadError, match="connection"):
            face.call_utility("is_sleeping")


@pytest.mark.parametrize("call_id", [0, 12345, 2**64 - 1, -1, -7])
def test_an_answer_to_no_call_ends_nothing(pair: tuple[Face, RawEngine], call_id: int) -> None:
    """Defect 17: it ended the reference's receiver."""
    face, engine = pair
    engine.send(utility=[call_id, None, [None, True]])
    engine.send(utility=[call_id, "no", None])
    assert_serves(face, engine)


def test_an_answer_to_a_call_that_was_given_up_ends_nothing(pair: tuple[Face, RawEngine]) -> None:
    """Defect 18: with a thread's future it ended the reference's receiver. Defect 25: the caller's own limit."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping", timeout=0.05)
    late = engine.next(UTILITY, method="is_sleeping")
    with pytest.raises(TimeoutError):
        call.result(PATIENCE_S)
    engine.answer(late, True)
    assert_serves(face, engine)


def test_an_answer_to_a_cancelled_task_ends_nothing() -> None:
    """Defect 18."""
    with talking("asyncio") as (face, (engine,)):
        assert face.loop is not None

        async def cancelled() -> None:
            task = asyncio.ensure_future(face.client.call_utility_async("is_sleeping"))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        face.loop.run(cancelled())
        engine.answer(engine.next(UTILITY, method="is_sleeping"), True)
        assert_serves(face, engine)


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"",
        pack(7),
        pack({"engine_index": 0}),
        pack([0, 3]),
        pack([0, [[5, [1]]]]),
        b"\x91" * 3000 + b"\x90",
        b"ENGINE_CORE_DEAD?",
    ],
    ids=["not msgpack", "empty", "int", "map", "no list", "no id", "deep", "nearly a marker"],
)
def test_a_message_that_is_none_ends_nothing(pair: tuple[Face, RawEngine], message: bytes) -> None:
    """Defect 19: any undecodable output ended the reference's receiver, and all requests with it."""
    face, engine = pair
    face.add_request(request("running", max_tokens=2))
    assert engine.next(ADD)[0] == "running"
    engine.token("running", 1)
    engine.output.send(message)
    engine.token("running", 2, finish_reason=1)
    assert [it.new_token_ids for it in face.outputs(2)] == [[1], [2]]
    assert_serves(face, engine)


@pytest.mark.parametrize(
    "result",
    [
        [["builtins", "bool"], True],
        [None, msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'true'\ntR.")],
        [None, [{"a": msgspec.msgpack.Ext(2, b"")}]],
        [None],
        7,
    ],
    ids=["typeinfo", "pickle", "cloudpickle inside", "one element", "no pair"],
)
def test_a_result_that_cannot_be_taken_fails_its_call_only(pair: tuple[Face, RawEngine], result: Any) -> None:
    """Defect 19: a result with typeinfo ended the reference's receiver."""
    face, engine = pair
    call = face.start("call_utility", "is_sleeping")
    engine.send(utility=[engine.next(UTILITY, method="is_sleeping")[1], None, result])
    with pytest.raises(UtilityCallError):
        call.result(PATIENCE_S)
    assert_serves(face, engine)


def test_an_output_that_cannot_be_read_fails_its_request_only(pair: tuple[Face, RawEngine]) -> None:
    """Defect 19."""
    face, engine = pair
    for request_id in ("bad", "good"):
        face.add_request(request(request_id, max_tokens=1))
        engine.next(ADD)
    tail: list[Any] = [None, None, None, 1, None, None, None, None, None, None, 0]
    engine.send([["bad", "no tokens", *tail], ["good", [5], *tail]])
    outputs = {it.request_id: it for it in face.outputs(2)}
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["good"].new_token_ids == [5]
    assert_serves(face, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_ready_responses_of_strangers_and_repeated_ones_do_not_end_start_up(kind: str) -> None:
    """Defect 20: both were a KeyError during the reference's start-up."""
    port = free_tcp_port()
    with RawEngine(port) as engine:

        def start() -> None:
            engine.say_hello()
            stranger = engine.connected(zmq.DEALER, engine.addresses["inputs"][0], b"\7\0")
            stranger.send(pack(READY_0_25))
            for length in (512, 256):
                engine.input.send(pack(READY_0_25 | {"max_model_len": length}))
            engine.say("READY")

        thread = threading.Thread(target=start, name="raw-engine")
        thread.start()
        face = Face(kind, lambda: make_client(kind, mock_config(port)))
        try:
            thread.join()
            wait_until(lambda: face.config.max_model_len == 256, PATIENCE_S, "the second response's turn")
            answer_pings_until_ready(face, engine)  # if it was read after start-up
            assert_serves(face, engine)
        finally:
            face.close()


def test_messages_on_the_input_socket_are_read_after_start_up(pair: tuple[Face, RawEngine]) -> None:
    """Defects 20 and 21: nobody in the reference reads it any more."""
    face, engine = pair
    stranger = engine.connected(zmq.DEALER, engine.addresses["inputs"][0], b"stranger")
    stranger.send_multipart([b"what", b"is", b"this"])
    engine.input.send(b"\xc1")
    wait_until(lambda: mp_client(face).inbox.dropped == 2, PATIENCE_S, "dropping of both")
    assert_serves(face, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_engine_is_taken_back(kind: str) -> None:
    """Defect 21: a restarted engine is not reachable for the reference."""
    with talking(kind) as (face, (engine,)):
        face.add_request(request("old"))
        engine.next(ADD)
        engine.disconnect()
        (failed,) = face.outputs(1)
        assert failed.finish_reason is FinishReason.ERROR
        assert str(failed.stop_reason).startswith("engine_lost: engine 0: ")
        with pytest.raises(EngineUnavailableError, match="engine 0"):
            face.add_request(request("refused"))
        old_addresses = engine.addresses
        engine.start()
        wait_until(lambda: is_serving(face), PATIENCE_S, "return")
        assert engine.addresses["inputs"] != old_addresses["inputs"]
        assert_serves(face, engine)


def succeeded(engine: RawEngine, *, has_output: bool = True) -> list[zmq.Socket[bytes]]:
    """Have another process take an engine's place on its link; return the former's sockets, which are still open."""
    former = [engine.input, engine.output]
    engine.input = engine.connected(zmq.DEALER, engine.addresses["inputs"][0])
    if has_output:
        engine.output = engine.connected(zmq.PUSH, engine.addresses["outputs"][0])
    engine.input.send(pack(READY_0_25))
    return former


def end_seen(face: Face, *sockets: zmq.Socket[bytes]) -> None:
    """Close sockets, and have the client see that their connections have ended."""
    link = mp_client(face).engines[0].link
    count = link.num_closed + len(sockets)
    for each in sockets:
        each.close(0)
    wait_until(lambda: link.num_closed == count, PATIENCE_S, "their end")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_former_of_an_engine_that_says_ready_again_leaves_behind_is_no_loss(kind: str) -> None:
    """Defect 21: the end of its former process's connections may be seen after the new ones.

    The engine was taken back, and was lost again with what it had got by then.
    """
    with talking(kind) as (face, (engine,)):
        face.add_request(request("forgotten"))
        engine.next(ADD)
        former = succeeded(engine)
        (failed,) = face.outputs(1)
        assert (failed.request_id, failed.finish_reason) == ("forgotten", FinishReason.ERROR)
        assert failed.stop_reason == "engine_lost: engine 0: it was restarted"
        answer_pings_until_ready(face, engine)
        face.add_request(request("running"))
        assert engine.next(ADD)[0] == "running"
        end_seen(face, *former)
        engine.token("running", 1, finish_reason=0)
        assert [(it.request_id, it.new_token_ids) for it in face.outputs(1)] == [("running", [1])]
        assert_serves(face, engine)
        assert face.client.engine_statuses()[0].num_deaths == 1


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("order", ["while the former's are open", "after the former's", "connected late", "no other"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_has_said_ready_again_is_watched_as_before(kind: str, order: str, which: str) -> None:
    """Defects 21, 22 and 37: each of its connections is, whatever there was before, and in whatever order."""
    with talking(kind) as (face, (engine,)):
        former: list[zmq.Socket[bytes]] = []
        if order == "no other":  # the same process says it once more
            engine.input.send(pack(READY_0_25))
        elif order == "connected late":
            end_seen(face, *succeeded(engine, has_output=False))
            engine.output = engine.connected(zmq.PUSH, engine.addresses["outputs"][0])
        else:
            former = succeeded(engine)
        wait_until(lambda: face.client.engine_statuses()[0].num_deaths == 1, PATIENCE_S, "its being registered")
        answer_pings_until_ready(face, engine)
        if order == "after the former's":
            end_seen(face, *former)
        face.add_request(request("cut off"))
        assert engine.next(ADD)[0] == "cut off"
        end_seen(face, engine.input if which == "input" else engine.output)
        if which == "output":  # as ZeroMQ does by itself
            engine.output = engine.connected(zmq.PUSH, engine.addresses["outputs"][0])
            engine.token("cut off", 5, finish_reason=0)
        (failed,) = face.outputs(1)
        assert (failed.request_id, failed.finish_reason) == ("cut off", FinishReason.ERROR)
        assert str(failed.stop_reason).startswith("engine_lost: engine 0: the connection to it was lost")
        assert face.client.engine_statuses()[0].num_deaths == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_started_twice_is_refused_and_the_first_goes_on(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Defect 21, turned around: a newcomer does not take a living engine's identity."""
    with talking(kind) as (face, (engine,)), RawEngine(face.config.data_parallel_rpc_port) as newcomer:
        newcomer.say("HELLO")
        engine.answer(engine.next(UTILITY), False)
        wait_until(lambda: "started twice" in caplog.text, PATIENCE_S, "an error in the log")
        assert not newcomer.handshake.poll(0)
        assert_serves(face, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_connection_fails_what_ran_there_at_once(kind: str) -> None:
    """Defect 22: the reference never notices; requests hang."""
    with talking(kind) as (face, (engine,)):
        face.add_request(request("r"))
        engine.next(ADD)
        began = time.monotonic()
        engine.disconnect()
        (failed,) = face.outputs(1)
        assert failed.finish_reason is FinishReason.ERROR
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_host_is_noticed_by_heartbeat_and_taken_back_when_it_speaks(kind: str) -> None:
    """Defect 22: a stopped process answers no heartbeat, as a host that is gone."""
    port = free_tcp_port()
    program = [sys.executable, str(Path(__file__).with_name("raw_engine.py")), str(port)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as engine:
        try:
            config = mock_config(port, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
            face = Face(kind, lambda: make_client(kind, config))
            try:
                face.add_request(request("before"))
                assert face.outputs(4)[-1].finish_reason is FinishReason.LENGTH
                engine.send_signal(signal.SIGSTOP)
                face.add_request(request("lost"))
                (failed,) = face.outputs(1)
                assert str(failed.stop_reason).startswith("engine_lost: engine 0: ")
                engine.send_signal(signal.SIGCONT)
                wait_until(lambda: is_serving(face), PATIENCE_S, "return")
                face.add_request(request("after"))
                outputs = face.outputs(4)
                assert {it.request_id for it in outputs} == {"after"}, "late outputs of the lost one are discarded"
            finally:
                face.close()
        finally:
            engine.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_restarts_the_limit_of_start_up(kind: str) -> None:
    """Defect 23: the reference's limit starts anew at each message, and HELLO has none."""
    port = free_tcp_port()
    is_over = threading.Event()
    with RawEngine(port) as engine:

        def talk() -> None:
            engine.say_hello()
            while not is_over.wait(0.05):
                engine.input.send(pack(READY_0_25))  # and never READY

        thread = threading.Thread(target=talk, name="raw-engine")
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(EngineStartupTimeout, match="not ready within 1 s: engine 0"):
                Face(kind, lambda: make_client(kind, mock_config(port, ready_timeout_s=1.0)))
        finally:
            is_over.set()
            thread.join()
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_one_of_two_engines_fails_is_reported_with_its_index(kind: str) -> None:
    """Defect 24: the reference loses the other's result, or returns the first one's whatever the second says."""
    with talking(kind, 2) as (face, (zero, one)):
        call = face.start("call_utility", "reset_prefix_cache", False, False)
        zero.answer(zero.next(UTILITY, method="reset_prefix_cache"), True)
        one.fail(one.next(UTILITY, method="reset_prefix_cache"), "busy")
        with pytest.raises(UtilityCallError, match="busy") as caught:
            call.result(PATIENCE_S)
        assert caught.value.engine_index == 1
        for answers in ((True, True), (True, False)):
            call = face.start("reset_prefix_cache")
            for engine, answer in zip((zero, one), answers, strict=True):
                engine.answer(engine.next(UTILITY, method="reset_prefix_cache"), answer)
            assert call.result(PATIENCE_S) is all(answers)
        call = face.start("is_sleeping")
        for engine, answer in ((zero, True), (one, False)):
            engine.answer(engine.next(UTILITY, method="is_sleeping"), answer)
        with pytest.raises(EngineClientError, match="agree"):
            call.result(PATIENCE_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_message_of_the_coordinator_does_not_end_listening(kind: str) -> None:
    """Defects 9 and 26: the reference's reader ends in silence, and engines that rest are not woken any more."""
    port = free_tcp_port()
    with RawEngine(port, index=1) as engine, engine.context.socket(zmq.XPUB) as coordinator:
        coordinator.linger = 0
        address = f"tcp://127.0.0.1:{free_tcp_port()}"
        coordinator.bind(address)
        ready = READY_0_25 | {"data_parallel_size": 2, "dp_stats_address": address}
        thread = threading.Thread(target=engine.start, args=(ready,), name="raw-engine")
        thread.start()
        settings = {"data_parallel_size": 2, "data_parallel_external_lb": True, "data_parallel_rank": 1}
        face = Face(kind, lambda: make_client(kind, mock_config(port, **settings)))
        try:
            thread.join()
            assert receive(coordinator) == [b"\1"]
            for broken in (b"", b"\xc1", pack(7), pack([[["x"]], 0, False]), pack([None, "x", 0]), pack([[], 3])):
                coordinator.send(broken)
            coordinator.send(pack([[[0, 0], [0, 0]], 5, False]))
            # Told of wave 5, it asks for it to begin, by rank and not by identity.
            face.add_request(request("r0"))
            wave = engine.next(ADD)[12]
            assert unpack(receive(coordinator)[0]) == [1, wave]
            wait_until(lambda: wave_of_next(face, engine) == 5, PATIENCE_S, "hearing of the wave")
        finally:
            face.close()


def wave_of_next(face: Face, engine: RawEngine) -> int:
    """Send a request; return the wave that it carries."""
    face.add_request(request(f"r{time.monotonic_ns()}"))
    wave: int = engine.next(ADD)[12]
    return wave


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_of_an_id_that_nobody_is_known_to_have_goes_to_all(kind: str) -> None:
    """Defect 27: the reference skips it."""
    with talking(kind, 2) as (face, engines):
        face.abort_requests(["unknown"])
        assert [engine.next(ABORT) for engine in engines] == [["unknown"], ["unknown"]]


def test_what_init_names_is_bound_before_it_is_told() -> None:
    """Defect 28: ports that are chosen, released and bound later may be somebody else's by then."""
    port = free_tcp_port()
    reached: list[str] = []
    with RawEngine(port) as engine:

        def start() -> None:
            engine.say_hello()
            for address in engine.addresses["inputs"] + engine.addresses["outputs"]:
                host, _, number = address.removeprefix("tcp://").rpartition(":")
                socket.create_connection((host, int(number)), timeout=PATIENCE_S).close()
                reached.append(address)
            engine.input.send(pack(READY_0_25))
            engine.say("READY")

        thread = threading.Thread(target=start, name="raw-engine")
        thread.start()
        face = Face("sync", lambda: make_client("sync", mock_config(port)))
        face.close()
        thread.join()
    assert len(reached) == 2


def test_a_message_to_an_engine_that_is_gone_is_an_error(pair: tuple[Face, RawEngine]) -> None:
    """Defect 36: the reference's is dropped without a word."""
    face, engine = pair
    engine.input.close(0)

    def is_refused() -> bool:
        try:
            face.abort_requests([])
            face.add_request(request(f"r{time.monotonic_ns()}"))
        except EngineUnavailableError as exc:
            return "engine 0" in str(exc)
        return False

    wait_until(is_refused, PATIENCE_S, "refusal of a request")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_connection_is_a_lost_request_and_not_a_short_one(kind: str) -> None:
    """Defect 37: the reference's request ends normally with too few tokens.

    The engine does not notice: its sockets connect again after 0.1 s, and what it sends meanwhile arrives then.
    """
    with contextlib.ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def through(address: str) -> str:
            proxies.append(stack.enter_context(TcpProxy(address)))
            return proxies[-1].address

        face, (engine,) = stack.enter_context(talking(kind, through=through))
        face.add_request(request("r", max_tokens=5))
        engine.next(ADD)
        engine.token("r", 1)
        assert face.outputs(1)[0].new_token_ids == [1]
        for proxy in proxies:
            proxy.cut()
        for token in (3, 4):  # 2 was lost with the connection
            engine.token("r", token)
        engine.token("r", 5, finish_reason=1)
        outputs = face.outputs(1)
        assert [it.finish_reason for it in outputs] == [FinishReason.ERROR]
        assert str(outputs[0].stop_reason).startswith("engine_lost: ")
        aborted: list[object] = []

        def is_back() -> bool:
            while engine.input.poll(0):
                kind, payload = receive(engine.input)
                if kind == UTILITY:
                    engine.answer(unpack(payload), False)
                elif kind == ABORT:
                    aborted.append(unpack(payload))
            return is_serving(face)

        wait_until(is_back, PATIENCE_S, "return")
        assert aborted == [["r"]], "the engine is told before it gets new requests"
        assert_serves(face, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_rests_while_its_engine_is_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is one sign, and not one at every look."""
    with talking(kind) as (face, (engine,)):
        face.add_request(request("r"))
        engine.next(ADD)
        engine.disconnect()
        assert face.outputs(1)[0].finish_reason == FinishReason.ERROR
        lookout, looks = face.client.lookout, list[float]()
        look = lookout.look

        def noted(now: float) -> list[Any]:
            looks.append(now)
            return look(now)

        monkeypatch.setattr(lookout, "look", noted)
        wait_until(lambda: len(looks) >= 8, PATIENCE_S, "some looks")
        assert looks[7] - looks[0] > lookout.interval_s


class NoSigns:
    """Stands in for a poll object, and has nothing to say before it is told to."""

    def __init__(self, may_return: threading.Event) -> None:
        self._may_return = may_return

    def poll(self, _: float) -> list[object]:
        """Wait."""
        self._may_return.wait(PATIENCE_S)
        return []


@pytest.mark.parametrize("who", ["loop", "receiver", "its signs"])
def test_a_gap_is_noticed_by_a_client_that_stood_still_meanwhile(who: str) -> None:
    """Defect 37: the engine is connected again and has sent more before anybody sees that the connection was lost."""
    with contextlib.ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def through(address: str) -> str:
            proxies.append(stack.enter_context(TcpProxy(address)))
            return proxies[-1].address

        kind = "asyncio" if who == "loop" else "sync"
        face, (engine,) = stack.enter_context(talking(kind, through=through))
        face.add_request(request("cut-off", max_tokens=5))
        engine.next(ADD)
        receiver, may_go_on = face.client._receiver, threading.Event()
        still = stack.enter_context(contextlib.ExitStack())
        still.callback(may_go_on.set)
        if who == "its signs":
            receiver._signs = NoSigns(may_go_on)
        first = face.start("get_output")
        if who == "its signs":
            wait_until(lambda: receiver._num_followers, PATIENCE_S, "the caller to wait")
        engine.token("cut-off", 1)
        assert first.result(PATIENCE_S).outputs[0].new_token_ids == [1]

        if face.loop is not None:
            face.loop.loop.call_soon_threadsafe(may_go_on.wait, PATIENCE_S)
        elif who == "receiver":
            still.enter_context(face.client.resources.send_lock)
        else:
            wait_until(lambda: receiver._reader is None, PATIENCE_S, "the thread to leave receiving to callers")
        for proxy in proxies:
            proxy.cut()
        # Before that, more than 2 would be lost with the connection.
        wait_until(lambda: all(proxy.is_connected for proxy in proxies), PATIENCE_S, "another connection")
        for token in (3, 4):
            engine.token("cut-off", token)
        engine.token("cut-off", 5, finish_reason=1)
        wait_until(
            lambda: any(proxy.passed_on.count(b"cut-off") == 3 for proxy in proxies), PATIENCE_S, "the rest to arrive"
        )
        rest = face.start("get_output")
        if who == "its signs":
            wait_until(lambda: receiver._is_asked, PATIENCE_S, "the caller to leave receiving to the thread")
        still.close()
        outputs = rest.result(PATIENCE_S).outputs
        assert [(it.new_token_ids, it.finish_reason) for it in outputs] == [([], FinishReason.ERROR)]


def test_a_request_that_ends_by_length_too_early_has_lost_outputs() -> None:
    """Defect 37: a gap that nobody noticed is an error, not a short result; an early end for another reason is none."""
    port = free_tcp_port()
    with RawEngine(port) as engine:

        def answer() -> None:
            engine.start()
            for finish_reason in (1, 0):
                request_id = engine.next(ADD)[0]
                engine.token(request_id, 7)
                engine.token(request_id, 8, finish_reason=finish_reason)

        thread = threading.Thread(target=answer, name="raw-engine")
        thread.start()
        with LLM("echo", data_parallel_size_local=0, data_parallel_rpc_port=port) as llm:
            five = SamplingParams(max_tokens=5, temperature=0)
            with pytest.raises(EngineGenerateError, match="outputs were lost: it ended by length with 2 tokens"):
                llm.generate([[1, 2, 3]], five)
            (output,) = llm.generate([[1, 2, 3]], five)
            assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([7, 8], "stop")
        thread.join()


def is_serving(face: Face) -> bool:
    return [status.state for status in face.client.engine_statuses()] == ["ready"]
