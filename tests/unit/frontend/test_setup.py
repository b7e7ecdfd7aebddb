"""From a constructor's arguments to a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from enginewire.config import EngineConfig
from enginewire.engine.executor import Executor
from enginewire.errors import ConfigError, ModelError
from enginewire.frontend.setup import fetch_model, make_config
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest


class Custom(Executor):
    """An executor that is never made."""

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Sequence[str]) -> None: ...

    def step(self) -> list[EngineCoreOutput]:
        return []

    def has_unfinished_requests(self) -> bool:
        return False


def test_the_default_model_and_engine_are_those_of_the_configuration() -> None:
    assert make_config(None, None, None, None, {}) == EngineConfig.create()


def test_the_echo_engine_needs_no_model() -> None:
    for engine in ("echo", "enginewire.executors.echo:EchoExecutor"):
        assert make_config(None, engine, None, None, {}).model == "echo"
    assert make_config("smollm2-135m", "echo", None, None, {}).model == "smollm2-135m"


def test_an_executor_class_is_named_in_the_configuration() -> None:
    config = make_config("m", Custom, None, {"a": 1}, {"max_num_seqs": 3})
    assert config.executor.endswith(":Custom")
    assert (config.executor_options, config.max_num_seqs) == ({"a": 1}, 3)


@pytest.mark.parametrize("more", [{"model": "echo"}, {"executor_options": {"a": 1}}, {"settings": {"max_num_seqs": 3}}])
def test_a_whole_configuration_takes_no_further_settings(more: dict[str, object]) -> None:
    config = EngineConfig.create("echo")
    arguments: dict[str, object] = {"model": None, "executor_options": None, "settings": {}} | more
    with pytest.raises(ConfigError, match="not both"):
        make_config(engine=None, config=config, **arguments)  # type: ignore[arg-type]
    assert make_config(None, None, config, None, {}) is config


def test_engine_and_executor_are_one_setting() -> None:
    with pytest.raises(ConfigError, match="one setting"):
        make_config("echo", "echo", None, None, {"executor": "echo"})


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting max_tokens; known: .*max_num_seqs"):
        make_config("echo", None, None, None, {"max_tokens": 3})


def test_a_missing_model_file_is_an_error_before_any_engine_starts(tmp_path: Path) -> None:
    """Errors that users will meet: missing model file."""
    with pytest.raises(ModelError, match="no such file"):
        fetch_model(EngineConfig.create(str(tmp_path / "no.gguf")))
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        fetch_model(EngineConfig.create("smollm2-135"))


def test_models_of_other_executors_and_of_remote_engines_are_not_looked_for() -> None:
    fetch_model(EngineConfig.create("theirs/model", executor="theirs"))
    fetch_model(EngineConfig.create("theirs/model", data_parallel_size_local=0))


@pytest.mark.parametrize("engine", [5, dict, Custom.step])
def test_an_engine_that_is_no_executor_is_refused_before_anything_starts(engine: object) -> None:
    with pytest.raises(ConfigError, match=r"engine must be a name, 'module:Class' or a subclass of .*, got "):
        make_config("echo", engine, None, None, {})  # type: ignore[arg-type]
