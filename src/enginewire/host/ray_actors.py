"""``CoreEngineActorManager``: engines spread over a Ray cluster, one actor and one placement group for each.

Ray finds the node. The engine talks to the frontend directly, over tcp, and it is that connection whose end means
death. What Ray says, as that an actor or its node died, is a further sign, and mostly the better cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from enginewire.engine.spec import EngineSpec
from enginewire.errors import EngineDeath, EngineStartupError
from enginewire.host.incarnations import Incarnations
from enginewire.host.ray_cluster import connection, ray
from enginewire.host.ray_engine import ASK_AGAIN_S, PlacedEngine

logger = logging.getLogger(__name__)

JOINED_S: Final = 30.0
"""How much longer than engines the thread may take to end: for each it asks Ray and an actor, within bounds. Only a
thread that is in Ray while somebody else disconnects from it does not come back."""

POLL_S: Final = 0.1
"""How soon a newly started engine is watched and an overdue death reported. An actor's end interrupts the wait."""

LAST_WORDS_S: Final = 0.5
"""How long a lost connection may wait for a better cause: an actor tells of its engine's end within milliseconds, Ray
of a killed actor too, and of a lost node after seconds."""


class CoreEngineActorManager(Incarnations[PlacedEngine]):
    """Owns engines in a Ray cluster and the thread that watches them: an ``EngineLauncher`` of many machines.

    Uses the cluster that this process is connected to; if there is none, that at ``RAY_ADDRESS``, or the one that
    runs on this machine, or one that is started for the purpose.

    Args:
        resources: what Ray sets aside for each engine.
        forward_log: pass their logs on; Ray does that, if this process was not connected before.

    Raises:
        ConfigError: the cluster cannot be reached.
    """

    def __init__(self, resources: Mapping[str, float], *, forward_log: bool = True) -> None:
        super().__init__(LAST_WORDS_S)
        self._resources = dict(resources)
        self._forward_log = forward_log
        self._is_closing = False
        self._is_closed = False
        self._pause = threading.Event()
        self._leaving: list[PlacedEngine] = []
        self._thread = threading.Thread(target=self._watch, name="enginewire-monitor", daemon=True)
        connection.open(forward_log=forward_log)
        try:
            self._host: str = ray.util.get_node_ip_address()
            self._thread.start()
        except BaseException:
            connection.close()
            raise

    @property
    def host(self) -> str:
        """The address of this node, under which the others reach it."""
        return self._host

    def start(self, spec: EngineSpec) -> None:
        """Have an engine placed, of a new rank or in the place of a former one; see ``EngineLauncher``."""
        index = spec.engine_index
        if not ray.is_initialized():  # or Ray would start a cluster
            raise EngineStartupError("this process has left the Ray cluster", stage="launch", engine_index=index)
        try:
            engine = PlacedEngine(spec, self._resources, forward_log=self._forward_log)
        except (ValueError, RuntimeError, ray.exceptions.RayError) as exc:
            raise EngineStartupError(f"Ray takes no engine: {exc}", stage="launch", engine_index=index) from exc
        with self._report_lock, self._lock:
            is_late = self._is_closing
            former = None if is_late else self._replace(engine)
        if is_late:
            engine.release()
            raise EngineStartupError("the launcher has been shut down", stage="launch", engine_index=index)
        if former is not None and former.death is None:
            self._see_off([former], 0)

    def stop(self, engine_index: int, timeout: float) -> None:
        """Take a rank out: SIGTERM to its engine, and SIGKILL after ``timeout`` seconds; see ``EngineLauncher``."""
        if (engine := self._take_out(engine_index)) is not None:
            self._see_off([engine], timeout)
            with self._someone_ended:
                self._someone_ended.wait_for(lambda: engine not in self._leaving)

    def expect_death(self, sign: str, engine_index: int | None = None) -> None:
        """Have a death reported soon, even if Ray does not show it; see ``EngineManager``."""
        super().expect_death(sign, engine_index)
        for index, engine in self.current.items():
            if engine_index in (None, index):
                engine.expect_death()

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        engine = self.current.get(engine_index)
        return () if engine is None else engine.log_tail()

    def shutdown(self, timeout: float) -> None:
        """Stop all engines, give back what they had, and leave the cluster if nobody else uses it. Idempotent."""
        with self._lock:
            self._on_death = None
            is_first, self._is_closing = not self._is_closing, True
        if is_first:
            self._see_off(list(self.current.values()), timeout)
            self._is_closed = True  # only now may the thread end: it gives back what they had
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout + JOINED_S)
        if is_first:
            connection.close()

    def _see_off(self, engines: Sequence[PlacedEngine], timeout: float) -> None:
        """Have engines leave. The thread gives back what they had, once they are gone."""
        for engine in engines:
            if engine.is_released or not ray.is_initialized():
                continue
            engine.leave(timeout)
            with self._lock:
                if engine not in self._leaving:
                    self._leaving.append(engine)

    def _watch(self) -> None:
        while (not self._is_closed or self._leaving) and ray.is_initialized():
            try:
                self._look(time.monotonic())
            except Exception:
                logger.exception("Ray does not tell how engines are; their connections still do")
                self._pause.wait(ASK_AGAIN_S)
        for engine in [] if self._is_closing else self.current.values():
            self._report(engine, engine.death_by("this process has left the Ray cluster, and the engine with it"))
        for engine in list(self._leaving):
            self._forget(engine)

    def _look(self, now: float) -> None:
        engines = list(self.current.values())
        for engine in engines:
            if (sign := engine.overdue_sign()) is not None:
                self._died(engine, engine.death_by(sign))
        ends = {engine.end: engine for engine in engines if engine.is_watched(now)}
        if not ends:
            self._pause.wait(POLL_S)
        for end in ray.wait(list(ends), timeout=POLL_S)[0] if ends else []:
            if (death := ends[end].take_end()) is not None:
                self._died(ends[end], death)
        for engine in engines:
            engine.look(now)
        for engine in [each for each in self._leaving if each.has_left(now)]:
            engine.release()
            self._forget(engine)

    def _died(self, engine: PlacedEngine, death: EngineDeath) -> None:
        self._report(engine, death)
        self._see_off([engine], 0)

    def _forget(self, engine: PlacedEngine) -> None:
        with self._someone_ended:
            self._leaving.remove(engine)
            self._someone_ended.notify_all()
