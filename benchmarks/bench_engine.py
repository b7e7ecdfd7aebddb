"""What our engine costs around an executor, and how soon it answers while its model steps.

    python benchmarks/bench_engine.py [--quick] [--out FOLDER]

Everything is compared with the bare executor: a loop that does nothing but call ``EchoExecutor.step``. Costs are CPU
time. What cannot be told from outside (schedule, execute, stop rules, encode) is measured in this process, the rest on
a real engine process, driven over its own sockets by raw pyzmq and msgspec. The peer has no part here: vLLM's engine
core cannot run an executor that does nothing. About three minutes; quickly, under 40 seconds.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from engine_driver import ENDLESS, PROMPT, Arrival, Engine, HoldsLock, Python, StampsAborts
from harness import Suite, arguments_for, finish

from enginewire.config import EngineConfig
from enginewire.engine.core import EngineCore
from enginewire.engine.step import run_step
from enginewire.executors import EchoExecutor
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.messages import EngineCoreRequest
from enginewire.wire.sampling import SamplingParams

ROOM = {"max_model_len": 1 << 30, "num_gpu_blocks": 1 << 34}
"""Nobody is to run out of tokens or cache."""

BARE, ENGINE, CHILD = "bare executor", "engine", "executor in a child"
THREADS = ("its main thread", "its I/O threads", "ZeroMQ's threads")

STEP_S = 0.02


# In this process: the stages of a step, and how they grow.


def microseconds(function: Callable[[], object], seconds: float) -> float:
    """Return the CPU time of one call, of as many as take so long."""
    calls = 1
    while (spent := _cpu(function, calls)) < seconds / 8:
        calls *= 4
    calls = max(1, int(calls * seconds / spent))
    return _cpu(function, calls) / calls * 1e6


def _cpu(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start


def new_request(request_id: str) -> EngineCoreRequest:
    """Make the request that the driver sends."""
    params = SamplingParams(max_tokens=ENDLESS, stop_token_ids=[5], eos_token_id=2)
    return EngineCoreRequest(request_id, list(PROMPT), sampling_params=params)


def core_with(num_running: int, num_waiting: int = 0) -> EngineCore:
    """Make a core in the middle of so many requests."""
    config = EngineConfig.create("echo", max_num_seqs=num_running, executor_options=ROOM)
    core = EngineCore(config, EchoExecutor)
    for i in range(num_running + num_waiting):
        core.add_request(core.preprocess_add_request(new_request(f"chatcmpl-{i:024x}")))
    core.step()
    gc.collect()
    gc.freeze()
    return core


def measure_stages(suite: Suite, num_running: int, seconds: float) -> None:
    """Measure what a step consists of."""
    core, encoder = core_with(num_running), MsgpackEncoder()
    step_input = core.schedule()
    assert step_input is not None
    result = run_step(core.executor, step_input)
    (message,) = core.update(result).values()
    suite.add(of_step(num_running), BARE, microseconds(core.executor.step, seconds), lower_is_better=True)
    stages: dict[str, Callable[[], object]] = {
        "schedule": core.schedule,
        "execute": lambda: run_step(core.executor, step_input),
        "stop rules": lambda: core.update(result),
        "encode": lambda: encoder.encode(message),
    }
    for name, stage in stages.items():
        suite.add(f"{of_step(num_running)}: {name}", ENGINE, microseconds(stage, seconds), lower_is_better=True)


def measure_growth(suite: Suite, seconds: float) -> None:
    """Measure how the core's costs grow with requests, running and waiting."""

    def note(what: str, by: str, column: str, costs: dict[int, float]) -> None:
        suite.add(f"{what}, {max(costs):,} {by}", column, costs[max(costs)], lower_is_better=True)
        suite.add(f"{what}: exponent over {by}", column, exponent(costs), lower_is_better=True)

    running = {count: core_with(count) for count in (64, 256, 1024, 4096)}  # of few it is the constant that one sees
    step = "CPU µs per step of the core"
    note(step, "running", BARE, {n: microseconds(core.executor.step, seconds) for n, core in running.items()})
    note(step, "running", ENGINE, {n: microseconds(core.step, seconds) for n, core in running.items()})

    waiting = {count: core_with(64, count) for count in (1, 16, 256, 4096)}
    note(step + ", 64 running", "waiting", ENGINE, {n: microseconds(core.step, seconds) for n, core in waiting.items()})

    def add_and_abort(core: EngineCore) -> None:
        core.add_request(core.preprocess_add_request(request))
        core.abort_requests([request.request_id])

    request = new_request("another")
    costs = {n: microseconds(partial(add_and_abort, core), seconds) for n, core in waiting.items()}
    note("CPU µs per add and abort", "waiting", ENGINE, costs)


def exponent(costs: dict[int, float]) -> float:
    """Return the slope of costs over counts, both as logarithms: 0 is constant, 1 is linear."""
    return statistics.linear_regression([math.log(n) for n in costs], [math.log(c) for c in costs.values()]).slope


# On an engine process: what a step costs altogether.


def of_step(num_running: int, pace_ms: int = 0) -> str:
    """Name a row."""
    return f"CPU µs per step, {num_running} running" + (f", steps of {pace_ms} ms" if pace_ms else "")


def measure_process(suite: Suite, num_running: int, num_steps: int, pace_ms: int = 0) -> None:
    """Measure steps of an engine process whose executor is in it, and of one whose executor has its own."""
    row = of_step(num_running, pace_ms)
    token_row = row.replace("step,", "token,")
    if pace_ms:
        suite.add(row, BARE, _paced(num_running, num_steps, pace_ms), lower_is_better=True)
    suite.add(token_row, BARE, suite.rows[row].values[BARE][-1] / num_running, lower_is_better=True)
    for column, executor in ((ENGINE, "echo"), (CHILD, HoldsLock)):
        options = {**ROOM, "step_time_s": pace_ms / 1000}
        with Engine(executor, options, max_num_seqs=num_running) as engine:
            engine.call("pause_scheduler", "keep", False)
            for i in range(num_running):
                engine.add(f"chatcmpl-{i:024x}", num_steps)
            engine.call("get_request_ids")  # all are there
            before = engine.cpu_time()
            engine.call("resume_scheduler")  # all begin in the same step, so there is one message a step
            arrivals = [*engine.arrivals, *engine.receive(num_steps - len(engine.arrivals))]
            spent = [seconds / num_steps * 1e6 for seconds in engine.cpu_time().since(before)]
        suite.add(row, column, sum(spent), lower_is_better=True)
        suite.add(token_row, column, sum(spent) / num_running, lower_is_better=True)
        if column == ENGINE:
            for thread, cost in zip(THREADS, spent, strict=False):
                suite.add(f"{row}: {thread}", ENGINE, cost, lower_is_better=True)
        if num_running == 64:
            speed = f"steps of {pace_ms} ms" if pace_ms else "at full speed"
            note_delays(suite, f"output made → received, 64 running, {speed}", column, delays_of(arrivals))


def _paced(num_running: int, num_steps: int, pace_ms: int) -> float:
    """Return the CPU time of a bare executor's step that also waits: waiting costs something, too."""
    executor = core_with(num_running).executor
    assert isinstance(executor, EchoExecutor)
    executor._options.step_time_s = pace_ms / 1000
    return _cpu(executor.step, num_steps) / num_steps * 1e6


def measure_intake(suite: Suite, count: int) -> None:
    """Measure what it costs to take in requests that wait."""
    with Engine("echo", ROOM) as engine:
        engine.call("pause_scheduler", "keep", False)
        before = engine.cpu_time()
        for i in range(count):
            engine.add(f"chatcmpl-{i:024x}", ENDLESS)
        engine.call("get_request_ids")
        spent = sum(engine.cpu_time().since(before))
    suite.add("CPU µs per request of 32 tokens taken in", ENGINE, spent / count * 1e6, lower_is_better=True)


# On an engine process: how soon it reacts.


def measure_delays(suite: Suite, executor: type, column: str, kind: str, samples: int, seed: int) -> None:
    """Measure reactions of an engine in the middle of steps of 20 ms."""
    rng = random.Random(seed)
    with Engine(executor, {**ROOM, "step_time_s": STEP_S}) as engine:
        engine.add("background", ENDLESS)
        engine.receive(1)

        def pause() -> None:
            engine.listen(rng.uniform(0, STEP_S))

        calls, adds, aborts = [], [], {}
        for i in range(samples):
            pause()
            calls.append(engine.call("is_sleeping")[1])
            pause()
            engine.add(f"long-{i}.", ENDLESS)
            sent = engine.add(f"short-{i}.", 1)
            adds.append(engine.receive_finished(f"short-{i}.") - sent)  # the long one was admitted before
            pause()
            aborts[f"long-{i}."] = engine.abort([f"long-{i}."])
        note_delays(suite, f"utility call, {kind}", column, calls)
        note_delays(suite, f"add → admitted, {kind}", column, adds)
        note_delays(suite, f"output made → received, {kind}", column, delays_of(engine.arrivals))
        note_delays(suite, f"abort → freed, {kind}", column, freed_after(engine, aborts))


def measure_idle(suite: Suite, samples: int) -> None:
    """Measure reactions of an engine that has nothing else to do."""
    with Engine("echo", ROOM) as engine:
        calls, adds = [], []
        for i in range(samples):
            calls.append(engine.call("is_sleeping")[1])
            sent = engine.add(f"short-{i}.", 1)
            adds.append(engine.receive_finished(f"short-{i}.") - sent)
    note_delays(suite, "utility call, idle", ENGINE, calls)
    note_delays(suite, "add → admitted, idle", ENGINE, adds)


def delays_of(arrivals: Sequence[Arrival]) -> list[float]:
    """Return how long after it was made each message was in the driver's hands."""
    return [arrival.at - arrival.head().timestamp for arrival in arrivals]


def freed_after(engine: Engine, aborts: dict[str, float]) -> list[float]:
    """Return how long after each abort the executor had forgotten the request."""
    deadline = time.monotonic() + 30
    freed: dict[str, float] = {}
    while not aborts.keys() <= freed.keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(aborts.keys() - freed.keys())} of {len(aborts)} aborts have not arrived")
        ((freed,), _) = engine.call("collective_rpc", "freed")
    return [freed[request_id] - at for request_id, at in aborts.items()]


def note_delays(suite: Suite, what: str, column: str, delays: list[float]) -> None:
    """Note the median and the 99th percentile."""
    delays.sort()
    suite.add(f"{what}, p50 ms", column, delays[len(delays) // 2] * 1e3, lower_is_better=True)
    suite.add(f"{what}, p99 ms", column, delays[len(delays) * 99 // 100] * 1e3, lower_is_better=True)


def run(rounds: int, seconds: float, num_steps: dict[int, int], samples: int) -> Suite:
    """Measure everything, round by round."""
    suite = Suite("engine", bases={ENGINE: [BARE], CHILD: [BARE]})
    for i in range(rounds):
        for num_running, count in num_steps.items():
            measure_stages(suite, num_running, seconds)
            measure_process(suite, num_running, count)
        measure_process(suite, 64, max(num_steps[256] // 4, 100), pace_ms=2)
        measure_intake(suite, 500)
        measure_growth(suite, seconds)
        measure_idle(suite, 5 * samples)
        measure_delays(suite, StampsAborts, ENGINE, "steps of 20 ms", samples, seed=i)
        measure_delays(suite, HoldsLock, CHILD, "steps of 20 ms", samples, seed=i)
        measure_delays(suite, Python, ENGINE, "20 ms of Python", samples, seed=i)
    return suite


def main() -> None:
    """Measure, print, save."""
    parser = arguments_for(__doc__, quick="one short round")
    arguments = parser.parse_args()
    if arguments.quick:
        suite = run(1, 0.04, {1: 5_000, 64: 1_000, 256: 400}, 40)
    else:
        suite = run(3, 0.2, {1: 20_000, 64: 4_000, 256: 1_500}, 200)
    finish(suite, arguments)


if __name__ == "__main__":
    main()
