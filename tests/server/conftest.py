"""Servers that several tests share; each is started when it is first needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from chromium import CHROMIUM, HEALTH, Browser
from serving import Served, serve


@pytest.fixture(scope="session")
def echo() -> Iterator[Served]:
    """A server of the model that echoes."""
    with serve("echo", "--admin") as served:
        yield served


@pytest.fixture(scope="session")
def slow_echo() -> Iterator[Served]:
    """The same, with 50 tokens a second and request, and room for few."""
    with serve(
        "echo",
        "--executor-option",
        "step_time_s=0.02",
        "--max-num-seqs",
        "4",
        "--max-queue",
        "4",
        "--max-body-bytes",
        "100000",
    ) as served:
        yield served


@pytest.fixture
def http(echo: Served) -> Iterator[httpx.Client]:
    """A plain client of ``echo``."""
    with httpx.Client(base_url=echo.url, timeout=30) as client:
        yield client


@pytest.fixture
def sdk(echo: Served) -> Iterator[openai.OpenAI]:
    """The official client of ``echo``, which does not try again by itself."""
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "chromium is not installed (apt-get install chromium)"
        assert not os.environ.get("ENGINEWIRE_REQUIRE_CHROMIUM"), reason
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[[str], Browser]]:
    """Return a function that opens an address in a new tab."""
    with chromium.tab() as browser:
        browser.resize(1280, 860)

        def open_url(url: str) -> Browser:
            browser.open(url)
            browser.wait_for(HEALTH, lambda health: health not in ("", "connecting"))
            return browser

        yield open_url
