"""The sync client: one thread adds, aborts and asks, another consumes, and engines are killed and stopped meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from census import Census, memory_mb
from chaos import WHY_NOT_ANSWERED, manager_of
from pooling_echo import PoolingEcho
from story import MINUTES, Story

from enginewire import (
    EngineConfig,
    EngineCoreClient,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineUnavailableError,
    FinishReason,
    SamplingParams,
    UtilityCallError,
)
from enginewire.client.sync_mp import SyncMPClient
from enginewire.wire.messages import PoolingParams

HANG_S = 150.0
NUM_ENGINES = 3
MOST_LIVE = 48
MOST_GROWTH_MB = 40.0
SETTINGS: dict[str, Any] = {
    "data_parallel_size": NUM_ENGINES,
    "failover": "exact",
    "restart_engine": 1000,
    "restart_window_s": 0.0,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.004},
}


@dataclass
class Live:
    """A request that has not ended.

    Attributes:
        may_be_lost: it cannot go on elsewhere.
    """

    prompt: list[int]
    num_tokens: int
    may_be_lost: bool = False
    since: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)

    def take(self, output: EngineCoreOutput) -> str | None:
        """Check an output; return how the request ended, if it did."""
        self.token_ids += output.new_token_ids
        count = len(self.token_ids)
        assert self.token_ids == [self.prompt[i % len(self.prompt)] for i in range(count)], "the tokens are the echo"
        if output.finish_reason is None:
            return None
        if output.finish_reason is FinishReason.ERROR:
            reason = str(output.stop_reason)
            assert reason.startswith("engine_lost: engine "), reason
            is_poison = reason.endswith("it ran on 3 engines when they ended, and may be why")
            assert is_poison or (self.may_be_lost and "seed: " in reason), reason
            return "three deaths" if is_poison else "lost, seeded"
        if self.num_tokens == 0:
            assert output.pooling_output is not None
            assert output.pooling_output.numpy().tolist() == self.prompt
            return "pooled"
        assert output.finish_reason is FinishReason.LENGTH
        assert count == self.num_tokens
        return "finish"


class Driver:
    """Adds and aborts at random; what comes is checked by a thread of its own.

    Attributes:
        errors: what should not have been.
    """

    def __init__(self, client: SyncMPClient, story: Story) -> None:
        self._client = client
        self._story = story
        self._live: dict[str, Live] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self.errors: list[str] = []

    def run(self) -> None:
        """Keep it up for as long as the story lasts; then wait until everything has ended."""
        jobs: list[Callable[[], None]] = [self._consume, self._ask, self._torment]
        with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="soak") as pool:
            running = [pool.submit(job) for job in jobs]
            try:
                self._add_and_abort()
            finally:
                self._is_over = True
                for job in running:
                    job.result()

    def _add_and_abort(self) -> None:
        rng, number, next_report = self._story.rng("requests"), 0, 60.0
        while self._story.elapsed < self._story.seconds and not self.errors:
            with self._lock:
                live = list(self._live)
                oldest = min((one.since for one in self._live.values()), default=time.monotonic())
            if time.monotonic() - oldest > HANG_S:
                self._wrong(f"hangs: {[request_id for request_id in live if self._live[request_id].since == oldest]}")
            if live and rng.random() < 0.15:
                self._abort(rng.sample(live, min(len(live), rng.randint(1, 3))))
            if len(live) < MOST_LIVE:
                number += 1
                self._add(str(number), rng)
            else:
                time.sleep(0.005)
            if self._story.elapsed > next_report:
                next_report += 60.0
                self._story.say(f"{self._story.elapsed:.0f} s, {memory_mb():.0f} MB, {dict(self._story.counts)}")

    def _add(self, request_id: str, rng: random.Random) -> None:
        prompt = [rng.randrange(50_000) for _ in range(rng.choice([1, 10, 300]))]
        if rng.random() < 0.1:
            live = Live(prompt, 0)
            request = EngineCoreRequest(request_id, prompt, pooling_params=PoolingParams(task="embed"))
        else:
            live = Live(prompt, rng.choice([1, 20, 100, 400]), may_be_lost=rng.random() < 0.1)
            params = SamplingParams(
                temperature=1.0 if live.may_be_lost else 0.0,
                seed=7 if live.may_be_lost else None,
                max_tokens=live.num_tokens,
                ignore_eos=True,
            )
            request = EngineCoreRequest(request_id, prompt, sampling_params=params)
        with self._lock:
            self._live[request_id] = live
        try:
            self._client.add_request(request)
        except EngineUnavailableError as exc:
            with self._lock:
                del self._live[request_id]
            self._story.tell("request: unavailable", f"{request_id}: {exc}")
            time.sleep(0.1)

    def _abort(self, request_ids: list[str]) -> None:
        with self._lock:
            mine = [request_id for request_id in request_ids if self._live.pop(request_id, None) is not None]
        self._client.abort_requests(mine)
        for request_id in mine:
            self._story.tell("request: abort", request_id)

    def _consume(self) -> None:
        ends = time.monotonic() + HANG_S
        while not self.errors:
            with self._lock:
                if self._is_over and not self._live:
                    return
            if not self._is_over:
                ends = time.monotonic() + HANG_S
            elif time.monotonic() > ends:
                self._wrong(f"hang at the end: {list(self._live)}")
            try:
                message = self._client.get_output(timeout=0.2)
            except TimeoutError:
                continue
            for output in message.outputs:
                self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        with self._lock:
            live = self._live.get(output.request_id)
            if live is None:
                return  # aborted
            try:
                end = live.take(output)
            except AssertionError as exc:
                self._wrong(f"{output.request_id}: {exc}; {output}; {live}")
                return
            if end is not None:
                del self._live[output.request_id]
                self._story.tell(f"request: {end}", output.request_id)

    def _ask(self) -> None:
        rng = self._story.rng("asks")
        while not (self._is_over or self.errors):
            time.sleep(rng.expovariate(4.0))
            try:
                assert self._client.get_supported_tasks() == ("generate", "embed")
                assert set(self._client.collective_rpc("sleep_for", args=(0.01,))) == {0.01}
                self._story.tell("ask: answered")
            except EngineUnavailableError as exc:
                self._story.tell("ask: unavailable", str(exc))
            except UtilityCallError as exc:
                if not any(cause in str(exc) for cause in WHY_NOT_ANSWERED):
                    self._wrong(f"asks: {exc!r}")
                self._story.tell("ask: lost", str(exc))

    def _torment(self) -> None:
        rng = self._story.rng("kills and stops")
        while not (self._is_over or self.errors):
            time.sleep(rng.expovariate(0.7))
            running = [one for one in manager_of(self._client).processes.values() if one.is_running]
            for process in rng.sample(running, min(len(running), rng.choice([1, 1, 1, 1, 2, 3]))):
                if rng.random() < 0.5:
                    self._story.tell("kill", f"engine {process.engine_index}")
                    process.signal(signal.SIGKILL)
                else:
                    self._story.tell("stop", f"engine {process.engine_index}")
                    process.signal(signal.SIGSTOP)
                    time.sleep(rng.choice([0.05, 1.0]))
                    if process.is_running:
                        process.signal(signal.SIGCONT)

    def _wrong(self, what: str) -> None:
        self._story.tell("WRONG", what)
        self.errors.append(what)


def wait_until_settled(client: SyncMPClient, before: Census) -> None:
    """Wait until nothing is left of anything."""
    deadline = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(TimeoutError):
            while True:
                client.get_output(timeout=0.05)
        left = {
            "states": [one.state for one in client.engine_statuses() if one.state != "ready"],
            "live": client.inbox.live,
            "calls": len(client.inbox.calls),
            "engines": [
                (engine, engine.stale, engine.load.running, engine.load.waiting)
                for engine in client.engines
                if engine.live or engine.stale or engine.load.running or engine.load.waiting
            ],
        }
        if not any(left.values()) and not client.call_utility("get_request_ids") and Census.take() == before:
            return
        assert time.monotonic() < deadline, f"left: {left}; before {before}, now {Census.take()}"


def run(name: str, seconds: float, show: Callable[[str], None]) -> None:
    """Run one soak; if it fails, tell what happened last."""
    story = Story(name, seconds, show)
    config = EngineConfig.create("echo", **SETTINGS)
    client = EngineCoreClient.make_client(True, False, config, PoolingEcho)
    try:
        assert isinstance(client, SyncMPClient)
        driver, before, memory = Driver(client, story), Census.take(), memory_mb()
        driver.run()
        assert driver.errors == []
        wait_until_settled(client, before)
        assert memory_mb() < memory + MOST_GROWTH_MB
        assert client.inbox.dropped == 0, "no message made no sense"
        story.say(str(dict(sorted(story.counts.items()))))
    except BaseException:
        story.say(f"\n{story}")
        raise
    finally:
        client.shutdown()


@pytest.mark.timeout(240)
def test_the_sync_client_for_some_seconds(show: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6, shows: make soak, in short; with pooling."""
    caplog.set_level(logging.ERROR, "enginewire")
    run("sync-short", 6.0, show)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_the_sync_client_for_minutes(show: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """Issue 6, shows: every request accounted for, counts return to zero, no leak; a fifth of the time."""
    caplog.set_level(logging.ERROR, "enginewire")
    run("sync", MINUTES * 12, show)
