"""``EngineCore``: a scheduler over an executor, and the utilities a frontend may call.

It has no thread, socket or loop. A client in the same process calls it directly; ``EngineCoreProc`` gives it a process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from enginewire.config import EngineConfig
from enginewire.engine.admission import Request
from enginewire.engine.executor import Executor
from enginewire.engine.pauses import Pauses
from enginewire.engine.scheduler import PauseState, Scheduler
from enginewire.engine.step import StepInput, StepOutput, run_step
from enginewire.engine.validate import check_request
from enginewire.errors import ConfigError
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest, LoRARequest
from enginewire.wire.v0_32 import DEFAULT_WEIGHT_VERSION

logger = logging.getLogger(__name__)

WAKE_UP_TAGS: Final = ("weights", "kv_cache", "scheduling")


class EngineCore:
    """Runs requests on an executor, step by step.

    Args:
        config: the settings; not changed.
        executor_class: makes the executor, which loads the model.
        log_stats: report statistics with the outputs.
        reports_load: a coordinator is told what this engine has to do, and frontends which requests have ended.

    Attributes:
        executor: the executor.
        max_model_len: most tokens of prompt and output together: the least of what the executor, the configuration
            and the KV cache allow.

    Raises:
        ConfigError: more ``max_model_len`` is asked for than the executor has.
        Exception: whatever the executor's constructor raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: Callable[[EngineConfig], Executor],
        log_stats: bool = True,
        *,
        reports_load: bool = False,
    ) -> None:
        self.config = config
        self.executor = executor_class(config)
        self.capacity = self.executor.capacity
        self.capabilities = self.executor.capabilities
        asked, most = config.max_model_len, self.capacity.max_model_len
        if asked is not None and asked > most:
            self.executor.shutdown()
            raise ConfigError(
                f"max_model_len is {asked}, and this engine holds at most {most}; ask for less, or leave it out"
            )
        bounds = [most if asked is None else asked]
        if self.capacity.num_gpu_blocks:
            bounds.append(self.capacity.num_gpu_blocks * self.capacity.block_size)
        self.max_model_len = min(bounds)
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            policy=config.scheduling_policy,
            log_stats=log_stats,
            reports_load=reports_load,
        )
        self._is_asleep = self.executor.is_sleeping
        """As of the last call; for other threads, as the executor itself is called by one thread only."""
        self.pauses = Pauses(self.scheduler, self.executor)
        self.step_fn = self.step

    def shutdown(self) -> None:
        """Release the executor. Called once, last."""
        self.pauses.fail("the engine is shutting down")
        self.executor.shutdown()

    # Requests.

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Check a request and make it ready for :meth:`add_request`. Changes nothing; safe in any thread.

        Raises:
            InvalidRequestError: this engine cannot run it.
        """
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.capacity.vocab_size,
            capabilities=self.capabilities,
        )
        return Request(request, self.max_model_len)

    def add_request(self, request: Request) -> None:
        """Enqueue a request, in every pause state.

        Raises:
            DuplicateRequestIdError: one of this id is live; it goes on undisturbed.
        """
        self.scheduler.add(request)
        if request.core_request.abort_immediately:
            self.scheduler.abort([request.request_id])

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests on their client's behalf, without any output for them. Unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def abort_client(self, client_index: int) -> None:
        """End the requests of a frontend that is gone. It is told nevertheless: it may come back unaware."""
        self.scheduler.abort(self.scheduler.request_ids_of(client_index), tell_clients=True)

    # Steps.

    def schedule(self) -> StepInput | None:
        """Decide the next step; ``None``: nothing to do until something arrives."""
        return self.scheduler.schedule()

    def update(self, result: StepOutput) -> dict[int, EngineCoreOutputs]:
        """Turn the result of a step into messages, keyed by client index."""
        return self.scheduler.update(result)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Do one step here: schedule, run, update. Empty if there is nothing to do."""
        step_input = self.schedule()
        messages = {} if step_input is None else self.update(run_step(self.executor, step_input))
        for client_index, synthetic in self.scheduler.take_synthetic().items():
            message = messages.setdefault(client_index, EngineCoreOutputs())
            message.outputs.extend(synthetic.outputs)
            message.finished_requests = synthetic.finished_requests
        return messages

    def post_step(self) -> None:
        """Do what had to wait for a step's outputs to be on their way."""
        self.pauses.post_step()

    # Utilities that read.

    def get_supported_tasks(self) -> list[str]:
        """Return what the engine serves, e.g. ``["generate"]``."""
        return list(self.capabilities.tasks)

    def get_request_ids(self) -> list[str]:
        """Return the ids of live requests. Ours, not the reference's: clients ask after a message was lost."""
        return self.scheduler.request_ids

    def is_scheduler_paused(self) -> bool:
        """Whether the scheduler is paused."""
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def is_sleeping(self) -> bool:
        """Whether the scheduler is paused or the executor asleep."""
        return self.is_scheduler_paused() or self._is_asleep

    def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """Describe the KV cache: one group."""
        block_size = self.capacity.block_size
        return [{"group_idx": 0, "kind": "full_attention", "block_size": block_size, "sliding_window": None}]

    def reset_mm_cache(self) -> None:
        """Forget cached multimodal inputs. There are none."""

    def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs. There are none."""

    def get_weight_version(self) -> str:
        """Name the weights."""
        return DEFAULT_WEIGHT_VERSION

    # Utilities of vLLM 0.32 that an engine whose weights stay what they are has no answer to.

    def set_weight_version(self, weight_version: str) -> None:
        """Weights are what they were loaded as."""
        raise NotImplementedError(
            f"this engine's weights cannot be replaced, so their version stays {DEFAULT_WEIGHT_VERSION!r}"
        )

    def release_kv_cache_memory(self) -> None:
        """Not without the weights."""
        raise NotImplementedError("this engine does not offer release_kv_cache_memory; sleep releases all it has")

    def compute_weight_checksums(self) -> list[dict[str, str]]:
        """Weights are not looked into."""
        raise NotImplementedError("this engine does not offer compute_weight_checksums")

    # Utilities that pause, sleep and wake (protocol section H).

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Pause.

        Args:
            mode: ``abort`` ends all requests; ``wait`` lets running ones finish, waiting ones wait; ``keep`` stops
                everything where it is.
            clear_cache: forget cached prefixes then; kept requests are recomputed.

        Returns:
            A future if running requests have to finish first.

        Raises:
            ValueError: another mode.
        """
        return self._pause(mode, self._clear_cache if clear_cache else lambda: None)

    def resume_scheduler(self) -> None:
        """Go on.

        Raises:
            ValueError: the executor is asleep.
            RuntimeError: ranks in lock-step have not agreed yet on a pause: some would go on, and some not.
        """
        if self._is_asleep:
            raise ValueError("the executor is asleep; call wake_up")
        self.pauses.resume()

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None] | None:
        """Pause, then give up memory: level 0 none, 1 weights and KV cache, 2 everything.

        Raises:
            ValueError: no such level or mode.
            NotImplementedError: the executor does not offer this level; nothing was paused.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"Invalid sleep level: {level}; 0, 1 or 2 was expected")
        if level and level not in self.capabilities.sleep_levels:
            offers = ", ".join(str(offered) for offered in (0, *self.capabilities.sleep_levels))
            raise NotImplementedError(f"this engine does not offer sleep level {level}; it offers {offers}")
        return self._pause(mode, (lambda: self._fall_asleep(level)) if level else lambda: None)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take memory back and, once all of it is there, go on.

        Args:
            tags: ``weights``, ``kv_cache``: only these; ``scheduling``: only go on; ``None``: everything.

        Returns:
            whether it is fully awake. Frontends of 0.25 expect nothing and do not look.

        Raises:
            ValueError: an unknown tag.
        """
        if unknown := [tag for tag in tags or () if tag not in WAKE_UP_TAGS]:
            raise ValueError(f"Invalid wake_up tags: {', '.join(unknown)}; known: {', '.join(WAKE_UP_TAGS)}")
        memory = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if memory != [] and self._is_asleep:
            self.executor.wake_up(memory)
            self._is_asleep = self.executor.is_sleeping
        if not self._is_asleep:
            self.resume_scheduler()
        return not self._is_asleep

    def _pause(self, mode: str, then: Callable[[], None]) -> Future[None] | None:
        if mode == "wait" and self._is_asleep and self.scheduler.num_running:
            raise ValueError("the requests kept by this pause cannot finish while the executor sleeps; call wake_up")
        return self.pauses.begin(mode, then)

    def _clear_cache(self) -> None:
        if self.capabilities.prefix_caching and not self._is_asleep:
            self.reset_prefix_cache(reset_running_requests=True)

    def _fall_asleep(self, level: int) -> None:
        if not self._is_asleep:
            self.executor.sleep(level)  # takes the cache along
            self.scheduler.note_cache_reset()
            self._is_asleep = self.executor.is_sleeping

    # Utilities of the executor.

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes. There is no connector to reset."""
        done = self.executor.reset_prefix_cache(reset_running_requests)
        if done:
            self.scheduler.note_cache_reset()
        return done

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop a profiler.

        Raises:
            NotImplementedError: a profile of some steps only, which vLLM 0.32's frontends can ask for.
        """
        if delay_iterations or max_iterations:
            raise NotImplementedError("this engine profiles from call to call; leave out delay and max_iterations")
        self.executor.profile(is_start, profile_prefix)

    def execute_dummy_batch(self) -> None:
        """Run a step without requests."""
        self.executor.execute_dummy_batch()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        return self.executor.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return self.executor.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        return self.executor.pin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of loaded adapters."""
        return self.executor.list_loras()

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights to a folder."""
        self.executor.save_sharded_state(path, pattern, max_size)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; return one result per worker."""
        return self.executor.collective_rpc(method, timeout, args, kwargs)
