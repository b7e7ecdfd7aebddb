"""One of several server processes over the same engines: ``python -m enginewire.server.process``.

The launcher has started it, hands it the sockets on which clients and engines come, and tells it over the lifeline
what it knows of the engines. It ends when the launcher does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from typing import NoReturn

import msgspec
import uvloop

from enginewire.client.base import EngineCoreClient
from enginewire.engine.channel import Channel
from enginewire.errors import AddressError, ConfigError, EngineClientError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server.access_log import set_up_logging
from enginewire.server.app import App
from enginewire.server.engine_news import EngineNews
from enginewire.server.engine_state import Health
from enginewire.server.lifeline import (
    AskEngine,
    Begin,
    Collect,
    Collected,
    EngineAnswers,
    EngineDied,
    ExpectDeath,
    Failed,
    FromLauncher,
    Line,
    Report,
    Reported,
    Serving,
    from_launcher,
)
from enginewire.server.run import serve_on, stop_signals
from enginewire.server.state import ServerState

logger = logging.getLogger(__name__)

ORPHANED = 1
"""Exit status when the launcher is gone. Nobody reads it."""

RETURN_S = 5.0
"""How long a process that takes another's place waits for the engines to connect with it before it serves."""

ANSWER_S = 1.0
"""How long an engine that the launcher asks about may take to answer."""


class Process:
    """The process's end of the lifeline, and what it does when the launcher says something.

    Args:
        begin: the launcher's first word.
        channel: the lifeline.
    """

    def __init__(self, begin: Begin, channel: Channel) -> None:
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._news = EngineNews(begin.local_ranks, self._expect_death)
        self._numbers = itertools.count()
        self._wanted: dict[int, asyncio.Future[ServerState]] = {}
        self._app: App | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for death in begin.deaths:
            self._news.died(death)
        self._line = Line(channel, from_launcher, self._hear, _leave)

    async def run(self, listener: socket.socket) -> int:
        """Serve until told to stop; return the exit status."""
        begin = self._begin
        try:
            with stop_signals() as stopped:
                return await serve_on(
                    listener,
                    self._make_llm,
                    begin.settings,
                    stopped,
                    self._on_ready,
                    self,
                    is_successor=bool(begin.ready),
                )
        except EngineClientError as exc:
            self._line.send(Failed(str(exc), isinstance(exc, ConfigError) and not isinstance(exc, AddressError)))
            return 1
        finally:
            for task in self._tasks:
                task.cancel()
            self._line.close()

    async def _make_llm(self) -> AsyncLLM:
        begin = self._begin
        addresses = {
            "inputs": [f"fd://{fd}" for fd in begin.inputs],
            "outputs": [f"fd://{fd}" for fd in begin.outputs],
            "engine_manager": self._news,
            "stats_update_address": begin.stats_address,
            "ready_responses": begin.ready,
        }

        def make() -> AsyncLLM:
            client = EngineCoreClient.make_async_mp_client(
                begin.config,
                client_addresses=addresses,
                client_count=begin.count,
                client_index=begin.index,
            )
            return AsyncLLM.from_client(client, tokenizer=begin.settings.tokenizer)

        llm = await asyncio.to_thread(make)
        llm.listen()
        deadline = time.monotonic() + RETURN_S
        while any(status.state == Health.LOST for status in llm.engine_statuses()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        return llm

    def _on_ready(self, app: App) -> None:
        self._app = app
        ready = {
            status.index: msgspec.msgpack.encode(status.ready)
            for status in app.context.llm.engine_statuses()
            if status.ready is not None
        }
        self._line.send(Serving(ready))

    async def collect(self, own: ServerState) -> ServerState:
        """Return the sum of this process's state and the others', which the launcher makes."""
        number = next(self._numbers)
        waiter: asyncio.Future[ServerState] = asyncio.get_running_loop().create_future()
        self._wanted[number] = waiter
        self._line.send(Collect(number, own))
        try:
            return await waiter
        finally:
            self._wanted.pop(number, None)

    # The launcher's words.

    def _hear(self, message: FromLauncher) -> None:
        """Take a message, in the lifeline's thread."""
        if isinstance(message, EngineDied):  # at once: a client may wait for it on the loop
            self._news.died(message.death)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_message, message)

    def _on_message(self, message: AskEngine | Report | Collected | Begin) -> None:
        match message:
            case AskEngine():
                task = asyncio.create_task(self._ask_engine(message.engine_index), name="enginewire-ask-engine")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Report():
                if self._app is not None:
                    self._line.send(Reported(message.number, self._app.context.own_state()))
            case Collected():
                waiter = self._wanted.pop(message.number, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(message.state)
            case Begin():
                logger.error("the launcher began twice")

    async def _ask_engine(self, index: int) -> None:
        answers = False
        with contextlib.suppress(EngineClientError, TimeoutError):
            if self._app is not None:
                async with asyncio.timeout(ANSWER_S):
                    await self._app.context.llm.is_engine_paused(index)
                answers = True
        self._line.send(EngineAnswers(index, answers))

    def _expect_death(self, engine_index: int, sign: str) -> None:
        self._line.send(ExpectDeath(engine_index, sign))


def _leave() -> NoReturn:
    """End at once: the launcher is gone, and so are the engines that it started."""
    os._exit(ORPHANED)


def main() -> int:
    """Serve for the launcher that started this process."""
    parser = argparse.ArgumentParser(description="Started by `enginewire serve --api-server-count N`.")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    args = parser.parse_args()
    channel = Channel.adopt(args.lifeline_fd)
    payload = channel.receive()
    if payload is None:
        return ORPHANED
    begin = from_launcher.decode(payload)
    assert isinstance(begin, Begin)
    set_up_logging(begin.log_level, {"server": begin.index})
    with socket.socket(fileno=args.listen_fd) as listener:

        async def run() -> int:
            return await Process(begin, channel).run(listener)

        return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
