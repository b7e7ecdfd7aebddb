"""Ports for tests to bind."""

from __future__ import annotations

import itertools
import random
import socket

_numbers = itertools.count(random.randrange(10_000))


def free_tcp_port() -> int:
    """Return a port of 127.0.0.1 that is free and that nobody else is likely to take before it is used.

    It lies below the range from which the kernel gives out ports of its own (32768 and up on Linux): a port from in
    there may belong to anybody's connection a moment later.
    """
    while True:
        port = 20_000 + next(_numbers) % 10_000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
