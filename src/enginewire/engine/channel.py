"""``Channel``: whole messages over a stream socket between a process and its own child.

A message is its length (4 bytes, big endian) and as many bytes. One thread sends and one receives at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Final

LENGTH_BYTES: Final = 4
MAX_MESSAGE_BYTES: Final = (1 << 8 * LENGTH_BYTES) - 1


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @classmethod
    def adopt(cls, fd: int) -> Channel:
        """Take over a descriptor that was inherited, and inherit it no further."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, to poll it."""
        return self._socket.fileno()

    def send(self, message: bytes | bytearray) -> None:
        """Send a message.

        Raises:
            OSError: the peer is gone.
            ValueError: it is larger than a length can say (4 GiB).
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long, at most {MAX_MESSAGE_BYTES}")
        # One call for both: a separate small write would wake the reader twice.
        self._socket.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)

    def receive(self) -> bytes | None:
        """Wait for the next message; ``None`` once the peer is gone, also in the middle of a message."""
        try:
            header = self._read(LENGTH_BYTES)
            return None if header is None else self._read(int.from_bytes(header, "big"))
        except ConnectionError:
            return None

    def _read(self, count: int) -> bytes | None:
        """Read so many bytes, and none of the next message: :meth:`is_readable` would not know of it."""
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data), socket.MSG_WAITALL)
            if not more:
                return None
            data = data + more if data else more
        return data

    def is_readable(self) -> bool:
        """Whether :meth:`receive` would not wait: something has come, or the peer is gone."""
        return bool(self._poll.poll(0))

    def hang_up(self) -> None:
        """Expect nothing more: a receiver, in another thread too, gets what has arrived and then ``None``."""
        with contextlib.suppress(OSError):  # closed before, or the peer is gone: either way nobody waits
            self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close this process's copy of what it shares with the process it was forked from, which goes on."""
        self._socket.close()

    def close(self) -> None:
        """Close; a receiver in another thread is woken. Idempotent."""
        self.hang_up()
        self._socket.close()
