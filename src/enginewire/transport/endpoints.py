"""Where a frontend's sockets are bound: ipc in a folder of their own, or tcp.

Unix socket paths are limited to about 107 bytes and need a writable folder. Where they cannot be had, ``auto``
falls back to tcp on loopback, which any local user can connect to; the ipc folder is private (mode 0700).
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass

from enginewire.config import EngineConfig, Transport
from enginewire.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_IPC_PATH_BYTES = 103
"""The smallest ``sun_path`` among the systems we know is 104 bytes with its terminator (macOS; Linux has 108)."""

FOLDER_PREFIX = "enginewire-"
LONGEST_SOCKET_NAME = "handshake"

LOOPBACK = "127.0.0.1"

PICKED_PORTS = (20_000, 30_000)
"""A port that the kernel gives out (32768 and up on Linux) may be anybody's connection a moment later."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses to bind; a tcp port ``*`` is resolved by binding. Source: protocol A.3.

    Attributes:
        handshakes: for one ROUTER; engines started by us use the first, those started elsewhere the last.
        host: for the tcp sockets of engines that cannot come by ipc.
        folder: holds the ipc sockets and belongs to us; ``None`` if there are none.
    """

    handshakes: tuple[str, ...]
    host: str = LOOPBACK
    folder: str | None = None

    def of_link(self, name: str, *, is_local: bool) -> tuple[str, str]:
        """Return the addresses of an engine's input and output; ``name`` is unique and short."""
        if is_local and self.folder is not None:
            return f"ipc://{self.folder}/i{name}", f"ipc://{self.folder}/o{name}"
        address = f"tcp://{LOOPBACK if is_local else self.host}:*"
        return address, address

    def remove(self) -> None:
        """Remove the folder and the sockets in it. Idempotent."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def choose_endpoints(config: EngineConfig, reachable_host: str | None = None) -> Endpoints:
    """Decide where the sockets of a client with these settings go.

    Args:
        config: the settings.
        reachable_host: this machine's address for engines that the client starts on others; ``None``: they run here.

    Raises:
        ConfigError: ``transport="ipc"`` and there is no folder for ipc sockets.
    """
    num_local = len(config.local_ranks)
    handshakes: list[str] = []
    folder, host = None, LOOPBACK
    if reachable_host is not None:
        host = tcp_host(reachable_host)
        handshakes.append(f"tcp://{host}:*")
    elif num_local and not config.starts_vllm:
        folder = None if config.transport == "tcp" else _private_folder(config.ipc_dir, config.transport)
        if folder is not None:
            handshakes.append(f"ipc://{folder}/handshake")
    if num_local < len(config.managed_ranks) or config.other_ranks:
        host = tcp_host(config.data_parallel_address)
        handshakes.append(f"tcp://{host}:{config.data_parallel_rpc_port or '*'}")
    return Endpoints(tuple(handshakes) or (f"tcp://{LOOPBACK}:*",), host, folder)


def free_ports(host: str, count: int) -> list[int]:
    """Find ports of this host that are free, for others to bind; below those that the kernel gives out by itself.

    Raises:
        OSError: the host is not this one.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*PICKED_PORTS)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
                continue
        if port not in found:
            found.append(port)
    return found


def tcp_host(host: str) -> str:
    """Bracket an IPv6 literal."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_ipv6(endpoint: str) -> bool:
    """Whether a socket needs ``ZMQ_IPV6`` for this endpoint."""
    return endpoint.startswith("tcp://[")


def _private_folder(base: str | None, transport: Transport) -> str | None:
    """Make a folder for ipc sockets, ``None`` if that cannot be and tcp will do."""
    base = base or tempfile.gettempdir()
    # mkdtemp adds eight random characters
    longest = os.path.join(base, FOLDER_PREFIX + "12345678", LONGEST_SOCKET_NAME)
    if sys.platform == "win32":
        reason = "this system has no ipc sockets"
    elif len(os.fsencode(longest)) > MAX_IPC_PATH_BYTES:
        reason = f"ipc paths in {base} would be longer than {MAX_IPC_PATH_BYTES} bytes"
    else:
        try:
            return tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base)
        except OSError as exc:
            reason = f"no folder for ipc sockets can be made in {base} ({exc.strerror})"
    if transport == "ipc":
        raise ConfigError(f"transport='ipc' is not possible: {reason}. Set ipc_dir to a short, writable folder")
    logger.info("using tcp on loopback: %s", reason)
    return None
