"""Failover between real OpenVINO engines: with ``deterministic=True`` the text is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from client_harness import Face, make_client, mp_client
from enginewire import EngineConfig, EngineCoreRequest, FinishReason, SamplingParams
from enginewire.models import resolve_model
from enginewire.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

START_S = 120.0
LENGTH = 48
WORDS = ("cats", "dogs", "rain", "snow", "sun", "moon")


def complete(face: Face, prompts: list[list[int]], params: SamplingParams, *, kill: int | None) -> list[list[int]]:
    """Run all prompts at once, half of them on each engine; kill one in the middle."""
    for i, prompt in enumerate(prompts):
        request_id = f"{i}-{kill}"
        face.add_request(EngineCoreRequest(request_id, prompt, sampling_params=params, data_parallel_rank=i % 2))
    tokens: dict[str, list[int]] = {f"{i}-{kill}": [] for i in range(len(prompts))}
    ends: dict[str, Any] = {}
    while len(ends) < len(prompts):
        for output in face.get_output(START_S).outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        if kill is not None and min(map(len, tokens.values())) > 5:
            manager = mp_client(face).resources.engine_manager
            assert manager is not None
            os.kill(manager.processes[kill].popen.pid, signal.SIGKILL)
            kill = None
    assert set(ends.values()) == {FinishReason.LENGTH}
    return list(tokens.values())


@pytest.mark.parametrize("mode", ["exact", "resume"])
def test_streams_of_a_killed_engine_go_on_at_the_other(mode: str) -> None:
    """Issue 6, shows: deterministic engines go on with the same text; others with the full length."""
    path = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(path)
    prompts = [list(tokenizer.encode(f"Once upon a time there was a story about {word}, and")) for word in WORDS]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    config = EngineConfig.create(
        str(path),
        data_parallel_size=2,
        failover=mode,
        forward_engine_log=False,
        executor_options={"num_kv_blocks": 64, "deterministic": mode == "exact"},
    )
    face = Face("sync", lambda: make_client("sync", config))
    try:
        undisturbed = complete(face, prompts, greedy, kill=None)
        disturbed = complete(face, prompts, greedy, kill=1)
        status = face.client.engine_statuses()[1]
        assert (status.num_deaths, status.num_moved, status.num_lost) == (1, len(prompts) // 2, 0)
        assert [len(tokens) for tokens in disturbed] == [LENGTH] * len(prompts)
        if mode == "exact":
            assert disturbed == undisturbed
    finally:
        face.close()
