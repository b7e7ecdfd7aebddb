"""Sockets that listen before ZeroMQ has them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from enginewire.transport.listeners import endpoint_of, listen
from enginewire.transport.sockets import bind_pull, connect_push


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://{folder}/socket"])
def test_a_listening_socket_is_taken_over_by_its_descriptor(endpoint: str, tmp_path: Path) -> None:
    """And what was sent before that arrives: the kernel has the connection."""
    if "[::1]" in endpoint and not has_ipv6():
        pytest.skip("this host has no IPv6")
    listener, address = listen(endpoint.format(folder=tmp_path))
    with listener, zmq.Context() as context:
        assert endpoint_of(listener.fileno()) == address
        assert not address.endswith("*")
        push = connect_push(context, address)
        push.send(b"early")
        pull, bound = bind_pull(context, f"fd://{listener.detach()}", 1000)
        assert bound == address
        assert pull.poll(5000)
        assert pull.recv() == b"early"
        push.close(0)
        pull.close(0)


def test_heartbeats_go_over_an_inherited_tcp_socket_too() -> None:
    """A silent host is noticed whoever has bound the socket."""
    listener, _ = listen("tcp://127.0.0.1:*")
    with zmq.Context() as context:
        pull, _ = bind_pull(context, f"fd://{listener.detach()}", 1000, (1.0, 7.0))
        assert pull.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 7000
        assert pull.getsockopt(zmq.MAXMSGSIZE) == 1000
        pull.close(0)


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    listener, address = listen(f"ipc://{tmp_path}/socket")
    with listener, pytest.raises(OSError, match="in use"):
        listen(address)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
