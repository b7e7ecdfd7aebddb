"""What soaks say while they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return what prints a line at once: nobody waits for half an hour without a word."""

    def show(line: str) -> None:
        with capfd.disabled():
            print(line, flush=True)

    return show
