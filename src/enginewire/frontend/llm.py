"""``LLM``: the offline frontend. Blocking calls, whole batches, results in order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, cast

from enginewire.client.base import EngineCoreClient, ExecutorChoice
from enginewire.config import EngineConfig
from enginewire.errors import EngineClientError, InvalidRequestError
from enginewire.frontend.inputs import InputProcessor, PreparedRequest, Prompt, is_conversation, is_single_prompt
from enginewire.frontend.outputs import RequestOutput
from enginewire.frontend.progress import ProgressBar
from enginewire.frontend.pump import Pump
from enginewire.frontend.setup import fetch_model, make_config
from enginewire.text.chat import Message
from enginewire.text.tokenizer import Tokenizer
from enginewire.wire.messages import LoRARequest
from enginewire.wire.sampling import RequestOutputKind, SamplingParams
from enginewire.wire.stats import SchedulerStats

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
OnError: TypeAlias = Literal["raise", "return"]


class LLM:
    """Generates text with an engine of its own. Safe to use from several threads.

    ::

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
                print(output.outputs[0].text)

    Args:
        model: alias, path of a .gguf file or model folder, or ``echo``; see :class:`EngineConfig`.
        engine: executor class or the name of one; default: by the model.
        multiprocess_mode: run the engine in a process of its own, not in this one.
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
        multiprocess_mode: bool = True,
        tokenizer: Tokenizer | str | Path | None = None,
        config: EngineConfig | None = None,
        executor_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = make_config(model, engine, config, executor_options, settings)
        fetch_model(config)
        executor_class = engine if isinstance(engine, type) else None
        self._attach(EngineCoreClient.make_client(multiprocess_mode, False, config, executor_class), tokenizer)

    @classmethod
    def from_client(cls, client: EngineCoreClient, *, tokenizer: Tokenizer | str | Path | None = None) -> Self:
        """Make one over a blocking client that exists; it belongs to the ``LLM`` from then on."""
        llm = cls.__new__(cls)
        llm._attach(client, tokenizer)
        return llm

    def _attach(self, client: EngineCoreClient, tokenizer: Tokenizer | str | Path | None) -> None:
        self._client = client
        self.config = client.config
        self._inputs = InputProcessor(client.config, tokenizer)
        self._pump = Pump(client)
        self._request_ids = itertools.count()

    # Generation.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete one prompt or many, and return the results in the order of the prompts.

        All prompts are checked before any is sent. If the engine fails some, the others are finished first.

        Args:
            prompts: one prompt or a list of them, see ``Prompt``.
            sampling_params: for all prompts, or one per prompt; ``output_kind`` does not matter here.
            progress: draw a progress bar on stderr; ``None``: if that is a terminal.
            priority: lower runs earlier, with the priority policy.
            lora_request: adapter to use.
            on_error: when requests failed, alone, with their engine or with all engines, ``raise`` the first error, or
                ``return`` all outputs, the failed ones with ``error`` set.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; names the position. Nothing was sent.
            RequestError: the engine failed a request.
            EngineDeadError: the engine is gone.
            KeyboardInterrupt: requests of this call were aborted; this object can be used again.
        """
        is_single = is_single_prompt(prompts)
        batch = cast("Sequence[Prompt]", [prompts] if is_single else prompts)
        prepared: list[PreparedRequest] = []
        for index, (prompt, params) in enumerate(zip(batch, _per_prompt(sampling_params, len(batch)), strict=True)):
            with _naming_position(None if is_single else index):
                prepared.append(self._prepare(prompt, params, priority, lora_request, RequestOutputKind.FINAL_ONLY))
        return self._run(prepared, progress, on_error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Any,  # those of generate
    ) -> list[RequestOutput]:
        """Answer one conversation or many; see :meth:`generate` for the rest.

        Args:
            messages: maps with ``role`` and ``content``, or a list of such conversations.
            add_generation_prompt: open the assistant's turn at the end.
            tools: function descriptions, for templates that know them.
            chat_template_kwargs: further variables for the chat template.
        """
        is_single = is_conversation(messages) or not messages
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_single else messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with _naming_position(None if is_single else index):
                prompts.append(
                    self._inputs.render_chat(
                        conversation,
                        add_generation_prompt=add_generation_prompt,
                        tools=tools,
                        **(chat_template_kwargs or {}),
                    )
                )
        return self.generate(prompts[0] if is_single else prompts, sampling_params, progress=progress, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt and yield outputs as they come, as ``sampling_params.output_kind`` says.

        Leaving the loop early aborts the request. Raises what :meth:`generate` raises.
        """
        prepared = self._prepare(prompt, sampling_params, priority, lora_request, None)
        with self._pump.submitted([prepared]) as (request,):
            while True:
                self._pump.receive_until(lambda: request.is_ready)
                if (output := self._pump.take(request)) is not None:
                    yield output
                    if output.finished:
                        return

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids."""
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if there is none."""
        return self._inputs.tokenizer

    @property
    def scheduler_stats(self) -> SchedulerStats | None:
        """The engine's statistics as of its last message, ``None`` before the first."""
        return self._pump.scheduler_stats

    # The engine's utilities.

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and give up memory; see ``EngineCoreClient.sleep``."""
        with self._pump.turn():
            self._client.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep`."""
        with self._pump.turn():
            self._client.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps or is paused."""
        with self._pump.turn():
            return self._client.is_sleeping()

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating; see ``EngineCoreClient.pause_scheduler``."""
        with self._pump.turn():
            self._client.pause_scheduler(mode, clear_cache)

    def resume_generation(self) -> None:
        """Undo :meth:`pause_generation`."""
        with self._pump.turn():
            self._client.resume_scheduler()

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        with self._pump.turn():
            return self._client.is_scheduler_paused()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prompt prefixes; ``False`` if running requests hold some and may not be recomputed."""
        with self._pump.turn():
            return self._client.reset_prefix_cache(reset_running_requests, reset_connector)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        with self._pump.turn():
            return self._client.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        with self._pump.turn():
            return self._client.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        with self._pump.turn():
            return self._client.list_loras()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start the engine's profiler."""
        with self._pump.turn():
            self._client.profile(True, profile_prefix)

    def stop_profile(self) -> None:
        """Stop the engine's profiler."""
        with self._pump.turn():
            self._client.profile(False)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks the engine serves."""
        with self._pump.turn():
            return self._client.get_supported_tasks()

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker of every engine by name; returns one result per worker, by rank."""
        with self._pump.turn():
            return self._client.collective_rpc(method, timeout, args, kwargs)

    # The end.

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine and release everything. Idempotent, from any thread.

        Requests in progress may run for ``shutdown_timeout_s``; then they end with finish reason ``abort``, or with
        ClientClosedError if the engine does not get to say so.
        """
        with self._pump.turn():
            self._client.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # How it works.

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        lora_request: LoRARequest | None,
        kind: RequestOutputKind | None,
    ) -> PreparedRequest:
        prepared = self._inputs.prepare(
            prompt, params, request_id=str(next(self._request_ids)), priority=priority, lora_request=lora_request
        )
        if kind is not None:
            prepared.params.output_kind = kind  # ours: it was copied
        return prepared

    def _run(self, prepared: list[PreparedRequest], progress: bool | None, on_error: OnError) -> list[RequestOutput]:
        with (
            ProgressBar(len(prepared), "requests", enabled=progress) as bar,
            self._pump.submitted(prepared, keep_errors=on_error == "return") as requests,
        ):
            pending = requests.copy()

            def all_finished() -> bool:
                while pending and pending[-1].finished:  # asked after every message: do not look at all of them
                    pending.pop()
                return not pending

            def draw() -> None:
                if bar.is_due:
                    bar.update(sum([request.finished for request in requests]))

            try:
                self._pump.receive_until(all_finished, draw if bar.enabled else None)
            except EngineClientError as exc:
                if on_error == "raise":
                    raise
                self._pump.fail(requests, exc)
            bar.update(len(requests), is_last=True)
        outputs: list[RequestOutput] = []
        errors: list[EngineClientError] = []
        for request in requests:
            if request.error is not None:
                errors.append(request.error)
                outputs.append(request.take_failed(request.error))
            else:
                outputs.append(cast("RequestOutput", request.take()))
        if errors and on_error == "raise":
            if len(requests) > 1:
                errors[0].add_note(
                    f"{len(errors)} of {len(requests)} requests failed; on_error='return' gives the rest"
                )
            raise errors[0]
        return outputs


def _per_prompt(params: Params, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        got = f"{len(params)}" if isinstance(params, Sequence) else type(params).__name__
        raise InvalidRequestError(
            f"sampling_params must be one for all or one per prompt ({count}), got {got}", parameter="sampling_params"
        )
    return params


@contextlib.contextmanager
def _naming_position(index: int | None) -> Iterator[None]:
    """Say in an error which of several prompts it is about."""
    try:
        yield
    except InvalidRequestError as exc:
        if index is None:
            raise
        raise InvalidRequestError(f"prompts[{index}]: {exc}", parameter=exc.parameter) from exc
