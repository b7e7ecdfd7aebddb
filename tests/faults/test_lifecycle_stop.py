"""Stopping: however a client ends, nothing of it is left, and whoever waits is told."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from fault_executors import IgnoresSigterm, Obedient
from test_client_death import engine_pid, is_running

from client_harness import ALL_FACES, MP_FACES, PATIENCE_S, echo_face, make_client, mp_client, request
from enginewire import (
    ClientClosedError,
    EngineConfig,
    EngineDeadError,
    EngineStartupError,
    FinishReason,
    UtilityCallError,
)
from enginewire.testing import wait_until


@pytest.mark.parametrize("kind", MP_FACES)
def test_shutdown_while_everything_waits(kind: str) -> None:
    """C-22: safe from any thread, concurrently, and while other calls are waiting."""
    with echo_face(kind, Obedient) as face:
        pid = engine_pid(face)
        waiting = [face.start("get_output"), face.start("call_utility", "collective_rpc", "hang")]
        wait_until(lambda: face.pending_calls() == 1, PATIENCE_S, "the call")
        threads = [threading.Thread(target=face.client.shutdown, args=(1.0,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for future in waiting:
            with pytest.raises((ClientClosedError, UtilityCallError)):  # or the engine still says that it stops
                future.result(PATIENCE_S)
        assert not is_running(pid)


@pytest.mark.parametrize("kind", MP_FACES)
def test_an_engine_that_does_not_leave_is_killed_in_time(kind: str) -> None:
    """C-22: SIGTERM, then SIGKILL."""
    with echo_face(kind, terminate_timeout_s=0.2) as face:
        pid = engine_pid(face)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        face.client.shutdown()
        assert 0.2 <= time.monotonic() - began < PATIENCE_S
        assert not is_running(pid)


def test_the_time_given_to_shutdown_wins() -> None:
    """C-22."""
    with echo_face("sync", terminate_timeout_s=600) as face:
        os.kill(engine_pid(face), signal.SIGSTOP)
        began = time.monotonic()
        face.client.shutdown(timeout=0.1)
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("kind", MP_FACES)
def test_running_requests_may_finish_within_the_drain_time(kind: str) -> None:
    """C-22: ``shutdown_timeout_s``. Their outputs arrive meanwhile and are there afterwards."""
    with echo_face(kind, shutdown_timeout_s=20.0, executor_options={"step_time_s": 0.02}) as face:
        face.add_request(request("a", max_tokens=20))
        face.get_output()
        if face.loop is None:
            face.client.shutdown()
        else:
            face.loop.run(face.client.__aexit__(None, None, None))
        tokens, reason = 1, None
        while reason is None:
            for output in face.get_output().outputs:
                tokens += len(output.new_token_ids)
                reason = output.finish_reason
        assert (tokens, reason) == (20, FinishReason.LENGTH)
        with pytest.raises(ClientClosedError):
            while True:
                face.get_output()


def test_without_drain_time_running_requests_are_aborted() -> None:
    """C-22; protocol I.1."""
    with echo_face("sync", executor_options={"step_time_s": 0.02}) as face:
        face.add_request(request("a", max_tokens=100_000))
        face.get_output()
        began = time.monotonic()
        face.client.shutdown()
        assert time.monotonic() - began < 4
        reasons = []
        with pytest.raises(ClientClosedError):
            while True:
                reasons += [it.finish_reason for it in face.get_output().outputs if it.finished]
        assert reasons == [FinishReason.ABORT]


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_client_that_is_dropped_is_cleaned_up_and_says_that_it_was_forgotten(kind: str) -> None:
    """C-21, C-22, C-26: neither receiver nor monitor keeps it alive."""
    with echo_face(kind) as face:
        pid = engine_pid(face)

        def drop() -> None:
            del face.__dict__["client"]
            gc.collect()
            wait_until(lambda: not is_running(pid), PATIENCE_S, "the end of the engine")

        with pytest.warns(ResourceWarning, match="call shutdown"):
            drop()


def test_where_warnings_are_errors_a_dropped_client_is_cleaned_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warning raised, and the finalizer ended with it."""
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: unraisable.append(args.exc_value))
    monkeypatch.setattr("sys.excepthook", lambda *args: unraisable.append(args[1]))
    with echo_face("sync") as face:
        pid = engine_pid(face)
        resources = mp_client(face).resources
        with pytest.raises(ResourceWarning):  # as `python -W error` would
            resources()
        assert resources.closed
        assert not is_running(pid)


@pytest.mark.parametrize("kind", ALL_FACES)
def test_no_signal_handler_is_changed(kind: str) -> None:
    """Issue 2; a library does not touch them."""
    numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    before = {number: signal.getsignal(number) for number in numbers}
    with echo_face(kind) as face:
        if face.kind != "uvloop":  # the loop, not the client, has one for the time it runs
            assert {number: signal.getsignal(number) for number in numbers} == before
    assert {number: signal.getsignal(number) for number in numbers} == before


def shared_memory() -> set[str]:
    """Return what is in shared memory."""
    return {entry.name for entry in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_six_rounds_of_start_serve_and_stop_leave_nothing(kind: str) -> None:
    """Issue 2, shows: no process, thread, descriptor, socket file (the leak check) or shared memory."""
    before = shared_memory()
    descriptors: list[int] = []
    for round_ in range(6):
        with echo_face(kind, Obedient, hello_timeout_s=60) as face:
            pid = engine_pid(face)
            face.add_request(request("a", max_tokens=3))
            assert len(face.outputs(3)) == 3
            match round_ % 3:
                case 0:
                    os.kill(pid, signal.SIGKILL)
                    with pytest.raises(EngineDeadError):
                        while True:
                            face.get_output()
                case 1:
                    face.collective_rpc("spawn")
                case _:
                    face.client.shutdown()
            face.close()
            assert not is_running(pid)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert len(set(descriptors[2:])) == 1, descriptors
    assert shared_memory() <= before


def test_several_clients_live_side_by_side() -> None:
    """Issue 2: two clients in one process; one's end is not the other's."""
    with echo_face("sync") as one, echo_face("asyncio") as two, echo_face("inproc") as three:
        for face in (one, two, three):
            face.add_request(request("same id", max_tokens=2))
        os.kill(engine_pid(one), signal.SIGKILL)
        wait_until(lambda: one.client.engine_dead, PATIENCE_S, "its death")
        for face in (two, three):
            tokens = 0
            while tokens < 2:
                tokens += sum(len(it.new_token_ids) for it in face.get_output().outputs)
        one.client.shutdown()
        assert two.is_sleeping() is False


def test_an_engine_that_was_told_to_stop_is_not_reported_dead() -> None:
    """Section 5 of the style guide: once asked to stop, an exit is the plan."""
    with echo_face("sync") as face:
        face.client.shutdown()
        assert not face.client.engine_dead
        with pytest.raises(ClientClosedError):
            face.get_output()


def test_an_engine_killed_by_somebody_before_shutdown_does_not_delay_it() -> None:
    with echo_face("sync", terminate_timeout_s=600) as face:
        os.kill(engine_pid(face), signal.SIGKILL)
        began = time.monotonic()
        face.client.shutdown()
        assert time.monotonic() - began < PATIENCE_S


def test_an_engine_deaf_to_sigterm_is_killed_when_start_up_fails() -> None:
    """C-21."""
    began = time.monotonic()
    with pytest.raises(EngineStartupError):
        make_client("sync", EngineConfig.create("echo", ready_timeout_s=0.7, forward_engine_log=False), IgnoresSigterm)
    assert time.monotonic() - began < PATIENCE_S


def test_an_interrupted_shutdown_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it waits for the engine: the finalizer is still there, and so is the next call."""
    with echo_face("sync") as face:
        client = mp_client(face)
        manager = client.resources.engine_manager
        assert manager is not None
        monkeypatch.setattr(manager, "shutdown", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.shutdown()
        assert client._finalizer.alive
        monkeypatch.undo()
        with pytest.raises(ClientClosedError):
            client.add_request(request())
        client.shutdown()
        assert client.resources.closed
        assert not client._finalizer.alive


def _interrupted(timeout: float) -> None:
    raise KeyboardInterrupt
