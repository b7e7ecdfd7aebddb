"""``MockFrontend``: a frontend of raw ZeroMQ sockets, to drive one real engine process and see every byte it sends.

For tests of engines and executors, in one thread::

    with MockFrontend() as frontend:
        frontend.launch(EngineConfig.create("echo"))
        frontend.shake_hands()
        frontend.add("a", [1, 2, 3], max_tokens=4)
        assert frontend.wait_finished("a").finish_reason == FinishReason.LENGTH
        assert frontend.token_ids("a") == [1, 2, 3, 1]
        assert frontend.utility("is_sleeping") is False

Everything received is kept in ``messages``; the ``wait_…`` methods receive until what they wait for is there, under a
deadline.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import zmq

from enginewire.config import EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.testing.launched_engine import LaunchedEngine
from enginewire.testing.mock_coordinator import MockCoordinator
from enginewire.testing.ports import free_tcp_port
from enginewire.testing.waiting import wait_until
from enginewire.transport.sockets import bind_pull, bind_router, make_context
from enginewire.wire.codec import MsgpackEncoder, OutputsDecoder
from enginewire.wire.frames import ABORT, ADD, UTILITY, engine_identity, is_death_marker
from enginewire.wire.handshake import (
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    HandshakeMessage,
)
from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from enginewire.wire.profile import V0_25, WireProfile, decode_ready
from enginewire.wire.sampling import SamplingParams
from enginewire.wire.utility import utility_result

T = TypeVar("T")

TIMEOUT_S: Final = 10.0
MAX_FRAME_BYTES: Final = 1 << 30


class UtilityFailed(Exception):
    """A utility call failed; the text is the engine's, unchanged."""


class MockFrontend:
    """One or several frontends (``num_clients``) of one engine.

    Args:
        profiles: the layouts they speak, per client; the last one is also that of all further clients.
        host: for tcp sockets on free ports of it; ``None``: ipc.
        coordinator: whom INIT names.
        parallel_config: what INIT says.
    """

    def __init__(
        self,
        num_clients: int = 1,
        *,
        engine_index: int = 0,
        profiles: Sequence[WireProfile] = (V0_25,),
        host: str | None = None,
        coordinator: MockCoordinator | None = None,
        parallel_config: dict[str, Any] | None = None,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="ew-mock-")
        self.engine: LaunchedEngine | None = None
        self.ready: list[EngineCoreReadyResponse] = []
        """The ready response, per client."""
        self.ready_maps: list[dict[str, Any]] = []
        """The same as they came, every key."""
        self.messages: list[list[EngineCoreOutputs]] = [[] for _ in range(num_clients)]
        """Everything received, per client."""
        self.payloads: list[list[bytes]] = [[] for _ in range(num_clients)]
        """The payload frames of these messages, as they came."""
        self._by_request: list[dict[str, list[EngineCoreOutput]]] = [{} for _ in range(num_clients)]
        self.is_marked_dead = [False] * num_clients
        """Whether the death marker came, per client."""
        self._engine_index = engine_index
        self._identity = engine_identity(engine_index)
        self._context = make_context()
        self._encoder = MsgpackEncoder()
        self._profiles = [profiles[min(client, len(profiles) - 1)] for client in range(num_clients)]
        self._decoders = [OutputsDecoder(profile.received_outputs) for profile in self._profiles]
        self._call_ids = itertools.count(1)

        def place(name: str) -> str:  # not a port that the kernel gives out: it is to be bound again later
            return f"ipc://{self.folder}/{name}" if host is None else f"tcp://{host}:{free_tcp_port()}"

        self._handshake, self.handshake_address = self._bind(bind_router, place("handshake"))
        inputs = [self._bind(bind_router, place(f"in{client}")) for client in range(num_clients)]
        outputs = [self._bind(bind_pull, place(f"out{client}")) for client in range(num_clients)]
        self._inputs = [router for router, _ in inputs]
        self._outputs = [pull for pull, _ in outputs]
        self.addresses = EngineZmqAddresses(
            inputs=[address for _, address in inputs],
            outputs=[address for _, address in outputs],
            coordinator_input=None if coordinator is None else coordinator.input_address,
            coordinator_output=None if coordinator is None else coordinator.output_address,
        )
        self._parallel_config = parallel_config or {}

    def _bind(self, bind: Callable[..., tuple[zmq.Socket[bytes], str]], address: str) -> tuple[zmq.Socket[bytes], str]:
        return bind(self._context, address, MAX_FRAME_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the engine if it still runs, close everything, remove the folder."""
        if self.engine is not None:
            self.engine.close()
        for open_socket in (self._handshake, *self._inputs, *self._outputs):
            open_socket.close(0)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Start-up.

    def spec(self, config: EngineConfig, **fields: Any) -> EngineSpec:
        """Make the spec of an engine that reports here; ``fields`` are others of :class:`EngineSpec`."""
        fields.setdefault("engine_index", self._engine_index)
        fields.setdefault("log_stats", config.log_stats)
        fields.setdefault("handshake_address", self.handshake_address)
        return EngineSpec(config=config, **fields)

    def launch(self, config: EngineConfig, **fields: Any) -> LaunchedEngine:
        """Start an engine process."""
        self.engine = LaunchedEngine(self.spec(config, **fields), os.path.join(self.folder, "log"))
        return self.engine

    def expect_handshake(self, status: str, timeout_s: float = TIMEOUT_S) -> HandshakeMessage:
        """Wait for HELLO or READY."""
        frames = self._receive(self._handshake, timeout_s, status)
        assert frames[0] == self._identity, f"identity {frames[0]!r} said {status}"
        message = msgspec.msgpack.decode(frames[1], type=HandshakeMessage)
        assert message.status == status, f"{status} was expected, got {message.status}"
        return message

    def send_init(self, addresses: EngineZmqAddresses | None = None) -> None:
        """Answer HELLO."""
        init = EngineHandshakeMetadata(addresses=addresses or self.addresses, parallel_config=self._parallel_config)
        self._handshake.send_multipart([self._identity, msgspec.msgpack.encode(init)])

    def expect_ready_responses(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for the ready response on every input socket."""
        for router in self._inputs:
            frames = self._receive(router, timeout_s, "a ready response")
            self.ready.append(decode_ready(frames[1:])[1])
            self.ready_maps.append(msgspec.msgpack.decode(frames[1]))

    def shake_hands(self, timeout_s: float = TIMEOUT_S) -> None:
        """Do the whole start-up."""
        self.expect_handshake("HELLO", timeout_s)
        self.send_init()
        self.expect_ready_responses(timeout_s)
        self.expect_handshake("READY", timeout_s)

    def vanish(self, client_index: int = 0) -> None:
        """Close a client's sockets, as a frontend does that dies."""
        for open_socket in (self._inputs[client_index], self._outputs[client_index]):
            open_socket.close(0)

    def come_back(self, client_index: int = 0) -> None:
        """Bind a client's sockets where they were, as a frontend does that was started again; wait for the engine."""
        self._inputs[client_index] = self._bind_again(bind_router, self.addresses.inputs[client_index])
        self._outputs[client_index] = self._bind_again(bind_pull, self.addresses.outputs[client_index])
        call_id = wait_until(partial(self._try_to_call, client_index), TIMEOUT_S, "the engine's connection")
        assert call_id is not None
        self.wait_answer(call_id, client_index=client_index)

    def _bind_again(self, bind: Callable[..., tuple[zmq.Socket[bytes], str]], address: str) -> zmq.Socket[bytes]:
        def try_it() -> zmq.Socket[bytes] | None:
            try:
                return self._bind(bind, address)[0]
            except OSError:  # the socket that was there is closed in a thread of ZeroMQ's
                return None

        bound = wait_until(try_it, TIMEOUT_S, f"{address} being free")
        assert bound is not None
        return bound

    def _try_to_call(self, client_index: int) -> int | None:
        try:
            return self.call("is_sleeping", client_index=client_index)
        except zmq.ZMQError:  # the engine has not noticed yet
            return None

    def restart_handshake(self) -> None:
        """Bind the handshake socket anew, as a frontend does that was started again."""
        self._handshake.close(0)
        self._handshake = self._bind_again(bind_router, self.handshake_address)

    def speak(self, profile: WireProfile, client_index: int = 0) -> None:
        """Let a client be of another version from now on."""
        self._profiles[client_index] = profile
        self._decoders[client_index] = OutputsDecoder(profile.received_outputs)

    # Sending.

    def send(self, *frames: bytes | bytearray | memoryview, client_index: int = 0) -> None:
        """Send raw frames, the type byte first."""
        self._inputs[client_index].send_multipart([self._identity, *frames])

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        client_index: int = 0,
        priority: int = 0,
        current_wave: int = 0,
        **params: Any,
    ) -> None:
        """Send an ADD; ``params`` are those of :class:`SamplingParams`."""
        request = EngineCoreRequest(
            request_id,
            list(prompt_token_ids),
            sampling_params=SamplingParams(**params),
            client_index=client_index,
            priority=priority,
            current_wave=current_wave,
        )
        self.add_request(request, client_index=client_index)

    def add_request(self, request: EngineCoreRequest, *, client_index: int = 0) -> None:
        """Send an ADD as it is, but in the frontend's layout."""
        self.send(
            ADD, *self._encoder.encode(self._profiles[client_index].request_of(request)), client_index=client_index
        )

    def abort(self, *request_ids: str, client_index: int = 0) -> None:
        """Send an ABORT."""
        self.send(ABORT, *self._encoder.encode(request_ids), client_index=client_index)

    def call(self, method: str, *args: Any, client_index: int = 0) -> int:
        """Send a utility call and return its call id."""
        call_id = next(self._call_ids)
        self.send(UTILITY, *self._encoder.encode([client_index, call_id, method, args]), client_index=client_index)
        return call_id

    def utility(self, method: str, *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Call a utility and wait for its value. Raises :class:`UtilityFailed`."""
        answer = self.wait_answer(self.call(method, *args), timeout_s=timeout_s)
        if answer.failure_message is not None:
            raise UtilityFailed(answer.failure_message)
        return utility_result(answer)

    # What has come.

    def outputs_of(self, request_id: str, *, client_index: int = 0) -> list[EngineCoreOutput]:
        """Return the outputs of a request that have been received."""
        return self._by_request[client_index].get(request_id, [])

    def token_ids(self, request_id: str, *, client_index: int = 0) -> list[int]:
        """Return the tokens of a request that have been received."""
        outputs = self.outputs_of(request_id, client_index=client_index)
        return [token_id for output in outputs for token_id in output.new_token_ids]

    def forget(self) -> None:
        """Start over: nothing has been received."""
        for messages, payloads in zip(self.messages, self.payloads, strict=True):
            messages.clear()
            payloads.clear()
        for outputs in self._by_request:
            outputs.clear()

    # Waiting.

    def wait(self, probe: Callable[[], T | None], what: str, timeout_s: float = TIMEOUT_S, client_index: int = 0) -> T:
        """Receive until ``probe`` gives something else than ``None``.

        Raises:
            TimeoutError: it does not in time; says what did come.
        """
        deadline = time.monotonic() + timeout_s
        while (found := probe()) is None:
            if self.is_marked_dead[client_index]:
                raise RuntimeError(f"the engine sent the death marker before {what}")
            self.receive(max(0.0, deadline - time.monotonic()), what, client_index)
        return found

    def receive(self, timeout_s: float = TIMEOUT_S, what: str = "a message", client_index: int = 0) -> None:
        """Receive one message into ``messages``, or the death marker."""
        frames = self._receive(self._outputs[client_index], timeout_s, what)
        if is_death_marker(frames):
            self.is_marked_dead[client_index] = True
        else:
            message = self._decoders[client_index].decode(frames)
            self.messages[client_index].append(message)
            self.payloads[client_index].append(frames[0])
            for output in message.outputs:
                self._by_request[client_index].setdefault(output.request_id, []).append(output)

    def wait_tokens(self, request_id: str, count: int, *, client_index: int = 0) -> None:
        """Wait until a request has this many tokens."""

        def probe() -> bool | None:
            return len(self.token_ids(request_id, client_index=client_index)) >= count or None

        self.wait(probe, f"{count} tokens of {request_id}", client_index=client_index)

    def wait_finished(
        self, request_id: str, *, client_index: int = 0, timeout_s: float = TIMEOUT_S
    ) -> EngineCoreOutput:
        """Wait for the last output of a request."""

        def probe() -> EngineCoreOutput | None:
            outputs = self.outputs_of(request_id, client_index=client_index)
            return outputs[-1] if outputs and outputs[-1].finished else None

        return self.wait(probe, f"the end of {request_id}", timeout_s, client_index)

    def wait_answer(self, call_id: int, *, client_index: int = 0, timeout_s: float = TIMEOUT_S) -> UtilityOutput:
        """Wait for the answer to a utility call."""

        def probe() -> UtilityOutput | None:
            for message in self.messages[client_index]:
                if message.utility_output is not None and message.utility_output.call_id == call_id:
                    return message.utility_output
            return None

        return self.wait(probe, f"the answer to call {call_id}", timeout_s, client_index)

    def wait_death_marker(self, *, client_index: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Receive until the death marker."""
        deadline = time.monotonic() + timeout_s
        while not self.is_marked_dead[client_index]:
            self.receive(max(0.0, deadline - time.monotonic()), "the death marker", client_index)

    def receive_rest(self, *, client_index: int = 0) -> None:
        """Receive what is there already."""
        while self._outputs[client_index].poll(0):
            self.receive(0, client_index=client_index)

    def _receive(self, from_: zmq.Socket[bytes], timeout_s: float, what: str) -> list[bytes]:
        if not from_.poll(int(timeout_s * 1000)):
            log = self.engine.read_log() if self.engine is not None else ""
            raise TimeoutError(f"no {what} came in time; the engine's log:\n{log}")
        return from_.recv_multipart()
