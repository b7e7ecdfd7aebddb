"""How an engine process gets at an executor class: by name, by import, or by value.

A class of an importable module is imported there. A class that lives in a script, on standard input or in a notebook
cell cannot be imported without running the script again, so it travels by value, with cloudpickle, over the private
socket pair between the two processes; never over a ZeroMQ socket.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from enginewire.engine.executor import Executor
from enginewire.engine.registry import executor_reference, find_executor
from enginewire.errors import ConfigError
from enginewire.host.vllm import VLLM


@dataclass(frozen=True, slots=True)
class ExecutorSource:
    """A reference to import, or the pickled class."""

    reference: str
    pickled: bytes | None = None


def executor_source(choice: type[Executor] | str) -> ExecutorSource:
    """Decide how ``choice`` gets to an engine process.

    Raises:
        ConfigError: a name that is not registered; or a class that can neither be imported nor pickled.
    """
    if choice == VLLM:
        return ExecutorSource(VLLM)
    if isinstance(choice, str):
        find_executor(choice)  # an unknown one is refused here, where the caller is
        return ExecutorSource(choice)
    with contextlib.suppress(ConfigError):
        return ExecutorSource(executor_reference(choice))
    where = f"{choice.__module__}:{choice.__qualname__}"
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(
            f"the engine process cannot import {where}: it lives in a script, a notebook cell or a function. Move it "
            'to a module, or install cloudpickle (pip install "enginewire[notebook]"), or use multiprocess_mode=False'
        ) from None
    try:
        return ExecutorSource(where, cloudpickle.dumps(choice))
    except Exception as exc:
        raise ConfigError(
            f"{where} cannot be sent to the engine process: {exc}. Move it to a module, or use multiprocess_mode=False"
        ) from exc
