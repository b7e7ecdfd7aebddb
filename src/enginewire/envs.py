"""Every environment variable that is read, in one place. A setting in the configuration wins over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from enginewire.errors import ConfigError

T = TypeVar("T", int, float)


def _number(name: str, default: T, parse: Callable[[str], T], low: T) -> T:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = parse(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} must be a number, got {text!r}") from None
    if not value >= low:
        raise ConfigError(f"environment variable {name} must be at least {low}, got {text!r}")
    return value


def ready_timeout_s() -> float:
    """``VLLM_ENGINE_READY_TIMEOUT_S``: seconds from launch to ready (600)."""
    return _number("VLLM_ENGINE_READY_TIMEOUT_S", 600.0, float, 0.001)


def rpc_base_path() -> str | None:
    """``VLLM_RPC_BASE_PATH``: folder for ipc sockets (the system's temporary folder)."""
    return os.environ.get("VLLM_RPC_BASE_PATH") or None


def zero_copy_threshold() -> int:
    """``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``: bytes from which an array gets a frame of its own (256)."""
    return _number("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", 256, int, 0)


def allow_insecure_serialization() -> bool:
    """``VLLM_ALLOW_INSECURE_SERIALIZATION=1``: allow pickle on the wire. Off; leave it off."""
    return os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") == "1"


def api_key() -> str | None:
    """``ENGINEWIRE_API_KEY``: the key that ``enginewire serve`` wants from clients (none)."""
    return os.environ.get("ENGINEWIRE_API_KEY") or None


def vllm_api_key() -> str | None:
    """``VLLM_API_KEY``: the same for ``enginewire-frontend``, as vLLM's own server has it (none)."""
    return os.environ.get("VLLM_API_KEY") or None


def state_dir() -> Path | None:
    """``XDG_STATE_HOME``: where frontends remember their engines (``~/.local/state``; ``None``: there is no home)."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "enginewire"
    except RuntimeError:
        return None


def cache_dir() -> str | None:
    """``ENGINEWIRE_CACHE``: folder for models (``$XDG_CACHE_HOME/enginewire``, else ``~/.cache/enginewire``)."""
    return os.environ.get("ENGINEWIRE_CACHE") or None
