"""The simulation of load balancers runs, and shows what the documents say about the policies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], dict[str, float]]:
    """Run the quick mode once."""
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "balancer_sim.py"), "--quick"], capture_output=True, text=True, check=True
    )
    line = json.loads(run.stdout.splitlines()[-1])
    return {(row["policy"], row["workload"]): row for row in line["results"]}


def test_every_policy_serves_every_request(results: dict[tuple[str, str], dict[str, float]]) -> None:
    assert len(results) == 5 * 2
    for workload in ("unique", "chat"):
        counts = {row["requests"] for (_, name), row in results.items() if name == workload}
        assert len(counts) == 1, "the same requests for all of them"
        assert counts.pop() > 100


def test_prefix_finds_more_in_caches_and_costs_nothing_without_any(
    results: dict[tuple[str, str], dict[str, float]],
) -> None:
    """docs/decisions/0012: why it is the default."""
    assert results["prefix", "chat"]["hit"] > 1.2 * results["inflight", "chat"]["hit"]
    assert results["prefix", "chat"]["ttft_p50"] < results["inflight", "chat"]["ttft_p50"]
    assert results["prefix", "unique"]["ttft_p99"] == results["inflight", "unique"]["ttft_p99"]


def test_who_knows_loads_spreads_them_better_than_who_does_not(
    results: dict[tuple[str, str], dict[str, float]],
) -> None:
    assert results["inflight", "unique"]["spread"] < results["random", "unique"]["spread"]
