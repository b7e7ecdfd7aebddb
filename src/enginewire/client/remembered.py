"""What a frontend remembers of engines that are started elsewhere, so that the next one finds them (restart, crash).

Such an engine connects again to the addresses that it was told once, and says nothing. So whoever binds the same
handshake address next, on a port that was chosen and not found, binds the others again, too, and asks who is there.
Source: "Two ways back" in the notes on remote engines.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from enginewire import envs
from enginewire.client.engines import Engine
from enginewire.errors import DecodeError
from enginewire.wire.profile import decode_ready

logger = logging.getLogger(__name__)

FORMAT: Final = 1


class RememberedEngine(msgspec.Struct):
    """Where an engine connects to, and what it said of itself (the bytes of its ready response)."""

    input: str
    output: str
    ready: bytes


class _File(msgspec.Struct):
    format: int
    engines: dict[int, RememberedEngine]


class Memory:
    """A small file, private to the user, named after a handshake address.

    Nothing depends on it: if it cannot be read or written, engines have to be restarted with their frontend.

    Args:
        handshake: the address, resolved.
    """

    def __init__(self, handshake: str) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "_", handshake.removeprefix("tcp://")).strip("_")
        folder = envs.state_dir()
        self.path: Path | None = None if folder is None else folder / "engines" / f"{name}.json"

    def recall(self) -> dict[int, RememberedEngine]:
        """Return what is remembered, by rank."""
        if self.path is None:
            return {}
        try:
            file = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as exc:
            logger.warning("engines of an earlier frontend are not looked for: %s: %s", self.path, exc)
            return {}
        return {
            index: engine for index, engine in file.engines.items() if file.format == FORMAT and _makes_sense(engine)
        }

    def remember(self, engines: Iterable[Engine]) -> None:
        """Write down what there is to know of engines that are started elsewhere."""
        if self.path is None:
            return
        known = {
            engine.index: RememberedEngine(
                engine.link.input_address,
                engine.link.output_address,
                b"" if engine.ready is None else msgspec.msgpack.encode(engine.ready),
            )
            for engine in engines
            if not engine.is_ours and engine.has_been_ready
        }
        draft = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(_File(FORMAT, known)))
            draft.replace(self.path)
        except OSError as exc:
            logger.warning("engines will not survive a restart of this frontend: %s: %s", self.path, exc.strerror)


def _makes_sense(engine: RememberedEngine) -> bool:
    try:
        return not engine.ready or bool(decode_ready([engine.ready]))
    except DecodeError:
        return False
