"""What the launcher and its server processes say to each other, each over a socket pair: the *lifeline*.

Its end of file tells either side that the other is gone, however it went.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from enginewire.config import EngineConfig
from enginewire.engine.channel import Channel
from enginewire.errors import EngineDeath
from enginewire.server.settings import ServerSettings
from enginewire.server.state import ServerState

T = TypeVar("T")


class Begin(Struct, tag=True, kw_only=True):
    """The launcher's first word: what to serve.

    Attributes:
        index: which of the server's processes this is; its ``client_index`` on the wire.
        count: how many there are.
        log_level: of the root logger.
        inputs, outputs: descriptors of the sockets that listen for each engine, by rank.
        stats_address: where the coordinator publishes; ``None``: there is none.
        local_ranks: engines whose processes the launcher watches.
        deaths: of engines so far.
        ready: what engines said of themselves, for a process that takes the place of another.
    """

    config: EngineConfig
    settings: ServerSettings
    index: int
    count: int
    log_level: int
    inputs: list[int]
    outputs: list[int]
    stats_address: str | None
    local_ranks: list[int]
    deaths: list[EngineDeath] = []
    ready: dict[int, bytes] = {}


class EngineDied(Struct, tag=True):
    """An engine's process has ended."""

    death: EngineDeath


class AskEngine(Struct, tag=True):
    """Find out whether an engine answers."""

    engine_index: int


class Report(Struct, tag=True):
    """Say what you have counted; somebody wants the sum."""

    number: int


class Collected(Struct, tag=True):
    """What all processes have counted."""

    number: int
    state: ServerState


class Serving(Struct, tag=True):
    """The process serves requests. ``ready`` is what the engines said of themselves, by rank."""

    ready: dict[int, bytes]


class Failed(Struct, tag=True):
    """The process leaves, and the server cannot go on: in the words of a configuration error or another."""

    message: str
    is_config_error: bool


class ExpectDeath(Struct, tag=True):
    """An engine seems to be dying; its process's end should be told soon."""

    engine_index: int
    sign: str


class EngineAnswers(Struct, tag=True):
    """Whether an engine answered."""

    engine_index: int
    answers: bool


class Collect(Struct, tag=True):
    """Somebody wants the sum over all processes; here is our part."""

    number: int
    own: ServerState


class Reported(Struct, tag=True):
    """What this process has counted."""

    number: int
    own: ServerState


FromLauncher: TypeAlias = Begin | EngineDied | AskEngine | Report | Collected
FromProcess: TypeAlias = Serving | Failed | ExpectDeath | EngineAnswers | Collect | Reported

from_launcher: msgspec.msgpack.Decoder[FromLauncher] = msgspec.msgpack.Decoder(FromLauncher)
from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)

_encode = msgspec.msgpack.Encoder().encode


class Line(Generic[T]):
    """One end of a lifeline. An event loop is held up neither by reading nor by writing, nor does it hold them up.

    Args:
        channel: nobody else reads or writes it from now on.
        decoder: of what the other side says.
        on_message: called in a thread of its own.
        on_end: called there when the other side is gone; not after :meth:`close`.
    """

    def __init__(
        self,
        channel: Channel,
        decoder: msgspec.msgpack.Decoder[T],
        on_message: Callable[[T], None],
        on_end: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._decoder = decoder
        self._on_message = on_message
        self._on_end = on_end
        self._is_closed = False
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="enginewire-lifeline-out")
        self._reader = threading.Thread(target=self._read, name="enginewire-lifeline", daemon=True)
        self._reader.start()

    def send(self, message: Struct) -> None:
        """Have something sent, in its turn. Nothing happens if the other side is gone."""
        payload = _encode(message)
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._sender.submit(self._send, payload)

    def close(self) -> None:
        """Send what is on its way, then hang up."""
        self._sender.shutdown(wait=True)
        self._is_closed = True
        self._channel.hang_up()
        self._reader.join()
        self._channel.close()

    def _send(self, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # gone: the reader notices
            self._channel.send(payload)

    def _read(self) -> None:
        while (payload := self._channel.receive()) is not None:
            self._on_message(self._decoder.decode(payload))
        if not self._is_closed:
            self._on_end()
