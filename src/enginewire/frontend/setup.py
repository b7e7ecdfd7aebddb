"""What ``LLM`` and ``AsyncLLM`` do before there is a client."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from enginewire.client.base import ExecutorChoice
from enginewire.config import EngineConfig
from enginewire.engine.executor import Executor
from enginewire.engine.registry import BUILT_IN
from enginewire.errors import ConfigError
from enginewire.frontend.progress import download_progress
from enginewire.models import ALIASES, resolve_model
from enginewire.text.tokenizer import ECHO_MODEL


def make_config(
    model: str | Path | None,
    engine: ExecutorChoice,
    config: EngineConfig | None,
    executor_options: dict[str, Any] | None,  # the executor knows their types
    settings: dict[str, Any],  # EngineConfig.create checks them
) -> EngineConfig:
    """Make the configuration from a constructor's arguments.

    Raises:
        ConfigError: a setting that cannot be, or settings next to a whole ``config``.
    """
    if config is not None:
        if model is not None or executor_options or settings:
            raise ConfigError("give either config or model, executor_options and settings, not both")
        return config
    if engine is not None:
        if "executor" in settings:
            raise ConfigError("engine and executor are one setting; give one of them")
        settings = settings | {"executor": _reference(engine)}
    if model is None and settings.get("executor") in ("echo", BUILT_IN["echo"]):
        model = ECHO_MODEL
    return EngineConfig.create(None if model is None else str(model), executor_options=executor_options, **settings)


def fetch_model(config: EngineConfig) -> None:
    """Have the model's file in place before an engine is started: its time to get ready is no time to download.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    # Other executors may give a meaning of their own to other names.
    if config.starts_engines and (config.model in ALIASES or config.executor in ("openvino", BUILT_IN["openvino"])):
        with download_progress() as progress:
            resolve_model(config.model, progress=progress)


def _reference(engine: object) -> str:
    if isinstance(engine, str):
        return engine
    if isinstance(engine, type) and issubclass(engine, Executor):
        return f"{engine.__module__}:{engine.__qualname__}"
    raise ConfigError(
        f"engine must be a name, 'module:Class' or a subclass of enginewire.Executor, got {reprlib.repr(engine)}"
    )
