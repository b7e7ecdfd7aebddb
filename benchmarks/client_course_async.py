"""The course of ``client_course.py`` for clients that are awaited; what is measured runs in one task."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from client_contestants import uvloop_loop
from client_course import SETTLED_S, Course, percentile, resident_bytes


class AsyncCourse(Course):
    """Awaited calls."""

    def __init__(self, kind: Any, addresses: tuple[str, str], column: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop_loop if "uvloop" in column else None)

        async def connect() -> Any:
            return kind(addresses)

        super().__init__(self._runner.run(connect()))

    def run(self, name: str, *arguments: Any) -> Any:
        """Take one measurement."""
        return self._runner.run(getattr(self, name)(*arguments))

    async def close(self) -> None:
        """Shut it down."""
        self.client.close()

    async def rate(self, count: int, batch: int, kind: str, is_read: bool = False) -> float:
        """Return messages per second of a burst, from when the engine began to send."""
        get, read = self.client.get, self.client.read
        await self.client.add(self._burst(count, batch, kind))
        for _ in range(count):
            message = await get()
            if is_read:
                for output in message.outputs:
                    read(output)
        took = time.monotonic() - message.timestamp
        await get()
        return count / took

    async def paced(self, count: int, batch: int, gap_us: int) -> tuple[float, float, float]:
        """Return p50 and p99 of the delay, and CPU time per message, of a steady stream; microseconds."""
        get, clock, delays = self.client.get, time.monotonic, []
        await self.client.add(self._burst(count, batch, "plain", gap_us))
        await get()
        began = time.process_time()
        for _ in range(count - 1):
            stamp = (await get()).timestamp
            delays.append(clock() - stamp)
        spent = time.process_time() - began
        await get()
        return percentile(delays, 0.5), percentile(delays, 0.99), spent / (count - 1) * 1e6

    async def first_output(self, count: int, in_flight: int) -> float:
        """Return the median time from a request to its only output, with so many on their way; microseconds."""
        add, get, clock = self.client.add, self.client.get, time.perf_counter
        began, delays, waiting = {}, [], self._requests("echo", count)
        while waiting or began:
            while waiting and len(began) < in_flight:
                request_id, request = self._last_ids[len(waiting) - 1], waiting.pop()
                began[request_id] = clock()
                await add(request)
            message = await get()
            now = clock()
            delays += [now - began.pop(output.request_id) for output in message.outputs]
        return percentile(delays, 0.5)

    async def utility(self, count: int) -> float:
        """Return the median time of a utility call, microseconds."""
        call, clock, delays = self.client.call, time.perf_counter, []
        for _ in range(count):
            began = clock()
            await call()
            delays.append(clock() - began)
        return percentile(delays, 0.5)

    async def add_cpu(self, count: int, num_tokens: int, with_embeds: bool = False) -> float:
        """Return the caller's CPU time to add a request, microseconds."""
        spent = 0.0
        for request in self._requests("hold", count, num_tokens, with_embeds=with_embeds):
            began = time.thread_time()
            await self.client.add(request)
            spent += time.thread_time() - began
            if with_embeds:
                await self.client.call()  # it has arrived
        await self.client.abort(self._last_ids)
        await self.client.call()
        return spent / count * 1e6

    async def abort(self, count: int) -> float:
        """Return the time to abort so many requests, until the engine has taken it; milliseconds."""
        for request in self._requests("hold", count, 4):
            await self.client.add(request)
        await self.client.call()
        began = time.perf_counter()
        await self.client.abort(self._last_ids)
        await self.client.call()
        return (time.perf_counter() - began) * 1e3

    async def growth(self, count: int, batch: int, size: int) -> float:
        """Return how much memory a message takes that nobody reads, in multiples of its size on the wire."""
        before = resident_bytes()
        await self.client.add(self._burst(count, batch, "plain"))
        last, now = 0, before
        while last != now or now < before + count * size * 0.9:
            await asyncio.sleep(SETTLED_S)
            last, now = now, resident_bytes()
        for _ in range(count + 1):
            await self.client.get()
        return (now - before) / count / size

    async def longest_block(self, count: int) -> float:
        """Return the longest time between two turns of somebody else on the loop during a burst, milliseconds."""
        longest = 0.0
        is_done = False

        async def watch() -> None:
            nonlocal longest
            last = time.perf_counter()
            while not is_done:
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest = max(longest, now - last)
                last = now

        watching = asyncio.ensure_future(watch())
        await self.client.add(self._burst(count, 1, "plain"))
        for _ in range(count + 1):
            await self.client.get()
        is_done = True
        await watching
        return longest * 1e3
