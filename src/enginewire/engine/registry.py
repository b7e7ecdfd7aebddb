"""Finding executors by name, and naming them."""

from __future__ import annotations

import importlib
import pickle
import sys
from functools import reduce
from typing import Any, Final

from enginewire.engine.executor import Executor
from enginewire.engine.spec import EngineSpec
from enginewire.errors import ConfigError

ENTRY_POINT_GROUP: Final = "enginewire.executors"

BUILT_IN: Final = {
    "echo": "enginewire.executors.echo:EchoExecutor",
    "openvino": "enginewire.executors.openvino:OpenVINOExecutor",
}
"""Ours, also found without reading the metadata of every installed package (30 ms of an engine's start)."""


def find_executor(reference: str) -> type[Executor]:
    """Find an executor class.

    Args:
        reference: a name from the entry-point group ``enginewire.executors``, or ``module:Class``.

    Raises:
        ConfigError: there is none of this name (the message lists those there are), or it is no executor.
    """
    if reference == "vllm":
        raise ConfigError("the engine vllm is a program of its own; it cannot run in this process")
    target = reference if ":" in reference else BUILT_IN.get(reference) or _entry_points().get(reference)
    if target is None:
        known = ", ".join(sorted(BUILT_IN.keys() | _entry_points().keys()))
        raise ConfigError(f"unknown executor {reference!r}; known: {known}, or name one as 'module:Class'")
    module_name, _, qualname = target.partition(":")
    try:
        module = importlib.import_module(module_name)
        found: Any = reduce(getattr, qualname.split("."), module)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"executor {reference!r} cannot be imported: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"executor {reference!r} is {found!r}, not a subclass of enginewire.Executor")
    return found


def load_executor_class(spec: EngineSpec) -> type[Executor]:
    """Find the executor class a spec asks for, in this process.

    Raises:
        ConfigError: it cannot be found.
    """
    sys.path.extend(path for path in spec.sys_path if path not in sys.path)
    if spec.executor_pickle is None:
        return find_executor(spec.executor)
    try:
        found: Any = pickle.loads(spec.executor_pickle)
    except Exception as exc:
        raise ConfigError(f"executor class {spec.executor} cannot be rebuilt in this process: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"executor {spec.executor} was sent as {type(found).__name__}, not as an Executor class")
    return found


def executor_reference(executor_class: type[Executor]) -> str:
    """Return the ``module:Class`` under which another process finds a class.

    Raises:
        ConfigError: it does not: the class lives in ``__main__``, in a function, or under another name.
    """
    reference = f"{executor_class.__module__}:{executor_class.__qualname__}"
    if executor_class.__module__ == "__main__" or "<locals>" in executor_class.__qualname__:
        raise ConfigError(f"executor class {reference} cannot be imported by another process; move it into a module")
    if find_executor(reference) is not executor_class:
        raise ConfigError(f"executor class {reference} is not what its module has under that name")
    return reference


def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points  # takes 20 ms, and most starts do not need it

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
