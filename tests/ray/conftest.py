"""A Ray cluster of three nodes, simulated on this machine, shared by the tests of this folder.

Run by ``make ray-test``, never by ``make test``, which needs no Ray. A node takes seconds to start, so tests share
them. They are in a network namespace where nothing but loopback is up: Ray binds to the host's primary address.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_cluster import TestCluster, engine_processes

import ray
from enginewire.testing import wait_until
from support.netns import lone_host

HERE = Path(__file__).parent
TIMEOUT_S = 240
"""Of one test, with the cluster if it is the first."""

GIVEN_BACK_WITHIN_S = 20.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder their marker and their time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """Three nodes, with this process as the driver of a job."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with lone_host() as host, host.entered():
        cluster = TestCluster()
        try:
            cluster.start()
            ray.init(cluster.address, namespace="enginewire", log_to_driver=False, configure_logging=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(autouse=True)
def nothing_leaks(cluster: TestCluster) -> Iterator[None]:
    """Fail a test that leaves a process of an engine, an actor, a placement group or a thread of ours.

    In the place of the check of the same name for all other tests: Ray keeps connections open.
    """
    yield
    _expect_none(engine_processes)
    _expect_none(lambda: [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"])
    _expect_none(lambda: ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0))
    _expect_none(lambda: [thread for thread in threading.enumerate() if thread.name.startswith("enginewire-")])


def _expect_none(left: Callable[[], object]) -> None:
    try:
        wait_until(lambda: not left(), GIVEN_BACK_WITHIN_S, "the end of what a test started")
    except TimeoutError:
        pytest.fail(f"left behind: {left()}", pytrace=False)
