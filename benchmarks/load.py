"""A load generator for servers of OpenAI's API that costs little: one thread, epoll, no HTTP library.

It opens all streams at once, each over a connection of its own, and looks into what comes no further than it must:
when the first event came, how many there were, and at the end the usage.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

STREAM_S = 180.0
"""How long a run may take."""

NAP_S = 0.005
"""Between two looks, once every stream has begun. Clients elsewhere do not take the server's processor away, either:
one that woke up for every event would be woken and switched to at the server's expense."""

FIRST = b"data: {"
EVENT = b"\n\n"


@dataclass(slots=True)
class Stream:
    """One response as it comes.

    Attributes:
        first: seconds from the request to the first event; 0 before.
        events: server-sent events so far, and chunks of HTTP that have none.
        tail: the end of what came.
    """

    connection: socket.socket
    start: float
    first: float = 0.0
    events: int = 0
    tail: bytes = b""

    def take(self, data: bytes, now: float) -> None:
        """Note what came."""
        if not self.first and FIRST in data:
            self.first = now - self.start
        self.events += data.count(EVENT)
        self.tail = data if len(data) >= 2000 else (self.tail + data)[-2000:]

    @property
    def tokens(self) -> int:
        """The usage's completion tokens."""
        if b"data: [DONE]" not in self.tail:
            raise RuntimeError(f"a stream ended early: {self.tail.decode(errors='replace')}")
        usage = self.tail[self.tail.rindex(b'"completion_tokens"') :].partition(b":")[2]
        return int(usage.replace(b"}", b",").partition(b",")[0])


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a run. Times are seconds."""

    tokens: int
    events: int
    elapsed: float
    firsts: list[float] = field(repr=False)

    def first(self, quantile: float) -> float:
        """Return a quantile of the time to the first event."""
        ordered = sorted(self.firsts)
        return statistics.median(ordered) if quantile == 0.5 else ordered[int((len(ordered) - 1) * quantile)]


def post(path: str, body: dict[str, Any]) -> bytes:
    """Make a request whose connection ends with its response."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def run(port: int, requests: list[bytes]) -> Load:
    """Send requests side by side and read their streams to the end."""
    poll = select.epoll()
    streams: dict[int, Stream] = {}
    for _ in requests:
        connection = socket.create_connection(("127.0.0.1", port), 10)
        streams[connection.fileno()] = Stream(connection, 0.0)
    start = time.perf_counter()
    for stream, request in zip(streams.values(), requests, strict=True):
        stream.start = time.perf_counter()
        stream.connection.sendall(request)
        poll.register(stream.connection.fileno(), select.EPOLLIN)
    running, waiting = set(streams), set(streams)
    while running:
        if not waiting:
            time.sleep(NAP_S)
        ready = poll.poll(STREAM_S)
        if not ready or time.perf_counter() - start > STREAM_S:
            raise RuntimeError(f"{len(running)} of {len(requests)} streams did not end within {STREAM_S:g} s")
        now = time.perf_counter()
        for number, _ in ready:
            stream = streams[number]
            if data := stream.connection.recv(1 << 16):
                stream.take(data, now)
                if stream.first:
                    waiting.discard(number)
            else:
                poll.unregister(number)
                running.discard(number)
                waiting.discard(number)
    elapsed = time.perf_counter() - start
    for stream in streams.values():
        stream.connection.close()
    poll.close()
    done = streams.values()
    return Load(
        sum(stream.tokens for stream in done),
        sum(stream.events for stream in done),
        elapsed,
        [stream.first for stream in done],
    )
