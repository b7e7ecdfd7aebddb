"""A mixture-of-experts model over two vLLM ranks, which step together, behind our coordinator.

vLLM's CPU build lacks two collectives for this; ``moe_patch.py`` supplies them in its workers. The model is tiny and
has random weights.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from deployment import Deployment
from environments import HERE, Environment
from processes import ENGINE_FLAGS, Runner, expect_ready, poll_until

from enginewire.testing import free_tcp_port


@pytest.fixture(scope="module")
def served(vllm: Environment, runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Our server, its coordinator, and two ranks of vLLM."""
    model = tmp_path_factory.mktemp("tinymoe")
    make_model(model, vllm.model)
    where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_tcp_port())]
    size = ["--data-parallel-size", "2"]
    aid = ["--load-format", "dummy", "--worker-extension-cls", "moe_patch.Ext"]
    lock_step = ["--set", "data_parallel_lock_step=true"]
    ranks = ["--headless", *size, "--data-parallel-size-local", "2", *where, *ENGINE_FLAGS, *aid]
    with (
        runner.serve(model, *size, "--data-parallel-size-local", "0", *where, *lock_step) as (server, url),
        runner.vllm(vllm, "ranks", model, *ranks, env={"PYTHONPATH": str(HERE)}) as engines,
    ):
        expect_ready(f"{url}/ready", server, engines, timeout_s=600)
        yield Deployment(url, model.name, server, engines)


def make_model(folder: Path, tokenizer: Path) -> None:
    """Put the configuration of the model and the tokenizer of the usual one into a folder."""
    shutil.copy(HERE / "tinymoe" / "config.json", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder)


def complete(served: Deployment, rank: int, max_tokens: int = 8) -> int:
    """Have a rank generate, and return how many tokens came."""
    body = {"model": served.model, "prompt": "one two", "max_tokens": max_tokens, "ignore_eos": True}
    response = httpx.post(
        f"{served.url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=60
    )
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["completion_tokens"])


def cpu_share(processes: list[psutil.Process], seconds: float) -> float:
    """Return how much of one processor they use together, over some time."""
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    begin = time.monotonic()
    time.sleep(seconds)  # what is measured is time
    after = sum(sum(process.cpu_times()[:2]) for process in processes)
    return (after - before) / (time.monotonic() - begin)


def test_a_request_to_either_rank_wakes_both(served: Deployment) -> None:
    """A rank that is alone in a wave blocks in its first collective; so this ends only if the other one steps too."""
    for rank in (0, 1, 1, 0):
        assert complete(served, rank) == 8


def test_idle_ranks_rest_between_waves_and_wake_again(served: Deployment) -> None:
    """A wave that does not end goes on with dummy batches, at full speed."""
    ranks = served.engine.children("EngineCore")
    assert len(ranks) == 2
    complete(served, 0)
    poll_until(lambda: cpu_share(ranks, 0.5) < 0.2, 60, "rest")
    for rank in (1, 0):
        assert complete(served, rank) == 8


def test_requests_to_both_ranks_at_once_share_waves(served: Deployment) -> None:
    """The one that ends first goes on with dummy batches until the other one is done."""
    with served.streaming(max_tokens=200) as one, served.streaming(max_tokens=20) as other:
        for lines in (other, one):
            events = [line for line in lines if line]
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_ranks_pause_and_resume_together(served: Deployment) -> None:
    """By consensus of the ranks: the utility goes to both, and the answer comes when they have agreed."""
    served.post("/pause?mode=wait")
    assert served.get("/is_paused").json() == {"is_paused": True}
    served.post("/resume")
    assert served.get("/is_paused").json() == {"is_paused": False}
    assert complete(served, 1) == 8
