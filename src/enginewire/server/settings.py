"""``ServerSettings``: everything about the server that is not about the engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from enginewire.errors import ConfigError

DEFAULT_PORT: Final = 8000

LOWEST: Final = {
    "api_server_count": 1,
    "max_queue": 0,
    "max_body_bytes": 1,
    "shutdown_timeout_s": 0,
    "stall_timeout_s": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        host: address to listen on.
        port: 0: any that is free.
        served_model_names: names that requests may use; the first is the one in responses.
        tokenizer: the model to take tokenizer and chat template from; ``None``: the one that is served.
        api_keys: if there are any, requests need one of them.
        admin: whether the endpoints that stop, change and look into the engine exist.
        api_server_count: processes that serve side by side; more than one for more than a few thousand tokens a second.
        max_queue: completions that may wait beyond those that the engines run at once; more are refused with 429.
        max_body_bytes: larger requests are refused with 413.
        shutdown_timeout_s: how long running requests may go on after SIGTERM.
        stall_timeout_s: after so long without a sign of life or of progress from a busy engine, it counts as not ready.
        exit_on_engine_death: end the process, with a non-zero status, when the engine is dead.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    served_model_names: tuple[str, ...]
    tokenizer: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin: bool = False
    api_server_count: int = 1
    max_queue: int = 1024
    max_body_bytes: int = 8 << 20
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    exit_on_engine_death: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("a served model needs a name")
        if not all(key.isascii() and key.isprintable() and key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII, and not empty")
        if not self.host:
            raise ConfigError("host must not be empty; to listen on every address, say 0.0.0.0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        for name, low in LOWEST.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.admin and not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"--admin on {self.host}, which others can reach, needs --api-key: it can stop the engine"
            )

    @property
    def model_name(self) -> str:
        """The name in responses."""
        return self.served_model_names[0]


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_model_name(model: str) -> str:
    """Return the name for a model that was given none: an alias as it is, a path without its folders."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or model
