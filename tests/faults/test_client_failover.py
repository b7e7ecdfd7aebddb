"""One of several real engines is killed under load, and no request notices (issue 6)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_executors import WorksOnce

from client_harness import MP_FACES, PATIENCE_S, echo_face, mp_client, request
from enginewire import LLM, AsyncLLM, FinishReason, RequestOutput, SamplingParams
from enginewire.client.mp import MPClient
from enginewire.testing import wait_until

NUM_STREAMS = 64
NUM_TOKENS = 120
START_S = 30.0
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 4,
    "failover": "exact",
    "restart_engine": 10,
    "restart_window_s": 0.0,
    "forward_engine_log": False,
    "executor_options": {"step_time_s": 0.01},
}
RESUME = {**SETTINGS, "failover": "resume"}


def kill(client: MPClient, rank: int) -> None:
    """Kill an engine."""
    manager = client.resources.engine_manager
    assert manager is not None
    os.kill(manager.processes[rank].popen.pid, signal.SIGKILL)


def mp_client_of(llm: LLM | AsyncLLM) -> MPClient:
    client = llm._client
    assert isinstance(client, MPClient)
    return client


def prompts() -> list[str]:
    return [f"stream {i:02}: so it goes on and on. " for i in range(NUM_STREAMS)]


def params_of(i: int) -> SamplingParams:
    """Vary what has to be right at the seam."""
    more: dict[str, Any] = [
        {},
        {"logprobs": 2, "min_tokens": 50},
        {"stop": [f"{i:02}: so it goes on and on. stream {i:02}: so"], "prompt_logprobs": 1},
        {"presence_penalty": 0.0, "prompt_logprobs": 0, "logprobs": 0},
    ][i // 4 % 4]
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS - i % 7, ignore_eos=True, **more)


@dataclass
class Told:
    """What a request told its user in the end."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: object
    cumulative_logprob: float | None
    logprobs: object
    prompt_logprobs: object
    num_cached_tokens: int | None

    @classmethod
    def by(cls, output: RequestOutput) -> Told:
        (one,) = output.outputs
        return cls(
            one.text,
            one.token_ids,
            one.finish_reason,
            one.stop_reason,
            one.cumulative_logprob,
            one.logprobs,
            output.prompt_logprobs,
            output.num_cached_tokens,
        )


async def streams(llm: AsyncLLM, num_started: asyncio.Semaphore | None = None) -> list[Told]:
    """Run all streams at once; release the semaphore once for each that has delivered something."""

    async def stream(i: int, prompt: str) -> Told:
        last: RequestOutput | None = None
        async for output in llm.generate(prompt, params_of(i), data_parallel_rank=i % 4):
            if last is None and num_started is not None:
                num_started.release()
            last = output
        assert last is not None
        return Told.by(last)

    return await asyncio.gather(*(stream(i, prompt) for i, prompt in enumerate(prompts())))


async def served_by(llm: AsyncLLM, rank: int) -> int | None:
    """Run a request on an engine; return who served it."""
    served: int | None = None
    async for output in llm.generate("Are you back?", SamplingParams(max_tokens=3), data_parallel_rank=rank):
        served = output.outputs[0].engine_index
    return served


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_rounds", [4, pytest.param(10, marks=pytest.mark.slow)])
async def test_one_of_four_is_killed_under_64_streams_time_after_time(num_rounds: int) -> None:
    """Issue 6, shows: 0 failed, every text as if undisturbed, and the engine is back and serves, ten times in a row."""
    async with AsyncLLM("echo", **SETTINGS) as llm:
        client = mp_client_of(llm)
        undisturbed = await streams(llm)
        assert {told.finish_reason for told in undisturbed} == {"length", "stop"}
        for i in range(num_rounds):
            victim = i % 4
            num_started = asyncio.Semaphore(0)
            running = asyncio.ensure_future(streams(llm, num_started))
            for _ in range(NUM_STREAMS):
                await num_started.acquire()
            kill(client, victim)
            assert await running == undisturbed, f"round {i}"
            async with asyncio.timeout(START_S):
                while not (status := llm.engine_statuses()[victim]).num_restarts > i // 4 or status.state != "ready":
                    await asyncio.sleep(0.05)
            assert await served_by(llm, victim) == victim
        statuses = llm.engine_statuses()
        assert sum(status.num_restarts for status in statuses) == num_rounds
        assert sum(status.num_moved for status in statuses) > num_rounds * NUM_STREAMS // 8, "of up to twice as many"
        assert sum(status.num_lost for status in statuses) == 0
        assert client.inbox.live == set()
        assert all(not engine.live for engine in client.engines)


def test_a_batch_does_not_notice_either() -> None:
    """Issue 6, shows: the sync face, whose consumer is another thread than its receiver."""
    with LLM("echo", **SETTINGS) as llm:
        params = [params_of(i) for i in range(NUM_STREAMS)]
        undisturbed = [Told.by(output) for output in llm.generate(prompts(), params)]
        client = mp_client_of(llm)

        def kill_in_the_middle() -> None:
            wait_until(lambda: all(len(engine.live) > 8 for engine in client.engines), START_S, "load")
            wait_until(lambda: client.engines[2].load.running, START_S, "running")
            kill(client, 2)

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        told = [Told.by(output) for output in llm.generate(prompts(), params)]
        killer.join()
        assert told == undisturbed
        status = client.engine_statuses()[2]
        assert (status.num_deaths, status.num_lost) == (1, 0)
        assert status.num_moved > 8


@pytest.mark.parametrize("kind", MP_FACES)
def test_with_a_single_engine_that_restarts_requests_wait_for_it(kind: str) -> None:
    """Issue 6: works with several engines, or with one that restarts."""
    settings = {**RESUME, "data_parallel_size": 1}
    with echo_face(kind, **settings) as face:
        for i in range(8):
            face.add_request(request(f"r{i}", prompt=range(10 + i, 30 + i), max_tokens=100))
        tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(8)}
        ends: dict[str, FinishReason] = {}
        was_killed = False
        while len(ends) < 8:
            for output in face.get_output(START_S).outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ends[output.request_id] = output.finish_reason
            if not was_killed and min(map(len, tokens.values())) > 20:
                kill(mp_client(face), 0)
                was_killed = True
        assert set(ends.values()) == {FinishReason.LENGTH}
        for i in range(8):
            assert tokens[f"r{i}"] == [*range(10 + i, 30 + i)] * 5


@pytest.mark.parametrize("kind", MP_FACES)
def test_what_may_not_be_resumed_fails_with_the_cause_and_what_has_no_token_begins_anew(kind: str) -> None:
    """Resuming: what may not resume fails with the cause; anything may restart if nothing was delivered yet."""
    with echo_face(kind, **{**RESUME, "data_parallel_size": 2}) as face:
        for request_id, params in {
            "seeded": {"seed": 1},
            "patterns": {"repetition_detection": {"max_pattern_size": 50, "min_count": 9}},
            "plain": {},
        }.items():
            one = request(request_id, max_tokens=200, **params)
            one.data_parallel_rank = 1
            face.add_request(one)
        seen: dict[str, int] = dict.fromkeys(("seeded", "patterns", "plain"), 0)
        while min(seen.values()) < 5:
            for output in face.get_output().outputs:
                seen[output.request_id] += len(output.new_token_ids)
        os.kill(mp_client(face).resources.engine_manager.processes[1].popen.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        late = request("late", max_tokens=5, seed=1)
        late.data_parallel_rank = 1
        face.add_request(late)
        kill(mp_client(face), 1)
        seen["late"] = 0
        ends: dict[str, tuple[FinishReason, object]] = {}
        while len(ends) < 4:
            for output in face.get_output().outputs:
                seen[output.request_id] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    ends[output.request_id] = output.finish_reason, output.stop_reason
        lost = "engine_lost: engine 1: killed by signal 9 (SIGKILL); it does not go on elsewhere: "
        assert ends["seeded"] == (FinishReason.ERROR, f"{lost}seed: the random numbers begin anew")
        assert ends["patterns"] == (FinishReason.ERROR, f"{lost}repetition_detection: it would begin anew")
        assert ends["plain"] == ends["late"] == (FinishReason.LENGTH, None)
        assert (seen["plain"], seen["late"]) == (200, 5)
        status = face.client.engine_statuses()[1]
        assert (status.num_moved, status.num_lost) == (2, 2)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_request_that_three_engines_did_not_survive_is_not_sent_to_a_fourth(kind: str) -> None:
    """Failover: it may be why they ended."""
    settings = {**RESUME, "data_parallel_size": 4, "restart_engine": 0}
    with echo_face(kind, **settings) as face:
        face.add_request(request("poison", max_tokens=100_000))
        for i in range(3):
            outputs = face.outputs(5)
            assert all(output.finish_reason is None for output in outputs)
            kill(mp_client(face), face.client.engine_index_of("poison"))
            deaths = i + 1
            wait_until(
                lambda deaths=deaths: sum(s.num_deaths for s in face.client.engine_statuses()) == deaths,
                PATIENCE_S,
                "its death",
            )
        while (output := face.outputs(1)[0]).finish_reason is None:
            pass
        assert output.finish_reason is FinishReason.ERROR
        assert str(output.stop_reason).endswith("it ran on 3 engines when they ended, and may be why")
        face.add_request(request("other"))
        assert face.outputs(4)[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_request_that_finds_no_engine_in_time_fails_with_the_cause(kind: str, tmp_path: Path) -> None:
    """failover_timeout_s."""
    options = {"step_time_s": 0.01, "mark": str(tmp_path / "mark"), "then": "hang"}
    settings = {**RESUME, "data_parallel_size": 1, "failover_timeout_s": 1.0, "executor_options": options}
    with echo_face(kind, WorksOnce, **settings) as face:
        face.add_request(request("r", max_tokens=100_000))
        face.add_request(request("aborted", max_tokens=100_000))
        face.outputs(2)
        kill(mp_client(face), 0)
        wait_until(lambda: face.client.engine_statuses()[0].num_deaths, PATIENCE_S, "its death")
        with_end: list[Any] = []
        aborted = False
        while not with_end:
            with_end = [output for output in face.outputs(1) if output.finish_reason is not None]
            if not aborted:
                face.abort_requests(["aborted"])
                aborted = True
        (end,) = with_end
        assert (end.request_id, end.finish_reason) == ("r", FinishReason.ERROR)
        assert end.stop_reason == (
            "engine_lost: engine 0: killed by signal 9 (SIGKILL); it does not go on elsewhere: "
            "no engine took it over within 1 s"
        )
        assert mp_client(face).inbox.live == set()


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_moved_request_is_aborted_where_it_is(kind: str) -> None:
    """C-51: under the id that its engine knows."""
    with echo_face(kind, **{**RESUME, "data_parallel_size": 2, "restart_engine": 0}) as face:
        one = request("r", max_tokens=100_000)
        one.data_parallel_rank = 1
        face.add_request(one)
        face.outputs(3)
        kill(mp_client(face), 1)
        wait_until(lambda: face.outputs(1) and face.client.engine_index_of("r") == 0, PATIENCE_S, "its move")
        assert face.call_utility("get_request_ids") == ["r~2"]
        face.abort_requests(["r"])
        wait_until(lambda: not face.call_utility("get_request_ids"), PATIENCE_S, "its end")
        assert mp_client(face).inbox.live == set()
        face.add_request(request("r", max_tokens=1))
