"""A model of engines and users, for ``balancer_sim.py``: continuous batching, KV caches with prefixes, conversations.

An engine's step takes a base time and some more for each running request, and all running requests get one token of
it; so steps need no events of their own, only requests that begin or end do. A prompt's tokens that are not in the
cache hold everything up for their share of time. The figures are those of an 8B model on one data-centre GPU.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_SEQS = 128
STEP_S = 0.010
STEP_PER_SEQ_S = 0.0001
PREFILL_PER_TOKEN_S = 0.0001
KV_TOKENS = 300_000
TOKEN_RANGE = 1 << 40
"""Made-up tokens: a conversation's are consecutive numbers that no other has."""


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        group: whose system prompt it begins with; -1: none.
        shared: length of that.
        conversation: it goes on in; what comes after the system prompt is its own.
        tail: tokens after the system prompt.
    """

    arrival: float
    group: int
    shared: int
    conversation: int
    tail: int
    output: int
    frontend: int = 0
    engine: int = -1
    started: float = math.nan
    first_token: float = math.nan
    hit: int = 0

    @property
    def prompt(self) -> int:
        return self.shared + self.tail

    def tokens(self) -> list[int]:
        """Make the prompt: as long and as much like others as it says."""
        own = TOKEN_RANGE + (self.conversation << 20)
        start = self.group << 20
        return [*range(start, start + self.shared), *range(own, own + self.tail)]


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. Time goes on when :meth:`advance` says so."""

    index: int
    is_up: bool = True
    queue: deque[Job] = field(default_factory=deque)
    running: list[tuple[float, int, Job]] = field(default_factory=list)
    kv_used: int = 0
    prefill_left: float = 0.0
    version: int = 0
    planned: int = -1
    _steps: float = 0.0
    _now: float = 0.0
    _cache: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    _cached: int = 0
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def step_s(self) -> float:
        return STEP_S + STEP_PER_SEQ_S * len(self.running)

    def advance(self, now: float) -> None:
        """Let time pass: first for prompts, then for steps."""
        passed = now - self._now
        self._now = now
        prefill = min(passed, self.prefill_left)
        self.prefill_left -= prefill
        if self.running:
            self._steps += (passed - prefill) / self.step_s

    def add(self, job: Job, now: float) -> None:
        job.engine = self.index
        self.queue.append(job)
        self.admit(now)

    def admit(self, now: float) -> None:
        """Begin what fits. ``version`` changes when the next end of a request has."""
        while self.queue and len(self.running) < MAX_SEQS:
            job = self.queue[0]
            need = job.prompt + job.output
            if self.running and self.kv_used + need > KV_TOKENS:
                return
            self.queue.popleft()
            job.hit = self._look_up(job)
            job.started = now + self.prefill_left
            self.prefill_left += (job.prompt - job.hit) * PREFILL_PER_TOKEN_S
            job.first_token = now + self.prefill_left
            self.kv_used += need
            heapq.heappush(self.running, (self._steps + job.output, next(self._order), job))
            self.version += 1

    def next_end(self) -> float:
        """Return when the next request will end, if nothing happens before."""
        if not self.running:
            return math.inf
        return self._now + self.prefill_left + max(0.0, self.running[0][0] - self._steps) * self.step_s

    def finish(self, now: float) -> Job:
        """End the request whose turn it is."""
        _, _, job = heapq.heappop(self.running)
        self.version += 1
        self.kv_used -= job.prompt + job.output
        self._remember(("conversation", job.conversation), job.tail + job.output)
        self.admit(now)
        return job

    def die(self) -> list[Job]:
        """Lose everything; return what was there."""
        lost = [*self.queue, *(job for _, _, job in self.running)]
        self.queue.clear()
        self.running.clear()
        self._cache.clear()
        self.kv_used = self._cached = 0
        self.prefill_left = 0.0
        self.version += 1
        self.is_up = False
        return lost

    def _look_up(self, job: Job) -> int:
        hit = 0
        if self._cache.get(("system", job.group), 0) >= job.shared:
            hit = job.shared + min(job.tail - 1, self._cache.get(("conversation", job.conversation), 0))
        self._remember(("conversation", job.conversation), job.tail)
        self._remember(("system", job.group), job.shared)
        return max(hit, 0)

    def _remember(self, key: tuple[str, int], tokens: int) -> None:
        self._cached += tokens - self._cache.pop(key, 0)
        self._cache[key] = tokens
        while self._cached > KV_TOKENS:
            _, evicted = self._cache.popitem(last=False)
            self._cached -= evicted


@dataclass(frozen=True, slots=True)
class Workload:
    """What users do.

    Attributes:
        rate: requests per second and engine, on average; in bursts three times as many, else half.
        shares: whether requests begin with system prompts and go on in conversations.
    """

    rate: float
    shares: bool


UNIQUE = Workload(rate=4.5, shares=False)
CHAT = Workload(rate=3.0, shares=True)
BURST, CALM = 3.0, 0.5
"""Factors of the rate. A fifth of the time is a burst, so they average to one."""
BURST_S = 0.8


@dataclass(slots=True)
class Talk:
    """A conversation that may go on."""

    group: int
    name: int
    tail: int


class Users:
    """Where requests come from.

    Outputs and what users write have heavy tails (log-normal and Pareto); system prompts are as popular as Zipf has
    it; three of four requests go on in one of twelve conversations per engine.
    """

    def __init__(self, workload: Workload, num_engines: int, num_frontends: int, rng: random.Random) -> None:
        self._workload = workload
        self._num_engines = num_engines
        self._num_frontends = num_frontends
        self._rng = rng
        self._groups = [int(min(6000, 300 * rng.paretovariate(1.2))) for _ in range(max(8, num_engines))]
        self._popularity = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(self._groups))))
        self._names = itertools.count()
        self._talks = [self._new_talk() for _ in range(12 * num_engines)]

    def arrivals(self, seconds: float) -> Iterator[Job]:
        """Yield requests in the order of their arrival, each at a frontend drawn at random."""
        rng = self._rng
        now, is_burst, switch = 0.0, False, rng.expovariate(1 / (4 * BURST_S))
        while True:
            rate = self._workload.rate * self._num_engines * (BURST if is_burst else CALM)
            now += rng.expovariate(rate)
            if now > switch:
                is_burst = not is_burst
                switch += rng.expovariate(1 / (BURST_S if is_burst else 4 * BURST_S))
            if now > seconds:
                return
            yield self._request(now)

    def _request(self, now: float) -> Job:
        rng = self._rng
        words = int(min(24_000, 60 * rng.paretovariate(1.1)))
        output = int(min(4000, max(1, rng.lognormvariate(5.0, 0.9))))
        frontend = rng.randrange(self._num_frontends)
        if not self._workload.shares:
            return Job(now, -1, 0, next(self._names), words + 400, output, frontend)
        at = rng.randrange(len(self._talks))
        talk = self._talks[at]
        if rng.random() > 0.75 or talk.tail + words > 30_000:
            talk = self._talks[at] = self._new_talk()
        talk.tail += words
        job = Job(now, talk.group, self._groups[talk.group], talk.name, talk.tail, output, frontend)
        talk.tail += output
        return job

    def _new_talk(self) -> Talk:
        group = self._rng.choices(range(len(self._groups)), cum_weights=self._popularity)[0]
        return Talk(group, next(self._names), 0)
