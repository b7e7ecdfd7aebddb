"""The operations of a client that are utility calls: each is one call, written once per face.

``name`` blocks, ``name_async`` awaits. What they do is the engine's business; see ``engine.core.EngineCore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from enginewire.wire.messages import LoRARequest


class UtilityOperations(ABC):
    """The engine's utilities by name. A client makes them of two methods: one that blocks, one that is awaited."""

    @abstractmethod
    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        """Call one of the engine's utilities and return its result.

        Args:
            timeout: how long to wait for the answer; ``None``: for ever.
            engine_index: of several engines, ask this one only.

        Raises:
            UtilityCallError: it failed; the message is the engine's.
            UtilityTimeoutError: no answer within ``timeout`` seconds.
        """

    @abstractmethod
    async def call_utility_async(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        """Like :meth:`call_utility`."""

    # Utilities, blocking.

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks the engine serves, e.g. ``("generate",)``."""
        return tuple(self.call_utility("get_supported_tasks"))

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the engine's profiler."""
        self.call_utility("profile", is_start, profile_prefix)

    def reset_mm_cache(self) -> None:
        """Forget cached multimodal inputs."""
        self.call_utility("reset_mm_cache")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prompt prefixes; ``False`` if running requests hold some and may not be recomputed."""
        return bool(self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector))

    def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs."""
        self.call_utility("reset_encoder_cache")

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and give up memory: level 0 none, 1 weights and KV cache until ``wake_up``, 2 everything.

        Args:
            mode: what happens to requests: ``abort``, ``wait`` or ``keep``, see :meth:`pause_scheduler`.
        """
        self.call_utility("sleep", level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep`, wholly or for some of ``weights``, ``kv_cache``, ``scheduling``."""
        self.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps or its scheduler is paused."""
        return bool(self.call_utility("is_sleeping"))

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; requests may be added meanwhile and wait.

        Args:
            mode: ``abort`` ends all requests, ``wait`` lets running ones finish, ``keep`` freezes them.
            clear_cache: forget cached prefixes too.
        """
        self.call_utility("pause_scheduler", mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Undo :meth:`pause_scheduler`."""
        self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """Whether the scheduler is paused."""
        return bool(self.call_utility("is_scheduler_paused"))

    def execute_dummy_batch(self) -> None:
        """Run a step without requests."""
        self.call_utility("execute_dummy_batch")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        return bool(self.call_utility("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return bool(self.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        return set(self.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return bool(self.call_utility("pin_lora", lora_id))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the engine's weights to a folder on its host."""
        self.call_utility("save_sharded_state", path, pattern, max_size)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker by name; ``timeout`` holds at both ends.

        Returns:
            one result per worker, of several engines one engine's after another's, by rank.
        """
        result = self.call_utility("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return cast("list[Any]", result)

    # Utilities, awaited.

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Like :meth:`get_supported_tasks`."""
        return tuple(await self.call_utility_async("get_supported_tasks"))

    async def profile_async(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Like :meth:`profile`."""
        await self.call_utility_async("profile", is_start, profile_prefix)

    async def reset_mm_cache_async(self) -> None:
        """Like :meth:`reset_mm_cache`."""
        await self.call_utility_async("reset_mm_cache")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Like :meth:`reset_prefix_cache`."""
        return bool(await self.call_utility_async("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_encoder_cache_async(self) -> None:
        """Like :meth:`reset_encoder_cache`."""
        await self.call_utility_async("reset_encoder_cache")

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        """Like :meth:`sleep`."""
        await self.call_utility_async("sleep", level, mode)

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        """Like :meth:`wake_up`."""
        await self.call_utility_async("wake_up", tags)

    async def is_sleeping_async(self) -> bool:
        """Like :meth:`is_sleeping`."""
        return bool(await self.call_utility_async("is_sleeping"))

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Like :meth:`pause_scheduler`."""
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        """Like :meth:`resume_scheduler`."""
        await self.call_utility_async("resume_scheduler")

    async def is_scheduler_paused_async(self) -> bool:
        """Like :meth:`is_scheduler_paused`."""
        return bool(await self.call_utility_async("is_scheduler_paused"))

    async def execute_dummy_batch_async(self) -> None:
        """Like :meth:`execute_dummy_batch`."""
        await self.call_utility_async("execute_dummy_batch")

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Like :meth:`add_lora`."""
        return bool(await self.call_utility_async("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Like :meth:`remove_lora`."""
        return bool(await self.call_utility_async("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        """Like :meth:`list_loras`."""
        return set(await self.call_utility_async("list_loras"))

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Like :meth:`pin_lora`."""
        return bool(await self.call_utility_async("pin_lora", lora_id))

    async def save_sharded_state_async(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Like :meth:`save_sharded_state`."""
        await self.call_utility_async("save_sharded_state", path, pattern, max_size)

    async def collective_rpc_async(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Like :meth:`collective_rpc`."""
        call = self.call_utility_async("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return cast("list[Any]", await call)
