"""``EngineConfig``: every setting of an engine and its client, validated once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from enginewire import envs
from enginewire.errors import ConfigError
from enginewire.wire.capabilities import EVERYTHING, Capabilities

MOST_ENGINES: Final = 1 << 16
"""A rank has two bytes on the wire (protocol A.1)."""

SchedulingPolicy = Literal["fcfs", "priority"]
Transport = Literal["auto", "ipc", "tcp"]
Failover = Literal["none", "resume", "exact"]
Backend = Literal["mp", "ray"]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(kw_only=True)
class EngineConfig:
    """Settings of an engine and of the client that drives it. Make one with :meth:`create`.

    Attributes:
        model: alias (``smollm2-135m``), path of a .gguf file or of a model folder, or ``echo``.
        executor: name under which an executor is registered (``openvino``, ``echo``, …) or ``module:Class``.
            Default: ``echo`` for the model ``echo``, otherwise ``openvino``.
        executor_options: for the executor, see its class.
        max_model_len: most tokens of prompt and output together; ``None``: what model and memory allow.
        max_num_seqs: most requests in the executor at once; the others wait.
        scheduling_policy: order of waiting requests: ``fcfs`` or ``priority`` (lower first, then arrival).
        log_stats: engines report scheduler statistics.
        forward_engine_log: pass on to stderr what a started engine prints; its tail is kept for errors anyway.
        ready_timeout_s: from launch to ready, one deadline. Environment: ``VLLM_ENGINE_READY_TIMEOUT_S``; 600.
        hello_timeout_s: from launch to the first word of a local engine process; it only has to start Python.
        shutdown_timeout_s: on shutdown, how long running requests may go on; 0 aborts them.
        terminate_timeout_s: how long an engine may take to leave after that, before it is killed.
        transport: ``auto``: ipc sockets, or tcp on loopback where those cannot be had.
        ipc_dir: folder for ipc sockets. Environment: ``VLLM_RPC_BASE_PATH``; the system's temporary folder.
        max_frame_bytes: larger frames are refused by the socket.
        max_frames: messages of more frames are dropped.
        zero_copy_threshold: arrays of at least this many bytes are sent in frames of their own, not copied.
        allow_pickle: pickle on the wire; whoever reaches a socket can then run code. Off.
        data_parallel_size: number of engines in the deployment.
        data_parallel_size_local: how many of them this node starts; 0: they are started elsewhere and report to
            ``tcp://data_parallel_address:data_parallel_rpc_port``.
        data_parallel_address, data_parallel_rpc_port: where the frontend binds for engines that are started elsewhere,
            and where those connect to.
        data_parallel_rank: external load balancing: the one rank this client manages.
        data_parallel_start_rank: hybrid load balancing and headless nodes: the first rank of this node.
        data_parallel_external_lb: somebody else spreads the load, each engine has a frontend of its own.
        data_parallel_hybrid_lb: somebody else spreads the load over nodes, each frontend over its node's engines.
        data_parallel_lock_step: the engines step together (mixture-of-experts models over data parallel ranks), so a
            coordinator keeps their waves.
        data_parallel_backend: what starts engines: ``mp``: processes of this machine; ``ray``: a Ray cluster, with an
            actor for each, see docs/ray.md. The frontend then binds to this node's address in the cluster.
        ray_resources: what Ray sets aside for each engine, ``{"CPU": 4}``; names of your own choose among nodes.
        load_balancer: how a client with several engines picks one, see :mod:`enginewire.client.balancer`.
        enable_elastic_ep: one engine may become several while serving, see ``scale_elastic_ep``; several always may.
        wire_version: the vLLM version whose layout an engine speaks: ``0.25.1`` or ``0.32.0``; ``None``: what a
            frontend's first request shows. Clients find out by themselves.
        heartbeat_interval_s, heartbeat_timeout_s: tcp only: a host that is silent for so long is lost.
        engine_return_timeout_s: how long a lost engine that was started elsewhere is awaited before it counts as dead;
            ``None``: for ever.
        failover: what happens to the requests of an engine that is gone: ``none``: they fail; ``resume``: what stays a
            valid sample of the model goes on at another engine; ``exact``: only what goes on as if nothing had
            happened. See docs/failover.md.
        failover_timeout_s: how long such a request waits for an engine that it can go on at, before it fails.
        restart_engine: how often in a row an engine that this client started is started again when it ended, before it
            is given up.
        restart_window_s: an engine that served for so long ends the row: it has all its restarts before it again.
        drain_timeout_s: how long the requests of an engine that is taken out may go on there.
        num_gpu_blocks, block_size, dtype, vocab_size, kv_cache_size_tokens, kv_cache_max_concurrency, capabilities:
            learned from the engine's ready response.
    """

    model: str = DEFAULT_MODEL
    executor: str = ""
    executor_options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    max_num_seqs: int = 256
    scheduling_policy: SchedulingPolicy = "fcfs"
    log_stats: bool = True
    forward_engine_log: bool = True

    ready_timeout_s: float = field(default_factory=envs.ready_timeout_s)
    hello_timeout_s: float = 60.0
    shutdown_timeout_s: float = 0.0
    terminate_timeout_s: float = 5.0

    transport: Transport = "auto"
    ipc_dir: str | None = field(default_factory=envs.rpc_base_path)
    max_frame_bytes: int = 1 << 30
    max_frames: int = 4096
    zero_copy_threshold: int = field(default_factory=envs.zero_copy_threshold)
    allow_pickle: bool = field(default_factory=envs.allow_insecure_serialization)

    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int = 0
    data_parallel_start_rank: int = 0
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    data_parallel_lock_step: bool = False
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: int = 29550
    data_parallel_backend: Backend = "mp"
    ray_resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    load_balancer: str = "prefix"
    enable_elastic_ep: bool = False
    wire_version: str | None = None
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    engine_return_timeout_s: float | None = None
    failover: Failover = "none"
    failover_timeout_s: float = 60.0
    restart_engine: int = 0
    restart_window_s: float = 60.0
    drain_timeout_s: float = 30.0

    num_gpu_blocks: int | None = None
    block_size: int | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    capabilities: Capabilities = EVERYTHING

    @classmethod
    def create(
        cls, model: str | None = None, *, executor_options: dict[str, Any] | None = None, **settings: Any
    ) -> EngineConfig:
        """Make a configuration from a model and any of the settings above.

        Raises:
            ConfigError: an unknown setting, or one with a value it cannot have.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(
            model=DEFAULT_MODEL if model is None else str(model),
            executor_options=dict(executor_options or {}),
            **settings,
        )

    def __post_init__(self) -> None:
        self.model = str(self.model)
        if not self.executor:
            self.executor = "echo" if self.model == "echo" else "openvino"
        if self.max_model_len is not None:
            self._at_least("max_model_len", 1)
        for name in ("max_num_seqs", "max_frame_bytes", "max_frames", "data_parallel_size"):
            self._at_least(name, 1)
        for name in ("zero_copy_threshold", "data_parallel_rank", "data_parallel_start_rank", "restart_engine"):
            self._at_least(name, 0)
        for name in ("ready_timeout_s", "hello_timeout_s", "heartbeat_interval_s", "heartbeat_timeout_s"):
            self._seconds(name, above_zero=True)
        for name in (
            "shutdown_timeout_s",
            "terminate_timeout_s",
            "engine_return_timeout_s",
            "failover_timeout_s",
            "restart_window_s",
            "drain_timeout_s",
        ):
            if getattr(self, name) is not None or name != "engine_return_timeout_s":
                self._seconds(name, above_zero=False)
        if self.data_parallel_size > MOST_ENGINES:
            raise ConfigError(
                f"data_parallel_size must be at most {MOST_ENGINES}, as ranks have two bytes on the wire; got "
                f"{self.data_parallel_size}"
            )
        self._one_of("scheduling_policy", get_args(SchedulingPolicy))
        self._one_of("transport", get_args(Transport))
        self._one_of("failover", get_args(Failover))
        self._one_of("data_parallel_backend", get_args(Backend))
        if not self.ray_resources or not all(amount > 0 for amount in self.ray_resources.values()):
            raise ConfigError(
                f"ray_resources must be amounts above 0 by name, as {{'CPU': 1}}; got {self.ray_resources}"
            )
        if self.wire_version is not None:
            self._known_version(self.wire_version)
        if self.data_parallel_lock_step and (self.failover != "none" or self.restart_engine):
            raise ConfigError(
                "engines in lock-step neither restart nor fail over alone: one that is gone stops them all. Leave out "
                "failover and restart_engine, or data_parallel_lock_step"
            )
        if self.data_parallel_external_lb and self.data_parallel_hybrid_lb:
            raise ConfigError("data_parallel_external_lb and data_parallel_hybrid_lb exclude each other; choose one")
        if self.data_parallel_size_local is None:
            self.data_parallel_size_local = 1 if self.data_parallel_external_lb else self.data_parallel_size
        if not 0 <= self.data_parallel_size_local <= self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size_local must be between 0 and data_parallel_size ({self.data_parallel_size}), "
                f"got {self.data_parallel_size_local}"
            )
        if self.restart_engine and not self.data_parallel_size_local:
            raise ConfigError(
                "restart_engine starts engines of this client again, and with data_parallel_size_local=0 it has none; "
                "leave it out: engines that were started elsewhere are awaited, see engine_return_timeout_s"
            )
        last = max(self.data_parallel_rank, self.data_parallel_start_rank + max(self.data_parallel_size_local - 1, 0))
        if last >= self.data_parallel_size:
            raise ConfigError(
                f"rank {last} is not below data_parallel_size ({self.data_parallel_size}); ranks count from 0, check "
                "data_parallel_rank, data_parallel_start_rank and data_parallel_size_local"
            )
        if not 0 <= self.data_parallel_rpc_port <= 65535:
            raise ConfigError(f"data_parallel_rpc_port must be a port number, got {self.data_parallel_rpc_port}")

    @property
    def managed_ranks(self) -> range:
        """The ranks whose engines a client with these settings drives."""
        if self.data_parallel_external_lb:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        if self.data_parallel_hybrid_lb:
            count = self.data_parallel_size_local or self.data_parallel_size - self.data_parallel_start_rank
            return range(self.data_parallel_start_rank, self.data_parallel_start_rank + count)
        return range(self.data_parallel_size)

    @property
    def local_ranks(self) -> range:
        """Those of them that this client starts; the first ones."""
        return self.managed_ranks[: self.data_parallel_size_local]

    @property
    def other_ranks(self) -> range:
        """Ranks of other nodes that come here first, to meet: lock-step engines with frontends of their own."""
        is_first = not self.managed_ranks.start and self._has_frontends_elsewhere
        return range(self.managed_ranks.stop, self.data_parallel_size) if is_first else range(0)

    @property
    def meets_at_rank_0(self) -> bool:
        """Whether this node's engines go to the one of rank 0 first, to meet the others (protocol B.6)."""
        return self.managed_ranks.start > 0 and self._has_frontends_elsewhere

    @property
    def _has_frontends_elsewhere(self) -> bool:
        return self.data_parallel_lock_step and (self.data_parallel_external_lb or self.data_parallel_hybrid_lb)

    @property
    def starts_engines(self) -> bool:
        """Whether the client starts engine processes, rather than waiting for ones started elsewhere."""
        return bool(self.data_parallel_size_local)

    @property
    def starts_vllm(self) -> bool:
        """Whether the engines that the client starts are vLLM's."""
        return self.starts_engines and self.executor == "vllm"

    @property
    def starts_with_ray(self) -> bool:
        """Whether the engines that the client starts are placed by Ray."""
        return self.starts_engines and self.data_parallel_backend == "ray"

    @property
    def starts_by_tcp(self) -> bool:
        """Whether the engines that the client starts come by tcp, as those do that are started elsewhere."""
        return self.starts_vllm or self.starts_with_ray

    def copy(self) -> EngineConfig:
        """Return a copy, so that what one client learns from its engine does not reach another's settings."""
        options, resources = dict(self.executor_options), dict(self.ray_resources)
        return dataclasses.replace(self, executor_options=options, ray_resources=resources)

    def _known_version(self, version: object) -> None:
        from enginewire.wire.profile import PROFILES, profile_named  # both layouts' tables, which few need so early

        if not isinstance(version, str) or profile_named(version) is None:
            known = " or ".join(profile.vllm_version for profile in PROFILES)
            raise ConfigError(f"wire_version must be a version of vLLM whose layout is known, {known}; got {version!r}")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")

    def _seconds(self, name: str, *, above_zero: bool) -> None:
        value = getattr(self, name)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value < 0 or (above_zero and value == 0):
            raise ConfigError(f"{name} must be a number of seconds{' above 0' if above_zero else ''}, got {value!r}")

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
