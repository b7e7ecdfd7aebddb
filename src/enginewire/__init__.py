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
        AddressError,
        ClientClosedError,
        ConfigError,
        DuplicateRequestIdError,
        EngineClientError,
        EngineDeadError,
        EngineGenerateError,
        EngineStartupError,
        EngineUnavailableError,
        InvalidRequestError,
        ModelError,
        RequestError,
        RequestLostError,
        UtilityCallError,
    )
    from enginewire.frontend.async_llm import AsyncLLM
    from enginewire.frontend.llm import LLM
    from enginewire.frontend.outputs import CompletionOutput, RequestOutput
    from enginewire.wire.capabilities import Capabilities
    from enginewire.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from enginewire.wire.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

_HOME_OF = {
    "AsyncLLM": "enginewire.frontend.async_llm",
    "Capabilities": "enginewire.wire.capabilities",
    "AddressError": "enginewire.errors",
    "ClientClosedError": "enginewire.errors",
    "CompletionOutput": "enginewire.frontend.outputs",
    "ConfigError": "enginewire.errors",
    "DuplicateRequestIdError": "enginewire.errors",
    "EngineClientError": "enginewire.errors",
    "EngineConfig": "enginewire.config",
    "EngineCoreClient": "enginewire.client.base",
    "EngineCoreOutput": "enginewire.wire.messages",
    "EngineCoreOutputs": "enginewire.wire.messages",
    "EngineCoreRequest": "enginewire.wire.messages",
    "EngineDeadError": "enginewire.errors",
    "EngineGenerateError": "enginewire.errors",
    "EngineStartupError": "enginewire.errors",
    "EngineUnavailableError": "enginewire.errors",
    "Executor": "enginewire.engine.executor",
    "ExecutorCapacity": "enginewire.engine.executor",
    "FinishReason": "enginewire.wire.messages",
    "InvalidRequestError": "enginewire.errors",
    "LLM": "enginewire.frontend.llm",
    "ModelError": "enginewire.errors",
    "RequestError": "enginewire.errors",
    "RequestLostError": "enginewire.errors",
    "RequestOutput": "enginewire.frontend.outputs",
    "RequestOutputKind": "enginewire.wire.sampling",
    "SamplingParams": "enginewire.wire.sampling",
    "StructuredOutputsParams": "enginewire.wire.sampling",
    "UtilityCallError": "enginewire.errors",
}

__all__ = [
    "LLM",
    "AddressError",
    "AsyncLLM",
    "Capabilities",
    "ClientClosedError",
    "CompletionOutput",
    "ConfigError",
    "DuplicateRequestIdError",
    "EngineClientError",
    "EngineConfig",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineStartupError",
    "EngineUnavailableError",
    "Executor",
    "ExecutorCapacity",
    "FinishReason",
    "InvalidRequestError",
    "ModelError",
    "RequestError",
    "RequestLostError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UtilityCallError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'enginewire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
