"""The start-up messages: HELLO, INIT, READY on the handshake socket, the ready response on the input socket.

All are maps in which every key is present. Source: protocol sections B.1 to B.5.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from enginewire.wire.capabilities import EngineInfo

MAX_HEARTBEAT_MS: Final = 2**31 - 1
HeartbeatMs = Annotated[int, Meta(ge=1, le=MAX_HEARTBEAT_MS)]


class HandshakeMessage(Struct, kw_only=True):
    """HELLO and READY, engine to frontend.

    Attributes:
        local: the engine was started by the process it is talking to.
        headless: it was started by a node that has no frontend.
        parallel_config_hash: with READY of lock-step (MoE) ranks only; 64 hex digits.
        enginewire: our own addition to HELLO: the version. Absent: a vLLM engine.
    """

    status: Literal["HELLO", "READY"]
    local: bool
    headless: bool
    parallel_config_hash: str | UnsetType = UNSET
    enginewire: str | UnsetType = UNSET


class EngineZmqAddresses(Struct, kw_only=True):
    """Where an engine connects to. Position in ``inputs`` and ``outputs`` is the client index."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class FrontendInfo(Struct, kw_only=True):
    """What a frontend of ours tells engines of ours alone.

    Attributes:
        heartbeat_ms: interval and time-out of the heartbeat that it has over tcp, and that engines are to have, too.
        refusal: why the engine gets no addresses; it is to end.
    """

    heartbeat_ms: tuple[HeartbeatMs, HeartbeatMs] | None = None
    refusal: str | None = None


class EngineHandshakeMetadata(Struct, kw_only=True):
    """INIT, frontend to engine.

    Attributes:
        parallel_config: empty unless the ranks run in lock-step.
        enginewire: our own addition, in the answer to a HELLO with the key of the same name.
    """

    addresses: EngineZmqAddresses
    parallel_config: dict[str, Any]
    enginewire: FrontendInfo | UnsetType = UNSET


class EngineCoreReadyResponse(Struct, kw_only=True):
    """What the engine turned out to be, sent on every input socket once its model is loaded.

    Attributes:
        max_model_len: tokens of prompt and output together; possibly less than was asked for.
        num_gpu_blocks: KV-cache blocks of this engine (the name is the field's; CPU blocks count too).
        block_size: tokens per block.
        dp_stats_address: echo of INIT's ``frontend_stats_publish_address``.
        world_size: tensor × pipeline parallel size of this rank.
        kv_cache_size_tokens: tokens the cache holds.
        kv_cache_max_concurrency: how many requests of ``max_model_len`` fit at once.
        enginewire: our own addition: version and capabilities. Absent: a vLLM engine, which can do everything.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None
    dtype: str
    vllm_version: str
    world_size: int = 1
    data_parallel_size: int = 1
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    enginewire: EngineInfo | UnsetType = UNSET
