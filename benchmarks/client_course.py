"""What a client is put through, in a process of its own: ``client_course.py FD COLUMN INPUT OUTPUT``.

Over the socket FD it says when it was connected and is sent the names of measurements with their arguments, a line of
JSON each; every one is answered with a value. Both courses, blocking and awaiting (``client_course_async.py``), measure
the same, in the same way. Little is imported before the client is connected, as that time and memory are measured.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
import time
from typing import Any

from client_contestants import ASYNC, CONTESTANTS

SETTLED_S = 0.2
"""Memory that has not changed for so long is what a backlog needs."""


def resident_bytes() -> int:
    """Return this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Course:
    """What both courses share.

    Every measurement leaves the client idle, with nothing on its way.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._ids = itertools.count()

    def _burst(self, count: int, batch: int, kind: str, gap_us: int = 0) -> Any:
        return self.client.request(f"burst:{count}:{batch}:{kind}:{gap_us}:{next(self._ids)}", 4)

    def _requests(self, prefix: str, count: int, num_tokens: int = 32, *, with_embeds: bool = False) -> list[Any]:
        self._last_ids = [f"{prefix}-{next(self._ids)}" for _ in range(count)]
        return [self.client.request(each, num_tokens, with_embeds=with_embeds) for each in self._last_ids]


def percentile(delays: list[float], share: float) -> float:
    """Return a quantile in microseconds."""
    return sorted(delays)[int(share * (len(delays) - 1))] * 1e6


class SyncCourse(Course):
    """Blocking calls."""

    def run(self, name: str, *arguments: Any) -> Any:
        """Take one measurement."""
        return getattr(self, name)(*arguments)

    def close(self) -> None:
        """Shut it down."""
        self.client.close()

    def rate(self, count: int, batch: int, kind: str, is_read: bool = False) -> float:
        """Return messages per second of a burst, from when the engine began to send."""
        get, read = self.client.get, self.client.read
        self.client.add(self._burst(count, batch, kind))
        for _ in range(count):
            message = get()
            if is_read:
                for output in message.outputs:
                    read(output)
        took = time.monotonic() - message.timestamp
        get()
        return count / took

    def paced(self, count: int, batch: int, gap_us: int) -> tuple[float, float, float]:
        """Return p50 and p99 of the delay, and CPU time per message, of a steady stream; microseconds."""
        get, clock, delays = self.client.get, time.monotonic, []
        self.client.add(self._burst(count, batch, "plain", gap_us))
        get()
        began = time.process_time()
        for _ in range(count - 1):
            stamp = get().timestamp
            delays.append(clock() - stamp)
        spent = time.process_time() - began
        get()
        return percentile(delays, 0.5), percentile(delays, 0.99), spent / (count - 1) * 1e6

    def first_output(self, count: int, in_flight: int) -> float:
        """Return the median time from a request to its only output, with so many on their way; microseconds."""
        add, get, clock = self.client.add, self.client.get, time.perf_counter
        began, delays, waiting = {}, [], self._requests("echo", count)
        while waiting or began:
            while waiting and len(began) < in_flight:
                request_id, request = self._last_ids[len(waiting) - 1], waiting.pop()
                began[request_id] = clock()
                add(request)
            message = get()
            now = clock()
            delays += [now - began.pop(output.request_id) for output in message.outputs]
        return percentile(delays, 0.5)

    def utility(self, count: int) -> float:
        """Return the median time of a utility call, microseconds."""
        call, clock, delays = self.client.call, time.perf_counter, []
        for _ in range(count):
            began = clock()
            call()
            delays.append(clock() - began)
        return percentile(delays, 0.5)

    def add_cpu(self, count: int, num_tokens: int, with_embeds: bool = False) -> float:
        """Return the caller's CPU time to add a request, microseconds."""
        spent = 0.0
        for request in self._requests("hold", count, num_tokens, with_embeds=with_embeds):
            began = time.thread_time()
            self.client.add(request)
            spent += time.thread_time() - began
            if with_embeds:
                self.client.call()  # it has arrived
        self.client.abort(self._last_ids)
        self.client.call()
        return spent / count * 1e6

    def abort(self, count: int) -> float:
        """Return the time to abort so many requests, until the engine has taken it; milliseconds."""
        for request in self._requests("hold", count, 4):
            self.client.add(request)
        self.client.call()
        began = time.perf_counter()
        self.client.abort(self._last_ids)
        self.client.call()
        return (time.perf_counter() - began) * 1e3

    def growth(self, count: int, batch: int, size: int) -> float:
        """Return how much memory a message takes that nobody reads, in multiples of its size on the wire."""
        before = resident_bytes()
        self.client.add(self._burst(count, batch, "plain"))
        last, now = 0, before
        while last != now or now < before + count * size * 0.9:
            time.sleep(SETTLED_S)
            last, now = now, resident_bytes()
        for _ in range(count + 1):
            self.client.get()
        return (now - before) / count / size


def main() -> None:
    """Connect and obey."""
    descriptor, column, *addresses = sys.argv[1:]
    kind = CONTESTANTS[column]
    if column in ASYNC:
        from client_course_async import AsyncCourse

        course = AsyncCourse(kind, (addresses[0], addresses[1]), column)
    else:
        course = SyncCourse(kind((addresses[0], addresses[1])))
    connected, memory = time.monotonic(), resident_bytes()

    import json

    with socket.socket(fileno=int(descriptor)) as orders, orders.makefile("rw") as lines:
        answer: Any = [connected, memory / 1e6]
        gc.collect()
        gc.freeze()  # as a server does
        while True:
            print(json.dumps(answer), file=lines, flush=True)
            name, *arguments = json.loads(lines.readline())
            answer = course.run(name, *arguments)
            if name == "close":
                return


if __name__ == "__main__":
    main()
