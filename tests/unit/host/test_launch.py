"""Which launcher a configuration gets."""

from __future__ import annotations

import sys

import pytest

from enginewire import ConfigError, EngineConfig
from enginewire.host.launch import make_launcher
from enginewire.host.manager import CoreEngineProcManager


def test_engines_are_processes_of_this_machine_unless_told_otherwise() -> None:
    launcher = make_launcher(EngineConfig.create("echo"))
    try:
        assert isinstance(launcher, CoreEngineProcManager)
        assert launcher.host is None
    finally:
        launcher.shutdown(0)


def test_a_missing_ray_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it was not there
    for name in ("ray_actors", "ray_engine", "ray_cluster"):
        monkeypatch.delitem(sys.modules, f"enginewire.host.{name}", raising=False)
    with pytest.raises(ConfigError, match=r'needs Ray.*pip install "enginewire\[ray\]"'):
        make_launcher(EngineConfig.create("echo", data_parallel_backend="ray"))


@pytest.mark.parametrize("resources", [{}, {"CPU": 0}, {"CPU": 1, "big": -1}])
def test_resources_that_cannot_be_are_refused(resources: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ray_resources must be amounts above 0"):
        EngineConfig.create("echo", ray_resources=resources)
