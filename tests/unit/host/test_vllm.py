"""How a vLLM is started, and what its end means."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from enginewire import ConfigError, EngineConfig
from enginewire.engine.registry import find_executor
from enginewire.engine.spec import EngineSpec
from enginewire.host.executor_source import executor_source
from enginewire.host.vllm import VLLM, vllm_command, vllm_end, vllm_environment, vllm_options


def spec(*, rank: int = 0, address: str = "tcp://127.0.0.1:29550", **settings: Any) -> EngineSpec:
    options = {"python": sys.executable, "args": ["--dtype", "bfloat16"]}
    config = EngineConfig.create("/hf", executor=VLLM, executor_options=options, **settings)
    return EngineSpec(config=config, engine_index=rank, handshake_address=address, local=False, headless=True)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_each_rank_has_a_launcher_of_its_own() -> None:
    """One of several takes them all down when one dies."""
    command = vllm_command(spec(rank=2, data_parallel_size=4), 9)
    assert value_of(command, "--data-parallel-size") == "4"
    assert value_of(command, "--data-parallel-size-local") == "1"
    assert value_of(command, "--data-parallel-start-rank") == "2"


def test_arguments_of_the_user_come_last_and_win() -> None:
    assert vllm_command(spec(), 9)[-2:] == ["--dtype", "bfloat16"]


def test_ours_are_not_given_where_nothing_was_set() -> None:
    command = vllm_command(spec(), 9)
    assert "--max-model-len" not in command
    assert "--disable-log-stats" not in command


def test_a_single_engine_is_told_the_frontend_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ignores the address flag then; with several engines it does not, and the variable means something else."""
    monkeypatch.delenv("VLLM_DP_MASTER_IP", raising=False)
    assert vllm_environment(spec(address="tcp://[fd00::1]:29550"))["VLLM_DP_MASTER_IP"] == "fd00::1"
    assert "VLLM_DP_MASTER_IP" not in vllm_environment(spec(data_parallel_size=2))
    assert value_of(vllm_command(spec(address="tcp://[fd00::1]:29550"), 9), "--data-parallel-address") == "fd00::1"


def test_on_loopback_its_own_ports_are_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert vllm_environment(spec())["VLLM_HOST_IP"] == "127.0.0.1"
    assert "VLLM_HOST_IP" not in vllm_environment(spec(address="tcp://10.0.0.1:29550"))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.7")
    assert vllm_environment(spec())["VLLM_HOST_IP"] == "127.0.0.7"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("/hf", {}, "needs the Python of an environment that has vLLM"),
        ("/hf", {"python": "/nowhere"}, "cannot run '/nowhere'"),
        ("/hf", {"python": sys.executable, "arguments": []}, "unknown field `arguments`"),
        ("/hf", {"python": sys.executable, "args": "--x"}, "Expected `array`, got `str`"),
        (None, {"python": sys.executable}, "smollm2-135m, the default here, is a model for openvino"),
    ],
)
def test_what_cannot_be_started_is_refused(model: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vllm_options(EngineConfig.create(model, executor=VLLM, executor_options=options))


def test_it_is_a_name_for_a_process_and_no_executor() -> None:
    """Nothing of vLLM is ever loaded here."""
    assert executor_source(VLLM).reference == VLLM
    with pytest.raises(ConfigError, match="cannot run in this process"):
        find_executor(VLLM)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            ["(EngineCore pid=1) ERROR [core.py:1] ValueError: too big", "RuntimeError: see above"],
            "ValueError: too big",
        ),
        (["  File 'x.py', line 3", "torch.OutOfMemoryError: 3 GiB"], "OutOfMemoryError: 3 GiB"),
        (["raise ValueError", "AssertionError"], "AssertionError"),
        (["INFO no errors here", "INFO Shutting down."], "its log does not say why"),
        (
            ["ValidationError: 1 validation error for ModelConfig", "  Value error, max_model_len is too long"],
            "ValidationError: 1 validation error for ModelConfig: Value error, max_model_len is too long",
        ),
        (["usage: vllm", "vllm serve: error: unrecognized arguments: --x"], "error: unrecognized arguments: --x"),
        ([], "its log does not say why"),
    ],
)
def test_its_end_is_explained_by_the_first_error_in_its_log(log: list[str], cause: str) -> None:
    """Its exit status is 0 even after SIGKILL."""
    assert vllm_end(log) == f"vLLM ended: {cause}"
