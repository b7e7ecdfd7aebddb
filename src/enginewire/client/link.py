"""``Link``: the sockets on which an engine is heard and spoken to, and what becomes of their connections."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginewire.transport.peers import PeerWatch
from enginewire.transport.sockets import bind_pull, bind_router
from enginewire.wire.codec import OutputsDecoder

if TYPE_CHECKING:
    import zmq

    from enginewire.client.engines import Engine
    from enginewire.config import EngineConfig

LAST_OUTPUTS_S: Final = 0.5
"""How long the outputs of an engine that hears nothing any more may be on their way."""

RECONNECT_S: Final = 0.1
"""How long it takes at least until an engine whose connection was closed has another one: ZeroMQ's default."""

HEAR_OUT_POLL_S: Final = 0.002
"""How often they are looked for when the client is closed."""


class Link:
    """The two sockets on which an engine is heard and spoken to: a ROUTER for what it gets, a PULL for what it sends.

    Each incarnation has its own, so that a loss is its own and no engine's peer can touch another's. Only where
    somebody else chose the addresses may several engines share one.

    The input socket is used under the client's send lock; the output socket belongs to the receiver.

    Args:
        addresses: of input and output.

    Raises:
        OSError: an address cannot be bound; nothing is left.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, addresses: tuple[str, str]
    ) -> None:
        heartbeat = (config.heartbeat_interval_s, config.heartbeat_timeout_s)
        limit = config.max_frame_bytes
        self.input_socket, self.input_address = bind_router(context, addresses[0], limit, heartbeat)
        try:
            self.output_socket, self.output_address = bind_pull(context, addresses[1], limit, heartbeat)
        except OSError:
            self.input_socket.close(linger=0)
            raise
        self.engines: list[Engine] = []
        """Who uses it."""
        self.sole: Engine | None = None
        """The one who uses it, if there is one only, as nearly always."""
        self.heads: frozenset[bytes] = frozenset()
        """How messages begin that are for the consumer for certain."""
        self.answer_heads: frozenset[bytes] = frozenset()
        """How messages begin that have no outputs, as utility answers have none."""
        self.decoders: dict[int, OutputsDecoder] = {}
        """For what each sends. Here, not with the engine: its next incarnation may speak another layout."""
        self._watches = [PeerWatch(self.input_socket), PeerWatch(self.output_socket)]
        self._input_lost_at: float | None = None
        self.events = [watch.monitor.readable for watch in self._watches]
        """Readable when a connection has come or gone."""
        self.sure_until = 0.0
        """Monotonic seconds. What comes later may be of a new connection, with a gap before it: to be found out first,
        by :meth:`Lookout.has_gap`, however long this process was not running."""

    def starts_anew(self) -> None:
        """Note that another process is its engine now: what becomes of the former's connections tells nothing."""
        if self.sole is not None:  # otherwise it is not known which are that engine's
            for watch in self._watches:
                watch.starts_anew()

    def settle(self) -> None:
        """Take the connections there are now for its engines'."""
        for watch in self._watches:
            watch.settle()

    def has_lost_peer(self, now: float) -> bool:
        """Whether a connection of its engines has been closed since.

        One that leaves in order takes nothing more before it has sent all: its last outputs are waited for.
        """
        is_input_lost, is_output_lost = [watch.has_lost_peer() for watch in self._watches]
        if not is_input_lost:
            self._input_lost_at = None
            return is_output_lost
        if self._input_lost_at is None:
            self._input_lost_at = now
        return is_output_lost or now - self._input_lost_at > LAST_OUTPUTS_S

    def has_ended(self) -> bool:
        """Whether the connection on which outputs come is gone: what came before can be received, and no more comes."""
        _, output_watch = self._watches
        return output_watch.has_lost_peer()

    def has_new_output(self) -> bool:
        """Whether outputs come on another connection than they did: what was sent in between is lost."""
        _, output_watch = self._watches
        return output_watch.has_new_peer()

    @property
    def num_closed(self) -> int:
        """How many connections have ended so far."""
        return sum(watch.num_closed for watch in self._watches)

    def close(self) -> None:
        """Close both sockets. Called by the receiver, which holds the send lock."""
        for watch in self._watches:
            watch.monitor.close()
        for socket, address in (
            (self.input_socket, self.input_address),
            (self.output_socket, self.output_address),
        ):
            socket.close(linger=0)
            if address.startswith("ipc://"):  # ZeroMQ leaves the file, and engines may be restarted for years
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
