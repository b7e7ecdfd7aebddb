"""``EchoExecutor``: an engine without a model, for developing and testing frontends.

It answers with the prompt's own tokens, in order and from the start again, one per step, until ``max_tokens``. What it
does is a function of the request alone: temperature, seeds, penalties and the rest are accepted and change nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct

from enginewire.config import EngineConfig
from enginewire.engine.executor import Executor, ExecutorCapacity, ExecutorStats, parse_options
from enginewire.errors import ConfigError, InvalidRequestError
from enginewire.wire.arrays import LogprobsLists, LogprobsTensors, Tensor
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, LoRARequest, PrefillStats

DEFAULT_MAX_MODEL_LEN: Final = 131_072
DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_NUM_BLOCKS: Final = 65_536
"""1,048,576 tokens: eight of the longest requests."""

NEVER: Final = threading.Event()
"""Waiting for it is sleeping, but signals and Ctrl-C get through."""


class EchoOptions(Struct, kw_only=True):
    """``executor_options`` of the echo executor.

    Attributes:
        load_time_s: how long construction takes.
        step_time_s: how long a step takes.
        fail_at_step: the step (1 is the first) that raises, and with it ends the engine.
        logprobs: most logprobs per token; ``None``: none at all. They are made up: each candidate is half as likely as
            the one before.
        max_model_len: most tokens of prompt and output together.
        num_gpu_blocks, block_size: its pretended KV cache. Requests that do not fit wait inside, latest first.
        vocab_size: token ids beyond are refused; ``None``: any.
    """

    load_time_s: float = 0.0
    step_time_s: float = 0.0
    fail_at_step: int | None = None
    logprobs: int | None = 20
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    num_gpu_blocks: int = DEFAULT_NUM_BLOCKS
    block_size: int = DEFAULT_BLOCK_SIZE
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("load_time_s", "step_time_s"):
            if not 0 <= getattr(self, name) < threading.TIMEOUT_MAX:
                raise ConfigError(f"{name} must be a number of seconds, got {getattr(self, name)}")
        for name in ("max_model_len", "num_gpu_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class _Echo:
    """A live request: the cycle it repeats and where in it."""

    __slots__ = ("cycle", "logprobs", "num_tokens", "position", "prefill", "request_id")

    def __init__(self, request: EngineCoreRequest) -> None:
        prompt = request.prompt_token_ids or []
        params = request.sampling_params
        num_output = resume_output_len(request)
        self.request_id = request.request_id
        self.cycle = prompt[: len(prompt) - num_output]
        self.position = num_output % len(self.cycle)
        self.num_tokens = len(prompt)
        self.logprobs = None if params is None else params.logprobs
        self.prefill: list[int] | None = prompt
        """The prompt, until the first output."""


class EchoExecutor(Executor):
    """Echoes prompts. Options: :class:`EchoOptions`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._options = options = parse_options(config, EchoOptions)
        NEVER.wait(options.load_time_s)
        capacity = options.num_gpu_blocks * options.block_size
        max_model_len = options.max_model_len if config.max_model_len is None else config.max_model_len
        self.capacity = ExecutorCapacity(
            max_model_len=min(max_model_len, options.max_model_len, capacity),
            num_gpu_blocks=options.num_gpu_blocks,
            block_size=options.block_size,
            vocab_size=options.vocab_size,
        )
        self.capabilities = Capabilities(
            max_logprobs=options.logprobs,
            max_prompt_logprobs=options.logprobs,
            penalties=True,
            min_p=True,
            lora=True,
            stochastic=False,
            deterministic=True,
            resume=True,
            sleep_levels=(1, 2),
        )
        self._live: dict[str, _Echo] = {}
        self._prompt_logprobs: dict[str, int] = {}
        self._blocks_used = 0
        self._num_preempted = 0
        self._num_steps = 0
        self._asleep: set[str] = set()
        self._loras: set[int] = set()
        self._logprobs = _MadeUpLogprobs()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in a request.

        Raises:
            InvalidRequestError: ``resume_output_len`` does not fit the prompt.
        """
        self._live[request.request_id] = _Echo(request)
        params = request.sampling_params
        if params is not None and params.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = params.prompt_logprobs

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self._prompt_logprobs.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        """Give every request that fits into the cache its next token."""
        self._num_steps += 1
        if self._num_steps == self._options.fail_at_step:
            raise RuntimeError(f"failing at step {self._num_steps}, as fail_at_step asks")
        if self._options.step_time_s:
            NEVER.wait(self._options.step_time_s)
        block_size = self.capacity.block_size
        free = self.capacity.num_gpu_blocks
        outputs: list[EngineCoreOutput] = []
        for echo in self._live.values():
            blocks = echo.num_tokens // block_size + 1  # with the new token
            if blocks > free:
                continue
            free -= blocks
            outputs.append(self._next(echo))
        self._blocks_used = self.capacity.num_gpu_blocks - free
        self._num_preempted = len(self._live) - len(outputs)
        return outputs

    def _next(self, echo: _Echo) -> EngineCoreOutput:
        token_id = echo.cycle[echo.position]
        echo.position = echo.position + 1 if echo.position + 1 < len(echo.cycle) else 0
        echo.num_tokens += 1
        output = EngineCoreOutput(echo.request_id, [token_id])
        if echo.logprobs is not None:
            output.new_logprobs = self._logprobs.of(token_id, echo.logprobs)
        if echo.prefill is not None:
            num_tokens = len(echo.prefill)
            output.prefill_stats = PrefillStats(num_prompt_tokens=num_tokens, num_computed_tokens=num_tokens)
            if (candidates := self._prompt_logprobs.pop(echo.request_id, None)) is not None and num_tokens > 1:
                output.new_prompt_logprobs_tensors = self._logprobs.of_prompt(echo.prefill, candidates)
            echo.prefill = None
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def stats(self) -> ExecutorStats:
        """Report the pretended cache."""
        used = self._blocks_used if self._live else 0
        return ExecutorStats(
            kv_cache_usage=used / self.capacity.num_gpu_blocks,
            num_preempted_reqs=self._num_preempted if self._live else 0,
        )

    # Utilities, as truthful as they can be without anything behind them.

    def sleep(self, level: int) -> None:
        """Pretend to give up memory. Requests stay, and go on where they were."""
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep`."""
        self._asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether it pretends to have given up memory."""
        return bool(self._asleep)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Nothing is cached, so nothing is left."""
        return True

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Remember an adapter's id; it changes nothing."""
        is_new = lora_request.lora_int_id not in self._loras
        self._loras.add(lora_request.lora_int_id)
        return is_new

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter's id."""
        was_there = lora_id in self._loras
        self._loras.discard(lora_id)
        return was_there

    def pin_lora(self, lora_id: int) -> bool:
        """Whether there is such an adapter."""
        return lora_id in self._loras

    def list_loras(self) -> set[int]:
        """Return the ids of adapters."""
        return set(self._loras)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Do nothing: there is nothing to profile."""

    def execute_dummy_batch(self) -> None:
        """Take as long as a step."""
        NEVER.wait(self._options.step_time_s)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call one of a few methods that behave well or badly, to see what a frontend makes of it.

        ``echo`` returns its arguments, ``sleep_for`` takes so many seconds, ``raise_error`` raises RuntimeError of its
        text, ``return_unserialisable`` returns what cannot be sent.
        """
        methods: dict[str, Callable[..., Any]] = {
            "echo": _echo,
            "sleep_for": _sleep_for,
            "raise_error": _raise_error,
            "return_unserialisable": object,
        }
        if method not in methods:
            raise ValueError(f"EchoExecutor has no method {method!r} to call; it has {', '.join(methods)}")
        return [methods[method](*args, **(kwargs or {}))]


def _echo(*args: Any, **kwargs: Any) -> Any:
    return {"args": list(args), "kwargs": kwargs}


def _sleep_for(seconds: float) -> float:
    NEVER.wait(seconds)
    return seconds


def _raise_error(text: str = "raised on request") -> None:
    raise RuntimeError(text)


def resume_output_len(request: EngineCoreRequest) -> int:
    """Return how many trailing tokens of a prompt are output already (``extra_args["resume_output_len"]``).

    Raises:
        InvalidRequestError: not a number of tokens that leaves any of the original prompt.
    """
    params = request.sampling_params
    value = (params.extra_args or {}).get("resume_output_len", 0) if params is not None else 0
    prompt_len = len(request.prompt_token_ids or ())
    if type(value) is not int or not 0 <= value < prompt_len:
        raise InvalidRequestError(
            f"resume_output_len must be at least 0 and less than the prompt's {prompt_len} tokens, got {value!r}",
            parameter="extra_args",
        )
    return value


class _MadeUpLogprobs:
    """Candidates and their logprobs: the token itself has 1/2, its neighbours 1/4, 1/8 …

    Neighbours are ``token ^ 1``, ``token ^ 2`` …: distinct, never negative, and below any limit that is a multiple of
    a power of two larger than their number, as vocabularies' sizes are.
    """

    def of(self, token_id: int, candidates: int) -> LogprobsLists:
        """Make the logprobs of one sampled token, ``[1, candidates + 1]``."""
        import numpy as np

        ids, logprobs = self._rows([token_id], candidates)
        return LogprobsLists(ids, logprobs, np.ones(1, np.int64))

    def of_prompt(self, prompt: list[int], candidates: int) -> LogprobsTensors:
        """Make the logprobs of a prompt's tokens from the second on, ``[len(prompt) - 1, candidates + 1]``."""
        import numpy as np

        ids, logprobs = self._rows(prompt[1:], candidates)
        ranks = np.ones(len(prompt) - 1, np.int64)
        return LogprobsTensors(Tensor.from_numpy(ids), Tensor.from_numpy(logprobs), Tensor.from_numpy(ranks))

    def _rows(self, token_ids: list[int], candidates: int) -> tuple[Any, Any]:
        import numpy as np

        places = np.arange(candidates, dtype=np.int32)
        tokens = np.array(token_ids, dtype=np.int32)[:, None]
        row = np.concatenate([np.zeros(1), places]) + 1
        logprobs = np.broadcast_to(-row * np.log(2), (len(token_ids), candidates + 1)).astype(np.float32)
        return np.concatenate([tokens, tokens ^ places], axis=1), logprobs
