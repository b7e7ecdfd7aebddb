"""enginewire: the client layer between LLM frontends and engines, both ends of the wire.

Names are loaded when they are first used: importing the package starts nothing and loads no numpy, tokenizer or model
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from enginewire._version import __version__

if TYPE_CHECKING:
    from enginewire.client.base import EngineCoreClient
    from enginewire.config import EngineConfig
    from enginewire.engine.executor import Executor, ExecutorCapacity
    from enginewire.errors import (
        ClientClosedError,
        ConfigError,
        DuplicateRequestIdError,
        EngineClientError,
        EngineDeadError,
        EngineGenerateError,
        EngineStartupError,
        InvalidRequestError,
        ModelError,
        RequestError,
        UtilityCallError,
    )
    from enginewire.frontend.async_llm import AsyncLLM
    from enginewire.frontend.llm import LLM
    from enginewire.frontend.outputs import CompletionOutput, RequestOutput
    from enginewire.wire.capabilities import Capabilities
    from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from enginewire.wire.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

_HOMES = {
    "enginewire.client.base": ["EngineCoreClient"],
    "enginewire.config": ["EngineConfig"],
    "enginewire.engine.executor": ["Executor", "ExecutorCapacity"],
    "enginewire.errors": [
        "ClientClosedError",
        "ConfigError",
        "DuplicateRequestIdError",
        "EngineClientError",
        "EngineDeadError",
        "EngineGenerateError",
        "EngineStartupError",
        "InvalidRequestError",
        "ModelError",
        "RequestError",
        "UtilityCallError",
    ],
    "enginewire.frontend.async_llm": ["AsyncLLM"],
    "enginewire.frontend.llm": ["LLM"],
    "enginewire.frontend.outputs": ["CompletionOutput", "RequestOutput"],
    "enginewire.wire.capabilities": ["Capabilities"],
    "enginewire.wire.messages": ["EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequest", "FinishReason"],
    "enginewire.wire.sampling": ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604 - computed from the one table above
    "__version__",
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'enginewire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
