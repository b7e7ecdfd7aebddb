"""Frontends that vanish, by whatever means, and come back: the engine stops working for them and serves the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.testing import free_tcp_port, wait_until
from enginewire.testing.mock_frontend import TIMEOUT_S, MockFrontend
from enginewire.wire.handshake import EngineZmqAddresses
from enginewire.wire.messages import FinishReason
from enginewire.wire.profile import PROFILES, V0_25

SUPPORT = Path(__file__).parents[1] / "support"
LONG = 100_000
"""Tokens that no test waits for."""


def config(executor: str = "echo", **settings: Any) -> EngineConfig:
    options = {"step_time_s": 0.002}
    return EngineConfig.create("echo", executor=executor, executor_options=options, **settings)


def wait_until_live(frontend: MockFrontend, *request_ids: str) -> None:
    """Ask, as the first client, until exactly these requests are live."""

    def are_live() -> bool:
        return sorted(frontend.utility("get_request_ids")) == sorted(request_ids)

    wait_until(are_live, TIMEOUT_S, f"{request_ids} being all that is live")


def wait_until_logged(frontend: MockFrontend, text: str) -> None:
    engine = frontend.engine
    assert engine is not None
    wait_until(lambda: text in engine.read_log(), TIMEOUT_S, f"a log line with {text!r}")


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["ipc", "tcp"])
@pytest.mark.parametrize("executor", ["echo", "stub_executors:HoldsGil"], ids=["inline", "child"])
def test_of_two_frontends_one_vanishes_and_the_other_does_not_notice(executor: str, host: str | None) -> None:
    """C-52, C-62: running and waiting requests of the one are aborted; it comes back and is served again."""
    with MockFrontend(num_clients=2, host=host) as frontend:
        frontend.launch(config(executor, max_num_seqs=2), sys_path=[str(SUPPORT)])
        frontend.shake_hands()
        frontend.add("stays", [1, 2], max_tokens=LONG)
        frontend.wait_tokens("stays", 1)
        for request_id in ("runs", "waits", "waits too"):
            frontend.add(request_id, [3], client_index=1, max_tokens=LONG)
        frontend.wait_tokens("runs", 1, client_index=1)
        wait_until_live(frontend, "stays", "runs", "waits", "waits too")
        frontend.vanish(1)
        wait_until_live(frontend, "stays")
        frontend.forget()
        frontend.come_back(1)
        frontend.add("fresh", [7, 8], client_index=1, max_tokens=4)
        frontend.wait_finished("fresh", client_index=1)
        assert frontend.token_ids("fresh", client_index=1) == [7, 8, 7, 8]
        for request_id in ("runs", "waits", "waits too"):  # told, unless that went to the socket that was closing
            told = frontend.outputs_of(request_id, client_index=1)  # of "runs" also what a step in flight made
            assert [output.finish_reason for output in told[-1:]] in ([], [FinishReason.ABORT])
            assert request_id == "runs" or not frontend.token_ids(request_id, client_index=1)
        seen = len(frontend.token_ids("stays"))
        frontend.wait_tokens("stays", seen + 5)


def test_a_headless_engine_whose_only_frontend_vanishes_waits_for_the_next() -> None:
    """A frontend that is started again on the same ports finds its engine there and idle."""
    with MockFrontend(host="127.0.0.1") as frontend:
        engine = frontend.launch(config(log_stats=True), local=False, headless=True)
        frontend.shake_hands()
        for lives in range(3):
            frontend.add("a", [1, 2], max_tokens=LONG)
            frontend.wait_tokens("a", 3)
            frontend.vanish()
            frontend.come_back()
            frontend.forget()
            wait_until_live(frontend)
            assert not frontend.token_ids("a"), "what waited for the dead is not sent"
            assert engine.read_log().count("client_index=0 is gone") == lives + 1
        frontend.add("b", [1, 2], max_tokens=2)
        frontend.wait_finished("b")
        assert engine.process.poll() is None


def test_a_frontend_that_comes_back_may_be_of_another_version() -> None:
    """Protocol M.1."""
    with MockFrontend(host="127.0.0.1", num_clients=2) as frontend:
        frontend.launch(config(), local=False, headless=True)
        frontend.shake_hands()
        for profile in (*PROFILES, V0_25):
            frontend.speak(profile, client_index=1)
            frontend.add("a", [1], client_index=1, max_tokens=1)
            assert frontend.wait_finished("a", client_index=1).finish_reason is FinishReason.LENGTH
            frontend.vanish(1)
            frontend.come_back(1)
            frontend.forget()
            frontend.wait_answer(frontend.call("is_sleeping", client_index=1), client_index=1)


def test_nothing_piles_up_for_a_frontend_that_is_away() -> None:
    """Statistics that belong to nobody go to the first frontend; not when it is away."""
    with MockFrontend(num_clients=2, host="127.0.0.1") as frontend:
        frontend.launch(config(log_stats=True), local=False, headless=True)
        frontend.shake_hands()
        frontend.vanish(0)
        wait_until_logged(frontend, "client_index=0 is gone")
        for number in range(20):
            request_id = f"r{number}"
            frontend.add(request_id, [1], client_index=1, max_tokens=2)
            frontend.wait_finished(request_id, client_index=1)
        frontend.come_back(0)
        frontend.utility("is_sleeping")
        assert len(frontend.messages[0]) <= 2, "the answer, and at most the statistics of a last step"


@contextmanager
def process(addresses: tuple[str, str], ttl_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """Run a frontend in a process of its own."""
    command = [sys.executable, str(SUPPORT / "raw_frontend.py"), *addresses, str(ttl_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frontend:
        try:
            yield frontend
        finally:
            frontend.kill()


def tell(frontend: subprocess.Popen[str], command: str) -> None:
    """Give a command and wait until it is carried out."""
    assert frontend.stdin is not None
    assert frontend.stdout is not None
    frontend.stdin.write(command + "\n")
    frontend.stdin.flush()
    assert frontend.stdout.readline() == "ok\n"


@contextmanager
def two_processes(ttl_s: float = 0.0) -> Iterator[tuple[MockFrontend, subprocess.Popen[str], tuple[str, str]]]:
    """One engine with two frontends: this process, and another one."""
    with MockFrontend(host="127.0.0.1") as frontend:
        ports = free_tcp_port(), free_tcp_port()
        other = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
        ours = frontend.addresses
        frontend.launch(config(), local=False, headless=True)
        frontend.expect_handshake("HELLO")
        with process(other, ttl_s) as killed:
            frontend.send_init(EngineZmqAddresses(inputs=[*ours.inputs, other[0]], outputs=[*ours.outputs, other[1]]))
            frontend.expect_ready_responses()
            frontend.expect_handshake("READY")
            tell(killed, "ready")
            tell(killed, "add 1")
            tell(killed, "read")
            wait_until_live(frontend, "a")
            yield frontend, killed, other


def test_a_frontend_that_is_killed_costs_the_others_nothing() -> None:
    """C-52: SIGKILL of one of two server processes; the next one on its ports is served."""
    with two_processes() as (frontend, killed, addresses):
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        wait_until_live(frontend)
        frontend.add("b", [1], max_tokens=3)
        frontend.wait_finished("b")
        with process(addresses) as successor:
            wait_until_logged(frontend, "client_index=1 is back")
            tell(successor, "add 1")
            tell(successor, "read")
            wait_until_live(frontend, "a")


def test_a_frontend_whose_host_falls_silent_is_noticed_by_its_own_heartbeat() -> None:
    """Our frontends ask their peers to expect a sign of life (``ZMQ_HEARTBEAT_TTL``), so that engines need no
    heartbeat of their own, with which vLLM's frontends would lose them for ever after a short cut."""
    with two_processes(ttl_s=0.5) as (frontend, stopped, _):
        for _ in range(200):  # of 2 ms at least: by then a heartbeat has been sent
            tell(stopped, "read")
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            wait_until_live(frontend)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        tell(stopped, "read")
        wait_until_logged(frontend, "client_index=1 is back")
        tell(stopped, "add 1")
        wait_until_live(frontend, "a")
