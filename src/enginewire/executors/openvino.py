"""``OpenVINOExecutor``: runs a model on the CPU with OpenVINO GenAI's continuous batching.

It loads GGUF files as they are, or OpenVINO model folders. What it adds to the library: the checks that the library
leaves out, a KV cache of known size, grammars that are tried before they run, and recovery when the library raises in
mid-step.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from enginewire.config import EngineConfig
from enginewire.engine.executor import Executor, ExecutorCapacity, ExecutorStats, parse_options
from enginewire.errors import INTERNAL_PREFIX, INVALID_REQUEST_PREFIX, InvalidRequestError
from enginewire.executors.openvino_grammar import KINDS, constraint_from
from enginewire.executors.openvino_memory import (
    BLOCK_SIZE,
    ModelGeometry,
    available_memory,
    plan_kv_cache,
)
from enginewire.executors.openvino_options import OpenVINOOptions
from enginewire.executors.openvino_pipeline import (
    FINISH_REASONS,
    FINISHED,
    IGNORED,
    Handle,
    Pipeline,
    PipelineSettings,
    import_openvino,
)
from enginewire.executors.openvino_probe import GrammarProbe
from enginewire.executors.openvino_recovery import Live, judge, why_not_resumable
from enginewire.executors.openvino_sampling import generation_settings, has_plain_choice
from enginewire.executors.openvino_signals import kept_signal_stack
from enginewire.models import resolve_model
from enginewire.wire.arrays import LogprobsLists
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)

_MAX_FAILURES: Final = 3
"""Failures in a row, without any token in between, after which the pipeline is given up and with it the engine."""

_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

_MEMORY_TAGS: Final = frozenset({"weights", "kv_cache"})


class OpenVINOExecutor(Executor):
    """Runs ``config.model`` on the CPU. Options: :class:`~enginewire.executors.openvino_options.OpenVINOOptions`.

    Raises:
        ModelError: the model is missing, damaged, cut, or not one that OpenVINO can load.
        ConfigError: an option that cannot be, or a ``max_model_len`` that model or memory do not allow.
    """

    holds_gil: ClassVar[bool] = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        options = parse_options(config, OpenVINOOptions)
        properties = options.plugin_properties()
        self._model = resolve_model(config.model)
        geometry = ModelGeometry.read(self._model)
        _, openvino = import_openvino()
        core = openvino.Core()

        def precision(name: str) -> str:
            with kept_signal_stack():
                return str(properties.get(name) or core.get_property("CPU", name).to_string())

        plan = plan_kv_cache(
            geometry,
            geometry.bytes_per_block(precision("KV_CACHE_PRECISION")),
            max_model_len=config.max_model_len,
            num_kv_blocks=options.num_kv_blocks,
            kv_cache_bytes=options.kv_cache_bytes,
            available_bytes=available_memory(),
        )
        self.capacity = ExecutorCapacity(
            max_model_len=plan.max_model_len,
            num_gpu_blocks=plan.num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=geometry.vocab_size,
            dtype=_DTYPES.get(dtype := precision("INFERENCE_PRECISION_HINT"), dtype),
        )
        self.capabilities = Capabilities(
            max_logprobs=0,
            structured_outputs=KINDS,
            penalties=True,
            min_p=True,
            deterministic=options.deterministic,
            sleep_levels=(1, 2),
            prefix_caching=options.enable_prefix_caching,
        )
        self._settings = PipelineSettings(
            num_kv_blocks=plan.num_blocks,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
            properties=properties,
        )
        self._running: dict[str, Live] = {}
        self._held: deque[Live] = deque()
        """Taken in but in no pipeline: while asleep, and while others are on trial."""
        self._failed: list[EngineCoreOutput] = []
        """ERROR outputs for the next step to return."""
        self._failures = 0
        self._asleep: set[str] = set()
        self._has_prefixes = False
        self._probe: GrammarProbe | None = None
        self._has_probe = True
        self._pipeline: Pipeline | None = self._load()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in a request. Raises InvalidRequestError if its grammar does not compile."""
        params = request.sampling_params
        assert params is not None  # validated
        if request.cache_salt is not None and self._settings.enable_prefix_caching:
            raise InvalidRequestError(
                "cache_salt is not supported by this engine: it cannot keep cached prefixes apart; "
                "start it with enable_prefix_caching=False",
                parameter="cache_salt",
            )
        live = Live(request, params, rank=int(has_plain_choice(params)))
        if self._pipeline is None or self._held:
            self._held.append(live)
        else:
            self._start(live)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests; their blocks are free after the next step, or at once if nothing else runs."""
        for request_id in request_ids:
            if (live := self._running.pop(request_id, None)) is not None and live.handle is not None:
                live.handle.cancel()
        gone = frozenset(request_ids)
        if self._held:
            self._held = deque(live for live in self._held if live.request.request_id not in gone)
        if self._failed:
            self._failed = [output for output in self._failed if output.request_id not in gone]
        if self._pipeline is not None and not self._running and not self._pipeline.settle():
            self._reload()

    def step(self) -> list[EngineCoreOutput]:
        """Advance every request by a token or a piece of its prompt.

        Raises:
            RuntimeError: OpenVINO failed several times in a row without producing anything.
        """
        outputs: list[EngineCoreOutput] = []
        self._admit()
        if self._pipeline is not None and self._running:
            try:
                self._pipeline.step()
            except Exception as exc:  # noqa: BLE001 - whatever a native library raises
                self._recover(exc)
            else:
                outputs = self._collect()
        if self._failed:
            answered = {output.request_id for output in outputs}  # at most one output per request and step
            outputs += [output for output in self._failed if output.request_id not in answered]
            self._failed = [output for output in self._failed if output.request_id in answered]
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._failed or (self._pipeline is not None and (self._running or self._held)))

    def stats(self) -> ExecutorStats:
        """Report the state after the last step. OpenVINO does not tell how much it found in its prefix cache."""
        if self._pipeline is None or not self._running:
            return ExecutorStats()
        starved = sum(live.starved for live in self._running.values())
        return ExecutorStats(kv_cache_usage=self._pipeline.cache_usage, num_preempted_reqs=starved)

    def shutdown(self) -> None:
        """Release everything."""
        self._unload()
        self._running.clear()
        self._held.clear()
        self._probe = None

    def sleep(self, level: int) -> None:
        """Give up weights and KV cache; both levels do, as the weights are read from the file again on waking up.

        Running requests go on afterwards, except those that cannot be taken up in mid-text: these fail.
        """
        if self._pipeline is not None:
            self._pipeline.settle(_handles(self._running.values()))
            self._hold(list(self._running.values()), "the engine was put to sleep")
            self._unload()
        self._asleep = set(_MEMORY_TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Load the model again, once both ``"weights"`` and ``"kv_cache"`` are asked for.

        Raises:
            ValueError: an unknown tag.
        """
        wanted = _MEMORY_TAGS if tags is None else frozenset(tags)
        if unknown := sorted(wanted - _MEMORY_TAGS):
            raise ValueError(f"unknown tag {', '.join(unknown)}; known: {', '.join(sorted(_MEMORY_TAGS))}")
        if self._pipeline is None and not self._asleep - wanted:
            self._pipeline = self._load()
        self._asleep -= wanted

    @property
    def is_sleeping(self) -> bool:
        """Whether any memory is given up."""
        return bool(self._asleep)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes by loading the model again, which takes seconds unless there are none."""
        if self._pipeline is None or not self._has_prefixes:
            return True
        if self._running and not reset_running_requests:
            return False
        self._pipeline.settle(_handles(self._running.values()))
        self._hold(list(self._running.values()), "the prefix cache was reset")
        self._reload()
        return True

    def _load(self) -> Pipeline:
        pipeline = Pipeline(self._model, self._settings)
        self._has_prefixes = False
        logger.info(
            "model loaded path=%s num_kv_blocks=%d max_model_len=%d properties=%s",
            self._model,
            self._settings.num_kv_blocks,
            self.capacity.max_model_len,
            self._settings.properties,
        )
        return pipeline

    def _unload(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close(_handles(self._running.values()))
            self._pipeline = None

    def _reload(self) -> None:
        self._unload()  # first, or both would need memory at once
        self._pipeline = self._load()

    def _admit(self) -> None:
        """Start what was held, but nothing beside a request that is on trial."""
        while self._held and self._pipeline is not None:
            if any(live.on_trial for live in self._running.values()):
                return
            live = self._held.popleft()
            try:
                self._start(live)
            except InvalidRequestError as exc:
                self._fail(live, INVALID_REQUEST_PREFIX + str(exc))
            except Exception as exc:  # noqa: BLE001 - whatever a native library raises
                self._fail(live, INTERNAL_PREFIX + str(exc))

    def _start(self, live: Live) -> None:
        """Put a request into the pipeline, with the tokens it has so far as part of its prompt."""
        assert self._pipeline is not None
        params, prompt = live.params, live.request.prompt_token_ids
        assert prompt is not None  # validated
        room = self.capacity.max_model_len - len(prompt)
        settings = generation_settings(
            params,
            num_delivered=len(live.delivered),
            max_new_tokens=(room if params.max_tokens is None else min(params.max_tokens, room)) - len(live.delivered),
            random_seed=secrets.randbits(32),
            model_eos=self._pipeline.model_eos,
            vocab_size=self.capacity.vocab_size or 0,
        )
        constraint = None
        if params.structured_outputs is not None:
            constraint = constraint_from(params.structured_outputs)
            if (probe := self._grammar_probe()) is not None:
                probe.check(constraint)
        live.max_delivered = len(live.delivered) + settings["max_new_tokens"]
        live.last_tokens = settings.get("stop_token_ids", ())
        live.handle = self._pipeline.add([*prompt, *live.delivered], settings, constraint)
        self._running[live.request.request_id] = live
        self._has_prefixes = self._settings.enable_prefix_caching

    def _grammar_probe(self) -> GrammarProbe | None:
        """Return the probe, made when first needed; ``None`` if it cannot be: recovery has to do then."""
        if self._probe is None and self._has_probe:
            try:
                self._probe = GrammarProbe()
            except Exception:  # it depends on OpenVINO's internals and on a temporary folder
                logger.warning("grammars are not checked before they run: the probe cannot be made", exc_info=True)
                self._has_probe = False
        return self._probe

    def _collect(self) -> list[EngineCoreOutput]:
        """Read what the step brought."""
        outputs: list[EngineCoreOutput] = []
        dropped = False
        for live in list(self._running.values()):
            handle = live.handle
            assert handle is not None
            if not handle.can_read():
                live.starved = bool(live.delivered)
                if live.starved and int(handle.get_status()) == FINISHED:  # or it would never end
                    del self._running[live.request.request_id]
                    self._fail(live, f"{INTERNAL_PREFIX}OpenVINO ended the request at a token that ends none")
                continue
            live.starved = False
            for native in handle.read().values():
                outputs.append(self._output(live, native))
                break
            else:
                dropped = dropped or int(handle.get_status()) == IGNORED
        if outputs:
            self._failures = 0
        if dropped:
            self._recover(RuntimeError("OpenVINO dropped requests, as one did not fit the KV cache"))
        return outputs

    def _output(self, live: Live, native: Any) -> EngineCoreOutput:
        token_ids: list[int] = native.generated_ids
        live.delivered += token_ids
        live.on_trial = False
        output = EngineCoreOutput(live.request.request_id, token_ids)
        if live.params.logprobs is not None:
            output.new_logprobs = LogprobsLists(
                np.array(token_ids, dtype=np.int32).reshape(-1, 1),
                np.array(native.generated_log_probs, dtype=np.float32).reshape(-1, 1),
                np.full(len(token_ids), live.rank, dtype=np.int64),
            )
        if live.can_have_ended and (finish_reason := FINISH_REASONS[int(native.finish_reason)]) is not None:
            del self._running[live.request.request_id]
            output.finish_reason = finish_reason
            last = token_ids[-1]
            if (
                finish_reason is FinishReason.STOP
                and last != live.params.eos_token_id
                and last in (live.params.stop_token_ids or ())
            ):
                output.stop_reason = last
        return output

    def _recover(self, cause: Exception) -> None:
        """Get the pipeline going again after ``cause``: answer who is to blame, let the others go on."""
        running = list(self._running.values())
        guilty, suspects, innocent = judge(running)
        logger.warning(
            "openvino raised, recovering running=%d suspects=%s: %s",
            len(running),
            [live.request.request_id for live in ([guilty] if guilty else suspects)],
            cause,
        )
        if guilty is None or guilty.delivered or not guilty.is_constrained:  # no simple explanation
            self._failures += 1
        if self._failures > _MAX_FAILURES:
            raise RuntimeError(
                f"OpenVINO failed {self._failures} times in a row without producing a token; last: {cause}"
            ) from cause
        if guilty is not None:
            is_invalid = guilty.is_constrained and not guilty.delivered
            self._fail(guilty, f"{INVALID_REQUEST_PREFIX if is_invalid else INTERNAL_PREFIX}OpenVINO: {cause}")
        for live in suspects:
            live.on_trial = True
        is_empty = self._pipeline is not None and self._pipeline.settle(_handles(running))
        self._hold([*innocent, *suspects], f"another request made OpenVINO fail ({cause})")
        if self._failures > 1 or not is_empty:
            self._reload()

    def _hold(self, lives: Iterable[Live], reason: str) -> None:
        """Keep requests for :meth:`_admit`, ahead of those that wait already; fail those that cannot go on."""
        self._running.clear()
        kept: list[Live] = []
        for live in lives:
            live.handle = None
            if (obstacle := why_not_resumable(live)) is None:
                kept.append(live)
            else:
                self._fail(live, f"{INTERNAL_PREFIX}{reason}, and {obstacle}")
        self._held.extendleft(reversed(kept))

    def _fail(self, live: Live, reason: str) -> None:
        self._failed.append(
            EngineCoreOutput(live.request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        )


def _handles(lives: Iterable[Live]) -> list[Handle]:
    return [live.handle for live in lives if live.handle is not None]
