"""``SocketThread``: a thread in which ZeroMQ sockets live; other threads hand it functions that use them."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

T = TypeVar("T")
Handlers = Mapping[zmq.Socket[bytes], Callable[[list[bytes]], None]]


class SocketThread:
    """Reads sockets until it is closed.

    Args:
        name: of the thread.
        handlers: returns the sockets to read now, and what to do with a message; asked before every wait.
        on_error: told what a handler raised.
        at_end: closes the sockets, in the thread.
    """

    def __init__(
        self,
        name: str,
        handlers: Callable[[], Handlers],
        on_error: Callable[[Exception], None],
        at_end: Callable[[], None],
    ) -> None:
        self._name = name
        self._handlers = handlers
        self._on_error = on_error
        self._at_end = at_end
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()  # no function is handed over to a thread that has ended
        self._is_closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for that. Once."""
        with self._lock:
            self._is_closing = True
        self._wake_writer.send(b"x")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` where the sockets live, and return its result. Raises what it raises."""
        if self.is_current:
            return function()
        future: Future[T] = Future()
        with self._lock:
            if self._is_closing:
                raise self._closed()
            self._commands.append((function, future))
            self._wake_writer.send(b"x")
        return future.result()

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"{self._name} is closed")

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                self._poll_once()
        finally:
            self._at_end()
            while self._commands:  # from before it was closed
                self._commands.popleft()[1].set_exception(self._closed())

    def _poll_once(self) -> None:
        handlers = self._handlers()
        poller = zmq.Poller()
        for readable in (self._wake_reader, *handlers):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(4096)
        while self._commands:
            function, future = self._commands.popleft()
            try:
                future.set_result(function())
            except Exception as exc:  # noqa: BLE001 - the caller gets it
                future.set_exception(exc)
        for source, handle in handlers.items():
            if source not in ready or source.closed:
                continue
            try:
                handle(source.recv_multipart())
            except Exception as exc:  # noqa: BLE001 - the test gets it
                self._on_error(exc)
