"""Real engines that somebody else started: killed, stopped, restarted; and their frontend killed instead of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_harness import MP_FACES, PATIENCE_S, Face, make_client, mock_config, mp_client, request, wait_state
from enginewire import EngineConfig, EngineUnavailableError, FinishReason
from enginewire.engine.spec import EngineSpec
from enginewire.testing import free_tcp_port, wait_until
from enginewire.testing.launched_engine import LaunchedEngine

STARTED_WITHIN_S = 30.0
TOLD_WITHIN_S = 2.0


class Site:
    """Echo engines of their own processes at one handshake port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_tcp_port()
        self.engines: list[LaunchedEngine] = []

    def launch(self, rank: int = 0, size: int = 1, step_time_s: float = 0.005) -> LaunchedEngine:
        """Start an engine, as a headless node does."""
        config = EngineConfig.create("echo", data_parallel_size=size, executor_options={"step_time_s": step_time_s})
        spec = EngineSpec(
            config=config,
            handshake_address=f"tcp://127.0.0.1:{self.port}",
            engine_index=rank,
            local=False,
            headless=True,
        )
        engine = LaunchedEngine(spec, str(self.folder / f"log-{len(self.engines)}"))
        self.engines.append(engine)
        return engine

    def start(self, kind: str, size: int = 1, **settings: float) -> Face:
        """Start a frontend."""
        config = mock_config(self.port, data_parallel_size=size, ready_timeout_s=STARTED_WITHIN_S, **settings)
        return Face(kind, lambda: make_client(kind, config))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        for engine in site.engines:
            engine.close()


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_remote_engine_that_is_killed_fails_its_requests_soon_and_serves_again_when_restarted(
    site: Site, kind: str
) -> None:
    """Issue 4: within 2 s; service comes back without restarting the frontend."""
    first = site.launch()
    with contextlib.closing(site.start(kind)) as face:
        face.add_request(request("a", max_tokens=100_000))
        face.outputs(3)
        os.kill(first.pid, signal.SIGKILL)
        killed = time.monotonic()
        while (last := face.outputs(1)[-1]).finish_reason is None:
            pass
        assert time.monotonic() - killed < TOLD_WITHIN_S
        assert last.finish_reason is FinishReason.ERROR
        assert str(last.stop_reason).startswith("engine_lost: engine 0: the connection to it was lost")
        with pytest.raises(EngineUnavailableError):
            face.add_request(request("b"))
        site.launch()
        wait_state(face, "ready")
        face.add_request(request("c", max_tokens=5))
        assert [it.request_id for it in face.outputs(5)] == ["c"] * 5
        assert face.is_sleeping() is False


def test_of_two_remote_engines_one_is_killed_and_the_other_does_not_notice(site: Site) -> None:
    """C-55."""
    zero, one = site.launch(0, 2), site.launch(1, 2)
    with contextlib.closing(site.start("asyncio", 2)) as face:
        for rank in (0, 1):
            mine = request(f"r{rank}", max_tokens=300)
            mine.data_parallel_rank = rank
            face.add_request(mine)
        face.outputs(10)
        os.kill(one.pid, signal.SIGKILL)
        ends: dict[str, FinishReason] = {}
        while len(ends) < 2:
            ends |= {it.request_id: it.finish_reason for it in face.outputs(1) if it.finish_reason is not None}
        assert ends == {"r0": FinishReason.LENGTH, "r1": FinishReason.ERROR}
        site.launch(1, 2)
        wait_state(face, "ready", 1)
        for i in range(8):
            face.add_request(request(f"next{i}", max_tokens=1))
        assert len(face.outputs(8)) == 8
        assert zero.process.poll() is None


def test_a_rank_started_twice_is_refused_while_the_first_serves(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Remote engines: refused loudly, on both sides."""
    first = site.launch()
    with contextlib.closing(site.start("sync")) as face:
        face.add_request(request("a", max_tokens=400))
        twin = site.launch()
        wait_until(lambda: "engine=0 was started twice" in caplog.text, STARTED_WITHIN_S, "the refusal")
        ended = [it for it in face.outputs(400) if it.finish_reason is not None]
        assert [it.finish_reason for it in ended] == [FinishReason.LENGTH]
        assert twin.wait_exit(STARTED_WITHIN_S) == 1
        assert "engine=0 was started twice: the one that is here answers" in twin.read_log()
        assert first.process.poll() is None


def test_a_rank_that_the_frontend_does_not_have_is_told_so(site: Site) -> None:
    """It ends with the reason, whether it comes before the others or after them."""
    early = site.launch(2, 3)
    site.launch()
    with contextlib.closing(site.start("sync")):
        late = site.launch(7, 8)
        for rank, engine in ((2, early), (7, late)):
            assert engine.wait_exit(STARTED_WITHIN_S) == 1
            assert f"rank {rank} is not expected here; expected: 0" in engine.read_log()


def test_a_stopped_host_is_lost_by_its_silence_and_comes_back_without_a_hello(site: Site) -> None:
    """Defect 22: SIGSTOP closes nothing. Way 1: its sockets connect again when it goes on."""
    engine = site.launch(step_time_s=0.02)
    with contextlib.closing(site.start("sync", heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)) as face:
        face.add_request(request("old", max_tokens=100_000))
        face.outputs(3)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            while (last := face.outputs(1)[-1]).finish_reason is None:
                pass
            assert "its host is gone or silent" in str(last.stop_reason)
            wait_state(face, "lost")
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        wait_state(face, "ready")
        face.add_request(request("new", max_tokens=10))
        tokens = face.outputs(10)
        assert {it.request_id for it in tokens} == {"new"}
        assert sum(len(it.new_token_ids) for it in tokens) == 10
        # The old one was aborted: nobody works for nobody.
        wait_until(lambda: face.call_utility("get_request_ids") == [], PATIENCE_S, "an idle engine")


FRONTEND = """
import sys
from client_harness import make_client, mock_config, request
client = make_client("sync", mock_config(int(sys.argv[1]), ready_timeout_s=30.0))
client.add_request(request("orphan", max_tokens=100_000))
client.get_output(timeout=10)
print("running", flush=True)
while True:
    client.get_output()
"""


def test_a_frontend_that_is_killed_is_followed_by_one_that_serves_at_once(site: Site, tmp_path: Path) -> None:
    """Issue 4: on the same ports, without a restart of the engine; the dead one's requests are aborted."""
    engine = site.launch()
    script = tmp_path / "frontend.py"
    script.write_text(textwrap.dedent(FRONTEND))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script), str(site.port)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as frontend:
        assert frontend.stdout is not None
        assert frontend.stdout.readline() == b"running\n"
        frontend.kill()
    with contextlib.closing(site.start("asyncio")) as face:
        face.add_request(request("mine", max_tokens=20))
        assert {it.request_id for it in face.outputs(20)} == {"mine"}
        wait_until(lambda: face.call_utility("get_request_ids") == [], PATIENCE_S, "the end of the orphan")
        assert mp_client(face).engines[0].num_deaths == 0
    assert engine.process.poll() is None
