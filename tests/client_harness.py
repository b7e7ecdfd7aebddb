"""What the client tests share: faces with one way to call them, and engines to put behind them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
import zmq

from enginewire import (
    EngineConfig,
    EngineCoreClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from enginewire.client.async_mp import AsyncMPClient
from enginewire.client.inproc import InprocClient
from enginewire.client.mp import MPClient
from enginewire.client.status import EngineStatus
from enginewire.client.sync_mp import SyncMPClient
from enginewire.testing import MockEngine, free_tcp_port, wait_until
from enginewire.wire.profile import V0_25, WireProfile

PATIENCE_S = 10.0
"""For what takes milliseconds, on a busy machine."""

MP_FACES = ("sync", "asyncio", "uvloop")
ALL_FACES = ("inproc", *MP_FACES)


def _warm_up() -> None:
    """Have libraries start what lives until the process ends, before any test is checked for leaks.

    uvloop keeps a pipe; pyzmq a thread and a context that hold buffers which are sent without a copy.
    """
    uvloop.new_event_loop().close()
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://warm-up")
        b.connect("inproc://warm-up")
        a.send(bytes(1 << 17), copy=False, track=True)
        b.recv()


_warm_up()


def request(request_id: str = "r", *, prompt: Sequence[int] = (1, 2, 3), **params: Any) -> EngineCoreRequest:
    """Make a request; ``params`` are sampling parameters."""
    sampling_params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
    return EngineCoreRequest(request_id, list(prompt), sampling_params=sampling_params)


def output(request_id: str = "r", tokens: Sequence[int] = (7,), *, finished: bool = False) -> EngineCoreOutput:
    """Make an output of a fake engine."""
    return EngineCoreOutput(request_id, list(tokens), finish_reason=FinishReason.LENGTH if finished else None)


class Loop:
    """An event loop on a thread of its own, in debug mode."""

    def __init__(self, kind: str) -> None:
        self.loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()
        self.loop.set_debug(True)
        self.loop.slow_callback_duration = 10.0
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"test-{kind}")
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a coroutine as a task on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = PATIENCE_S) -> Any:
        """Run a coroutine on the loop."""
        return self.start(coroutine).result(timeout_s)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop."""

        async def call() -> Any:
            return function()

        return self.run(call())

    def close(self) -> None:
        """Cancel what runs, stop and close the loop. Idempotent."""
        if self.loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        assert not self.errors, self.errors


class Face:
    """A client behind blocking calls, whichever face it has. For an asyncio client every call runs on its loop."""

    def __init__(self, kind: str, make: Callable[[], EngineCoreClient]) -> None:
        self.kind = kind
        self.loop = Loop(kind) if kind in ("asyncio", "uvloop") else None
        try:
            self.client: Any = self.loop.run(self._made(make), 60) if self.loop else make()
        except BaseException:
            self.close()
            raise

    async def _made(self, make: Callable[[], EngineCoreClient]) -> EngineCoreClient:
        return make()

    def __getattr__(self, name: str) -> Any:
        """Return an operation of the client, as a blocking function."""
        if self.loop is None or name in ("shutdown", "config", "ensure_alive"):
            return getattr(self.client, name)
        twin = getattr(self.client, f"{name}_async")
        return lambda *args, **kwargs: self.loop.run(twin(*args, **kwargs))

    def start(self, name: str, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Begin an operation that may take a while: on the loop, or on a thread."""
        if self.loop is not None:
            return self.loop.start(getattr(self.client, f"{name}_async")(*args, **kwargs))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        operation = getattr(self.client, name)

        def run() -> None:
            try:
                future.set_result(operation(*args, **kwargs))
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=run, name=f"test-{name}").start()
        return future

    def get_output(self, timeout: float = PATIENCE_S) -> EngineCoreOutputs:
        """Return the next message, with a limit on either face."""
        if self.loop is None:
            return self.client.get_output(timeout=timeout)

        async def get() -> Any:
            async with asyncio.timeout(timeout):
                return await self.client.get_output_async()

        return self.loop.run(get(), timeout + PATIENCE_S)

    def outputs(self, count: int) -> list[EngineCoreOutput]:
        """Return the next ``count`` outputs."""
        if self.loop is None:
            found: list[EngineCoreOutput] = []
            while len(found) < count:
                found += self.client.get_output(timeout=PATIENCE_S).outputs
            return found

        async def collect() -> list[EngineCoreOutput]:
            found: list[EngineCoreOutput] = []
            while len(found) < count:
                async with asyncio.timeout(PATIENCE_S):
                    found += (await self.client.get_output_async()).outputs
            return found

        return self.loop.run(collect(), 6 * PATIENCE_S)

    def pending_calls(self) -> int:
        """Return how many utility calls are in the registry."""
        return len(self.client.inbox.calls)

    def close(self) -> None:
        """Shut down the client and the loop. Idempotent."""
        if "client" in self.__dict__:
            self.client.shutdown()
        if self.loop is not None:
            self.loop.close()


CLIENTS: dict[str, type[EngineCoreClient]] = {
    "inproc": InprocClient,
    "sync": SyncMPClient,
    "asyncio": AsyncMPClient,
    "uvloop": AsyncMPClient,
}


def make_client(kind: str, config: EngineConfig, executor_class: Any = None) -> EngineCoreClient:
    """Make a client through the factory."""
    return EngineCoreClient.make_client(kind != "inproc", kind in ("asyncio", "uvloop"), config, executor_class)


@contextlib.contextmanager
def echo_face(kind: str, executor_class: Any = None, **settings: Any) -> Iterator[Face]:
    """Run an echo engine behind a face; it is shut down at the end."""
    config = EngineConfig.create("echo", **{"forward_engine_log": False, **settings})
    face = Face(kind, lambda: make_client(kind, config, executor_class))
    try:
        yield face
    finally:
        face.close()


def mock_config(port: int, **settings: Any) -> EngineConfig:
    """Make a configuration for an engine that is started elsewhere and connects to ``port``."""
    return EngineConfig.create(
        "echo", data_parallel_size_local=0, data_parallel_rpc_port=port, **{"ready_timeout_s": 20.0, **settings}
    )


@contextlib.contextmanager
def mock_face(
    kind: str, *, settings: dict[str, Any] | None = None, **mock_options: Any
) -> Iterator[tuple[Face, MockEngine]]:
    """Put a :class:`MockEngine` behind a face."""
    port = free_tcp_port()
    config = mock_config(port, **(settings or {}))
    with MockEngine(f"tcp://127.0.0.1:{port}", **mock_options) as engine:
        face = Face(kind, lambda: make_client(kind, config))
        try:
            engine.wait_started()
            yield face, engine
        finally:
            face.close()


@contextlib.contextmanager
def mock_faces(
    kind: str, count: int = 2, *, settings: dict[str, Any] | None = None, profiles: Sequence[WireProfile] = ()
) -> Iterator[tuple[Face, list[MockEngine]]]:
    """Put several :class:`MockEngine`, one per rank, behind a face."""
    port = free_tcp_port()
    config = mock_config(port, data_parallel_size=count, **(settings or {}))
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                MockEngine(
                    f"tcp://127.0.0.1:{port}", engine_index=index, profile=profiles[index] if profiles else V0_25
                )
            )
            for index in range(count)
        ]
        face = Face(kind, lambda: make_client(kind, config))
        try:
            for engine in engines:
                engine.wait_started()
            yield face, engines
        finally:
            face.close()


def assert_serves(face: Face, engine: MockEngine, request_id: str = "proof") -> None:
    """Show that requests and utilities still work."""
    face.add_request(request(request_id))
    assert engine.expect_add().request_id == request_id
    engine.send_outputs([output(request_id, [42], finished=True)])
    (got,) = face.outputs(1)
    assert (got.request_id, got.new_token_ids) == (request_id, [42])
    answer = face.start("call_utility", "is_sleeping")
    engine.answer_utility(engine.expect_utility("is_sleeping"), False)
    assert answer.result(PATIENCE_S) is False


def status_of(face: Face, rank: int = 0) -> EngineStatus:
    """Return how an engine is."""
    status: EngineStatus = face.client.engine_statuses()[rank]
    return status


def wait_state(face: Face, state: str, rank: int = 0, timeout_s: float = 3 * PATIENCE_S) -> EngineStatus:
    """Wait until an engine is in a state; engines of their own processes may have to start for it."""
    wait_until(lambda: status_of(face, rank).state == state, timeout_s, f"engine {rank} to be {state}")
    return status_of(face, rank)


def mp_client(face: Face) -> MPClient:
    """Return the client of a face, for a look inside."""
    assert isinstance(face.client, MPClient)
    return face.client


PYTHON = sys.executable

FAKE_ENGINE_HEAD = """
import os, sys, threading, time
from enginewire.engine.channel import Channel
from enginewire.engine.spec import EngineSpec
from enginewire.testing import MockEngine

lifeline = Channel.adopt(int(sys.argv[sys.argv.index("--lifeline-fd") + 1]))
spec = EngineSpec.decode(lifeline.receive())

def wait_for_parent():
    while lifeline.receive() is not None:
        pass
    os._exit(0)
"""


def fake_python(folder: Path, script: str, *, head: str = FAKE_ENGINE_HEAD) -> str:
    """Write a program to put in ``sys.executable``'s place: it runs ``script`` instead of our engine process."""
    source = folder / "fake_engine.py"
    source.write_text(head + textwrap.dedent(script))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{PYTHON}" "{source}" "$@"\n')
    program.chmod(0o755)
    return str(program)
