"""How an executor class gets to an engine process."""

from __future__ import annotations

import pickle

import pytest

from enginewire import ConfigError
from enginewire.errors import describe_exit
from enginewire.executors import EchoExecutor
from enginewire.host.executor_source import executor_source


class InThisModule(EchoExecutor):
    pass


def test_a_name_travels_as_a_name() -> None:
    assert executor_source("echo").reference == "echo"
    assert executor_source("enginewire.executors.echo:EchoExecutor").pickled is None


def test_a_class_of_a_module_travels_as_a_reference() -> None:
    source = executor_source(InThisModule)
    assert source.reference == f"{__name__}:InThisModule"
    assert source.pickled is None


def test_a_class_of_a_function_travels_by_value() -> None:
    class Local(EchoExecutor):
        answer = 42

    source = executor_source(Local)
    assert source.pickled is not None
    assert pickle.loads(source.pickled).answer == 42


def test_a_class_under_another_name_travels_by_value() -> None:
    """Its module has something else under its name: importing that would run the wrong one."""
    renamed = type("InThisModule", (EchoExecutor,), {"answer": 43, "__module__": __name__})
    source = executor_source(renamed)
    assert source.pickled is not None
    assert pickle.loads(source.pickled).answer == 43


@pytest.mark.parametrize("name", ["nothing", "no.module:Class", "pathlib:Nothing", "pathlib:Path"])
def test_what_cannot_be_found_is_refused_here(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        executor_source(name)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-99, "killed by signal 99 (unknown signal)"),
    ],
)
def test_an_exit_status_in_words(status: int, words: str) -> None:
    """C-27."""
    assert describe_exit(status) == words
