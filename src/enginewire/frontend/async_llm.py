"""``AsyncLLM``: the online frontend. One async iterator per request, over an engine in another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from enginewire.client.base import EngineCoreClient, ExecutorChoice
from enginewire.client.startup import given_up
from enginewire.client.status import EngineStatus
from enginewire.config import EngineConfig
from enginewire.errors import ClientClosedError
from enginewire.frontend.inputs import InputProcessor, PreparedRequest, Prompt
from enginewire.frontend.output_handler import handle_outputs
from enginewire.frontend.outputs import RequestOutput
from enginewire.frontend.processor import OutputProcessor
from enginewire.frontend.reader import Reader
from enginewire.frontend.requests import RequestState
from enginewire.frontend.setup import fetch_model, make_config
from enginewire.frontend.stats import StatLogger
from enginewire.text.chat import Message
from enginewire.text.tokenizer import Tokenizer
from enginewire.wire.messages import LoRARequest
from enginewire.wire.sampling import SamplingParams
from enginewire.wire.stats import SchedulerStats


class AsyncLLM:
    """Generates text for asyncio code with an engine of its own.

    ::

        async with AsyncLLM("smollm2-135m") as llm:
            params = SamplingParams(max_tokens=64, output_kind=RequestOutputKind.DELTA)
            async for output in llm.generate("Once upon a time", params):
                print(output.outputs[0].text, end="")

    The constructor waits until the engine is ready, which stops a running event loop for seconds; :meth:`create` does
    it on a thread. It belongs to one event loop at a time; when that is closed, it may be used on another.

    A task, the output handler, receives for all requests while there is a loop. It does not keep this object alive.

    Args:
        model: alias, path of a .gguf file or model folder, or ``echo``; see :class:`EngineConfig`.
        engine: executor class or the name of one; default: by the model.
        tokenizer: one, or the model to take it from; default: the model's. Loaded when first needed.
        config: all settings at once, instead of ``model``, ``executor_options`` and ``settings``.
        executor_options: for the executor.
        settings: any other setting of :class:`EngineConfig`.

    Attributes:
        config: the settings, with what the engine reported.

    Raises:
        ConfigError: a setting that cannot be.
        ModelError: the model cannot be found or fetched.
        EngineStartupError: the engine could not be started.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: ExecutorChoice = None,
        tokenizer: Tokenizer | str | Path | None = None,
        config: EngineConfig | None = None,
        executor_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = make_config(model, engine, config, executor_options, settings)
        fetch_model(config)
        executor_class = engine if isinstance(engine, type) else None
        self._attach(EngineCoreClient.make_client(True, True, config, executor_class), tokenizer)

    @classmethod
    async def create(cls, model: str | Path | None = None, **arguments: Any) -> Self:
        """Make one without stopping the event loop; the arguments are the constructor's."""
        unwanted = threading.Event()
        token = given_up.set(unwanted)  # the task, and the thread, take a copy of the context
        try:
            making = asyncio.ensure_future(asyncio.to_thread(cls, model, **arguments))
        finally:
            given_up.reset(token)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread cannot be stopped; it stops waiting for engines, and what it makes otherwise is not wanted.
            unwanted.set()
            making.add_done_callback(_shut_down_result)
            raise

    @classmethod
    def from_client(cls, client: EngineCoreClient, *, tokenizer: Tokenizer | str | Path | None = None) -> Self:
        """Make one over an asyncio client that exists; it belongs to the ``AsyncLLM`` from then on."""
        llm = cls.__new__(cls)
        llm._attach(client, tokenizer)
        return llm

    def _attach(self, client: EngineCoreClient, tokenizer: Tokenizer | str | Path | None) -> None:
        self._client = client
        self.config = client.config
        self._inputs = InputProcessor(client.config, tokenizer)
        self._outputs = OutputProcessor()
        self._handler: asyncio.Task[None] | None = None
        self._request_ids = itertools.count()
        # The handler holds the client, so that the client's own finalizer would never run.
        self._finalizer = weakref.finalize(self, _dropped, client)

    # Generation.

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        data_parallel_rank: int | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield outputs as they come, as ``sampling_params.output_kind`` says.

        Outputs that came while the reader was busy are merged into one. Closing the iterator, or cancelling the task
        that waits for it, aborts the request on the engine.

        Args:
            prompt: see ``Prompt``.
            sampling_params: default: 16 tokens, sampled.
            request_id: the user's id, for :meth:`abort` and logs; several requests may have the same.
            priority: lower runs earlier, with the priority policy.
            lora_request: adapter to use.
            data_parallel_rank: the engine to use.
            trace_headers: handed to the engine.

        Raises:
            InvalidRequestError: the request cannot be served.
            RequestError: the engine failed it.
            EngineDeadError: the engine is gone.
            ClientClosedError: :meth:`shutdown` was called.
            RuntimeError: this object is in use on another event loop.
        """
        submitted = self.submitted(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            lora_request=lora_request,
            data_parallel_rank=data_parallel_rank,
            trace_headers=trace_headers,
        )
        async with submitted as request:
            reader = Reader([request])
            while not reader.is_done:
                _, news = await reader.next()
                yield request.output_of(news)

    @contextlib.asynccontextmanager
    async def submitted(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,  # those of generate
    ) -> AsyncIterator[RequestState]:
        """Send a request; abort it when the block is left before it has ended. See :meth:`generate` for the rest.

        A :class:`Reader` takes its outputs, and those of others, with less effort than an iterator for each.
        """
        prepared = await self._prepare(
            prompt,
            sampling_params,
            request_id=str(next(self._request_ids)) if request_id is None else request_id,
            **options,
        )
        request = self._outputs.add(prepared, time.monotonic())
        try:
            for core_request, completion in zip(prepared.requests, request.completions, strict=True):
                await self._client.add_request_async(core_request)
                completion.engine_index = self._client.engine_index_of(core_request.request_id)
            self._ensure_handler()
            yield request
        finally:
            request.listener = None  # a circle, which would be left to the garbage collector
            # Also for requests whose ADD was on its way: the engine ignores ids that it does not know.
            await self._abort(self._outputs.discard(request))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Any,  # those of generate
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; see :meth:`generate` for the rest.

        Args:
            messages: maps with ``role`` and ``content``.
            add_generation_prompt: open the assistant's turn at the end.
            tools: function descriptions, for templates that know them.
            chat_template_kwargs: further variables for the chat template.
        """
        prompt = await asyncio.to_thread(
            self._inputs.render_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        async with contextlib.aclosing(self.generate(prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End the requests with this id or these ids: their streams end with the tokens so far, ``abort``.

        Unknown ids are ignored.
        """
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        aborted: list[str] = []
        for request in self._outputs.requests:
            if request.request_id in ids:
                aborted += self._outputs.abort(request)
                request.wake()
        await self._abort(aborted)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if there is none."""
        return self._inputs.tokenizer

    def listen(self) -> None:
        """Receive from the engines from now on, and not only from the first request on: statistics, losses, returns."""
        self._ensure_handler()

    def engine_statuses(self) -> list[EngineStatus]:
        """Return how the engines are, by rank."""
        return self._client.engine_statuses()

    @property
    def on_engine_change(self) -> Callable[[EngineStatus], None] | None:
        """Is told when an engine becomes ready, is lost, dies or is taken out, if set; see ``EngineCoreClient``."""
        return self._client.on_engine_change

    @on_engine_change.setter
    def on_engine_change(self, callback: Callable[[EngineStatus], None] | None) -> None:
        self._client.on_engine_change = callback

    @property
    def scheduler_stats(self) -> SchedulerStats | None:
        """The engine's statistics as of its last message, of several the one that reported last; ``None``: none has."""
        return self._outputs.scheduler_stats

    @property
    def stat_logger(self) -> StatLogger | None:
        """Is told what happens to requests and in the engine, if set."""
        return self._outputs.stat_logger

    @stat_logger.setter
    def stat_logger(self, logger: StatLogger | None) -> None:
        self._outputs.stat_logger = logger

    # The engine's utilities.

    async def check_health(self) -> None:
        """Ask the engine for a sign of life; returns when it gave one.

        Raises:
            EngineDeadError: it is gone.
        """
        await self._client.is_scheduler_paused_async()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and give up memory; see ``EngineCoreClient.sleep``."""
        await self._client.sleep_async(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep`."""
        await self._client.wake_up_async(tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps or is paused."""
        return await self._client.is_sleeping_async()

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating; see ``EngineCoreClient.pause_scheduler``."""
        await self._client.pause_scheduler_async(mode, clear_cache)

    async def resume_generation(self) -> None:
        """Undo :meth:`pause_generation`."""
        await self._client.resume_scheduler_async()

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return await self._client.is_scheduler_paused_async()

    async def is_engine_paused(self, engine_index: int) -> bool:
        """Whether generation is paused on one of several engines."""
        return bool(await self._client.call_utility_async("is_scheduler_paused", engine_index=engine_index))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prompt prefixes; ``False`` if running requests hold some and may not be recomputed."""
        return await self._client.reset_prefix_cache_async(reset_running_requests, reset_connector)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        return await self._client.add_lora_async(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return await self._client.remove_lora_async(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        return await self._client.list_loras_async()

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start the engine's profiler."""
        await self._client.profile_async(True, profile_prefix)

    async def stop_profile(self) -> None:
        """Stop the engine's profiler."""
        await self._client.profile_async(False)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks the engine serves."""
        return await self._client.get_supported_tasks_async()

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker of every engine by name; returns one result per worker, by rank."""
        return await self._client.collective_rpc_async(method, timeout, args, kwargs)

    # The number of engines.

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float | None = None) -> None:
        """Have so many engines from now on; see ``DPLBAsyncMPClient.scale_elastic_ep``."""
        self._ensure_handler()
        await self._client.scale_elastic_ep(new_data_parallel_size, drain_timeout)

    @property
    def is_scaling(self) -> bool:
        """Whether the number of engines is being changed."""
        return self._client.is_scaling

    # The end.

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine and release everything. Idempotent, from any thread.

        Requests in progress may run for ``shutdown_timeout_s``; then they end with finish reason ``abort``, or with
        ClientClosedError if the engine, or this loop, does not get to say so.
        """
        self._finalizer.detach()
        self._client.shutdown(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An engine takes up to seconds to leave.
        await asyncio.to_thread(self.shutdown)
        if self._handler is not None and self._handler.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._handler])

    # How it works.

    async def _prepare(self, prompt: Prompt, params: SamplingParams | None, **options: Any) -> PreparedRequest:
        if self._inputs.is_slow(prompt, params):
            return await asyncio.to_thread(self._inputs.prepare, prompt, params, **options)
        return self._inputs.prepare(prompt, params, **options)

    async def _abort(self, engine_ids: list[str]) -> None:
        if engine_ids:
            with contextlib.suppress(ClientClosedError):
                await self._client.abort_requests_async(engine_ids)

    def _ensure_handler(self) -> None:
        """Have the output handler run on this loop. The client has refused by now if it is in use on another."""
        loop = asyncio.get_running_loop()
        if self._handler is None or self._handler.done() or self._handler.get_loop() is not loop:
            handle = handle_outputs(self._client, self._outputs)
            self._handler = loop.create_task(handle, name="enginewire-output-handler")
            # A loop may be closed with the handler waiting in it. That is no oversight to be complained about.
            self._handler._log_destroy_pending = False  # type: ignore[attr-defined]


def _dropped(client: EngineCoreClient) -> None:
    """Finalize: the object was dropped without ``shutdown()``, or the interpreter ends."""
    try:
        warnings.warn("an AsyncLLM was not shut down; call shutdown() or use `async with`", ResourceWarning, 2)
    finally:  # warnings may be errors
        client.shutdown()


def _shut_down_result(making: asyncio.Future[Any]) -> None:  # of whatever subclass was made
    if not making.cancelled() and making.exception() is None:
        making.result().shutdown()
