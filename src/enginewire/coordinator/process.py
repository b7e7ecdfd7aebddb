"""``DPCoordinator``: a running coordinator, in a thread of this process or in a process of its own."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import Final

import msgspec

from enginewire.config import EngineConfig
from enginewire.coordinator.server import CoordinatorAddresses, CoordinatorServer, CoordinatorSpec, CoordinatorStarted
from enginewire.engine.channel import Channel
from enginewire.errors import EngineStartupError, describe_exit
from enginewire.host.process import child_environment
from enginewire.transport.endpoints import tcp_host

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 120.0
"""How long its process may take to say where it has bound. It only has to start Python."""

LEAVE_TIMEOUT_S: Final = 5.0
"""How long it may take to leave when it is told to."""

MIN_LIFE_S: Final = 5.0
MAX_SHORT_LIVES: Final = 3
"""A process that ends before its time so often in a row is not started again."""


def coordinator_addresses(config: EngineConfig, folder: str | None) -> CoordinatorAddresses:
    """Decide where a coordinator binds. Source: protocol A.3.

    Args:
        folder: a private one for ipc sockets; ``None``: everything goes by tcp.
    """
    all_local = len(config.local_ranks) == config.data_parallel_size
    is_internal = not (config.data_parallel_external_lb or config.data_parallel_hybrid_lb)
    host = tcp_host(config.data_parallel_address)

    def address(name: str, *, is_local: bool) -> str:
        if is_local and folder is not None:
            return f"ipc://{folder}/{name}"
        return f"tcp://{'127.0.0.1' if is_local else host}:*"

    return CoordinatorAddresses(
        coordinator_input=address("waves", is_local=all_local),
        coordinator_output=address("counts", is_local=all_local),
        frontend_stats_publish_address=address("stats", is_local=is_internal),
    )


class DPCoordinator(ABC):
    """A running coordinator. Frontends that share it may be in other processes; they only need its addresses.

    Attributes:
        addresses: where engines and frontends find it, for INIT.
    """

    addresses: CoordinatorAddresses

    @staticmethod
    def start(config: EngineConfig, *, folder: str | None = None, own_process: bool = False) -> DPCoordinator:
        """Start the coordinator of a deployment.

        Args:
            config: of the deployment.
            folder: for ipc sockets; belongs to the caller. ``None``: everything goes by tcp.
            own_process: run it in a process of its own, so that a busy frontend does not hold it up.

        Raises:
            EngineStartupError: an address cannot be bound, or no process can be started.
        """
        spec = CoordinatorSpec(
            size=config.data_parallel_size,
            lock_step=config.data_parallel_lock_step,
            wire_version=config.wire_version,
            addresses=coordinator_addresses(config, folder),
        )
        return CoordinatorProcess(spec) if own_process else CoordinatorThread(spec)

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it runs, or is just being started again."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it and wait for that. Idempotent."""


class CoordinatorThread(DPCoordinator):
    """A coordinator in a thread of this process."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        try:
            server = CoordinatorServer(spec)
        except OSError as exc:
            raise EngineStartupError(f"the coordinator {exc.strerror}", stage="launch") from exc
        self.addresses = server.addresses
        ours, theirs = socket.socketpair()
        self._lifeline = Channel(ours)
        self._thread = threading.Thread(
            target=_serve, args=(server, Channel(theirs)), name="enginewire-coordinator", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def shutdown(self) -> None:
        self._lifeline.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_TIMEOUT_S)


def _serve(server: CoordinatorServer, lifeline: Channel) -> None:
    try:
        server.run(lifeline)
    except Exception:
        logger.exception("the coordinator ended; engines that run in lock-step will not wake any more")
    finally:
        lifeline.close()


class CoordinatorProcess(DPCoordinator):
    """A coordinator in a process of its own, which ends with this one, however that ends.

    If it ends before, it is started again on the same addresses: engines and frontends connect again by themselves,
    and it learns the wave from them.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        self.addresses = spec.addresses
        self._spec = spec
        self._is_closed = False
        # Guards the process and its lifeline: no restart in the middle of a shutdown.
        self._lock = threading.Lock()
        self._start()
        _processes.add(self)
        self._thread = threading.Thread(target=self._watch, name="enginewire-coordinator", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def pid(self) -> int:
        """The process it runs in at present."""
        return self._popen.pid

    def shutdown(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lifeline.hang_up()
        try:
            self._popen.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the coordinator did not leave within %.0f s and is killed", LEAVE_TIMEOUT_S)
            self._popen.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_TIMEOUT_S)

    def leave_lifeline(self) -> None:
        """Close this process's copy of the lifeline, after a fork; the parent's stays as it is."""
        self._lifeline.leave()

    def _watch(self) -> None:
        num_short_lives = 0
        while True:
            started = time.monotonic()
            status = self._popen.wait()
            num_short_lives = num_short_lives + 1 if time.monotonic() - started < MIN_LIFE_S else 0
            with self._lock:
                self._lifeline.close()
                if self._is_closed:
                    return
                logger.error("the coordinator %s", describe_exit(status))
                if num_short_lives == MAX_SHORT_LIVES:
                    logger.error("it is not started again; engines that run in lock-step will not wake any more")
                    return
                try:
                    self._start()
                except EngineStartupError:
                    logger.exception("it cannot be started again; engines that run in lock-step will not wake any more")
                    return

    def _start(self) -> None:
        """Start the process and wait until it has bound. What it reports is where the next one binds, too."""
        ours, theirs = socket.socketpair()
        ours.settimeout(START_TIMEOUT_S)
        self._lifeline = Channel(ours)
        with theirs:
            fd = theirs.fileno()
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "enginewire.coordinator.main", "--lifeline-fd", str(fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(fd,),
                    start_new_session=True,
                    env=child_environment(),
                )
            except OSError as exc:
                self._lifeline.close()
                raise EngineStartupError(f"cannot start the coordinator: {exc.strerror}", stage="launch") from exc
        try:
            addresses = self._told_addresses()
        except BaseException:
            self._lifeline.close()
            self._popen.kill()
            self._popen.wait()
            raise
        self.addresses = addresses
        self._spec = msgspec.structs.replace(self._spec, addresses=addresses)

    def _told_addresses(self) -> CoordinatorAddresses:
        """Tell the process what to do, and return where it has bound."""
        why = "its process ended at once; see its log"
        try:
            self._lifeline.send(msgspec.msgpack.encode(self._spec))
            if (reply := self._lifeline.receive()) is not None:
                started = msgspec.msgpack.decode(reply, type=CoordinatorStarted)
                if started.addresses is not None:
                    return started.addresses
                why = started.error
        except OSError as exc:  # a time-out is one
            why = f"its process: {exc}"
        raise EngineStartupError(f"the coordinator could not start: {why}", stage="launch")


_processes: Final[weakref.WeakSet[CoordinatorProcess]] = weakref.WeakSet()


def _leave_lifelines_to_parent() -> None:
    """Close our copies in a forked child: a coordinator would not notice its parent's end while one is open."""
    for process in _processes:
        process.leave_lifeline()


os.register_at_fork(after_in_child=_leave_lifelines_to_parent)
