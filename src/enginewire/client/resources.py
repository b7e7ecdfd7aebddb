"""``BackgroundResources``: everything a client with an engine elsewhere has to give back (C-21 to C-23)."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from enginewire.errors import ClientClosedError
from enginewire.transport.endpoints import Endpoints
from enginewire.transport.sockets import make_context

if TYPE_CHECKING:
    from enginewire.coordinator import DPCoordinator
    from enginewire.host.launcher import EngineManager

logger = logging.getLogger(__name__)


class BackgroundResources:
    """Owns context, sockets, engine processes and files of one client, and holds no reference to it.

    Registered with ``weakref.finalize`` before anything is made, so a constructor that fails anywhere, a client that
    is dropped, and the end of the interpreter all end here.

    Args:
        drain_s, terminate_s: how long engines may take to leave, see ``EngineConfig``.

    Attributes:
        stop_receiver: how the face takes in what engines sent last, and stops receiving; set once it receives.
            ``False``: it cannot stop now and will call :meth:`release_sockets` itself.
        on_closed: how the face fails what waits after that, told why.
        closing: nothing new may start.
    """

    def __init__(self, drain_s: float, terminate_s: float) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = make_context()
        self.handshake_socket: zmq.Socket[bytes] | None = None
        # Guards input sockets, as a ROUTER may be used by one thread at a time, and which receiver there is.
        self.send_lock = threading.RLock()
        self.endpoints: Endpoints | None = None
        self.engine_manager: EngineManager | None = None
        self.coordinator: DPCoordinator | None = None
        self.stop_receiver: Callable[[], bool] | None = None
        self.on_closed: Callable[[Callable[[], BaseException]], None] | None = None
        self.closing = False
        self.closed = False
        self._stop_after_s = drain_s + terminate_s
        self._pid = os.getpid()
        self._close_lock = threading.RLock()

    def __call__(self) -> None:
        """Finalize: the client was dropped without ``shutdown()``, failed to start, or the interpreter ends."""
        if self.closed or os.getpid() != self._pid:  # a forked child owns none of this
            return
        try:
            warnings.warn("an enginewire client was not shut down; call shutdown() or use `with`", ResourceWarning, 2)
        finally:  # also where warnings are errors
            # The garbage collector may have chosen one of our own threads, which cannot wait for itself.
            if threading.current_thread().name.startswith("enginewire-"):
                threading.Thread(target=self.close, name="finalize-client").start()
            else:
                self.close()

    def close(self, timeout: float | None = None) -> None:
        """Stop the engines, fail what waits, release everything. Idempotent; concurrent callers wait for the first.

        Args:
            timeout: seconds until engines are killed; default: what the configuration says.
        """
        if os.getpid() != self._pid:
            return
        with self._close_lock:
            if self.closed:
                return
            self.closing = True
            # Receiving goes on meanwhile: engines that drain still send outputs.
            if self.engine_manager is not None:
                self.engine_manager.shutdown(self._stop_after_s if timeout is None else timeout)
            if self.coordinator is not None:
                self.coordinator.shutdown()
            self.closed = True
            with self.send_lock:  # a receiver that is just being made is either seen here or sees that we are closing
                stop_receiver = self.stop_receiver
            has_stopped = stop_receiver is None or stop_receiver()
            if self.on_closed is not None:
                self.on_closed(closed_error)
            if has_stopped:
                self.release_sockets()
            else:
                logger.warning("the receiver is busy and does not give its sockets back yet; it will close them itself")
            if self.endpoints is not None:
                self.endpoints.remove()

    def release_sockets(self) -> None:
        """Close the sockets that are still open and end the context, once no other thread or loop uses one."""
        with self.send_lock:
            self.context.destroy(linger=0)


def closed_error() -> ClientClosedError:
    """Make the error that whoever uses a closed client gets."""
    return ClientClosedError("this client was shut down")
