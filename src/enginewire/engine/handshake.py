"""The engine's half of start-up: HELLO, INIT, READY on the handshake socket, and the ready response (protocol B)."""

from __future__ import annotations

import os
import time
from typing import Final, Literal

import msgspec
import zmq
from msgspec import UNSET, UnsetType

from enginewire._version import __version__
from enginewire.engine.core import EngineCore
from enginewire.errors import DecodeError, EngineStartupError
from enginewire.transport.peers import ConnectionWatch
from enginewire.transport.sockets import connect_dealer
from enginewire.wire import v0_32
from enginewire.wire.capabilities import EngineInfo
from enginewire.wire.codec import MsgpackDecoder
from enginewire.wire.frames import engine_identity
from enginewire.wire.handshake import (
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    FrontendInfo,
    HandshakeMessage,
)
from enginewire.wire.profile import V0_25, V0_32, WireProfile

INIT_TIMEOUT_S: Final = 300.0
"""How long a frontend may take to answer HELLO. The reference's engines wait as long."""

LINGER_MS: Final = 5000
"""For READY to leave after the socket is closed."""

SIGNAL_CHECK_MS: Final = 500
"""How often waiting is interrupted: a signal that comes just before it begins does not end it."""

MAX_INIT_BYTES: Final = 1 << 20
"""Room for thousands of addresses."""


class Handshake:
    """A conversation with the frontend or launcher at ``address``."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, engine_index: int, *, local: bool, headless: bool
    ) -> None:
        self._address = address
        self._engine_index = engine_index
        self._local = local
        self._headless = headless
        try:
            self._socket = connect_dealer(context, address, engine_identity(engine_index), MAX_INIT_BYTES)
        except OSError as exc:
            raise self._error(f"the handshake failed: {exc}") from exc
        self._watch: ConnectionWatch | None = ConnectionWatch(self._socket)
        """Until INIT has come; nobody would read it afterwards."""
        self._was_cut_off = False
        """Since it was connected last. What is said before it is connected at all is kept by the socket."""

    def hello(self, timeout_s: float = INIT_TIMEOUT_S) -> EngineHandshakeMetadata:
        """Say HELLO and wait for INIT: whom to connect to, and what ranks in lock-step have to know of each other.

        HELLO is said again to whoever answers at the address after the first one is gone.

        Raises:
            EngineStartupError: no answer in time, or one that cannot be followed, or a refusal.
        """
        self._say("HELLO")
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(SIGNAL_CHECK_MS):
            for is_connected in self._watch.changes() if self._watch is not None else ():
                # HELLO, or the answer to it, died with the frontend. Not before there is another: what is said to a
                # connection that is just being lost may be lost with it.
                if is_connected and self._was_cut_off:
                    self._say("HELLO")
                self._was_cut_off = not is_connected
            if time.monotonic() >= deadline:
                raise self._error(f"no response from the frontend at {self._address} within {timeout_s:g} s")
        self._end_watch()
        frames = self._socket.recv_multipart()
        try:
            init = MsgpackDecoder(EngineHandshakeMetadata).decode(frames[-1:])
        except DecodeError as exc:
            raise self._error(f"the frontend's INIT message: {exc}") from exc
        if isinstance(init.enginewire, FrontendInfo) and init.enginewire.refusal is not None:
            raise self._error(f"the frontend at {self._address} refuses this engine: {init.enginewire.refusal}")
        addresses = init.addresses
        if (addresses.coordinator_input is None) is not (addresses.coordinator_output is None):
            raise self._error("INIT must give both addresses of the coordinator, or none; got one")
        if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
            raise self._error(
                "INIT must give as many input as output addresses, at least one; "
                f"got {len(addresses.inputs)} and {len(addresses.outputs)}"
            )
        return init

    def ready(self, parallel_config_hash: str | UnsetType = UNSET) -> None:
        """Say READY, ranks in lock-step with the hash of their configuration. The last word on this socket."""
        self._say("READY", parallel_config_hash)
        self._socket.close(LINGER_MS)

    def close(self) -> None:
        """Close without another word. Idempotent."""
        self._end_watch()
        self._socket.close(0)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.monitor.close()
            self._watch = None

    def _say(self, status: Literal["HELLO", "READY"], parallel_config_hash: str | UnsetType = UNSET) -> None:
        message = HandshakeMessage(
            status=status,
            local=self._local,
            headless=self._headless,
            parallel_config_hash=parallel_config_hash,
            enginewire=__version__ if status == "HELLO" else UNSET,
        )
        self._socket.send(msgspec.msgpack.encode(message))

    def _error(self, message: str) -> EngineStartupError:
        return EngineStartupError(message, stage="hello", engine_index=self._engine_index)


def ready_response(
    core: EngineCore,
    executor_name: str,
    engine_index: int,
    addresses: EngineZmqAddresses,
    told: WireProfile | None,
    num_ranks: int = 1,
) -> bytes:
    """Make the message that tells a frontend what the engine turned out to be.

    Without a ``told`` layout it has every key of both versions: frontends of 0.25 ignore what they do not know.
    ``num_ranks`` counts those in lock-step with this one, itself included.
    """
    capacity = core.capacity
    capabilities = core.capabilities
    tokens = capacity.num_gpu_blocks * capacity.block_size
    profile = told or V0_32
    common = EngineCoreReadyResponse(
        max_model_len=core.max_model_len,
        num_gpu_blocks=capacity.num_gpu_blocks,
        block_size=capacity.block_size,
        dp_stats_address=addresses.frontend_stats_publish_address,
        dtype=capacity.dtype,
        vllm_version=profile.vllm_version,
        data_parallel_size=num_ranks,
        kv_cache_size_tokens=tokens or None,
        kv_cache_max_concurrency=tokens / core.max_model_len if tokens else None,
        enginewire=EngineInfo(
            version=__version__,
            executor=executor_name,
            vocab_size=capacity.vocab_size,
            wire_version=None if told is None else told.vllm_version,
            capabilities=capabilities,
        ),
    )
    if profile is V0_25:
        return msgspec.msgpack.encode(common)
    response = v0_32.EngineCoreReadyResponse(
        **msgspec.structs.asdict(common),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=engine_index,
        max_num_seqs=core.config.max_num_seqs,
        max_num_batched_tokens=max(core.config.max_num_seqs, core.max_model_len),
        instance_id=os.urandom(16).hex(),
        supports_lora=capabilities.lora,
        max_loras=int(capabilities.lora),
        enable_sleep_mode=bool(capabilities.sleep_levels),
    )
    return msgspec.msgpack.encode(response)
