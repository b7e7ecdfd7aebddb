"""Load balancers under simulated load: 8 to 4,096 engines, several frontends, bursts, shared prefixes, deaths.

    python benchmarks/balancer_sim.py [--engines 8,64,512,4096] [--frontends 1,4,16] [--policies inflight,prefix]
                                      [--workloads unique,chat] [--seconds 30] [--quick] [--output results.jsonl]

The policies are the objects that clients use. Engines, users and the way of the counts (an engine reports every
change, the coordinator publishes every 100 ms) are modelled, see ``balancer_model.py``. What is measured:

* ``wait``: from arrival until the engine begins with the prompt; ``ttft``: to the first token;
* ``spread``: the most loaded engine against the average, in requests, over the second half of the run;
* ``hit``: share of prompt tokens found in the chosen engine's cache;
* ``stale``: by how many requests a policy's view of the engine it chose was wrong, on average;
* ``cost``: CPU time of one decision, microseconds;
* ``reports``: messages that the coordinator takes in per second. What they cost is measured on a real one.

Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from balancer_model import CHAT, KV_TOKENS, UNIQUE, Engine, Job, Users, Workload

from enginewire import EngineConfig, __version__
from enginewire.client.balancer import BALANCERS, EngineLoad, LoadBalancer, Prefix, make_balancer
from enginewire.coordinator import DPCoordinator
from enginewire.coordinator.core import MIN_INTERVAL_S
from enginewire.coordinator.process import CoordinatorProcess
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats

SEED = 20250101
WORKLOADS = {"unique": UNIQUE, "chat": CHAT}
SAMPLE_EVERY_S = 0.25
DEATHS_PER_ENGINE_S = 1 / 600
RETURN_S = 10.0
NUM_REPORTS = 50_000


class Random(LoadBalancer):
    """For comparison: what a balancer that knows nothing does."""

    def __init__(self, *, client_count: int = 1, client_index: int = 0) -> None:
        super().__init__(client_count=client_count, client_index=client_index)
        self._rng = random.Random(client_index)

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return self._rng.choice(engines)


class Frontend:
    """One frontend: a policy and what it knows of the engines."""

    def __init__(self, policy: str, index: int, count: int, num_engines: int) -> None:
        name = f"{__name__}:Random" if policy == "random" else policy
        self.balancer = make_balancer(name, count, index)
        self.loads = [EngineLoad(engine) for engine in range(num_engines)]
        self.up = list(self.loads)

    def changed(self, engines: Sequence[Engine], index: int) -> None:
        """Take an engine out, or in again."""
        self.balancer.removed(index)
        self.loads[index] = EngineLoad(index)
        self.up = [self.loads[engine.index] for engine in engines if engine.is_up]


@dataclass(slots=True)
class Result:
    """What one run measured; times in seconds unless the name says otherwise."""

    policy: str
    workload: str
    engines: int
    frontends: int
    requests: int = 0
    lost: int = 0
    wait_p50: float = 0.0
    wait_p99: float = 0.0
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    spread: float = 0.0
    hit: float = 0.0
    stale: float = 0.0
    cost_us: float = 0.0
    reports_per_s: float = 0.0


class Simulation:
    """One run of one policy."""

    def __init__(self, policy: str, workload: Workload, num_engines: int, num_frontends: int, seconds: float) -> None:
        self.engines = [Engine(index) for index in range(num_engines)]
        self.frontends = [Frontend(policy, index, num_frontends, num_engines) for index in range(num_frontends)]
        self.seconds = seconds
        self.rng = random.Random(SEED)
        self.jobs = Users(workload, num_engines, num_frontends, random.Random(SEED)).arrivals(seconds)
        self.done: list[Job] = []
        self.lost = 0
        self.reports = 0
        self.spreads: list[float] = []
        self.staleness = 0
        self.decision_s = 0.0
        self.decisions = 0
        self._needs_tokens = isinstance(self.frontends[0].balancer, Prefix)
        self._events: list[tuple[float, int, str, int]] = []
        self._sequence = 0

    def run(self) -> None:
        """Simulate all arrivals, and what they started."""
        self._at(MIN_INTERVAL_S, "publish")
        self._at(self.seconds / 2, "sample")
        self._at(self._next_death(), "death")
        job = next(self.jobs, None)
        while job is not None or self._events:
            if job is not None and (not self._events or job.arrival < self._events[0][0]):
                self._arrive(job)
                job = next(self.jobs, None)
                continue
            now, _, kind, argument = heapq.heappop(self._events)
            if kind == "end":
                self._end(now, argument)
            elif now < self.seconds:
                getattr(self, f"_{kind}")(now, argument)

    def _at(self, when: float, kind: str, argument: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, kind, argument))

    def _arrive(self, job: Job) -> None:
        frontend = self.frontends[job.frontend]
        request = EngineCoreRequest("", job.tokens() if self._needs_tokens else [])
        started = time.thread_time()
        chosen = frontend.balancer.pick(request, frontend.up)
        self.decision_s += time.thread_time() - started
        self.decisions += 1
        load, engine = frontend.loads[chosen], self.engines[chosen]
        self.staleness += abs(load.waiting + load.running - engine.load)
        load.add()
        engine.advance(job.arrival)
        engine.add(job, job.arrival)
        self.reports += 1
        self._plan(engine)

    def _plan(self, engine: Engine) -> None:
        """Note when its next request ends, if that changed; what was noted before has another version."""
        if engine.running and engine.planned != engine.version:
            engine.planned = engine.version
            self._at(engine.next_end(), "end", engine.index | engine.version << 16)

    def _end(self, now: float, argument: int) -> None:
        engine, version = self.engines[argument & 0xFFFF], argument >> 16
        if version != engine.version:
            return
        engine.advance(now)
        job = engine.finish(now)
        self.frontends[job.frontend].loads[engine.index].finish()
        self.done.append(job)
        self.reports += 1
        self._plan(engine)

    def _publish(self, now: float, _: int) -> None:
        for frontend in self.frontends:
            for load, engine in zip(frontend.loads, self.engines, strict=True):
                load.report(len(engine.queue), len(engine.running), min(1.0, engine.kv_used / KV_TOKENS))
        self._at(now + MIN_INTERVAL_S, "publish")

    def _sample(self, now: float, _: int) -> None:
        loads = [engine.load for engine in self.engines if engine.is_up]
        self.spreads.append(max(loads) / max(statistics.fmean(loads), 1.0))
        self._at(now + SAMPLE_EVERY_S, "sample")

    def _next_death(self) -> float:
        return self.rng.expovariate(DEATHS_PER_ENGINE_S * len(self.engines))

    def _death(self, now: float, _: int) -> None:
        engine = self.rng.choice(self.engines)
        if engine.is_up and sum(other.is_up for other in self.engines) > 1:
            self.lost += len(engine.die())
            for frontend in self.frontends:
                frontend.changed(self.engines, engine.index)
            self._at(now + RETURN_S, "return", engine.index)
        self._at(now + self._next_death(), "death")

    def _return(self, now: float, index: int) -> None:
        engine = self.engines[index]
        engine.advance(now)
        engine.is_up = True
        for frontend in self.frontends:
            frontend.changed(self.engines, index)


def simulate(policy: str, workload: str, engines: int, frontends: int, seconds: float) -> Result:
    """Run one simulation and add it up, without the first third, in which caches and queues fill."""
    run = Simulation(policy, WORKLOADS[workload], engines, frontends, seconds)
    run.run()
    done = [job for job in run.done if job.arrival > seconds / 3]
    waits = sorted(job.started - job.arrival for job in done)
    firsts = sorted(job.first_token - job.arrival for job in done)
    return Result(
        policy, workload, engines, frontends,
        requests=run.decisions, lost=run.lost,
        wait_p50=quantile(waits, 0.5), wait_p99=quantile(waits, 0.99),
        ttft_p50=quantile(firsts, 0.5), ttft_p99=quantile(firsts, 0.99),
        spread=statistics.fmean(run.spreads or [1.0]),
        hit=sum(job.hit for job in done) / max(sum(job.prompt for job in done), 1),
        stale=run.staleness / max(run.decisions, 1),
        cost_us=run.decision_s / max(run.decisions, 1) * 1e6,
        reports_per_s=run.reports / seconds,
    )  # fmt: skip


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class CoordinatorCost:
    """CPU time of a real coordinator process, with its sockets.

    Attributes:
        report_us: to take in one report, of many that wait.
        publish_us: to publish once to one frontend, less what a second one costs.
        publish_bytes: size of that message.
        busiest: share of one core, for the reports of the ``chat`` run and ten publications a second to each frontend.
    """

    engines: int
    frontends: int
    report_us: float
    publish_us: float
    publish_bytes: int
    busiest: float = 0.0


def measure_coordinator(engines: int, frontends: int) -> CoordinatorCost:
    """Run a coordinator in a process of its own and read its CPU time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    coordinator = DPCoordinator.start(EngineConfig.create("echo", wire_version="0.32.0"), own_process=True)
    assert isinstance(coordinator, CoordinatorProcess)
    process = psutil.Process(coordinator.pid)
    try:
        addresses = coordinator.addresses
        engine = context.socket(zmq.XSUB)
        engine.connect(addresses.coordinator_input)
        engine.send(b"\x01")
        engine.recv()
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.connect(addresses.coordinator_output)
        subscribers = [context.socket(zmq.XSUB) for _ in range(frontends)]
        for subscriber in subscribers:
            subscriber.connect(addresses.frontend_stats_publish_address)
            subscriber.send(b"\x01")
        subscribers[0].send(msgspec.msgpack.encode(("SCALE_ELASTIC_EP", engines)))

        def report(number: int) -> None:
            stats = SchedulerStats(num_running_reqs=number)
            push.send(msgspec.msgpack.encode(EngineCoreOutputs(engine_index=number % engines, scheduler_stats=stats)))

        def wait_for(number: int) -> int:
            """Wait until a report has been published; return that publication's size."""
            while True:
                payload = subscribers[0].recv()
                counts, _, _ = msgspec.msgpack.decode(payload)
                if len(counts) == engines and counts[number % engines][1] == number:
                    return len(payload)

        size = wait_for(0)
        few, many = 40, 40 + NUM_REPORTS
        cpu = []
        for first, last, pause in ((2, few, MIN_INTERVAL_S), (few + 1, many, 0.0)):
            before = sum(process.cpu_times()[:2])
            for number in range(first, last + 1):
                report(number)
                if pause:
                    time.sleep(pause)
            wait_for(last)
            cpu.append(sum(process.cpu_times()[:2]) - before)
        publish_s = cpu[0] / (few - 1)
        report_s = cpu[1] / NUM_REPORTS
        return CoordinatorCost(engines, frontends, report_s * 1e6, publish_s * 1e6, size)
    finally:
        coordinator.shutdown()
        context.destroy(linger=0)


def print_table(rows: Sequence[Any], columns: str) -> None:
    """Print one line per row."""
    names = columns.split()
    print("".join(f"{name:>13}" for name in names))
    for row in rows:
        values = [getattr(row, name) for name in names]
        print("".join(f"{value:>13.3f}" if isinstance(value, float) else f"{value!s:>13}" for value in values))
    print(flush=True)


RESULT_COLUMNS = "policy workload engines frontends requests lost wait_p99 ttft_p50 ttft_p99 spread hit stale cost_us"


def numbers(text: str) -> list[int]:
    """Parse ``8,64``."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=numbers, default=[8, 64, 512, 4096])
    parser.add_argument("--frontends", type=numbers, default=[4])
    parser.add_argument("--policies", default=",".join([*BALANCERS, "random"]))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="a few seconds: eight engines, ten simulated seconds")
    parser.add_argument("--output", type=Path, help="append the JSON line to this file")
    parser.add_argument("--no-coordinator", action="store_true", help="leave the real coordinator out")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.engines, arguments.seconds, arguments.no_coordinator = [8], 10.0, True
    results: list[Result] = []
    for workload, engines, frontends in itertools.product(
        arguments.workloads.split(","), arguments.engines, arguments.frontends
    ):
        batch = [
            simulate(policy, workload, engines, frontends, arguments.seconds)
            for policy in arguments.policies.split(",")
        ]
        print_table(batch, RESULT_COLUMNS)
        results += batch
    costs: list[CoordinatorCost] = []
    if not arguments.no_coordinator:
        for engines, frontends in itertools.product(arguments.engines, arguments.frontends):
            cost = measure_coordinator(engines, frontends)
            reports = max((r.reports_per_s for r in results if r.engines == engines), default=0.0)
            cost.busiest = (reports * cost.report_us + cost.publish_us / MIN_INTERVAL_S) / 1e6
            costs.append(cost)
        print_table(costs, "engines frontends report_us publish_us publish_bytes busiest")
    line = json.dumps(
        {
            "what": "balancer_sim", "version": __version__, "python": platform.python_version(),
            "machine": platform.machine(), "results": [asdict(result) for result in results],
            "coordinator": [asdict(cost) for cost in costs],
        }
    )  # fmt: skip
    if arguments.output is not None:
        with arguments.output.open("a") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
