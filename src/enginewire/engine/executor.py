"""``Executor``: how an engine plugs in. Implement four methods and two attributes, and every client can drive it.

A minimal executor::

    class Parrot(Executor):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self.capacity = ExecutorCapacity(max_model_len=4096, num_gpu_blocks=256, block_size=16, vocab_size=1000)
            self._live: dict[str, EngineCoreRequest] = {}

        def add_request(self, request: EngineCoreRequest) -> None:
            self._live[request.request_id] = request

        def abort_requests(self, request_ids: Sequence[str]) -> None:
            for request_id in request_ids:
                self._live.pop(request_id, None)

        def step(self) -> list[EngineCoreOutput]:
            return [EngineCoreOutput(i, [r.prompt_token_ids[0]]) for i, r in self._live.items()]

        def has_unfinished_requests(self) -> bool:
            return bool(self._live)

Requests end by the stop rules of :class:`~enginewire.engine.core.EngineCore` (EOS, stop tokens, length, repetition),
which aborts them here before the next step, or before the one after that if this runs in a child process.
An executor that ends a request by itself sets ``finish_reason``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct, field

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, LoRARequest, PrefixCacheStats

Options = TypeVar("Options", bound=Struct)


class ExecutorCapacity(Struct, kw_only=True):
    """What an executor can hold; reported in the ready response.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        num_gpu_blocks: KV-cache blocks (on whatever device).
        block_size: tokens per block.
        vocab_size: token ids are ``0 … vocab_size - 1``; ``None``: not checked.
        dtype: of the weights' arithmetic, e.g. ``"float32"``.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    vocab_size: int | None = None
    dtype: str = "float32"


class ExecutorStats(Struct, kw_only=True):
    """State after a step.

    Attributes:
        kv_cache_usage: share of the KV blocks in use, 0 … 1.
        num_preempted_reqs: requests it holds but does not run for lack of blocks.
        prefix_cache: changes since the last call.
    """

    kv_cache_usage: float = 0.0
    num_preempted_reqs: int = 0
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)


class Executor(ABC):
    """Runs the model. One thread calls it, one call at a time.

    A subclass sets ``capacity`` in its constructor, which loads the model, and ``capabilities`` there or on the class.
    Raise :class:`~enginewire.errors.InvalidRequestError` from :meth:`add_request` to refuse a request; any other
    exception there fails only that request. An exception from :meth:`step` ends the engine.
    """

    holds_gil: ClassVar[bool] = False
    """Whether :meth:`step` keeps the interpreter lock for long (a native library that does not release it).

    Such an executor runs in a child process of the engine's, so that messages are answered while it steps.
    """

    lock_step: ClassVar[bool] = False
    """Whether data parallel ranks of this executor meet in every step, as mixture-of-experts models do.

    Then a rank without work is given :meth:`execute_dummy_batch` as long as another has any, all rest and wake
    together, and pauses are agreed on (:mod:`enginewire.engine.waves`). Alone it is an executor like any other.
    """

    capabilities: Capabilities = Capabilities()
    capacity: ExecutorCapacity

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in a request. Validated: prompt not empty, within ``max_model_len`` and the vocabulary, ``n`` 1,
        ``max_tokens`` set and capped, nothing beyond ``capabilities``.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests, without any output for them. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[EngineCoreOutput]:
        """Advance every request that can be; return what is new, at most one output per request."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""

    def stats(self) -> ExecutorStats:
        """Report the state after the last step."""
        return ExecutorStats()

    def shutdown(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything. Called once; no other call follows. Not called when the process is killed."""

    # What follows is optional; the default answers a utility call with a clear failure.

    def sleep(self, level: int) -> None:
        """Give up memory: level 1 weights and KV cache, to be restored; level 2 everything.

        Requests may be live (pause mode ``keep``): they go on after :meth:`wake_up`, recomputed if need be.
        """
        raise self._not_offered("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep`, wholly (``None``) or for ``"weights"`` or ``"kv_cache"``."""
        raise self._not_offered("wake_up")

    @property
    def is_sleeping(self) -> bool:
        """Whether any memory is given up."""
        return False

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes; ``False`` if running requests hold some and may not be recomputed."""
        raise self._not_offered("reset_prefix_cache")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        raise self._not_offered("add_lora")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        raise self._not_offered("remove_lora")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        raise self._not_offered("pin_lora")

    def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        raise self._not_offered("list_loras")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop a profiler."""
        raise self._not_offered("profile")

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights to a folder."""
        raise self._not_offered("save_sharded_state")

    def join_group(self, rank: int, parallel_config: dict[str, Any]) -> None:  # noqa: B027 - most have no group
        """Meet the other ranks, before the first step; for executors in lock-step.

        Args:
            rank: of this one, 0 … ``data_parallel_size`` - 1.
            parallel_config: ``data_parallel_size``, ``data_parallel_master_ip``, ``data_parallel_master_port`` and
                ``_data_parallel_master_port_list``, of which the engine uses the last port for itself.
        """

    def execute_dummy_batch(self) -> None:
        """Run a step without requests (lock-step engines)."""
        raise self._not_offered("execute_dummy_batch")

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker by name; return one result per worker."""
        raise self._not_offered("collective_rpc")

    def _not_offered(self, operation: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not offer {operation}")


def parse_options(config: EngineConfig, options_type: type[Options]) -> Options:
    """Check ``config.executor_options`` against a struct of the executor's options.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type; lists the known ones.
    """
    known = msgspec.structs.fields(options_type)
    if unknown := sorted(set(config.executor_options) - {option.name for option in known}):
        names = ", ".join(option.name for option in known)
        raise ConfigError(f"executor {config.executor!r} has no option {', '.join(unknown)}; it has {names}")
    try:
        return msgspec.convert(config.executor_options, options_type)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"executor {config.executor!r}: {exc}") from None
