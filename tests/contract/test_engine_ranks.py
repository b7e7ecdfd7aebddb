"""Ranks that agree: one thread for each, over loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from enginewire.engine.ranks import Agreement, NotAgreed, ParallelConfig, RankGroup, RankLost
from enginewire.errors import EngineStartupError
from enginewire.testing import free_tcp_port

HOST = "127.0.0.1"
TIMEOUT_S = 10.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def meet(threads: ThreadPoolExecutor, size: int, port: int) -> list[RankGroup]:
    """Make a group, the last rank first."""
    joining = [threads.submit(RankGroup, rank, size, HOST, port, TIMEOUT_S) for rank in reversed(range(size))]
    return [future.result(TIMEOUT_S) for future in reversed(joining)]


@pytest.fixture(params=[2, 5])
def groups(request: pytest.FixtureRequest, threads: ThreadPoolExecutor) -> Iterator[list[RankGroup]]:
    groups = meet(threads, request.param, free_tcp_port())
    yield groups
    for group in groups:
        group.close()


def all_agree(threads: ThreadPoolExecutor, groups: list[RankGroup], *said: tuple[bool, bool]) -> set[Agreement]:
    futures = [
        threads.submit(group.agree, has_work=work, pauses=pauses)
        for group, (work, pauses) in zip(groups, said, strict=True)
    ]
    return {future.result(TIMEOUT_S) for future in futures}


def test_work_of_any_rank_is_everybodys_and_a_pause_needs_all(
    threads: ThreadPoolExecutor, groups: list[RankGroup]
) -> None:
    """J.4, H."""
    others = len(groups) - 1
    nothing = (False, False)
    assert all_agree(threads, groups, *[nothing] * (others + 1)) == {Agreement(False, False)}
    assert all_agree(threads, groups, *[nothing] * others, (True, False)) == {Agreement(True, False)}
    assert all_agree(threads, groups, (True, False), *[nothing] * others) == {Agreement(True, False)}
    assert all_agree(threads, groups, *[(True, True)] * others, (False, False)) == {Agreement(True, False)}
    assert all_agree(threads, groups, *[(True, True)] * (others + 1)) == {Agreement(True, True)}


def test_nobody_goes_on_before_all_have_spoken(threads: ThreadPoolExecutor, groups: list[RankGroup]) -> None:
    *early, last = groups
    waiting = [threads.submit(group.agree) for group in early]
    first_of_all = threads.submit(last.agree, has_work=True)
    assert first_of_all.result(TIMEOUT_S) == Agreement(True, False)
    assert {future.result(TIMEOUT_S) for future in waiting} == {Agreement(True, False)}


@pytest.mark.parametrize("gone", [0, -1])
def test_a_rank_that_leaves_is_noticed_by_those_that_wait(
    threads: ThreadPoolExecutor, groups: list[RankGroup], gone: int
) -> None:
    lost = groups.pop(gone)
    lost.close()
    name = lost.rank if groups[0].rank == 0 else 0
    with pytest.raises(RankLost, match=f"rank {name} is gone"):
        threads.submit(groups[0].agree).result(TIMEOUT_S)


def test_a_rank_at_rest_is_told_that_another_is_gone(threads: ThreadPoolExecutor, groups: list[RankGroup]) -> None:
    told: Future[RankLost] = Future()
    groups[0].watch(told.set_result)
    assert all_agree(threads, groups, *[(True, False)] * len(groups)) == {Agreement(True, False)}
    assert not told.done()
    groups.pop().close()
    assert str(told.result(TIMEOUT_S)).startswith(f"rank {len(groups)} is gone")


def test_a_watch_ends_with_its_group(groups: list[RankGroup]) -> None:
    told: list[RankLost] = []
    for group in groups:
        group.watch(told.append)
    groups[-1].close()
    assert [each for each in told if "rank 0" in str(each)] == [], "nobody else has left"
    groups[-1].close()


def test_waiting_can_be_given_up(threads: ThreadPoolExecutor, groups: list[RankGroup]) -> None:
    enough = threading.Event()
    waiting: Future[Any] = threads.submit(groups[0].agree, give_up=enough.is_set)
    enough.set()
    with pytest.raises(NotAgreed):
        waiting.result(TIMEOUT_S)


def test_strangers_are_not_taken_for_ranks(threads: ThreadPoolExecutor) -> None:
    """They are closed, and the ranks meet nevertheless."""
    port = free_tcp_port()
    first = threads.submit(RankGroup, 0, 2, HOST, port, TIMEOUT_S)
    for greeting in (b"", b"GET / HTTP", b"EWrg\x00\x05\x00\x02", b"EWrg\x00\x01\x00\x07"):
        with connected(port) as stranger:
            with contextlib.suppress(OSError):  # it may be closed before this is done
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # closed with something left unread
                assert stranger.recv(8) == b""
    second = RankGroup(1, 2, HOST, port, TIMEOUT_S)
    first.result(TIMEOUT_S).close()
    second.close()


def connected(port: int) -> socket.socket:
    deadline = threading.Event()
    for _ in range(100):
        try:
            return socket.create_connection((HOST, port), TIMEOUT_S)
        except ConnectionRefusedError:
            deadline.wait(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_named(rank: int) -> None:
    missing = {0: "rank 1, 2", 1: "rank 0"}[rank]
    with pytest.raises(EngineStartupError, match=f"rank {rank} cannot meet {missing} at 127.0.0.1:.* within 0.3 s"):
        RankGroup(rank, 3, HOST, free_tcp_port(), 0.3)


def test_a_program_that_listens_there_is_not_taken_for_rank_0() -> None:
    with (
        socket.create_server((HOST, free_tcp_port())) as other,
        pytest.raises(EngineStartupError, match="cannot meet rank 0"),
    ):
        RankGroup(1, 2, HOST, other.getsockname()[1], 0.3)


INIT = {
    "data_parallel_master_ip": "10.0.0.1", "data_parallel_master_port": 1001,
    "_data_parallel_master_port_list": [1002, 1003], "data_parallel_size": 4,
}  # fmt: skip


def test_init_says_where_ranks_meet() -> None:
    """B.2: the engine takes the last port, and leaves the master port to its executor."""
    assert ParallelConfig.from_init(INIT) == ParallelConfig(4, "10.0.0.1", 1003)
    assert ParallelConfig.from_init(INIT | {"_data_parallel_master_port_list": []}) == ParallelConfig(
        4, "10.0.0.1", 1001
    )
    assert ParallelConfig.from_init({}) is None
    assert ParallelConfig.from_init({"data_parallel_size": 1}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"data_parallel_size": 0},
        {"data_parallel_size": "4"},
        {"data_parallel_master_ip": None},
        {"_data_parallel_master_port_list": [0]},
        {"_data_parallel_master_port_list": ["1"]},
        {"_data_parallel_master_port_list": 7},
        {"_data_parallel_master_port_list": [], "data_parallel_master_port": None},
    ],
    ids=str,
)
def test_what_init_cannot_mean_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EngineStartupError, match="INIT's parallel_config must have"):
        ParallelConfig.from_init(INIT | change)
