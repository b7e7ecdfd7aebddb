"""``Tally``: what all server processes together have counted, whichever of them is asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from enginewire.server.lifeline import Collect, Collected, Report, Reported
from enginewire.server.server_process import ServerProcess
from enginewire.server.state import ServerState

REPORT_S: Final = 1.0
"""How long a process may take to report. One that does not counts with what it reported last."""


class Tally:
    """Collects the processes' states and adds them up.

    Everything that anybody was ever shown has come by here, so that counters never go back: not when a process is slow,
    and not when one ends.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._reports: dict[int, asyncio.Future[None]] = {}
        self._ended: ServerState | None = None

    async def collect(self, asker: ServerProcess, message: Collect, processes: Iterable[ServerProcess]) -> None:
        """Ask the others for their states and send ``asker`` the sum."""
        asker.latest = message.own
        waiters: list[asyncio.Future[None]] = []
        for process in processes:
            if process is not asker and process.is_serving:
                number = next(self._numbers)
                waiter = self._reports[number] = asyncio.get_running_loop().create_future()
                process.send(Report(number))
                waiters.append(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await asyncio.gather(*waiters)
        total = _copy(message.own if self._ended is None else self._ended)
        if self._ended is not None:
            total.add(message.own)
        for process in processes:
            if process is not asker and process.latest is not None:
                total.add(process.latest)
        asker.send(Collected(message.number, total))

    def reported(self, process: ServerProcess, message: Reported) -> None:
        """Take note of what a process has counted."""
        process.latest = message.own
        waiter = self._reports.pop(message.number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def ended(self, process: ServerProcess) -> None:
        """Keep what a process has counted that is gone."""
        state, process.latest = process.latest, None
        if state is None:
            return
        state.retire()
        if self._ended is None:
            self._ended = state
        else:
            self._ended.add(state)


def _copy(state: ServerState) -> ServerState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ServerState)
