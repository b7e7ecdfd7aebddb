"""Real engines in lock-step behind one client, which has their coordinator in its own process."""

from __future__ import annotations

import concurrent.futures
import os
import signal

import pytest

from client_harness import MP_FACES, PATIENCE_S, echo_face, mp_client, request
from enginewire import EngineConfig, EngineDeadError, FinishReason
from enginewire.client.sync_mp import SyncMPClient
from enginewire.executors.lock_step import LockStepEchoExecutor
from enginewire.testing import free_tcp_port, wait_until


@pytest.mark.parametrize("kind", MP_FACES)
def test_engines_in_lock_step_run_in_waves_and_rest_in_between(kind: str) -> None:
    """C-50; issue 5: a request for one wakes both; when nobody has work, both rest."""
    with echo_face(kind, LockStepEchoExecutor, data_parallel_size=2, data_parallel_lock_step=True) as face:
        assert [status.ready.data_parallel_size for status in face.client.engine_statuses()] == [2, 2]
        for wave in range(3):
            wait_until(lambda: not face.client.dp_engines_running(), PATIENCE_S, "rest")
            mine = request(f"r{wave}", max_tokens=30)
            mine.data_parallel_rank = wave % 2
            face.add_request(mine)
            outputs = face.outputs(30)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        coordination = mp_client(face).lookout.coordination
        assert coordination is not None
        wait_until(lambda: coordination.wave >= 3, PATIENCE_S, "the third wave's end")


def test_both_get_work_and_pause_together() -> None:
    """Protocol H: a pause completes by consensus, and goes to all ranks."""
    with echo_face("sync", LockStepEchoExecutor, data_parallel_size=2, data_parallel_lock_step=True) as face:
        for i in range(6):
            face.add_request(request(f"r{i}", max_tokens=20))
        assert len(face.outputs(120)) == 120
        face.pause_scheduler("wait")
        assert face.is_scheduler_paused() is True
        face.resume_scheduler()
        face.add_request(request("after", max_tokens=3))
        assert len(face.outputs(3)) == 3


def test_ranks_in_lock_step_live_and_die_together() -> None:
    """Remote engines: restart and failover of lock-step ranks are per group."""
    with echo_face("sync", LockStepEchoExecutor, data_parallel_size=2, data_parallel_lock_step=True) as face:
        manager = mp_client(face).resources.engine_manager
        assert manager is not None
        face.add_request(request("a", max_tokens=100_000))
        face.outputs(3)
        os.kill(manager.processes[1].popen.pid, signal.SIGKILL)  # type: ignore[attr-defined]

        def drain() -> None:
            while True:
                face.get_output()

        with pytest.raises(EngineDeadError):
            drain()


def test_ranks_in_lock_step_are_not_added_or_taken_out() -> None:
    """Issue 6: as a group, or not at all; they serve on."""
    with echo_face("asyncio", LockStepEchoExecutor, data_parallel_size=2, data_parallel_lock_step=True) as face:
        for size in (1, 3):
            with pytest.raises(NotImplementedError, match="they run in lock-step, as one group"):
                face.loop.run(face.client.scale_elastic_ep(size))
        face.add_request(request("a", max_tokens=10))
        assert len(face.outputs(10)) == 10


@pytest.mark.parametrize("mode", ["external", "hybrid"])
def test_each_node_has_a_frontend_of_its_own_and_the_ranks_meet_at_rank_0(mode: str) -> None:
    """C-53; protocol B.6: two handshakes; a request at either node wakes the other's engines."""
    port, per_node = free_tcp_port(), 1 if mode == "external" else 2
    common = {
        "data_parallel_size": 2 * per_node,
        "data_parallel_lock_step": True,
        "data_parallel_rpc_port": port,
        f"data_parallel_{mode}_lb": True,
        "data_parallel_size_local": per_node,
        "forward_engine_log": False,
        "executor": "enginewire.executors.lock_step:LockStepEchoExecutor",
    }

    def start(node: int) -> SyncMPClient:
        which = "data_parallel_rank" if mode == "external" else "data_parallel_start_rank"
        return SyncMPClient(EngineConfig.create("echo", **common, **{which: node * per_node}))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        nodes = [future.result(60) for future in [pool.submit(start, node) for node in (1, 0)]]
    try:
        ranks = [[status.index for status in node.engine_statuses()] for node in nodes]
        assert ranks == ([[1], [0]] if mode == "external" else [[2, 3], [0, 1]])
        for wave in range(2):
            for name, node in zip("ba", nodes, strict=True):
                node.add_request(request(f"{name}{wave}", max_tokens=10))
                tokens: list[int] = []
                while len(tokens) < 10:
                    for each in node.get_output(timeout=PATIENCE_S).outputs:
                        assert each.request_id == f"{name}{wave}"
                        tokens += each.new_token_ids
                wait_until(lambda node=node: not node.dp_engines_running(), PATIENCE_S, "rest")  # type: ignore[misc]
    finally:
        for node in nodes:
            node.shutdown()
