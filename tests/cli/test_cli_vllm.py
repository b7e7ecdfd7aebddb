"""`--engine vllm`: its launcher started, watched, and never left behind. A stand-in takes vLLM's place."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import fake_vllm
import psutil
import pytest
from command_line import DEADLINE_S, Start, descendants, error_line, read_some, run, wait_for_exit_of

from client_harness import echo_face, mp_client, request
from enginewire import LLM, SamplingParams
from enginewire.testing import free_tcp_port, wait_until

RUN = ["run", "echo", "hello", "--engine", "vllm", "--engine-python", sys.executable]


def headless(start: Start, port: int, folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start a node with one vLLM."""
    vllm = ["--engine", "vllm", "--engine-python", sys.executable, *args]
    env = fake_vllm.install(folder)
    return start("serve", "/hf", "--headless", "-dpp", str(port), *vllm, env=env)


def frontend(port: int) -> LLM:
    """Make a frontend of an engine elsewhere; waits for it."""
    return LLM("echo", data_parallel_size_local=0, data_parallel_rpc_port=port, ready_timeout_s=DEADLINE_S)


def engine_and_launcher(process: subprocess.Popen[str]) -> tuple[psutil.Process, psutil.Process]:
    """Return the two processes that make up a vLLM, once the engine runs."""
    found = wait_until(
        lambda: found if len(found := descendants(process)) == 2 else [], DEADLINE_S, "a launcher and its engine"
    )
    launcher, engine = sorted(found, key=lambda child: child.ppid() != process.pid)
    return engine, launcher


def errors_at_end(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a command's end; return what it says itself, without the engines' logs."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return [line for line in errors.splitlines() if line.startswith("enginewire: ")]


def test_a_vllm_is_started_with_our_settings_and_serves(start: Start, tmp_path: Path) -> None:
    port = free_tcp_port()
    args = ["--engine-args", "--dtype 'bfloat16' --enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    process = headless(start, port, tmp_path, *args, "--set", "log_stats=false", "--shutdown-timeout", "7")
    with frontend(port) as llm:
        (output,) = llm.generate("hello", SamplingParams(max_tokens=5))
        assert output.outputs[0].text == "hello"
        process.terminate()
        assert errors_at_end(process) == []
    assert process.returncode == 0
    arguments = fake_vllm.seen(tmp_path)["arguments"]
    assert arguments == [
        *("/hf", "--headless"),
        *("--data-parallel-size", "1", "--data-parallel-size-local", "1", "--data-parallel-start-rank", "0"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)),
        *("--max-model-len", "512", "--max-num-seqs", "8", "--scheduling-policy", "fcfs", "--shutdown-timeout", "7"),
        *("--disable-log-stats", "--dtype", "bfloat16", "--enforce-eager"),
    ]
    assert fake_vllm.seen(tmp_path)["variables"] == {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_HOST_IP": "127.0.0.1"}


def test_a_vllm_that_cannot_start_is_reported_with_the_error_in_its_log(start: Start, tmp_path: Path) -> None:
    """Its exit status is 0."""
    process = headless(start, free_tcp_port(), tmp_path, "--engine-args", "--fail")
    (line,) = errors_at_end(process)
    assert line == ("enginewire: error: engine 0 is dead: vLLM ended: ValueError: no room for the KV cache")
    assert process.returncode == 1


@pytest.mark.parametrize("victim", ["engine", "launcher"])
def test_a_vllm_that_is_killed_is_dead_and_all_of_it_gone(start: Start, tmp_path: Path, victim: str) -> None:
    """The reference's launcher exits with status 0 then; a launcher that is killed leaves its engine behind."""
    process = headless(start, free_tcp_port(), tmp_path)
    engine, launcher = engine_and_launcher(process)
    (engine if victim == "engine" else launcher).kill()
    (line,) = errors_at_end(process)
    assert line == "enginewire: error: engine 0 is dead: vLLM ended: its log does not say why"
    assert process.returncode == 1
    wait_for_exit_of([engine, launcher], DEADLINE_S)


def test_it_is_the_engine_of_a_command_as_any_other(tmp_path: Path) -> None:
    result = run(*RUN, "--max-tokens", "5", "--engine-args", "--dtype auto", env=fake_vllm.install(tmp_path))
    assert result.stdout == "hello\n", result.stderr
    assert fake_vllm.seen(tmp_path)["arguments"][-2:] == ["--dtype", "auto"]


def test_a_command_whose_vllm_cannot_start_says_why(tmp_path: Path) -> None:
    result = run(*RUN, "--engine-args", "--fail", env=fake_vllm.install(tmp_path))
    assert result.returncode == 1
    assert "engine 0 could not start: vLLM ended: ValueError: no room for the KV cache" in error_line(result)


def test_a_vllm_that_is_killed_ends_the_stream_that_runs_there(start: Start, tmp_path: Path) -> None:
    process = start(*RUN, "--max-tokens", "100000", env=fake_vllm.install(tmp_path))
    read_some(process)
    engine, launcher = engine_and_launcher(process)
    engine.kill()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.startswith("enginewire: error: engine 0 is dead: ")
    wait_for_exit_of([engine, launcher], DEADLINE_S)


def test_a_killed_command_leaves_no_vllm(start: Start, tmp_path: Path) -> None:
    """C-62."""
    process = start(*RUN, "--max-tokens", "100000", env=fake_vllm.install(tmp_path))
    read_some(process)
    below = engine_and_launcher(process)
    process.kill()
    wait_for_exit_of(list(below), DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_vllm_is_left_when_its_owner_ends(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    """C-62."""
    process = headless(start, free_tcp_port(), tmp_path)
    processes = engine_and_launcher(process)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == (-number if number is signal.SIGKILL else 0)
    wait_for_exit_of(list(processes), DEADLINE_S)


def test_llm_takes_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of it: a launcher each, and the client expects engines that come by tcp."""
    monkeypatch.setattr("os.environ", fake_vllm.install(tmp_path))
    options = {"python": sys.executable, "args": ["--enforce-eager"]}
    with LLM("echo", engine="vllm", executor_options=options, data_parallel_size=2, forward_engine_log=False) as llm:
        outputs = llm.generate(["hello", "world"], SamplingParams(max_tokens=5))
    assert [output.outputs[0].text for output in outputs] == ["hello", "world"]
    assert fake_vllm.seen(tmp_path)["arguments"][-1] == "--enforce-eager"


@pytest.mark.parametrize("victim", ["launcher", "engine"])
def test_one_of_several_that_is_killed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Issue 6: a rank of vLLM restarts like one of ours, whichever of its two processes ends."""
    monkeypatch.setattr("os.environ", fake_vllm.install(tmp_path))
    with echo_face(
        "sync",
        executor="vllm",
        executor_options={"python": sys.executable},
        data_parallel_size=2,
        data_parallel_rpc_port=free_tcp_port(),
        restart_engine=1,
    ) as face:
        manager = mp_client(face).resources.engine_manager
        assert manager is not None
        launcher = psutil.Process(manager.processes[1].popen.pid)
        (engine,) = launcher.children()
        (launcher if victim == "launcher" else engine).kill()
        wait_until(lambda: face.client.engine_statuses()[1].num_restarts, DEADLINE_S, "its restart")
        wait_until(lambda: face.client.engine_statuses()[1].state == "ready", DEADLINE_S, "its return")
        wait_for_exit_of([launcher, engine], DEADLINE_S)
        for i in range(4):
            face.add_request(request(f"r{i}", max_tokens=10_000))
        assert [face.client.engine_index_of(f"r{i}") for i in range(4)].count(1) == 2
