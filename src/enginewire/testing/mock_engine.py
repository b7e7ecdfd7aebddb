"""``MockEngine``: the engine's end of the wire in the test's own process, over real ZeroMQ, without a model.

It starts like an engine that somebody launched elsewhere, and then does only what the test tells it::

    port = free_tcp_port()
    with MockEngine(f"tcp://127.0.0.1:{port}") as engine:
        config = EngineConfig.create("echo", data_parallel_size_local=0, data_parallel_rpc_port=port)
        client = EngineCoreClient.make_client(True, False, config, ...)
        client.add_request(request)
        assert engine.expect_add().request_id == request.request_id
        engine.send_outputs([EngineCoreOutput(request.request_id, [42])])

Start-up is a script, so that a test can break it anywhere::

    def ready_twice(engine: MockEngine) -> None:
        engine.send_hello()
        engine.expect_init()
        engine.connect()
        engine.send_ready_response()
        engine.send_ready_response()
        engine.send_ready()

    with MockEngine(address, startup=ready_twice) as engine: ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import msgspec
import zmq

from enginewire.testing.socket_thread import Handlers, SocketThread
from enginewire.wire import v0_32
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder, RequestDecoder
from enginewire.wire.frames import ABORT, ADD, ENGINE_CORE_DEAD, REQUEST_TYPES, UTILITY, Buffer, engine_identity
from enginewire.wire.handshake import EngineCoreReadyResponse, EngineHandshakeMetadata, HandshakeMessage
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, UtilityCall, utility_output
from enginewire.wire.profile import V0_25, V0_32, WireProfile

T = TypeVar("T")
SocketName = Literal["handshake", "input", "output"]

EXPECT_TIMEOUT_S: Final = 5.0
"""How long the ``expect_`` methods wait: on loopback an answer takes milliseconds, on a busy machine a second."""

LAST_WORD_LINGER_MS: Final = 1000
"""How long a message that precedes a close may take to leave. Without it ``die()`` could lose its marker."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message from a frontend.

    Attributes:
        kind: ``"ADD"``, ``"ABORT"``, ``"UTILITY"``, ``"START_DP_WAVE"``.
        message: :class:`EngineCoreRequest`, list of request ids, :class:`UtilityCall`; else the bare msgpack value.
        client_index: which frontend's socket it came from.
        frames: as they came, type byte first.
    """

    kind: str
    message: Any
    client_index: int
    frames: list[bytes]


def mock_ready(**changes: Any) -> EngineCoreReadyResponse:
    """Make a ready response with small, plausible figures; ``enginewire=EngineInfo(…)`` adds capabilities."""
    fields: dict[str, Any] = {
        "max_model_len": 1024,
        "num_gpu_blocks": 100,
        "block_size": 16,
        "dtype": "float32",
        "vllm_version": "0.25.1",
        "kv_cache_size_tokens": 1600,
        "kv_cache_max_concurrency": 1.5625,
    }
    return EngineCoreReadyResponse(**(fields | changes))


def mock_ready_0_32(**changes: Any) -> v0_32.EngineCoreReadyResponse:
    """Make a ready response of vLLM 0.32."""
    fields: dict[str, Any] = {
        "vllm_version": "0.32.0",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "instance_id": "mock",
        "supports_lora": False,
        "max_loras": 0,
    }
    return v0_32.EngineCoreReadyResponse(**(msgspec.structs.asdict(mock_ready()) | fields | changes))


class MockEngine:
    """A fake engine, driven by the test. A context manager; entering starts it and does not wait.

    Its methods may be called from any thread, from ``startup`` and from ``on_message``. Whatever goes wrong in its
    own threads (an undecodable message, an exception of ``on_message``) is raised by the next ``expect_`` call or by
    leaving the context.

    Args:
        handshake_address: where the frontend's handshake socket is or will be, e.g. ``"tcp://127.0.0.1:29550"``.
        engine_index: rank that it claims.
        identity: ZeroMQ identity, if not the rank's.
        local, headless: what HELLO and READY say; the defaults are those of an engine started elsewhere.
        startup: what it does at first, on a thread of its own; by default :meth:`start_up`.
        on_message: called on the engine's thread with each message, to answer at once: for asyncio tests, where the
            test itself must not block. The message is still recorded.
        zero_copy_threshold: bytes from which arrays of outputs get frames of their own.
        profile: the layout that it speaks.

    Attributes:
        answers_pings: answer a frontend that asks whether it lives (``is_scheduler_paused``) at once and by itself, as
            every sound engine does; such calls are counted in ``num_pings`` and not otherwise recorded. Turn it off for
            an engine that hangs.
    """

    def __init__(
        self,
        handshake_address: str,
        *,
        engine_index: int = 0,
        identity: bytes | None = None,
        local: bool = False,
        headless: bool = True,
        startup: Callable[[MockEngine], None] | None = None,
        on_message: Callable[[MockEngine, Received], None] | None = None,
        zero_copy_threshold: int = 256,
        profile: WireProfile = V0_25,
    ) -> None:
        self.engine_index = engine_index
        self.identity = engine_identity(engine_index) if identity is None else identity
        self.init: EngineHandshakeMetadata | None = None
        """The INIT that came, if any."""
        self.received: list[Received] = []
        """Every message, in order of arrival."""
        self._handshake_address = handshake_address
        self._flags = {"local": local, "headless": headless}
        self._startup = MockEngine.start_up if startup is None else startup
        self._on_message = on_message
        self._encoder = MsgpackEncoder(zero_copy_threshold=zero_copy_threshold)
        self.profile = profile
        self.answers_pings = True
        self.num_pings = 0
        self._request_decoder = RequestDecoder(profile.request)
        self._utility_decoder = MsgpackDecoder(UtilityCall)

        self._context = zmq.Context()
        self._handshake: zmq.Socket[bytes] | None = None
        self._inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []

        # Guards what follows: what the threads tell the test.
        self._news = threading.Condition()
        self._unclaimed: list[Received] = []
        self._failure: BaseException | None = None
        self._started = False
        self._closing = False
        name = f"mock-engine-{engine_index}"
        self._io = SocketThread(f"{name}-io", self._handlers, self._fail, lambda: self._close_sockets(0))
        self._startup_thread = threading.Thread(target=self._run_startup, name=f"{name}-startup", daemon=True)

    def __enter__(self) -> MockEngine:
        self._io.start()
        self._startup_thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if exc is None and self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the sockets, end and join the threads. Idempotent."""
        with self._news:
            already = self._closing
            self._closing = True
            self._news.notify_all()
        if already:
            return
        self._io.close()
        self._startup_thread.join()
        self._context.term()

    # Start-up, step by step.

    def start_up(self) -> None:
        """Do what a sound engine does: HELLO, INIT, connect, ready response, READY."""
        self.send_hello()
        self.expect_init(timeout_s=60)
        self.connect()
        self.send_ready_response()
        self.send_ready()

    def send_hello(self) -> None:
        """Say HELLO, on a fresh handshake socket if there is none."""
        self._send_status("HELLO")

    def expect_init(self, timeout_s: float = EXPECT_TIMEOUT_S) -> EngineHandshakeMetadata:
        """Wait for INIT and return it."""
        return self._wait(lambda: self.init, timeout_s, "INIT")

    def connect(self) -> None:
        """Connect to the inputs and outputs that INIT named."""
        init = self.init
        assert init is not None, "connect() before INIT came"
        self._on_io_thread(lambda: self._connect(init))

    def send_ready_response(
        self, ready: EngineCoreReadyResponse | Mapping[str, object] | None = None, *, client_index: int | None = None
    ) -> None:
        """Send the ready response to one frontend or to all; by default that of :func:`mock_ready`, in its layout."""
        if ready is None:
            ready = mock_ready_0_32() if self.profile is V0_32 else mock_ready()
        payload = msgspec.msgpack.encode(ready)
        indices = range(len(self._inputs)) if client_index is None else [client_index]
        for index in indices:
            self.send_raw([payload], to="input", client_index=index)

    def send_ready(self, *, parallel_config_hash: str | None = None) -> None:
        """Say READY and close the handshake socket."""
        self._send_status("READY", **({"parallel_config_hash": parallel_config_hash} if parallel_config_hash else {}))
        self._on_io_thread(self._close_handshake)

    def wait_started(self, timeout_s: float = EXPECT_TIMEOUT_S) -> None:
        """Wait until the start-up script has ended; raises what it raised."""
        self._wait(lambda: self._started or None, timeout_s, "the end of its start-up")

    # What the frontend sent.

    def expect_add(self, timeout_s: float = EXPECT_TIMEOUT_S) -> EngineCoreRequest:
        """Take the next ADD that no other call has taken."""
        request: EngineCoreRequest = self.expect("ADD", timeout_s).message
        return request

    def expect_abort(self, timeout_s: float = EXPECT_TIMEOUT_S) -> list[str]:
        """Take the request ids of the next ABORT."""
        request_ids: list[str] = self.expect("ABORT", timeout_s).message
        return request_ids

    def expect_utility(self, method: str | None = None, timeout_s: float = EXPECT_TIMEOUT_S) -> UtilityCall:
        """Take the next utility call, or the next one of this method."""
        call: UtilityCall = self.expect("UTILITY", timeout_s, lambda it: method in (None, it.message.method)).message
        return call

    def expect(
        self, kind: str, timeout_s: float = EXPECT_TIMEOUT_S, matches: Callable[[Received], bool] = lambda _: True
    ) -> Received:
        """Take the first message of this kind that ``matches`` and that no other call has taken.

        Raises:
            TimeoutError: none came; says what did.
        """

        def take() -> Received | None:
            for position, received in enumerate(self._unclaimed):
                if received.kind == kind and matches(received):
                    return self._unclaimed.pop(position)
            return None

        return self._wait(take, timeout_s, kind)

    # What it answers.

    def send_outputs(
        self, outputs: EngineCoreOutputs | Sequence[EngineCoreOutput], *, client_index: int = 0, **fields: Any
    ) -> None:
        """Send a message of outputs; ``fields`` are further ones of :class:`EngineCoreOutputs`."""
        if not isinstance(outputs, EngineCoreOutputs):
            outputs = EngineCoreOutputs(engine_index=self.engine_index, outputs=list(outputs), **fields)
        message = self.profile.outputs_of(outputs)
        self._on_io_thread(lambda: self._socket("output", client_index).send_multipart(self._encoder.encode(message)))

    def answer_utility(self, call: UtilityCall, value: object = None) -> None:
        """Answer a utility call with a value."""
        answer = utility_output(call.call_id, value)
        self.send_outputs([], client_index=call.client_index, utility_output=answer)

    def fail_utility(self, call: UtilityCall, message: str) -> None:
        """Answer a utility call with a failure."""
        answer = utility_output(call.call_id, failure_message=message)
        self.send_outputs([], client_index=call.client_index, utility_output=answer)

    def send_raw(self, frames: Sequence[Buffer], *, to: SocketName = "output", client_index: int = 0) -> None:
        """Send any frames on any of its sockets."""

        def send() -> None:
            self._socket(to, client_index).send_multipart(list(frames))

        self._on_io_thread(send)

    def die(self) -> None:
        """Send the death marker to every frontend and close everything: an engine whose main loop broke."""

        def last_word() -> None:
            for output in self._outputs:
                output.send(ENGINE_CORE_DEAD)
            self._close_sockets(LAST_WORD_LINGER_MS)

        self._on_io_thread(last_word)

    def stop_listening(self) -> None:
        """Close the input sockets: an engine that leaves in order. It can still send."""

        def stop() -> None:
            for input_ in self._inputs:
                input_.close(linger=0)
            self._inputs = []

        self._on_io_thread(stop)

    def vanish(self) -> None:
        """Close every socket without a word: an engine that was killed."""
        self._on_io_thread(lambda: self._close_sockets(0))

    def leave(self) -> None:
        """Close every socket once what was sent has left: an engine that ends in order."""
        self._on_io_thread(lambda: self._close_sockets(LAST_WORD_LINGER_MS))

    # Between the threads.

    def _wait(self, probe: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Wait until ``probe``, called with the lock held, gives something else than ``None``."""
        assert not self._io.is_current, "expect_ methods would block the engine's own thread"
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                if self._failure is not None:
                    raise self._failure
                if (found := probe()) is not None:
                    return found
                remaining = deadline - time.monotonic()
                if self._closing or remaining <= 0:
                    why = "was closed" if self._closing else f"waited {timeout_s:g} s"
                    kinds = ", ".join(received.kind for received in self._unclaimed) or "nothing"
                    raise TimeoutError(f"mock engine {self.engine_index} {why}; no {what} came, unclaimed: {kinds}")
                self._news.wait(remaining)

    def _on_io_thread(self, function: Callable[[], T]) -> T:
        """Run ``function`` where the sockets live, and return its result."""
        return self._io.run(function)

    def _fail(self, exc: BaseException) -> None:
        with self._news:
            self._failure = self._failure or exc
            self._news.notify_all()

    def _run_startup(self) -> None:
        try:
            self._startup(self)
        except Exception as exc:  # noqa: BLE001 - the test gets it
            if not self._closing:  # a half handshake is cut short by leaving the context
                self._fail(exc)
        with self._news:
            self._started = True
            self._news.notify_all()

    # The I/O thread.

    def _handlers(self) -> Handlers:
        handlers: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {
            input_: partial(self._received_message, client_index) for client_index, input_ in enumerate(self._inputs)
        }
        if self._handshake is not None:
            handlers[self._handshake] = self._received_init
        return handlers

    def _received_init(self, frames: list[bytes]) -> None:
        init = msgspec.msgpack.decode(frames[0], type=EngineHandshakeMetadata)
        with self._news:
            self.init = init
            self._news.notify_all()

    def _received_message(self, client_index: int, frames: list[bytes]) -> None:
        kind, payload = frames[0], frames[1:]
        message: Any
        if kind == ADD:
            message = self._request_decoder.decode(payload)
        elif kind == UTILITY:
            message = self._utility_decoder.decode(payload)
        elif kind == ABORT:
            message = msgspec.msgpack.decode(payload[0], type=list[str])
        else:
            message = msgspec.msgpack.decode(payload[0])
        if kind == UTILITY and message.method == "is_scheduler_paused":
            self.num_pings += 1
            if self.answers_pings:
                self.answer_utility(message, False)
            return
        received = Received(REQUEST_TYPES.get(kind, kind.hex()), message, client_index, frames)
        with self._news:
            self.received.append(received)
            self._unclaimed.append(received)
            self._news.notify_all()
        if self._on_message is not None:
            self._on_message(self, received)

    def _send_status(self, status: str, **more: str) -> None:
        message = msgspec.convert({"status": status, **self._flags, **more}, HandshakeMessage)

        def send() -> None:
            if self._handshake is None:
                self._handshake = self._new_socket(zmq.DEALER, self._handshake_address)
            self._handshake.send(msgspec.msgpack.encode(message))

        self._on_io_thread(send)

    def _connect(self, init: EngineHandshakeMetadata) -> None:
        self._inputs = [self._new_socket(zmq.DEALER, address) for address in init.addresses.inputs]
        self._outputs = [self._new_socket(zmq.PUSH, address) for address in init.addresses.outputs]

    def _new_socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket_: zmq.Socket[bytes] = self._context.socket(kind)
        socket_.linger = 0
        socket_.sndhwm = socket_.rcvhwm = 0
        socket_.reconnect_ivl = 10  # ms; the frontend may bind a moment later
        if kind == zmq.DEALER:
            socket_.identity = self.identity
        socket_.connect(address)
        return socket_

    def _socket(self, name: SocketName, client_index: int) -> zmq.Socket[bytes]:
        if name == "handshake":
            found = [] if self._handshake is None else [self._handshake]
            client_index = 0
        else:
            found = self._inputs if name == "input" else self._outputs
        if client_index >= len(found):
            raise RuntimeError(f"mock engine {self.engine_index} has no {name} socket for client {client_index}")
        return found[client_index]

    def _close_handshake(self) -> None:
        if self._handshake is not None:
            self._handshake.close(linger=LAST_WORD_LINGER_MS)
            self._handshake = None

    def _close_sockets(self, linger_ms: int) -> None:
        for socket_ in [*self._inputs, *self._outputs, *([self._handshake] if self._handshake else [])]:
            socket_.close(linger=linger_ms)
        self._handshake, self._inputs, self._outputs = None, [], []
