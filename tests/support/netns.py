"""Hosts of a test's own: two network namespaces with a cable between them, which can be cut.

No names and no helper processes: a namespace lives as long as its descriptor or a process in it. A thread *enters* a
host; the sockets, ZeroMQ contexts and processes that it makes there belong to that host::

    with two_hosts() as (near, far):
        with near.entered():
            server = subprocess.Popen(...)
            httpx.get(f"http://{near.address}:8000/health")
        far.cut()
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pytest

CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Host:
    """One end of the cable.

    Attributes:
        address: its IPv4 address, which the other host reaches.
        namespace: descriptor of its network namespace.
    """

    address: str
    namespace: int = field(repr=False)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be on this host, with the calling thread."""
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self.namespace, CLONE_NEWNET))
            try:
                yield
            finally:
                _check(_libc.setns(outside, CLONE_NEWNET))
        finally:
            os.close(outside)

    def cut(self) -> None:
        """Pull the cable on this side: the other host hears nothing, and no error either."""
        with self.entered():
            _ip("link", "set", "cable", "down")

    def restore(self) -> None:
        """Plug it in again."""
        with self.entered():
            _ip("link", "set", "cable", "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts. Skips the test where that is not allowed, unless ``CI`` is set: there it fails."""
    with contextlib.ExitStack() as stack:
        with _skipped_where_forbidden():
            near, far = (Host(f"10.203.0.{number}", _new_namespace(stack)) for number in (1, 2))
            _connect(near, far)
        yield near, far


@contextlib.contextmanager
def lone_host() -> Iterator[Host]:
    """Make a host without a cable, which reaches itself and nothing else. Skips as :func:`two_hosts` does."""
    with contextlib.ExitStack() as stack:
        with _skipped_where_forbidden():
            host = Host("127.0.0.1", _new_namespace(stack))
            with host.entered():
                _ip("link", "set", "lo", "up")
        yield host


@contextlib.contextmanager
def _skipped_where_forbidden() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.CalledProcessError) as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"network namespaces cannot be made here: {exc}")


def _new_namespace(stack: contextlib.ExitStack) -> int:
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.unshare(CLONE_NEWNET))
        try:
            namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, namespace)
        finally:
            _check(_libc.setns(outside, CLONE_NEWNET))
    finally:
        os.close(outside)
    return namespace


def _connect(near: Host, far: Host) -> None:
    with near.entered():
        peer = ["peer", "name", "cable", "netns", f"/proc/self/fd/{far.namespace}"]
        _ip("link", "add", "cable", "type", "veth", *peer, pass_fds=(far.namespace,))
    for host in (near, far):
        with host.entered():
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{host.address}/24", "dev", "cable")
            _ip("link", "set", "cable", "up")


def _ip(*words: str, pass_fds: tuple[int, ...] = ()) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, pass_fds=pass_fds)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
