"""Several real engines, one of which is killed under load: it takes its own requests along and nobody else's (C-55)."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict

import pytest

from client_harness import MP_FACES, PATIENCE_S, Face, echo_face, mp_client, request
from enginewire import EngineDeadError, EngineUnavailableError, FinishReason
from enginewire.testing import wait_until

TOLD_WITHIN_S = 2.0


def engine_pid(face: Face, rank: int) -> int:
    """Return the process id of one engine."""
    manager = mp_client(face).resources.engine_manager
    assert manager is not None
    return manager.processes[rank].popen.pid


def add_to_each(face: Face, count: int, max_tokens: int) -> dict[str, int]:
    """Send as many requests to each engine; return where each one went."""
    ranks = {}
    for rank in mp_client(face).config.managed_ranks:
        for i in range(count):
            one = request(f"{rank}-{i}", max_tokens=max_tokens)
            one.data_parallel_rank = rank
            face.add_request(one)
            ranks[one.request_id] = rank
    return ranks


@pytest.mark.parametrize(("kind", "count"), [("sync", 4), ("asyncio", 2), ("uvloop", 4)])
def test_a_killed_engine_takes_its_own_requests_along_and_the_client_goes_on(kind: str, count: int) -> None:
    """C-55; issue 5: its requests fail with the cause, the others finish, the client stays usable."""
    with echo_face(kind, data_parallel_size=count, executor_options={"step_time_s": 0.005}) as face:
        victim = count - 1
        ranks = add_to_each(face, 8, max_tokens=200)
        tokens: dict[str, int] = defaultdict(int)
        ends: dict[str, tuple[FinishReason, object]] = {}
        killed = 0.0
        while len(ends) < len(ranks):
            for output in face.get_output().outputs:
                tokens[output.request_id] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    ends[output.request_id] = output.finish_reason, output.stop_reason
                    if ranks[output.request_id] == victim:
                        assert time.monotonic() - killed < TOLD_WITHIN_S
            if not killed and min(tokens[request_id] for request_id in ranks) > 3:
                os.kill(engine_pid(face, victim), signal.SIGKILL)
                killed = time.monotonic()
        for request_id, rank in ranks.items():
            if rank == victim:
                cause = f"engine_lost: engine {victim}: killed by signal 9 (SIGKILL)"
                assert ends[request_id] == (FinishReason.ERROR, cause)
            else:
                assert ends[request_id] == (FinishReason.LENGTH, None)
                assert tokens[request_id] == 200
        status = face.client.engine_statuses()[victim]
        assert (status.state, status.num_deaths, status.is_awaited) == ("dead", 1, False)
        assert status.death is not None
        assert status.death.exit_code == -9
        assert any("ready" in line for line in status.death.log_tail)
        for i in range(8):
            face.add_request(request(f"after-{i}"))
        assert len(face.outputs(32)) == 32
        assert face.is_sleeping() is False
        assert mp_client(face).inbox.live == set()


@pytest.mark.parametrize("kind", MP_FACES)
def test_sending_while_an_engine_dies_finds_the_others(kind: str) -> None:
    """C-27, C-55: no request is refused because of an engine that it need not go to."""
    with echo_face(kind, data_parallel_size=2) as face:
        os.kill(engine_pid(face, 0), signal.SIGKILL)
        for i in range(50):
            face.add_request(request(f"r{i}", max_tokens=1))
        ended = {it.request_id: it.finish_reason for it in face.outputs(50)}
        assert len(ended) == 50
        assert FinishReason.LENGTH in ended.values()
        wait_until(lambda: face.client.engine_statuses()[0].state == "dead", PATIENCE_S, "its death")
        named = request("named")
        named.data_parallel_rank = 0
        with pytest.raises(EngineUnavailableError, match=r"engine 0 is not available: killed by signal 9 \(SIGKILL\)"):
            face.add_request(named)


@pytest.mark.parametrize("kind", MP_FACES)
def test_when_the_last_engine_is_dead_so_is_the_client(kind: str) -> None:
    """C-27."""
    with echo_face(kind, data_parallel_size=2, executor_options={"step_time_s": 0.01}) as face:
        add_to_each(face, 1, max_tokens=100_000)
        for rank in (0, 1):
            os.kill(engine_pid(face, rank), signal.SIGKILL)

        def drain() -> None:
            while True:
                face.get_output()

        with pytest.raises(EngineDeadError, match=r"killed by signal 9 \(SIGKILL\)"):
            drain()
        with pytest.raises(EngineDeadError):
            face.is_sleeping()
        assert [status.num_in_flight for status in face.client.engine_statuses()] == [0, 0]


@pytest.mark.parametrize("kind", MP_FACES)
def test_an_engine_whose_step_raises_says_so_and_the_others_go_on(kind: str) -> None:
    """C-55: the marker, then the end of the process with its own words."""
    with echo_face(kind, data_parallel_size=2, executor_options={"fail_at_step": 3}) as face:
        one = request("a", max_tokens=10)
        one.data_parallel_rank = 1
        face.add_request(one)
        outputs = [face.outputs(1)[0]]
        while outputs[-1].finish_reason is None:
            outputs += face.outputs(1)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert str(outputs[-1].stop_reason).startswith("engine_lost: engine 1: RuntimeError: ")
        other = request("b", max_tokens=1)
        face.add_request(other)
        assert face.outputs(1)[0].finish_reason is FinishReason.LENGTH
