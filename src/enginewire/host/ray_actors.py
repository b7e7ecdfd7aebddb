"""``CoreEngineActorManager``: engines spread over a Ray cluster, one actor and one placement group for each.

Ray finds the node and starts the actor there; the engine is a process of its own even so, started by the actor as
``CoreEngineProcManager`` starts one here and tied to it by the same lifeline. Children of an actor outlive its SIGKILL
and its node's raylet; an engine on a lifeline does not.

The engine talks to the frontend directly, over tcp, and it is that connection whose end means death. What Ray says, as
that an actor or its node died, is a further sign, and mostly the better cause.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from enginewire.engine.spec import EngineSpec
from enginewire.errors import ConfigError, EngineDeath, EngineStartupError
from enginewire.host.incarnations import Incarnation, Incarnations
from enginewire.host.manager import KILLED_S, CoreEngineProcManager

# Not a module to type checkers: it need not be there, and a remote class has no attribute for its remote methods.
ray: Any = importlib.import_module("ray")

logger = logging.getLogger(__name__)

POLL_S: Final = 0.1
"""How soon a newly started engine is watched and an overdue death reported. An actor's end interrupts the wait."""

LAST_WORDS_S: Final = 0.5
"""How long a lost connection may wait for a better cause: an actor tells of its engine's end within milliseconds, Ray
of a killed actor too, and of a lost node after seconds."""

ANSWER_S: Final = 2.0
"""How long an actor may take for a short answer, beside what it is asked to wait for."""

ASK_AGAIN_S: Final = 0.5
"""After Ray said that an actor cannot be reached now."""

PLACED_S: Final = 10.0
"""How long a placement may take before the log tells what it waits for."""


_CAUSE: Final = re.compile(r"^The actor (?:is dead|died) because (.+?)(?:\. |\.?$)", re.MULTILINE)


class EngineActor:
    """Runs one engine on a node of the cluster. Instantiated by Ray, there; several of its threads call it.

    Args:
        spec: encoded, as it goes over a lifeline.
        forward_log: have the engine's log in the actor's, which Ray passes on to the driver.
    """

    def __init__(self, spec: bytes, forward_log: bool) -> None:
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


class PlacedEngine(Incarnation):
    """An engine in the cluster, as whoever had it placed sees it: its actor, and what that is asked all the time.

    Args:
        spec: what the engine is told.
        resources: what Ray sets aside for it, ``{"CPU": 1}``.
        forward_log: have its log passed on.
    """

    def __init__(self, spec: EngineSpec, resources: Mapping[str, float], *, forward_log: bool) -> None:
        super().__init__(spec.engine_index)
        self.node: str | None = None
        self._remark = ""
        self._ask_at = 0.0
        self._overdue_at = time.monotonic() + PLACED_S
        self._group = ray.util.placement_group([dict(resources)], strategy="STRICT_PACK")
        others = dict(resources)
        options = {
            "num_cpus": others.pop("CPU", 0),
            "num_gpus": others.pop("GPU", 0),
            "memory": others.pop("memory", None),
            "resources": others,
            "max_concurrency": 4,  # one thread waits for the end
            "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, 0),
        }
        self.actor = ray.remote(EngineActor).options(**options).remote(spec.encode(), forward_log)
        self._where = self.actor.where.remote()
        self.end = self.actor.wait_for_death.remote()
        self._resources = resources

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
        return EngineDeath(self.engine_index, f"{sign}{where}{self._remark}", None, self.log_tail())

    def log_tail(self) -> tuple[str, ...]:
        """Ask for the last lines that it printed; there are none where nobody answers soon."""
        if self.death is not None:
            return self.death.log_tail
        if self.node is None or not ray.is_initialized():
            return ()
        try:
            tail: tuple[str, ...] = ray.get(self.actor.log_tail.remote(), timeout=LAST_WORDS_S)
            return tail
        except ray.exceptions.RayError:
            return ()

    def release(self) -> None:
        """Kill its actor and give back what was set aside. Idempotent."""
        if not ray.is_initialized():  # all is gone, and either call would start a cluster
            return
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actor)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(self._group)


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
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="enginewire-monitor", daemon=True)
        _connection.open(forward_log=forward_log)
        try:
            self._host: str = ray.util.get_node_ip_address()
            self._thread.start()
        except BaseException:
            _connection.close()
            raise

    @property
    def host(self) -> str:
        """The address of this node, under which the others reach it."""
        return self._host

    def start(self, spec: EngineSpec) -> None:
        """Have an engine placed, of a new rank or in the place of a former one; see ``EngineLauncher``."""
        index = spec.engine_index
        with self._report_lock, self._lock:
            if self._is_closing.is_set():
                raise EngineStartupError("the launcher has been shut down", stage="launch", engine_index=index)
            if (former := self.current.get(index)) is not None:
                former.release()  # first: there may be no room for both
            try:
                self._replace(PlacedEngine(spec, self._resources, forward_log=self._forward_log))
            except (ValueError, RuntimeError, ray.exceptions.RayError) as exc:
                raise EngineStartupError(f"Ray takes no engine: {exc}", stage="launch", engine_index=index) from exc

    def stop(self, engine_index: int, timeout: float) -> None:
        """Take a rank out: SIGTERM to its engine, and SIGKILL after ``timeout`` seconds; see ``EngineLauncher``."""
        if (engine := self._take_out(engine_index)) is not None:
            _end([engine], timeout)

    def log_tail(self, engine_index: int) -> tuple[str, ...]:
        """Return the last lines that an engine printed."""
        engine = self.current.get(engine_index)
        return () if engine is None else engine.log_tail()

    def shutdown(self, timeout: float) -> None:
        """Stop all engines, give back what they had, and leave the cluster if nobody else uses it. Idempotent."""
        with self._lock:
            self._on_death = None
            is_first = not self._is_closing.is_set()
            self._is_closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(KILLED_S)
        if is_first:
            _end(list(self.current.values()), timeout)
            _connection.close()

    def _watch(self) -> None:
        while not self._is_closing.is_set():
            now = time.monotonic()
            engines = list(self.current.values())
            if not ray.is_initialized():
                for engine in engines:
                    self._died(engine, engine.death_by("this process left the Ray cluster, and the engine with it"))
                return
            ends = {engine.end: engine for engine in engines if engine.is_watched(now)}
            if not ends:
                self._is_closing.wait(POLL_S)
            for end in ray.wait(list(ends), timeout=POLL_S)[0] if ends else []:
                if (death := ends[end].take_end()) is not None:
                    self._died(ends[end], death)
            for engine in engines:
                engine.look(now)
                if (sign := engine.overdue_sign()) is not None:
                    self._died(engine, engine.death_by(sign))

    def _died(self, engine: PlacedEngine, death: EngineDeath) -> None:
        self._report(engine, death)
        engine.release()


def _end(engines: Sequence[PlacedEngine], timeout: float) -> None:
    """End engines, politely first, and give back what was set aside for them."""
    there = [engine for engine in engines if engine.death is None and engine.node is not None]
    asked = [engine.actor.stop.remote(timeout) for engine in there]
    if asked and len(ray.wait(asked, num_returns=len(asked), timeout=timeout + ANSWER_S)[0]) < len(asked):
        logger.warning("not every engine's actor answered within %.1f s; all are killed", timeout + ANSWER_S)
    for engine in engines:
        engine.release()


class _Connection:
    """This process's connection to the cluster, which all managers in it share; what we opened, the last one closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ours = False

    def open(self, *, forward_log: bool) -> None:
        """Connect, unless that is done. Raises :class:`ConfigError`."""
        with self._lock:
            if not ray.is_initialized():
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                try:
                    with _kept_signal_handlers():
                        ray.init(namespace="enginewire", include_dashboard=False, log_to_driver=forward_log)
                except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as exc:
                    raise ConfigError(f"cannot connect to a Ray cluster (RAY_ADDRESS says where): {exc}") from exc
                self._is_ours = True
            self._num_users += 1

    def close(self) -> None:
        """Disconnect if nobody else is left who came by :meth:`open`."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._is_ours:
                self._is_ours = False
                with _kept_signal_handlers():
                    ray.shutdown()


_connection: Final = _Connection()


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Put back the handler of SIGTERM that Ray replaces, twice: in Python, and beneath it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def is_done(answer: Any) -> bool:
    """Whether an actor's answer, an ``ObjectRef``, is there."""
    return bool(ray.wait([answer], timeout=0)[0])


def cause_of(exc: Exception) -> str:
    """Put an error of Ray's into one sentence: of its half a page, why the actor is gone."""
    text = str(exc).strip()
    if match := _CAUSE.search(text):
        return match[1]
    return text.splitlines()[-1] if text else type(exc).__name__
