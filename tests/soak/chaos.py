"""What engines suffer in a soak: they are killed, stopped, added, taken out, and asked things meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from story import Story

from enginewire import AsyncLLM, EngineStartupError, EngineUnavailableError, UtilityCallError
from enginewire.client.dp import DPLBAsyncMPClient
from enginewire.host.manager import CoreEngineProcManager
from enginewire.host.process import EngineProcess

ANSWER_S: Final = 60.0
"""A utility call, or a step of scaling, that takes longer hangs."""

MOST_ENGINES: Final = 5

WHY_NOT_ANSWERED: Final = ("was lost meanwhile", "was taken out meanwhile", "Server shutting down", "not available")


def client_of(llm: AsyncLLM) -> DPLBAsyncMPClient:
    """Return the client, for a look inside."""
    client = llm._client
    assert isinstance(client, DPLBAsyncMPClient)
    return client


def manager_of(client: Any) -> CoreEngineProcManager:
    """Return what has the engine processes."""
    manager = client.resources.engine_manager
    assert isinstance(manager, CoreEngineProcManager)
    return manager


class Chaos:
    """Torments the engines of an ``AsyncLLM``.

    Args:
        pace: how often something happens; 1: about once a second.

    Attributes:
        errors: what should not have been.
    """

    def __init__(self, llm: AsyncLLM, story: Story, pace: float = 1.0) -> None:
        self._llm = llm
        self._story = story
        self._pace = pace
        self._over = asyncio.Event()
        self.errors: list[str] = []

    async def run(self) -> None:
        """Go on until :meth:`finish`; what is stopped is continued in the end."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat("kills", 5.0, self._kill))
            group.create_task(self._repeat("stops", 2.0, self._stop))
            group.create_task(self._repeat("scales", 4.0, self._scale))
            group.create_task(self._repeat("asks", 0.3, self._ask))
            group.create_task(self._repeat("pauses", 6.0, self._pause))

    def finish(self) -> None:
        """Begin nothing more."""
        self._over.set()

    async def _repeat(self, name: str, mean_s: float, do: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
        rng = self._story.rng(name)
        while not self.errors and not await self._is_over_after(rng.expovariate(self._pace / mean_s)):
            try:
                await do(rng)
            except Exception as exc:
                self._story.tell("WRONG", f"{name}: {exc!r}")
                self.errors.append(f"{name}: {exc!r}")

    async def _is_over_after(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _victim(self, rng: random.Random) -> EngineProcess | None:
        """Draw a process, whatever it is doing."""
        running = [process for process in manager_of(client_of(self._llm)).processes.values() if process.is_running]
        return rng.choice(running) if running else None

    async def _kill(self, rng: random.Random) -> None:
        for _ in range(rng.choice([1, 1, 1, 1, 1, 1, 2, MOST_ENGINES])):
            if (process := self._victim(rng)) is not None:
                state = self._states().get(process.engine_index)
                self._story.tell("kill", f"engine {process.engine_index}, which is {state}")
                process.signal(signal.SIGKILL)

    async def _stop(self, rng: random.Random) -> None:
        if (process := self._victim(rng)) is None:
            return
        seconds = rng.choice([0.05, 0.3, 1.0, 3.0])
        self._story.tell("stop", f"engine {process.engine_index} for {seconds} s")
        process.signal(signal.SIGSTOP)
        await self._is_over_after(seconds)
        if process.is_running:
            process.signal(signal.SIGCONT)

    async def _scale(self, rng: random.Random) -> None:
        size, drain_s = rng.randint(2, MOST_ENGINES), rng.choice([0.0, 0.2, 2.0])
        self._story.tell("scale", f"{len(self._states())} -> {size} engines, {drain_s} s to drain")
        scaling = asyncio.ensure_future(self._llm.scale_elastic_ep(size, drain_s))
        if rng.random() < 0.2:
            await asyncio.wait([scaling], timeout=rng.uniform(0, 1))
            scaling.cancel()
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait([scaling])
                await scaling
        except EngineStartupError as exc:
            if "killed by signal 9" not in str(exc):
                raise
            self._story.tell("scale: newcomer killed", str(exc))
        except asyncio.CancelledError:
            self._story.tell("scale: cancelled", str(self._states()))
        else:
            self._story.tell("scale: done", str(self._states()))

    async def _ask(self, rng: random.Random) -> None:
        name, call = rng.choice(
            [
                ("tasks", self._llm.get_supported_tasks),
                ("reset", self._llm.reset_prefix_cache),
                ("loras", self._llm.list_loras),
                ("echo", lambda: self._llm.collective_rpc("echo", args=("x" * 1000,))),
                ("slow", lambda: self._llm.collective_rpc("sleep_for", args=(0.2,))),
                ("fails", lambda: self._llm.collective_rpc("raise_error", args=("as asked",))),
            ]
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await call()
        except EngineUnavailableError as exc:
            self._story.tell("ask: unavailable", f"{name}: {exc}")
        except UtilityCallError as exc:
            is_lost = any(cause in str(exc) for cause in WHY_NOT_ANSWERED)
            if not is_lost and "as asked" not in str(exc):
                raise
            self._story.tell("ask: lost" if is_lost else "ask: failed as asked", f"{name}: {exc}")
        else:
            expected: dict[str, Any] = {
                "tasks": ("generate",),
                "reset": True,
                "loras": set(),
                "echo": {"args": ["x" * 1000], "kwargs": {}},
                "slow": 0.2,
            }
            if name in ("echo", "slow"):  # of every engine
                assert answer
                answer = next((one for one in answer if one != expected[name]), expected[name])
            assert answer == expected[name], f"{name} was answered with {answer!r}"
            self._story.tell("ask: answered", name)

    async def _pause(self, rng: random.Random) -> None:
        """Pause for a while. An engine that comes meanwhile is not paused."""
        for call in (self._llm.pause_generation("keep"), None, self._llm.resume_generation()):
            if call is None:
                await self._is_over_after(rng.uniform(0, 0.5))
                continue
            try:
                async with asyncio.timeout(ANSWER_S):
                    await call
            except (EngineUnavailableError, UtilityCallError) as exc:
                self._story.tell("pause: lost", str(exc))
        self._story.tell("pause")

    def _states(self) -> dict[int, str]:
        return {status.index: status.state for status in self._llm.engine_statuses()}
