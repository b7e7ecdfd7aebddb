"""Real vLLM processes of both versions, shared by as many tests as can share them: each takes a minute to start.

These tests are run by ``make interop`` and ``make interop-core``, never by ``make test``. A vLLM that is missing is
made; nothing is skipped for the want of one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environments import VERSIONS, Environment, ensure, interop_folder
from processes import Runner

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""Of one test with the processes that it is the first to need."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder their marker and their time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def pytest_configure() -> None:
    """Let compiled kernels outlive the run: the temporary folder does not."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(interop_folder() / "torchinductor"))


@pytest.fixture(scope="session", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Environment:
    """A vLLM to test against; every test that needs one runs with each version."""
    return ensure(request.param)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """What starts processes. Their logs are in pytest's temporary folder."""
    return Runner(tmp_path_factory.mktemp("logs"))
