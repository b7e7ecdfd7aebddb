"""The server's process: listens at once, starts the engine, serves, and leaves in good order.

Signals: the first SIGTERM or SIGINT refuses new work and lets running requests finish; a second one leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, NoReturn

import uvicorn

from enginewire.config import EngineConfig
from enginewire.errors import AddressError, EngineDeadError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server.app import App, build_app
from enginewire.server.connection import HttpConnection
from enginewire.server.context import Siblings
from enginewire.server.errors import UnavailableError, http_error
from enginewire.server.http import ASGIApp, Receive, ResponseSender, Scope, Send, json_response
from enginewire.server.settings import ServerSettings
from enginewire.server.status import Status

logger = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
"""How long responses that are over, or were just ended, may take to reach their clients."""

KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays open: longer than load balancers keep theirs (60 s), so that they close first."""

BACKLOG: Final = 2048

GC_THRESHOLD: Final = 20_000
"""Objects between two collections. With Python's 700 what waits for a token counts as old when there are hundreds
of streams, and is walked again and again: at 4,096 a third to a half of all CPU time. See decision 25."""

TICK_S: Final = 1.0
"""How long a response's ``Date`` may lag behind."""

SIGNALLED: Final = 128
"""Plus the signal's number is the exit status after a signal that did not wait, as shells report it."""


LLMMaker = Callable[[], Awaitable[AsyncLLM]]


async def serve(config: EngineConfig, settings: ServerSettings, on_ready: Callable[[str], None]) -> int:
    """Run the server until a signal or an engine's death ends it; return the exit status.

    Args:
        config: the engine's.
        settings: the server's.
        on_ready: is called with the URL once requests are served.

    Raises:
        AddressError: the address cannot be had.
        EngineClientError: the engine cannot be started.
    """
    with _listen(settings) as listener, stop_signals() as stopped:
        url = _url(settings, listener)
        if settings.api_server_count > 1:
            from enginewire.server.launcher import launch

            return await launch(config, settings, listener, stopped, lambda: on_ready(url))

        async def make_llm() -> AsyncLLM:
            return await AsyncLLM.create(config=config, tokenizer=settings.tokenizer)

        return await serve_on(listener, make_llm, settings, stopped, lambda app: on_ready(url))


async def serve_on(
    listener: socket.socket,
    make_llm: LLMMaker,
    settings: ServerSettings,
    stopped: asyncio.Event,
    on_ready: Callable[[App], None],
    siblings: Siblings | None = None,
    *,
    is_successor: bool = False,
) -> int:
    """Serve on a socket until told to stop; return the exit status.

    Args:
        listener: may be shared with other processes.
        make_llm: makes the frontend, which is shut down at the end. Meanwhile requests are told that it starts.
        settings: the server's.
        stopped: is set when it is to stop.
        on_ready: is called once requests are served.
        siblings: the other processes.
        is_successor: leave all requests to the other processes until this one can serve them.

    Raises:
        EngineClientError: the engines cannot be started, or one is dead and the settings say to leave then.
    """
    gate = _Gate()
    async with contextlib.AsyncExitStack() as stack:
        if not is_successor:
            await stack.enter_async_context(_answering(gate, listener))
        starting = asyncio.create_task(_start(make_llm), name="enginewire-start")
        if not await first(starting, stopped.wait()):
            logger.info("told to stop while the engine starts; a second signal does not wait for it")
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        llm = starting.result()
        try:
            app = gate.app = build_app(llm, settings, siblings)
            async with app.running():
                keep_collections_rare()
                if is_successor:
                    await stack.enter_async_context(_answering(gate, listener))
                on_ready(app)
                return await _until_stopped(app, settings, stopped)
        finally:
            await asyncio.to_thread(llm.shutdown)


def keep_collections_rare() -> None:
    """Set the garbage collector for a process that has started and will hold much that lives for a moment."""
    gc.collect()
    gc.freeze()  # what is there now stays: a collection need not walk it again
    gc.set_threshold(GC_THRESHOLD)


async def _start(make_llm: LLMMaker) -> AsyncLLM:
    llm = await make_llm()
    try:
        await asyncio.to_thread(lambda: llm.tokenizer)  # the first request should not wait for it
    except BaseException:
        llm.shutdown(timeout=0)
        raise
    return llm


async def _until_stopped(app: App, settings: ServerSettings, stopped: asyncio.Event) -> int:
    context = app.context
    if settings.exit_on_engine_death:
        died = asyncio.create_task(context.monitor.wait_died(), name="enginewire-death-watch")
        if await first(died, stopped.wait()):
            # What ran there hears of it; other engines finish what they have.
            reason = UnavailableError("an engine is dead and the server leaves", "engine_dead")
            await _drain(app, FLUSH_S if context.monitor.are_all_dead() else settings.shutdown_timeout_s, reason)
            raise EngineDeadError(died.result())
        died.cancel()
    else:
        await stopped.wait()
    await _drain(app, settings.shutdown_timeout_s, UnavailableError("the server is shutting down", "draining"))
    return 0


async def _drain(app: App, timeout_s: float, reason: UnavailableError) -> None:
    """Let running requests finish; end those that do not in time. New ones are refused for ``reason``."""
    context = app.context
    logger.info("draining num_in_flight=%d timeout_s=%g", context.admission.num_in_flight, timeout_s)
    context.monitor.draining()
    context.admission.close(reason)
    if not await within(timeout_s, context.admission.wait_idle()):
        logger.warning("aborting what is left num_in_flight=%d", context.admission.num_in_flight)
        await context.generation.abort_all()
        await within(FLUSH_S, context.admission.wait_idle())


async def first(task: asyncio.Task[Any], other: Coroutine[Any, Any, object]) -> bool:
    """Wait for one of the two; return whether it was ``task``. ``other`` is cancelled."""
    alternative = asyncio.create_task(other)
    try:
        await asyncio.wait({task, alternative}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        alternative.cancel()
    return task.done()


async def within(timeout_s: float, work: Awaitable[object]) -> bool:
    """Wait for ``work``; return whether it came to its end in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        return False
    return True


@contextlib.asynccontextmanager
async def _answering(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Have requests that come on a socket answered."""
    server = _Uvicorn(_uvicorn_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="enginewire-http")
    try:
        yield
    finally:
        server.stop()
        await serving


class _Gate:
    """What answers: until the engine has started, that it has not."""

    def __init__(self) -> None:
        self.app: ASGIApp | App = _starting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    sender = ResponseSender(send, {})
    if scope["path"] == "/health":
        await json_response(Status("starting")).send(sender)
        return
    error = http_error(UnavailableError("the engine is starting", "starting"))
    await json_response(error.body, error.status, error.headers).send(sender)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, as it is decided here what a signal means; and without looking ten times a
    second whether it is to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Have it close its connections and return from ``serve``."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Keep the date in headers up to date until told to stop."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",  # we are in it already
        http=HttpConnection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


@contextlib.contextmanager
def _listen(settings: ServerSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as exc:
        why, *_ = str(exc.strerror or exc).partition(" (while ")  # Python repeats the address there
        raise AddressError(exc.errno, f"cannot listen on {settings.host} port {settings.port}: {why}") from exc
    with listener:
        yield listener


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Set the event at the first SIGTERM or SIGINT; end the process at the second."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopped.is_set():
            _leave_at_once(number)
        stopped.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stopped
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _leave_at_once(number: int) -> NoReturn:
    """End this process. An engine process notices that and ends itself (C-62)."""
    os._exit(SIGNALLED + number)
