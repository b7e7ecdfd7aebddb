"""``InprocClient``: the engine in the caller's own process. No thread, no socket, no serialisation, no copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from enginewire.client.base import EngineCoreClient, ExecutorChoice
from enginewire.client.resources import closed_error
from enginewire.client.status import EngineStatus
from enginewire.config import EngineConfig
from enginewire.engine.core import EngineCore
from enginewire.engine.registry import find_executor
from enginewire.engine.spec import describe
from enginewire.engine.utilities import failure_text, invoke_utility
from enginewire.errors import ConfigError, EngineDeath, UtilityCallError
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest


class InprocClient(EngineCoreClient):
    """Client of an :class:`EngineCore` that it builds itself. For one thread at a time.

    Args:
        config: copied; ``self.config`` is completed by what the engine turned out to be.
        executor_class: overrides ``config.executor``.
        log_stats: overrides ``config.log_stats``.

    Raises:
        ConfigError: the executor cannot be found, or there are to be several engines, or none here.
        Exception: whatever its constructor raises.
    """

    def __init__(
        self, config: EngineConfig, executor_class: ExecutorChoice = None, log_stats: bool | None = None
    ) -> None:
        if len(config.managed_ranks) > 1 or not config.starts_engines:
            raise ConfigError(
                f"an engine in this process is one engine, started here; got data_parallel_size "
                f"{config.data_parallel_size}, data_parallel_size_local {config.data_parallel_size_local}. "
                "Use multiprocess_mode=True"
            )
        self.config = config.copy()
        if log_stats is not None:
            self.config.log_stats = log_stats
        choice = executor_class or self.config.executor
        self._closed = False
        self._death: EngineDeath | None = None
        # Messages of steps that a utility had to take.
        self._ready: deque[EngineCoreOutputs] = deque()
        core_class = find_executor(choice) if isinstance(choice, str) else choice
        self.engine_core = EngineCore(self.config, core_class, self.config.log_stats)
        capacity = self.engine_core.capacity
        self.config.max_model_len = self.engine_core.max_model_len
        self.config.num_gpu_blocks = capacity.num_gpu_blocks
        self.config.block_size = capacity.block_size
        self.config.vocab_size = capacity.vocab_size
        self.config.dtype = capacity.dtype
        self.config.capabilities = self.engine_core.capabilities

    def add_request(self, request: EngineCoreRequest) -> None:
        """Preprocess a request and add it.

        Raises:
            InvalidRequestError: this engine cannot run it.
            DuplicateRequestIdError: the id is in use.
        """
        self._ensure_alive()
        self.engine_core.add_request(self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if request_ids and not self._closed and self._death is None:
            self.engine_core.abort_requests(request_ids)

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Do one step and its post-step and return what it brought: empty if there was nothing to do.

        ``timeout`` has no meaning here: nothing arrives that this call does not make itself.
        """
        self._ensure_alive()
        return self._ready.popleft() if self._ready else self._step()

    def _step(self) -> EngineCoreOutputs:
        try:
            messages = self.engine_core.step_fn()
            self.engine_core.post_step()
        except Exception as exc:
            self._death = EngineDeath(0, describe(exc))
            if self.on_engine_change is not None:
                self.on_engine_change(*self.engine_statuses())
            raise self._death.exception() from exc
        return messages.get(0) or EngineCoreOutputs()

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        """Call a method of the core. One that has to wait for running requests takes the steps they need."""
        self._ensure_alive()
        try:
            result = invoke_utility(self.engine_core, method, args)
            if isinstance(result, Future):
                while not result.done():
                    self._ready.append(self._step())
                result = result.result()
        except Exception as exc:
            if self._death is not None:
                raise
            raise UtilityCallError(failure_text(method, exc), method=method) from exc
        return result

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._refuse_wait(mode)
        super().sleep(level, mode)

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._refuse_wait(mode)
        super().pause_scheduler(mode, clear_cache)

    def engine_index_of(self, request_id: str) -> int | None:
        return 0 if request_id in self.engine_core.get_request_ids() else None

    def engine_statuses(self) -> list[EngineStatus]:
        state = "ready" if self._death is None else "dead"
        num_deaths = int(self._death is not None)
        return [EngineStatus(0, state, self._death, len(self.engine_core.get_request_ids()), num_deaths)]

    def _refuse_wait(self, mode: str) -> None:
        if mode == "wait":
            raise ValueError(
                "mode 'wait' needs somebody else to run the requests meanwhile, and in this process there is nobody; "
                "use 'abort' or 'keep', or a client with the engine in another process (SyncMPClient)"
            )

    def shutdown(self, timeout: float | None = None) -> None:
        if not self._closed:
            self._closed = True
            self.engine_core.shutdown()

    def _ensure_alive(self) -> None:
        if self._closed:
            raise closed_error()
        if self._death is not None:
            raise self._death.exception()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "dead" if self._death else "ready"
        return f"<{type(self).__name__} {state}>"
