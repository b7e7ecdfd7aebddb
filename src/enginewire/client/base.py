"""``EngineCoreClient``: the one list of operations between a frontend and an engine, and the factory.

Two questions, "sync or asyncio?" and "same process or another?", decide which client a frontend gets; its code is the
same for all of them. A client implements five operations: add, abort, get_output, call_utility, shutdown. All others
are utility calls, written in ``operations``. ``name`` blocks, ``name_async`` awaits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from enginewire.client.operations import UtilityOperations
from enginewire.client.status import EngineStatus
from enginewire.config import EngineConfig
from enginewire.engine.executor import Executor
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest

ExecutorChoice = type[Executor] | str | None
"""An executor class, the name of one, or ``None``: what the configuration says."""


class EngineCoreClient(UtilityOperations):
    """Pushes requests to an engine, pulls outputs from it, calls its utilities.

    Attributes:
        config: a copy of the configuration, with what the engine reported filled in (``max_model_len``,
            ``num_gpu_blocks``, ``capabilities`` …).
        on_engine_change: called when an engine becomes ready, is lost, dies or is taken out, with its new status; on
            any thread, so it should be quick. It lives as long as the client's engines are watched: until
            ``shutdown()``.
        is_scaling: the number of engines is being changed.

    Raises (any operation):
        EngineDeadError: the engine is gone, or all of several are; says why.
        EngineUnavailableError: no engine takes requests now, and the return of one is awaited.
        ClientClosedError: the client was shut down.
        UtilityCallError: the engine failed a utility call (utilities only).
        NotImplementedError: this client does not offer the operation; says which does.
    """

    config: EngineConfig
    on_engine_change: Callable[[EngineStatus], None] | None = None
    is_scaling: bool = False

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        config: EngineConfig,
        executor_class: ExecutorChoice = None,
        log_stats: bool | None = None,
    ) -> EngineCoreClient:
        """Make the client that answers the two questions; it is ready for requests when this returns.

        Args:
            multiprocess_mode: the engine runs in another process.
            asyncio_mode: the caller is asyncio code; needs ``multiprocess_mode``.
            config: copied, never changed.
            executor_class: overrides ``config.executor``.
            log_stats: overrides ``config.log_stats``.

        Raises:
            NotImplementedError: asyncio without another process.
            EngineStartupError: the engine could not be started. Everything is cleaned up.
        """
        if asyncio_mode and not multiprocess_mode:
            raise NotImplementedError(
                "asyncio needs the engine in another process: a step would block the event loop. "
                "Use multiprocess_mode=True, or asyncio_mode=False"
            )
        if asyncio_mode:
            return EngineCoreClient.make_async_mp_client(config, executor_class, log_stats)
        if multiprocess_mode:
            from enginewire.client.sync_mp import SyncMPClient

            return SyncMPClient(config, executor_class, log_stats)
        from enginewire.client.inproc import InprocClient

        return InprocClient(config, executor_class, log_stats)

    @staticmethod
    def make_async_mp_client(
        config: EngineConfig,
        executor_class: ExecutorChoice = None,
        log_stats: bool | None = None,
        client_addresses: Mapping[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> EngineCoreClient:
        """Make the asyncio client for this deployment.

        Args:
            client_addresses: where to bind, when somebody else does the handshake with the engines; see ``MPClient``.
            client_count: how many frontends share the engines.
            client_index: which of them this is.
        """
        from enginewire.client import async_mp, dp

        if config.data_parallel_size == 1 and not config.enable_elastic_ep:
            client_class = async_mp.AsyncMPClient
        elif config.data_parallel_external_lb:
            client_class = dp.DPAsyncMPClient
        else:
            client_class = dp.DPLBAsyncMPClient
        return client_class(
            config,
            executor_class,
            log_stats,
            client_addresses=client_addresses,
            client_count=client_count,
            client_index=client_index,
        )

    # The five operations of a client. Each face implements its half.

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine if this client started it, and release everything. Idempotent, from any thread.

        Args:
            timeout: seconds until the engine is killed; default: ``shutdown_timeout_s + terminate_timeout_s``.
        """

    def engine_statuses(self) -> list[EngineStatus]:
        """Return how its engines are, by rank; from any thread. None of a client that keeps no account of them."""
        return []

    def engine_index_of(self, request_id: str) -> int | None:
        """Return the rank of the engine that has a request of this client; ``None``: none of them."""
        return None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs come out of :meth:`get_output`.

        Raises:
            DuplicateRequestIdError: the id is in use.
        """
        raise self._other_face("add_request")

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Like :meth:`add_request`."""
        raise self._other_face("add_request_async")

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests; nothing more is sent for them. Unknown ids are ignored, so is a dead engine."""
        raise self._other_face("abort_requests")

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Like :meth:`abort_requests`."""
        raise self._other_face("abort_requests_async")

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Return the next message from the engine, waiting for it.

        Raises:
            TimeoutError: none came within ``timeout`` seconds.
        """
        raise self._other_face("get_output")

    async def get_output_async(self) -> EngineCoreOutputs:
        """Like :meth:`get_output`; use ``asyncio.timeout`` to bound the wait."""
        raise self._other_face("get_output_async")

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        raise self._other_face("call_utility")

    async def call_utility_async(
        self, method: str, *args: Any, timeout: float | None = None, engine_index: int | None = None
    ) -> Any:
        raise self._other_face("call_utility_async")

    # Several engines.

    def dp_engines_running(self) -> bool:
        """Whether lock-step engines are in a wave; one engine never is."""
        return False

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float | None = None) -> None:
        """Change the number of engines while serving; see :meth:`DPLBAsyncMPClient.scale_elastic_ep`."""
        raise NotImplementedError(
            f"the number of engines of this {type(self).__name__} is fixed; an asyncio client of several engines can "
            "change it, and one that is made for one engine with enable_elastic_ep=True"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _other_face(self, operation: str) -> NotImplementedError:
        if operation.endswith("_async"):
            return NotImplementedError(
                f"{type(self).__name__} is not an asyncio client and has no {operation}; AsyncMPClient has it, "
                f"and here {operation.removesuffix('_async')} blocks"
            )
        return NotImplementedError(
            f"{type(self).__name__} is an asyncio client and does not block in {operation}; SyncMPClient and "
            f"InprocClient do, and here {operation}_async can be awaited"
        )
