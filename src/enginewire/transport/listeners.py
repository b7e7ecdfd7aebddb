"""Sockets that listen before ZeroMQ has them, so that they outlive the process that accepts on them."""

from __future__ import annotations

import contextlib
import os
import socket

BACKLOG = 128


def endpoint_of(descriptor: int) -> str:
    """Return the endpoint at which a socket listens."""
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        address = listener.getsockname()
        if listener.family == socket.AF_UNIX:
            return f"ipc://{address}"
        host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
        return f"tcp://{host}:{address[1]}"


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """Listen at an endpoint, ``ipc://PATH`` or ``tcp://HOST:PORT``; return the socket and its resolved endpoint.

    ZeroMQ takes it over by its descriptor, in this process or in one that inherits it.

    Raises:
        OSError: it cannot be had.
    """
    scheme, _, address = endpoint.partition("://")
    with contextlib.ExitStack() as undo:
        if scheme == "ipc":
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(address)
        else:
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            listener = undo.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, 0 if port == "*" else int(port)))
            endpoint = f"tcp://{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        listener.listen(BACKLOG)
        undo.pop_all()
    return listener, endpoint
