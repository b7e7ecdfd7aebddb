"""The asyncio clients of deployments with several engines, under the names that readers of vLLM look for.

Most of what they do is :class:`~enginewire.client.mp.MPClient`'s: routing, losses and returns are the same for one
engine and for many, and for the sync face, too. What is written here is how engines come and go while others serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Final

import zmq
from msgspec.structs import replace

from enginewire.client.async_mp import AsyncMPClient
from enginewire.client.engines import Engine, EngineState
from enginewire.client.inbox import Failures
from enginewire.client.restarts import Restarts
from enginewire.config import MOST_ENGINES
from enginewire.errors import ENGINE_LOST_PREFIX, ConfigError, EngineClientError, EngineDeath, startup_error

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
"""How often engines that come or go are looked at."""

STARTING_AT_ONCE: Final = 8
"""Newcomers that start at the same time: more would take the processors from those that serve."""

MOST_NEWCOMERS: Final = 256
"""Engines that one call adds. More is a slip, and as processes of one machine would be the end of it."""


class DPAsyncMPClient(AsyncMPClient):
    """One engine of several, each with a frontend of its own: somebody else spreads the load (external)."""


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Several engines, between which this client spreads its requests (internal and hybrid)."""

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float | None = None) -> None:
        """Change the number of engines while serving (C-54).

        More: engines are started, and take requests once all of them are ready. If one cannot start, none is added.
        Fewer: those of the highest ranks get no requests any longer; what runs there may finish for ``drain_timeout``
        seconds, then it goes on at another engine where ``failover`` allows, or fails with the cause.

        Cancelled, or failed, it takes back what it has begun, except that engines that have been stopped are gone.

        Args:
            new_data_parallel_size: how many engines there are to be, at least 1, and at most 256 more than there are.
            drain_timeout: default: ``drain_timeout_s`` of the configuration.

        Raises:
            ConfigError: not a number of engines, or not a time.
            EngineStartupError: a new engine could not be started; the others serve on.
            NotImplementedError: these engines are not this client's to start and stop one by one; says why.
            EngineClientError: their number is being changed already, or only dead engines would be left.
        """
        size = new_data_parallel_size
        if type(size) is not int or not 1 <= size <= MOST_ENGINES:
            raise ConfigError(f"new_data_parallel_size must be an integer from 1 to {MOST_ENGINES}, got {size!r}")
        drain_s = self.config.drain_timeout_s if drain_timeout is None else drain_timeout
        if type(drain_s) not in (int, float) or not 0 <= drain_s < math.inf:
            raise ConfigError(f"drain_timeout must be seconds, 0 or more, got {drain_s!r}")
        if (reason := self._why_fixed()) is not None:
            raise NotImplementedError(f"the number of these engines cannot be changed: {reason}")
        if self.is_scaling:
            raise EngineClientError("the number of engines is being changed; try again when that is done")
        if (num_new := size - len(self.engines)) > MOST_NEWCOMERS:
            raise ConfigError(
                f"at most {MOST_NEWCOMERS} engines are added at a time, and {size} would be {num_new} more"
            )
        self._ensure_receiver()
        self.ensure_alive()
        self.is_scaling = True
        try:
            count = len(self.engines)
            if size > count:
                await self._grow(range(count, size))
            elif size < count:
                self._ensure_one_is_left(size)
                await self._shrink([self.engines[index] for index in range(size, count)], drain_s)
        finally:
            self.is_scaling = False

    def _why_fixed(self) -> str | None:
        config = self.config
        if config.data_parallel_lock_step:
            return "they run in lock-step, as one group"
        if config.data_parallel_external_lb or config.data_parallel_hybrid_lb:
            return "they are spread over several frontends"
        if self.lookout.returns.launcher is None or not all(engine.is_ours for engine in self.engines):
            return "somebody else started them"
        return "vLLM ranks are started for a fixed number" if config.starts_vllm else None

    async def _grow(self, ranks: range) -> None:
        returns = self.lookout.returns
        logger.info("growing from %d to %d engines", ranks.start, ranks.stop)
        newcomers: list[Engine] = []
        self._resize(ranks.stop)
        returns.held = frozenset(ranks)
        try:
            waiting = deque(ranks)
            while waiting or not all(returns.is_up(index) for index in ranks):
                num_starting = sum(not returns.is_up(engine.index) for engine in newcomers)
                if waiting and num_starting < STARTING_AT_ONCE:
                    self._start_newcomer(waiting.popleft(), newcomers)
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(POLL_S)
                self.ensure_alive()
                if (death := _first_death(newcomers)) is not None:
                    raise startup_error(death)
        except BaseException:
            await self._stop(newcomers, 0.0)
            raise
        finally:
            returns.held = frozenset()
        for engine in newcomers:
            engine.restarts = Restarts(self.config.restart_engine, self.config.restart_window_s)
        while any(engine.state is EngineState.STARTING for engine in newcomers):
            self._wake_receiver()
            await asyncio.sleep(0)
            self.ensure_alive()

    def _start_newcomer(self, index: int, newcomers: list[Engine]) -> None:
        returns = self.lookout.returns
        engine = Engine(index, returns.open_link(index), is_ours=True)  # while it starts, without restarts
        newcomers.append(engine)
        self.engines.add(engine)
        template = returns.specs[0]
        config = template.config.copy()
        config.data_parallel_size = config.data_parallel_size_local = self.config.data_parallel_size
        returns.specs[index] = replace(template, config=config, engine_index=index)
        returns.start(engine, monotonic())

    def _ensure_one_is_left(self, size: int) -> None:
        """Refuse to take out all that serve: ranks are taken from the end, whoever is dead."""
        if all(self.engines[index].state is EngineState.DEAD for index in range(size)):
            raise EngineClientError(
                f"the {size} engines of the lowest ranks, which would stay, are dead, and none would serve any longer; "
                "have more engines instead of fewer, or start this program anew"
            )

    async def _shrink(self, leaving: Sequence[Engine], drain_s: float) -> None:
        before = [(engine, engine.state) for engine in leaving]
        for engine in leaving:
            self.engines.leaves(engine)
        calls, deadline = self.inbox.calls, monotonic() + drain_s
        try:
            while any(engine.live or calls.are_for(engine.index) for engine in leaving) and monotonic() < deadline:
                await asyncio.sleep(POLL_S)
                self.ensure_alive()
        except BaseException:
            for engine, state in before:
                self.engines.stays(engine, state)
            raise
        for engine in leaving:
            if request_ids := list(engine.live):
                self._evict(engine, request_ids, f"it was taken out, and the request was not done within {drain_s:g} s")
        await self._stop(leaving, self.config.shutdown_timeout_s + self.config.terminate_timeout_s)

    def _evict(self, engine: Engine, request_ids: list[str], cause: str) -> None:
        """Take an engine's requests away from it. What it still sends of them is dropped, and made anew elsewhere."""
        with contextlib.suppress(zmq.ZMQError):  # it has just ended
            self.outbox.abort(engine, request_ids)
        engine.is_haunted = True
        reason = f"{ENGINE_LOST_PREFIX}engine {engine.index}: {cause}"
        self._arrivals.add([Failures(engine, request_ids, reason, is_loss=True, is_death=False)])

    async def _stop(self, engines: Sequence[Engine], timeout: float) -> None:
        """End the processes of engines, and forget them. Cancelled, it finishes that first: nothing is half done."""
        stopping = asyncio.ensure_future(self._stop_all(engines, timeout))
        is_cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                is_cancelled = True
        stopping.result()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _stop_all(self, engines: Sequence[Engine], timeout: float) -> None:
        launcher = self.lookout.returns.launcher
        assert launcher is not None
        await asyncio.gather(*(asyncio.to_thread(launcher.stop, engine.index, timeout) for engine in engines))
        if self.resources.closing:
            return
        for engine in engines:
            self.lookout.dismiss(engine)
        self._resize(len(self.engines))
        if self._receiver is not None:
            self._receiver.read_links()  # before the loop looks at sockets that are closed

    def _resize(self, size: int) -> None:
        self.config.data_parallel_size = self.config.data_parallel_size_local = size


def _first_death(engines: Sequence[Engine]) -> EngineDeath | None:
    return next((engine.death for engine in engines if engine.state is EngineState.DEAD), None)
