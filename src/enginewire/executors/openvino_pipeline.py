"""``Pipeline``: OpenVINO GenAI's ``ContinuousBatchingPipeline`` with its errors translated and its mess cleaned up."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct

from enginewire.errors import ConfigError, ModelError
from enginewire.executors.openvino_grammar import Constraint
from enginewire.executors.openvino_signals import kept_signal_stack
from enginewire.wire.messages import FinishReason

FINISH_REASONS: Final[Mapping[int, FinishReason | None]] = {0: None, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
"""``int(GenerationFinishReason)`` to ours."""

FINISHED: Final = 1
"""``int(GenerationStatus)`` of a request that has ended."""

IGNORED: Final = 2
"""``int(GenerationStatus)`` of a request that was dropped, as one did not fit the KV cache."""

_STEPS_TO_SETTLE: Final = 3
"""Cancelled requests are gone after one step; more means that the pipeline is stuck."""


class PipelineSettings(Struct, kw_only=True, frozen=True):
    """What a pipeline is built from.

    Attributes:
        num_kv_blocks: blocks of 32 tokens.
        max_num_batched_tokens: most tokens that one step computes.
        max_num_seqs: most requests that one step computes for.
        enable_prefix_caching: keep blocks for prompts that start alike.
        properties: for OpenVINO's CPU plugin.
    """

    num_kv_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    properties: dict[str, Any]


class Handle(Protocol):
    """A request inside OpenVINO (``GenerationHandle``)."""

    def can_read(self) -> bool:
        """Whether a step brought something."""
        ...

    def read(self) -> Mapping[int, Any]:
        """Return what it brought: one ``GenerationOutput``, or nothing if the request was dropped."""
        ...

    def get_status(self) -> Any:
        """Return its ``GenerationStatus``."""
        ...

    def cancel(self) -> None:
        """Take it out at the next step."""
        ...


class Pipeline:
    """A loaded model.

    Args:
        model: a .gguf file or an OpenVINO model folder.

    Raises:
        ConfigError: the ``openvino`` extra is not installed.
        ModelError: OpenVINO cannot load it; says why.
    """

    def __init__(self, model: Path, settings: PipelineSettings) -> None:
        genai, openvino = import_openvino()
        if model.is_file() and not os.access(model, os.R_OK | os.W_OK):
            # It only reads, but opens for appending too.
            raise ModelError(f"{model}: OpenVINO needs permission to read and write the file it loads")
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.num_kv_blocks
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.enable_prefix_caching = settings.enable_prefix_caching
        scheduler.dynamic_split_fuse = True  # prompts are computed in pieces, beside the others' next tokens
        try:
            with kept_signal_stack():
                self._native: Any = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings.properties)
        except Exception as exc:
            raise ModelError(f"{model}: OpenVINO cannot load it: {exc}") from exc
        self._genai = genai
        self._tensor = openvino.Tensor
        self._next_id = 0
        self.model_eos = int(self._native.get_config().eos_token_id)

    def add(self, token_ids: Sequence[int], settings: Mapping[str, Any], constraint: Constraint | None) -> Handle:
        """Add a request under an id of its own: one that is reused would break the pipeline."""
        config = self._genai.GenerationConfig()
        for name, value in settings.items():
            setattr(config, name, value)
        if constraint is not None:
            config.structured_output_config = self._genai.StructuredOutputConfig(**{constraint.field: constraint.text})
        self._next_id += 1
        prompt = self._tensor(np.array([token_ids], dtype=np.int64))
        handle: Handle = self._native.add_request(self._next_id, prompt, config)
        return handle

    def step(self) -> None:
        """Compute one step. Raises whatever OpenVINO does; then only :meth:`settle` makes it usable again."""
        self._native.step()

    def settle(self, handles: Iterable[Handle] = ()) -> bool:
        """Cancel what is left, free its blocks, and say whether the pipeline is empty and in order.

        This also repairs a pipeline whose ``step`` raised, provided *every* request in it is cancelled: what it
        stumbles over is requests that are marked as being computed. The prefix cache survives.
        """
        for handle in handles:
            handle.cancel()
        try:
            for _ in range(_STEPS_TO_SETTLE):
                if not self._native.has_non_finished_requests():
                    return True
                self._native.step()
            return not self._native.has_non_finished_requests()
        except Exception:  # noqa: BLE001 - whatever a native library raises: it is beyond repair
            return False

    @property
    def cache_usage(self) -> float:
        """Share of the KV blocks that the last step's requests used, 0 … 1."""
        return float(self._native.get_metrics().cache_usage) / 100

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache; 0 before the first step."""
        return int(self._native.get_metrics().kv_cache_size_in_bytes)

    def close(self, handles: Iterable[Handle] = ()) -> None:
        """Give up the memory (all handles must be gone as well)."""
        self.settle(handles)  # or its destructor complains on stderr about blocks in use
        self._native = None


def import_openvino() -> tuple[Any, Any]:
    """Import ``openvino_genai`` and ``openvino``: 0.3 s and 65 MB, hence not at the top.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        with _without_telemetry():
            import openvino
            import openvino_genai
    except ImportError as exc:
        raise ConfigError(
            f"the openvino executor needs OpenVINO GenAI, which cannot be imported ({exc}); "
            "install it with: pip install 'enginewire[openvino]'"
        ) from None
    return openvino_genai, openvino


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """Hide ``openvino_telemetry`` from an import of OpenVINO, which does without it then.

    It starts a thread and reports the use of OpenVINO to its makers unless the user has opted out.
    """
    name = "openvino_telemetry"
    if name in sys.modules:  # somebody else has imported it
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # documented: makes the import fail
    try:
        yield
    finally:
        del sys.modules[name]
