"""How both ends' sockets are made. Source: protocol section A.2 and its additions in ours (handover, mandatory)."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from enginewire.errors import AddressError
from enginewire.transport.endpoints import is_ipv6
from enginewire.transport.listeners import endpoint_of
from enginewire.wire.frames import Buffer

LARGE_BUFFER_BYTES = 512 << 20
"""Kernel buffers on hosts with more than 32 GiB, as the reference asks for; the kernel clamps it."""

MAX_SOCKETS = 1 << 15
"""Six for each engine over tcp, with those that watch. ZeroMQ's own limit of 1,023 would be reached at 170 engines."""

HEARTBEAT_S = (1.0, 10.0)
"""Interval and time-out; tcp only: a silent host is noticed after this time. Works against peers that set nothing."""

MAX_TTL_MS = 6_553_599
"""What fits into a heartbeat's 16 bits, in tenths of a second."""

GOODBYE_MS = 86_400_000
"""A day. A connection to a silent host is closed here, and for so long the kernel tries to tell the host. By itself it
would give up after two minutes, and an engine that has nothing to send would never connect again."""

_BIND_HINTS = {
    errno.EADDRINUSE: "; another process listens there",
    errno.EADDRNOTAVAIL: "; a frontend binds an address of its own host, and engines connect to it",
    errno.ENODEV: "; no such host or interface",
}

LISTENER_SCHEME = "fd://"
"""``fd://4``: a socket that listens already and was handed to this process."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context of our own; the shared instance belongs to the application.

    It has one I/O thread, not two as the reference's: see decision 29.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    max_frame_bytes: int,
    heartbeat_s: tuple[float, float] = HEARTBEAT_S,
) -> tuple[zmq.Socket[bytes], str]:
    """Bind a ROUTER and return it with its resolved address.

    A restarted engine takes its identity over (handover), and a message to an engine that is gone is an error
    instead of silence (mandatory).
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket, _prepare_and_bind(socket, endpoint, max_frame_bytes, heartbeat_s)


def bind_pull(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    max_frame_bytes: int,
    heartbeat_s: tuple[float, float] = HEARTBEAT_S,
) -> tuple[zmq.Socket[bytes], str]:
    """Bind a PULL and return it with its resolved address."""
    socket = context.socket(zmq.PULL)
    return socket, _prepare_and_bind(socket, endpoint, max_frame_bytes, heartbeat_s)


def bind_also(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind a socket to a further address and return it resolved."""
    if is_ipv6(endpoint):
        socket.setsockopt(zmq.IPV6, 1)
    return _bind(socket, endpoint)


def bind_publisher(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_frame_bytes: int
) -> tuple[zmq.Socket[bytes], str]:
    """Bind an XPUB and return it with its resolved address. It shows every subscription, also a second one."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    return socket, _prepare_and_bind(socket, endpoint, max_frame_bytes, HEARTBEAT_S)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_frame_bytes: int,
    heartbeat_s: tuple[float, float] | None = None,
) -> zmq.Socket[bytes]:
    """Connect an engine's DEALER, to a handshake or to a frontend's input.

    The latter needs a heartbeat of its own. The other side's makes it expect the next one (``HEARTBEAT_TTL``), but any
    message that comes in between ends that: after a request, silence would never be noticed.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    if heartbeat_s is not None and endpoint.startswith("tcp://"):
        _set_heartbeat(socket, heartbeat_s)
    return _connect(socket, endpoint, max_frame_bytes)


def connect_push(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Connect an engine's PUSH, to a frontend's output."""
    return _connect(context.socket(zmq.PUSH), endpoint, -1)


def connect_xsub(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_frame_bytes: int, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """Connect an XSUB to a coordinator; it hears nothing before it has sent ``01``."""
    socket = context.socket(zmq.XSUB)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    return _connect(socket, endpoint, max_frame_bytes)


def inproc_pair(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Make two connected PAIRs, to wake a thread that polls sockets. ``name`` is unique in the context."""
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (ours, theirs):
        socket.setsockopt(zmq.LINGER, 0)
    ours.bind(f"inproc://{name}")
    theirs.connect(f"inproc://{name}")
    return ours, theirs


def _connect(socket: zmq.Socket[bytes], endpoint: str, max_frame_bytes: int) -> zmq.Socket[bytes]:
    try:
        endpoint = _adopt_listener(socket, endpoint)
        _set_common_options(socket, endpoint, max_frame_bytes)
        socket.connect(endpoint)
    except zmq.ZMQError as exc:
        socket.close(linger=0)
        raise OSError(exc.errno, f"cannot connect to {endpoint}: {exc.strerror}") from exc
    return socket


def _adopt_listener(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Have a socket use the listener that ``fd://…`` names; return the endpoint at which that listens."""
    if not endpoint.startswith(LISTENER_SCHEME):
        return endpoint
    descriptor = int(endpoint.removeprefix(LISTENER_SCHEME))
    socket.setsockopt(zmq.USE_FD, descriptor)
    return endpoint_of(descriptor)


def _set_common_options(socket: zmq.Socket[bytes], endpoint: str, max_frame_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    if _has_plenty_of_memory():
        socket.setsockopt(zmq.RCVBUF, LARGE_BUFFER_BYTES)
        socket.setsockopt(zmq.SNDBUF, LARGE_BUFFER_BYTES)
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))


_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
AT_ONCE: Final = int(zmq.NOBLOCK)
"""Without waiting. Plain ints: combining pyzmq's enums costs more than sending a small frame."""

_READABLE: Final = int(zmq.POLLIN)

_send: Final = zmq.backend.Socket.send
"""Without what ``zmq.Socket.send`` does first, for kinds of sockets that are not ours: twice a small frame's cost."""

receive_frame: Final = zmq.backend.Socket.recv
"""``receive_frame(socket, flags, copy)``, without that, too."""


def send_message(
    socket: zmq.Socket[bytes], head: Sequence[Buffer], arrays: Sequence[Buffer] = ()
) -> list[zmq.MessageTracker]:
    """Send one message without waiting: ``head`` is copied, ``arrays`` are not.

    Returns:
        a tracker for each array that ZeroMQ still reads.

    Raises:
        ZMQError: the peer is not connected; nothing was sent.
    """
    try:
        if not arrays:
            for frame in head[:-1]:
                _send(socket, frame, _MORE)
            _send(socket, head[-1], AT_ONCE)
            return []
        for frame in head:
            _send(socket, frame, _MORE)
        trackers = [socket.send(frame, _MORE, copy=False, track=True) for frame in arrays[:-1]]
        trackers.append(socket.send(arrays[-1], AT_ONCE, copy=False, track=True))
    except BaseException:
        _cut_off(socket)
        raise
    return [tracker for tracker in trackers if tracker is not None and not tracker.done]


def send_small(socket: zmq.Socket[bytes], identity: Buffer, kind: Buffer, payload: Buffer) -> None:
    """Do the same with the three frames of nearly everything that an engine gets: a loop over them costs as much."""
    try:
        _send(socket, identity, _MORE)
        _send(socket, kind, _MORE)
        _send(socket, payload, AT_ONCE)
    except BaseException:
        _cut_off(socket)
        raise


def _cut_off(socket: zmq.Socket[bytes]) -> None:
    """End a message that was cut off in the middle, by Ctrl-C or a buffer that is none: the next must not continue it.

    The peer drops it as incomplete. If nothing was begun, this goes to nobody and is refused.
    """
    with contextlib.suppress(zmq.ZMQError):
        socket.send(b"", AT_ONCE)


def receive_message(socket: zmq.Socket[bytes], flags: int = AT_ONCE) -> list[bytes]:
    """Receive one message: without waiting, or with ``flags=0`` for as long as the socket's own time limit says.

    Raises:
        Again: there is none.
    """
    return rest_of_message(socket, receive_frame(socket, flags, False))


def rest_of_message(socket: zmq.Socket[bytes], frame: zmq.Frame) -> list[bytes]:
    """Return a message whose first frame has been received.

    A frame tells by itself whether more follow; asking the socket, as ``recv_multipart`` does, costs more than
    receiving a small frame.
    """
    frames = [frame.bytes]
    while frame.more:
        frame = receive_frame(socket, AT_ONCE, False)
        frames.append(frame.bytes)
    return frames


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there to be received. After this, the socket's descriptor tells of the next one."""
    return bool(zmq.zmq_poll([(socket, _READABLE)], 0))  # pyzmq's ``getsockopt`` costs half as much again


def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive one message without waiting, as frames that know where they came from.

    Raises:
        Again: there is none.
    """
    frames = [socket.recv(AT_ONCE, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(AT_ONCE, copy=False))
    return frames


def _prepare_and_bind(
    socket: zmq.Socket[bytes], endpoint: str, max_frame_bytes: int, heartbeat_s: tuple[float, float]
) -> str:
    try:
        endpoint = _adopt_listener(socket, endpoint)
        _set_common_options(socket, endpoint, max_frame_bytes)
        if endpoint.startswith("tcp://"):
            _set_heartbeat(socket, heartbeat_s)
            socket.setsockopt(zmq.TCP_MAXRT, GOODBYE_MS)
        return _bind(socket, endpoint)
    except BaseException:
        socket.close(linger=0)
        raise


def _set_heartbeat(socket: zmq.Socket[bytes], heartbeat_s: tuple[float, float]) -> None:
    interval_ms, timeout_ms = (max(1, round(seconds * 1000)) for seconds in heartbeat_s)
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    # The peer, which sets nothing itself, is to notice when this host is silent.
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(timeout_ms, MAX_TTL_MS))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as exc:
        why, *_ = str(exc.strerror).partition(" (addr=")  # pyzmq repeats the address there
        hint = _BIND_HINTS.get(exc.errno or 0, "")
        raise AddressError(exc.errno, f"cannot bind {endpoint}: {why}{hint}") from exc
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _has_plenty_of_memory() -> bool:
    """Whether the host has more than 32 GiB in total and 16 GiB available (the reference's rule)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib.get("MemTotal", 0) > 32 << 20 and kib.get("MemAvailable", 0) > 16 << 20
