"""``RankGroup``: the ranks of a lock-step model agree, over plain tcp.

Rank 0 listens, the others connect; an agreement is one byte from each and one byte back. It is what the engines use
(:mod:`enginewire.engine.lock_step`), and executors without collectives of their own may. The ports come with INIT.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from enginewire.errors import EngineStartupError

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
"""How often waiting is interrupted to look whether it is still worth it, and to let a signal's handler run."""

GREETING: Final = struct.Struct(">4sHH")
MAGIC: Final = b"EWrg"
"""A stray connection is told from a rank by it; whoever sends it on purpose is trusted, as all of tcp is here."""

HAS_WORK: Final = 1
PAUSES: Final = 2


class RankLost(ConnectionError):
    """Another rank's process is gone: lock-step ranks live and die together."""


class NotAgreed(Exception):
    """Waiting for the others was given up."""


class Agreement(NamedTuple):
    """What the ranks are at together."""

    any_has_work: bool
    all_pause: bool


class ParallelConfig(NamedTuple):
    """What INIT's ``parallel_config`` says (protocol B.2).

    Attributes:
        size: number of ranks.
        host, port: where rank 0 listens for the engines' agreement.
    """

    size: int
    host: str
    port: int

    @classmethod
    def from_init(cls, values: Mapping[str, Any]) -> ParallelConfig | None:
        """Read it; ``None``: there is one rank, or nothing that has to be agreed on.

        The executor may use ``data_parallel_master_port``, so the engine takes the last one of the list beside it.

        Raises:
            EngineStartupError: it is incomplete or malformed.
        """
        size = values.get("data_parallel_size", 1)
        if size == 1:
            return None
        host = values.get("data_parallel_master_ip")
        ports = values.get("_data_parallel_master_port_list") or [values.get("data_parallel_master_port")]
        if type(size) is int and size > 1 and isinstance(host, str) and isinstance(ports, list):
            port = ports[-1]
            if type(port) is int and 0 < port < 1 << 16:
                return cls(size, host, port)
        raise EngineStartupError(
            "INIT's parallel_config must have a data_parallel_size of at least 1 (int), a data_parallel_master_ip "
            f"(str) and ports (_data_parallel_master_port_list: [int]); got {dict(values)!r:.300}",
            stage="hello",
        )


class RankGroup:
    """One rank's connection to the others. Used by one thread.

    Raises:
        EngineStartupError: the others are not there in time, or the address cannot be had.
    """

    def __init__(self, rank: int, size: int, host: str, port: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._peers: dict[int, socket.socket] = {}
        """Of rank 0: all others; of the others: rank 0."""
        self._watcher: threading.Thread | None = None
        self._end_watch, self._watch_ended = socket.socketpair()
        deadline = time.monotonic() + timeout_s
        try:
            if rank == 0:
                self._accept_all(host, port, deadline)
            else:
                self._peers[0] = self._connect(host, port, deadline)
        except OSError as exc:
            self.close()
            missing = sorted({*range(size)} - {rank, *self._peers}) if rank == 0 else [0]
            raise EngineStartupError(
                f"rank {rank} cannot meet rank {', '.join(map(str, missing))} at {host}:{port} within {timeout_s:g} s: "
                f"{exc}; are all {size} ranks started, and is the address reachable from each?",
                stage="ready",
                engine_index=rank,
            ) from exc
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(POLL_S)

    def agree(
        self, *, has_work: bool = False, pauses: bool = False, give_up: Callable[[], bool] = lambda: False
    ) -> Agreement:
        """Tell the others and wait for all of them.

        Args:
            has_work: this rank has something to do.
            pauses: it is ready to pause.
            give_up: looked at every 0.2 s.

        Raises:
            RankLost: another rank is gone.
            NotAgreed: given up. The group is of no use any more.
        """
        own = HAS_WORK * has_work | PAUSES * pauses
        if self.rank:
            self._send(0, own)
            (result,) = self._receive_all(give_up)
        else:
            said = [own, *self._receive_all(give_up)]
            result = HAS_WORK * any(each & HAS_WORK for each in said) | PAUSES * all(each & PAUSES for each in said)
            for rank in self._peers:
                self._send(rank, result)
        return Agreement(bool(result & HAS_WORK), bool(result & PAUSES))

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        """Have ``on_lost`` called, in a thread, when a peer is gone, so that a rank at rest does not outlive it."""
        if hasattr(select, "POLLRDHUP"):  # Linux; elsewhere it is noticed when the ranks meet next
            self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="rank-watch", daemon=True)
            self._watcher.start()

    def _watch(self, on_lost: Callable[[RankLost], None]) -> None:
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        poll.register(self._watch_ended, select.POLLIN)
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        (descriptor, _), *_ = poll.poll()  # the end of the watch comes first, if both have
        if descriptor in ranks:
            on_lost(RankLost(f"rank {ranks[descriptor]} is gone: it closed the connection"))

    def close(self) -> None:
        """Leave. The others notice. Idempotent."""
        self._end_watch.close()
        if self._watcher is not None:
            self._watcher.join()
        for open_socket in (self._watch_ended, *self._peers.values()):
            open_socket.close()

    def _send(self, rank: int, value: int) -> None:
        try:
            self._peers[rank].sendall(bytes([value]))
        except OSError as exc:
            raise RankLost(f"rank {rank} is gone: {exc}") from exc

    def _receive_all(self, give_up: Callable[[], bool]) -> list[int]:
        """Wait for a byte from every peer, in any order: one that is gone is noticed whoever else is late."""
        received: list[int] = []
        waiting = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting:
            if give_up():
                raise NotAgreed
            for descriptor, _ in poll.poll(POLL_S * 1000):
                rank = waiting.pop(descriptor)
                poll.unregister(descriptor)
                received.append(self._receive(rank))
        return received

    def _receive(self, rank: int) -> int:
        try:
            byte = self._peers[rank].recv(1)
        except OSError as exc:
            raise RankLost(f"rank {rank} is gone: {exc}") from exc
        if not byte:
            raise RankLost(f"rank {rank} is gone: it closed the connection")
        return byte[0]

    def _accept_all(self, host: str, port: int, deadline: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=self.size) as server:
            while len(self._peers) < self.size - 1:
                server.settimeout(max(0.001, min(POLL_S, deadline - time.monotonic())))
                try:
                    peer, address = server.accept()
                except TimeoutError:
                    if time.monotonic() >= deadline:
                        raise
                    continue
                self._take_in(peer, address)

    def _take_in(self, peer: socket.socket, address: Any) -> None:
        try:
            peer.settimeout(5 * POLL_S)
            magic, rank, size = GREETING.unpack(peer.recv(GREETING.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            magic, rank, size = b"", 0, 0
        if (magic, size) != (MAGIC, self.size) or rank in self._peers or not 0 < rank < self.size:
            logger.warning("a connection from %s is no missing rank of this group of %d; closed", address, self.size)
            peer.close()
        else:
            peer.sendall(GREETING.pack(MAGIC, 0, self.size))
            self._peers[rank] = peer

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            peer: socket.socket | None = None
            try:
                peer = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
                peer.sendall(GREETING.pack(MAGIC, self.rank, self.size))
                peer.settimeout(max(0.001, deadline - time.monotonic()))
                if peer.recv(GREETING.size, socket.MSG_WAITALL) == GREETING.pack(MAGIC, 0, self.size):
                    return peer
                raise ConnectionError("what listens there is not rank 0 of this group")
            except OSError:
                if peer is not None:
                    peer.close()
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_S)  # rank 0 is not there yet
