"""A proxy that cuts the connections through it: what two peers see when something between them does that."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType

from enginewire.testing import free_tcp_port


class TcpProxy:
    """Passes bytes on between whoever connects to ``address`` and ``target``. A context manager.

    Args:
        target: where to, ``tcp://127.0.0.1:PORT``.

    Attributes:
        passed_on: what was passed on since the last cut, in both directions.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        number = free_tcp_port()
        self.address = f"tcp://127.0.0.1:{number}"
        self._listener = socket.create_server(("127.0.0.1", number))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, socket.socket] = {}
        self.passed_on = b""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tcp-proxy")

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_closing = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    @property
    def is_connected(self) -> bool:
        """Whether anybody is connected through it."""
        return bool(self._peers)

    def cut(self) -> None:
        """Close every connection; new ones are passed on as before."""
        with self._lock:
            for one in list(self._peers):
                self._drop(one)
            self.passed_on = b""

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(0.02):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                        self._pass_on(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:  # nobody listens there any longer, as whoever tries to connect is to see
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, one: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(65536)
            self._peers[one].sendall(data)
            self.passed_on += data
        if not data:
            self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        if (other := self._peers.pop(one, None)) is None:
            return  # dropped with its other end
        del self._peers[other]
        for end in (one, other):
            self._selector.unregister(end)
            end.close()
