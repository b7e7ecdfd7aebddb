"""`enginewire serve --headless`: engines for a frontend elsewhere."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from command_line import COMMAND, DEADLINE_S, Start, descendants, error_line, run, wait_for_exit_of

from enginewire import LLM, EngineClientError, SamplingParams
from enginewire.cli.data_parallel import data_parallel_settings
from enginewire.cli.main import main
from enginewire.testing import free_tcp_port, wait_until

TEN = SamplingParams(max_tokens=10, temperature=0)


def headless(start: Start, port: int, *words: str, model: str = "echo") -> subprocess.Popen[str]:
    """Start engines, and wait until they wait."""
    process = start("serve", model, "--headless", "-dpp", str(port), *words)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert f"waiting for a frontend at tcp://127.0.0.1:{port}" in line, process.communicate()[1]
    return process


def frontend(port: int, model: str = "echo") -> LLM:
    """Make a frontend of an engine elsewhere; waits for it."""
    return LLM(model, data_parallel_size_local=0, data_parallel_rpc_port=port, ready_timeout_s=DEADLINE_S)


def engines_of(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the engine processes of a node."""
    return wait_until(
        lambda: [e for e in descendants(process) if "enginewire.engine.main" in e.cmdline()][: count or None],
        DEADLINE_S,
        "start of the engine processes",
    )


def errors_at_end(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a command's end; return what it says itself, without the engines' logs."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return [line for line in errors.splitlines() if line.startswith("enginewire: ")]


@pytest.mark.parametrize("first", ["engine", "frontend"])
def test_a_frontend_elsewhere_is_served_whoever_starts_first(start: Start, first: str) -> None:
    port = free_tcp_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        early = pool.submit(frontend, port) if first == "frontend" else None
        process = headless(start, port)
        with early.result(DEADLINE_S) if early else frontend(port) as llm:
            assert process.stdout is not None
            assert process.stdout.readline() == "Engine 0: ready\n"
            (output,) = llm.generate("hello", TEN)
            assert output.outputs[0].text == "hellohello"
            process.terminate()
            assert errors_at_end(process) == []
            assert process.returncode == 0


def test_a_class_of_the_user_s_own_is_hosted(start: Start, tmp_path: Path) -> None:
    """Its module lies in the working directory."""
    (tmp_path / "loud.py").write_text(
        "from enginewire.executors import EchoExecutor\n"
        "class Loud(EchoExecutor):\n"
        "    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):\n"
        "        return [method.upper()]\n"
    )
    port = free_tcp_port()
    process = start("serve", "echo", "--headless", "--engine", "loud:Loud", "-dpp", str(port), cwd=tmp_path)
    with frontend(port) as llm:
        assert llm.collective_rpc("hello") == ["HELLO"]
    process.terminate()
    assert errors_at_end(process) == []


def test_sigterm_lets_running_requests_finish(start: Start) -> None:
    port = free_tcp_port()
    process = headless(start, port, "--executor-option", "step_time_s=0.01")
    with frontend(port) as llm:
        stream = llm.stream("abc", SamplingParams(max_tokens=100))
        next(stream)
        process.terminate()
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 100
    assert errors_at_end(process) == []
    assert process.returncode == 0


def test_what_does_not_finish_in_time_is_aborted(start: Start) -> None:
    port = free_tcp_port()
    process = headless(start, port, "--executor-option", "step_time_s=0.01", "--shutdown-timeout", "0.2")
    with frontend(port) as llm:
        stream = llm.stream("abc", SamplingParams(max_tokens=100_000))
        next(stream)
        process.terminate()
        *_, last = stream
        assert last.outputs[0].finish_reason == "abort"
    assert errors_at_end(process) == []
    assert process.returncode == 0


def test_a_second_signal_does_not_wait(start: Start) -> None:
    port = free_tcp_port()
    process = headless(start, port, "--executor-option", "step_time_s=0.01")
    engines = engines_of(process, 1)
    with frontend(port) as llm, pytest.raises(EngineClientError):
        for _ in llm.stream("abc", SamplingParams(max_tokens=100_000)):
            process.terminate()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    wait_for_exit_of(engines, DEADLINE_S)


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_killed_launcher_leaves_no_engine(start: Start, is_connected: bool) -> None:
    """C-62: there is no frontend to end them."""
    port = free_tcp_port()
    process = headless(start, port)
    engines = engines_of(process, 1)
    if is_connected:
        with frontend(port):
            process.kill()
    else:
        process.kill()
    wait_for_exit_of(engines, DEADLINE_S)


def test_an_engine_that_dies_leaves_its_siblings_alone_and_a_failed_status(start: Start) -> None:
    """Defect 33: the reference's launcher ends the sibling, with status 0."""
    process = headless(start, free_tcp_port(), "-dp", "3", "-dpl", "2", "-dpr", "1")
    engines = wait_until(
        lambda: found if len(found := engines_of(process, 2)) == 2 else [], DEADLINE_S, "two engine processes"
    )
    engines[0].kill()
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("enginewire: "))
    assert line.startswith("enginewire: error: engine ")
    assert "is dead: killed by signal 9 (SIGKILL)" in line
    assert engines[1].is_running()
    assert process.poll() is None
    process.terminate()
    assert errors_at_end(process) == []  # it was said
    assert process.returncode == 1
    wait_for_exit_of(engines, DEADLINE_S)


def test_when_no_engine_is_left_the_launcher_ends_with_the_cause(start: Start) -> None:
    """Defect 33."""
    process = headless(start, free_tcp_port())
    engines_of(process, 1)[0].kill()
    (line,) = errors_at_end(process)
    assert line == "enginewire: error: engine 0 is dead: killed by signal 9 (SIGKILL)"
    assert process.returncode == 1


def test_an_engine_that_cannot_load_its_model_says_so(start: Start, tmp_path: Path) -> None:
    port = free_tcp_port()
    process = headless(start, port, "--engine", "openvino", "--set", "hello_timeout_s=30", model=str(tmp_path))
    with pytest.raises(EngineClientError):
        LLM("echo", data_parallel_size_local=0, data_parallel_rpc_port=port, ready_timeout_s=3)
    (line,) = errors_at_end(process)
    assert line.startswith("enginewire: error: engine 0 is dead: ModelError: ")
    assert process.returncode == 1


def test_it_needs_neither_a_server_s_packages_nor_a_model_s() -> None:
    """A node for engines has the base install and what its executor needs."""
    program = (
        "import sys\n"
        "for name in ('uvicorn', 'uvloop', 'httptools', 'prometheus_client', 'tokenizers', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "from enginewire.cli.main import main\n"
        f"sys.exit(main(['serve', 'echo', '--headless', '-dpp', '{free_tcp_port()}']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "waiting for a frontend" in process.stdout.readline()
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


REFUSED = {
    "--headless -dpl 0": "--data-parallel-size-local must be at least 1, got 0",
    "--headless -dpp 0": "--data-parallel-rpc-port 0 is none",
    "--headless --api-server-count 2": "--api-server-count 2",
    "--headless --data-parallel-hybrid-lb": "no --data-parallel-hybrid-lb",
    "--headless -dp 2 -dpn 1": "--data-parallel-rank",
    "--headless -dp 2 -dpl 2 -dpr 1": "rank 2 is not below data_parallel_size (2)",
    "--headless -dp 2 -dpr 2": "rank 2 is not below data_parallel_size (2)",
    "--api-server-count 0": "--headless",
    "--data-parallel-external-lb": "needs --data-parallel-rank",
    "-dp 2 -dpn 1 -dpr 1": "choose one",
    "-dp 2 -dpn 1 -dpl 2": "must be 1 or 0",
    "-dp 2 -dpn 2": "rank 2 is not below data_parallel_size (2)",
    "-dp 2 -dpl 3": "data_parallel_size_local must be between 0 and data_parallel_size (2)",
    "--data-parallel-backend ray --headless": "needs `ray start`",
    "--data-parallel-backend ray --api-server-count 2": "one server process",
    "--engine vllm": "--engine-python PATH",
    "--engine vllm --engine-python /nowhere/python": "'/nowhere/python'",
    "--engine-python python3": "is for --engine vllm",
    "--headless --restart-engine 1": "have a supervisor start the command again",
    "--headless --failover resume --drain-timeout 5": "--drain-timeout, --failover is for the server",
    "--restart-engine -1": "restart_engine must be an integer of at least 0, got -1",
    "--failover-timeout -1": "failover_timeout_s must be",
    "--drain-timeout nan": "drain_timeout_s must be",
    "--failover resume --set data_parallel_lock_step=true -dp 2": "lock-step",
    "--port 70000": "port must be 0 to 65535, got 70000",
    "--host=": "host must not be empty",
    "--max-queue -1": "max_queue must be at least 0, got -1",
    "--max-body-bytes 0": "max_body_bytes must be at least 1, got 0",
    "--shutdown-timeout nan": "shutdown_timeout_s must be at least 0, got nan",
    "--stall-timeout -1": "stall_timeout_s must be at least 0, got -1",
    "--max-num-seqs 0": "max_num_seqs must be",
    "--max-model-len 0": "max_model_len must be",
    "--wire-version 9": "9",
    "--served-model-name=": "a served model needs a name",
    "--api-key=": "API key must be",
    "--admin --host 0.0.0.0": "needs --api-key",
    "--set nonsense=1": "nonsense",
    "--engine nonsense": "unknown executor 'nonsense'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_contradict_each_other_are_refused_with_the_reason(
    words: str, capsys: pytest.CaptureFixture[str], own_signals: None
) -> None:
    """Protocol K.1. The status is that of wrong usage, as with flags that argparse refuses."""
    assert main(["serve", "echo", "--port", "0", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[words] in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--load-balancer luck", "luck"),
        ("--executor-option speed=1", "has no option speed"),
        ("--executor-option load_time_s=-1", "load_time_s"),
    ],
)
def test_what_is_found_wrong_later_is_wrong_usage_too(words: str, reason: str) -> None:
    """By the client, or by the engine, which has written a log."""
    result = run("serve", "echo", "--port", "0", *words.split())
    assert result.returncode == 2
    assert reason in result.stderr.splitlines()[-1]


def test_several_server_processes_do_not_restart_engines_and_say_so() -> None:
    result = run("serve", "echo", "--port", "0", "-dp", "2", "--api-server-count", "2", "--restart-engine", "1")
    assert result.returncode == 2
    assert "restart_engine needs a single server process" in result.stderr


def test_two_modes_at_once_are_wrong_usage() -> None:
    result = run("serve", "echo", "--data-parallel-hybrid-lb", "--data-parallel-external-lb")
    assert result.returncode == 2
    assert "not allowed with" in result.stderr


def test_an_engine_of_vllm_needs_a_model_that_vllm_knows() -> None:
    line = error_line(run("serve", "--headless", "--engine", "vllm", "--engine-python", sys.executable))
    assert "smollm2-135m, the default here, is a model for openvino" in line


ACCEPTED = {
    "-dp 4 -dpl 0 -dpa 10.0.0.1 -dpp 1234": {
        "data_parallel_size": 4,
        "data_parallel_size_local": 0,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 1234,
    },
    "-dp 4 -dpl 2 -dpr 2": {
        "data_parallel_size": 4,
        "data_parallel_size_local": 2,
        "data_parallel_start_rank": 2,
        "data_parallel_hybrid_lb": True,
    },
    "-dp 4 -dpr 1": {
        "data_parallel_size": 4,
        "data_parallel_size_local": 3,
        "data_parallel_start_rank": 1,
        "data_parallel_hybrid_lb": True,
    },
    "-dp 2 -dpl 1 -dpr 0": {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_start_rank": 0},
    "-dp 2 -dpr 0 --data-parallel-hybrid-lb": {
        "data_parallel_size": 2,
        "data_parallel_size_local": 2,
        "data_parallel_start_rank": 0,
        "data_parallel_hybrid_lb": True,
    },
    "-dp 2 -dpn 1": {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_external_lb": True},
    "--headless -dp 4 -dpr 1 --api-server-count 0": {
        "data_parallel_size": 4,
        "data_parallel_size_local": 3,
        "data_parallel_start_rank": 1,
    },
    "--headless --set data_parallel_size=2": {"data_parallel_size": 2, "data_parallel_size_local": 2},
    "--load-balancer prefix --wire-version 0.32.0": {"load_balancer": "prefix", "wire_version": "0.32.0"},
}


@pytest.mark.parametrize("words", ACCEPTED)
def test_flags_become_settings(words: str, parse_serve: Callable[[str], object]) -> None:
    """Protocol K.1: a rank means external balancing, a first rank hybrid balancing or a headless node."""
    assert data_parallel_settings(parse_serve(words)) == ACCEPTED[words]


def test_engine_args_may_begin_with_a_dash() -> None:
    """As every argument of vLLM does; argparse alone would take it for a flag of ours."""
    words = ["serve", "echo", "--engine", "vllm", "--engine-python", "/nowhere", "--engine-args", "--enforce-eager"]
    assert "'/nowhere'" in subprocess.run([*COMMAND, *words], capture_output=True, text=True).stderr
