"""An engine in a Ray cluster: ``EngineActor`` on its node, ``PlacedEngine`` where it was asked for.

The engine is a process of its own, started by the actor as ``CoreEngineProcManager`` starts one anywhere and tied to it
by the same lifeline. Children of an actor outlive its SIGKILL; an engine on a lifeline does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath
from enginewire.host.incarnations import Incarnation
from enginewire.host.manager import CoreEngineProcManager
from enginewire.host.ray_cluster import cause_of, is_done, ray

logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
"""How long an actor may take for an answer, beside what it is asked to wait for; it may be starting."""

ASK_AGAIN_S: Final = 0.5
"""After Ray said that an actor cannot be reached now."""

INIT_PID: Final = 1
"""The parent of a process whose own has ended; never a raylet, which ``ray start`` starts."""

RAYLET_CHECK_S: Final = 0.5
"""How soon an actor notices that its node is lost; the frontend has requests go elsewhere meanwhile."""

PLACED_S: Final = 10.0
"""How long a placement may take before the log tells what it waits for."""


class EngineActor:
    """Runs one engine on a node of the cluster. Instantiated by Ray, there; several of its threads call it.

    Args:
        spec: encoded, as it goes over a lifeline.
        forward_log: have the engine's log in the actor's, which Ray passes on to the driver.
    """

    def __init__(self, spec: bytes, forward_log: bool) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), name="raylet", daemon=True).start()
        self._spec = EngineSpec.decode(spec)
        self._manager = CoreEngineProcManager([self._spec], forward_log=forward_log)

    def where(self) -> str:
        """Return the node's address."""
        address: str = ray.util.get_node_ip_address()
        return address

    def wait_for_death(self) -> EngineDeath:
        """Return when the engine has ended, and why."""
        while (death := self._manager.wait_for_death(60.0)) is None:
            pass
        return death

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines that the engine printed."""
        return self._manager.log_tail(self._spec.engine_index)

    def stop(self, timeout: float) -> None:
        """Have the engine leave, and kill it after ``timeout`` seconds."""
        self._manager.shutdown(timeout)


def _end_with(raylet: int) -> None:
    """End this actor, and with it the engine, when its node's raylet is gone. Ray leaves a busy actor running."""
    while os.getppid() == raylet != INIT_PID:
        threading.Event().wait(RAYLET_CHECK_S)
    os._exit(1)


class PlacedEngine(Incarnation):
    """An engine in the cluster, as whoever had it placed sees it: its actor, and what that is asked all the time.

    Args:
        spec: what the engine is told.
        resources: what Ray sets aside for it, ``{"CPU": 1}``.
        forward_log: have its log passed on.
    """

    def __init__(self, spec: EngineSpec, resources: Mapping[str, float], *, forward_log: bool) -> None:
        super().__init__(spec.engine_index)
        payload = spec.encode()
        self.node: str | None = None
        self._resources = resources
        self.is_released = False
        self._remark = ""
        self._tail: Any = None
        self._ask_at = 0.0
        self._overdue_at = time.monotonic() + PLACED_S
        self._group = ray.util.placement_group([dict(resources)], strategy="STRICT_PACK")
        try:
            self.actor = ray.remote(EngineActor).options(**self._options()).remote(payload, forward_log)
        except BaseException:
            ray.util.remove_placement_group(self._group)
            raise
        self._where = self.actor.where.remote()
        self.end = self.actor.wait_for_death.remote()

    def _options(self) -> dict[str, Any]:
        others = dict(self._resources)
        return {
            "num_cpus": others.pop("CPU", 0),
            "num_gpus": others.pop("GPU", 0),
            "memory": others.pop("memory", None),
            "resources": others,
            "max_concurrency": 4,  # one thread waits for the end
            "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, 0),
        }

    def look(self, now: float) -> None:
        """Take note of where it was placed, or say that it was not."""
        if self.node is None and is_done(self._where):
            with contextlib.suppress(ray.exceptions.RayError):  # its end says more
                self.node = ray.get(self._where)
                logger.info("engine=%d runs on node=%s", self.engine_index, self.node)
        if self.node is None and now > self._overdue_at:
            self._overdue_at = float("inf")
            free = {name: amount for name, amount in ray.available_resources().items() if name in self._resources}
            logger.warning(
                "engine=%d waits for Ray to place it: it needs %s, and %s is free in the whole cluster",
                self.engine_index,
                dict(self._resources),
                free,
            )

    def is_watched(self, now: float) -> bool:
        """Whether to wait for its end now."""
        return self.death is None and now > self._ask_at

    def take_end(self) -> EngineDeath | None:
        """Read the answer that has come; ``None`` if it means nothing yet."""
        try:
            death: EngineDeath = ray.get(self.end)
            return death
        except ray.exceptions.ActorUnavailableError as exc:
            self._remark = f"; Ray says that {cause_of(exc)}"
            self._ask_at = time.monotonic() + ASK_AGAIN_S
            self.end = self.actor.wait_for_death.remote()
            return None
        except ray.exceptions.RayError as exc:
            where = f" (node {self.node})" if self.node else ""
            return EngineDeath(self.engine_index, f"its actor is gone{where}: {cause_of(exc)}")

    def death_by(self, sign: str) -> EngineDeath:
        """Make the death of which nothing is known but a sign."""
        where = f" (it ran on node {self.node})" if self.node else ""
        tail: tuple[str, ...] = ()
        if self._tail is not None and ray.is_initialized() and is_done(self._tail):
            with contextlib.suppress(ray.exceptions.RayError):
                tail = ray.get(self._tail)
        return EngineDeath(self.engine_index, f"{sign}{where}{self._remark}", None, tail)

    def log_tail(self) -> tuple[str, ...]:
        """Ask for the last lines that it printed; there are none where nobody answers soon."""
        if self.death is not None:
            return self.death.log_tail
        if self.node is None or not ray.is_initialized():
            return ()
        try:
            tail: tuple[str, ...] = ray.get(self.actor.log_tail.remote(), timeout=ANSWER_S)
            return tail
        except ray.exceptions.RayError:
            return ()

    def expect_death(self) -> None:
        """Ask for the last lines that it printed while there is somebody to ask, without waiting."""
        if self._tail is None and self.death is None:
            self._tail = self.actor.log_tail.remote()

    def leave(self, timeout: float) -> None:
        """Ask its actor to end it, which may take ``timeout`` seconds; see :meth:`has_left`."""
        is_pending = False
        with contextlib.suppress(Exception):  # then it is asked all the same
            is_pending = ray.util.placement_group_table(self._group)["state"] == "PENDING"
        self._left = None if is_pending else self.actor.stop.remote(timeout)
        self._kill_at = time.monotonic() + timeout + ANSWER_S

    def has_left(self, now: float) -> bool:
        """Whether it is gone, or nobody answers."""
        if now > self._kill_at:
            logger.warning("engine=%d cannot be asked to leave; its actor is killed", self.engine_index)
            return True
        return self._left is None or is_done(self._left)

    def release(self) -> None:
        """Kill its actor and give back what was set aside."""
        self.is_released = True
        with contextlib.suppress(Exception):  # nothing that could be done about it
            ray.kill(self.actor)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)
