"""Ports for tests to bind."""

from __future__ import annotations

import functools
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Final

RANGE: Final = range(12_000, 32_000)
"""Below that from which the kernel gives out ports of its own (32768 and up on Linux): a port from in there may belong
to anybody's connection a moment later."""

BLOCK: Final = 400


def free_tcp_port() -> int:
    """Return a port of 127.0.0.1 that is free and that nobody else is likely to take before it is used.

    Processes that ask at the same time get different ports, and the same process gets the same again after many others.

    Raises:
        OSError: there is none.
    """
    for port in itertools.islice(_own_ports(), BLOCK - 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _binds(probe, port):
                return port
    raise OSError(f"none of the {BLOCK - 1} ports that this process gives out is free: close some")


@functools.cache
def _own_ports() -> Iterator[int]:
    """Return the ports that this process gives out, round and round: a block whose first port it keeps bound."""
    blocks = [RANGE[first : first + BLOCK] for first in range(0, len(RANGE), BLOCK)]
    for block in random.sample(blocks, len(blocks)):
        with socket.socket() as claim:
            if _binds(claim, block[0]):
                claim.detach()  # stays open until this process ends
                return itertools.cycle(block[1:])
    raise OSError(f"all {len(blocks)} blocks of ports belong to other processes, or a port of each is in use")


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
