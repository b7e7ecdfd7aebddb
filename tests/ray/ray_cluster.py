"""The simulated cluster, and which processes of engines there are on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray.cluster_utils import Cluster

STORE_BYTES: Final = 80 << 20

QUICK_CHECKS: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray notices the loss of a node within 2 s, not 25."""


class TestCluster:
    """A head with one CPU, and two nodes with three: four engines need two of them, and fit if one of those is lost."""

    __test__ = False

    def start(self) -> None:
        """Start the nodes."""
        head = {**_node(1), "include_dashboard": False, "_system_config": QUICK_CHECKS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._cluster.add_node(**_node(3)) for _ in range(2)]

    @property
    def address(self) -> str:
        """Where a driver connects to."""
        return self._cluster.address

    def replace(self, node: Any) -> None:
        """Put a node in the place of one that was lost."""
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes = [each for each in self.nodes if each is not node] + [self._cluster.add_node(**_node(3))]

    def raylets(self) -> set[int]:
        """Return the process ids of the raylets that are left."""
        return {raylet_of(node) for node in (self._cluster.head_node, *self.nodes) if is_alive(raylet_of(node))}

    def lose(self, node: Any) -> None:
        """Kill a node's raylet; what it started is not asked."""
        os.kill(raylet_of(node), 9)

    def shutdown(self) -> None:
        """End everything."""
        if hasattr(self, "_cluster"):
            self._cluster.shutdown()


def _node(num_cpus: int) -> dict[str, Any]:
    return {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}


def raylet_of(node: Any) -> int:
    """Return the process id of a node's raylet."""
    return int(node.all_processes["raylet"][0].process.pid)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass(frozen=True)
class EngineProcess:
    """Process ids of an engine, the actor that started it, and the raylet that started that."""

    pid: int
    actor: int
    raylet: int


def engine_processes() -> list[EngineProcess]:
    """Return the engines on this host, which is the test's own."""
    here = os.readlink("/proc/thread-self/ns/net")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and b"enginewire.engine.main" in (entry / "cmdline").read_bytes()
                and os.readlink(entry / "ns/net") == here
            ):
                actor = _parent(int(entry.name))
                found.append(EngineProcess(int(entry.name), actor, _parent(actor)))
        except OSError:  # it has just ended
            continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
