"""The page at ``/``, in headless Chromium."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import HEALTH, Browser
from serving import Served, serve

from enginewire.server.playground import page

pytestmark = pytest.mark.timeout(120)

OUTPUT = "document.querySelector('#output').innerText"
STATUS = "document.querySelector('#status').innerText"
RUNNING = "document.querySelector('#running').innerText"
FOCUS = "document.activeElement.id"
TOO_WIDE = (
    "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth).map("
    "(e) => e.outerHTML.slice(0, 80))"
)


def screenshot(browser: Browser, name: str) -> None:
    """Keep a picture where ``ENGINEWIRE_SCREENSHOTS`` says, for people to look at."""
    if folder := os.environ.get("ENGINEWIRE_SCREENSHOTS"):
        browser.screenshot(Path(folder, f"{name}.png"))


def test_a_stream_grows_and_the_stop_button_ends_it(slow_echo: Served, open_page: Callable[[str], Browser]) -> None:
    """Issue 3: streams a completion and stops it."""
    browser = open_page(slow_echo.url)
    browser.click("label[for=mode-text]")
    browser.click("#prompt")
    browser.type("Once upon a time there was an engine. ")
    browser.evaluate("document.querySelector('#max_tokens').value = 5000")
    browser.click("#go")
    lengths = [browser.wait_for(f"{OUTPUT}.length", lambda length: length > 80)]
    lengths.append(browser.wait_for(f"{OUTPUT}.length", lambda length: length > lengths[0]))
    browser.wait_for(RUNNING, lambda running: running == "1")
    browser.wait_for("Number(document.querySelector('#rate').innerText)", lambda rate: rate > 5)
    screenshot(browser, "streaming-1280")
    browser.click("#go")
    browser.wait_for(STATUS, lambda status: status.startswith("stopped · about "))
    browser.wait_for(RUNNING, lambda running: running == "0")
    stopped_at = browser.evaluate(OUTPUT)
    assert slow_echo.metric("vllm:num_requests_running") == 0
    assert stopped_at.startswith("Once upon a time there was an engine. Once upon")
    assert browser.evaluate(OUTPUT) == stopped_at
    assert browser.evaluate("document.querySelector('#go').innerText").startswith("Complete")
    assert browser.complaints() == []
    assert {url[: len(slow_echo.url)] for url in browser.requested_urls()} == {slow_echo.url}


def test_a_chat_works_with_the_keyboard_alone(slow_echo: Served, open_page: Callable[[str], Browser]) -> None:
    browser = open_page(slow_echo.url)
    assert browser.evaluate(FOCUS) == "prompt"
    browser.type("Hello")
    for expected in ("go", "SUMMARY"):
        browser.press("Tab")
        assert browser.evaluate(f"{FOCUS} || document.activeElement.tagName") == expected
    browser.press("Tab")
    assert browser.evaluate(FOCUS) == "max_tokens"
    browser.evaluate("document.activeElement.select()")
    browser.type("5")
    browser.press("Enter", ctrl=True)
    browser.wait_for(STATUS, lambda status: status.startswith("length · 5 tokens"))
    assert browser.evaluate("document.querySelector('.turn.assistant').innerText")
    assert re.search(r"\d+ in the prompt · first after .* · [\d.]+ tokens/s", browser.evaluate(STATUS))

    browser.evaluate("document.querySelector('#prompt').focus()")
    browser.type("Again and " * 50)
    browser.evaluate("document.querySelector('#max_tokens').value = 5000")
    browser.press("Enter", ctrl=True)
    browser.wait_for(
        "document.querySelectorAll('.turn.assistant')[1]?.innerText.length", lambda length: (length or 0) > 5
    )
    browser.press("Escape")
    browser.wait_for(STATUS, lambda status: status.startswith("stopped"))
    assert browser.evaluate(FOCUS) == "prompt"
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 4
    assert browser.complaints() == []


def test_what_is_sent_before_the_models_are_known_waits_for_them(
    slow_echo: Served, open_page: Callable[[str], Browser]
) -> None:
    """A quick hand, or a script, sends while the page still loads: that must not be for the model ''."""
    browser = open_page(slow_echo.url)
    browser.wait_for("document.querySelector('#model').options.length")
    browser.type("Hello")
    browser.evaluate("document.querySelector('#max_tokens').value = 5")
    browser.evaluate(
        "document.querySelector('#model').replaceChildren(),"
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true})), 0"
    )
    browser.wait_for(STATUS, lambda status: status.startswith("length · 5 tokens"))
    assert browser.evaluate("document.querySelector('#model').value") == "echo"
    assert browser.evaluate("document.querySelector('#error').hidden")


def test_all_that_can_be_operated_has_a_name(slow_echo: Served, open_page: Callable[[str], Browser]) -> None:
    """As the accessibility tree has it: what a screen reader says."""
    browser = open_page(slow_echo.url)
    browser.wait_for("document.querySelector('#model').options.length")
    browser.call("Accessibility.enable")
    roles = {"button", "textbox", "spinbutton", "combobox", "radio", "DisclosureTriangle", "meter", "log", "image"}
    nameless = [
        node
        for node in browser.call("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in roles and not node["name"]["value"].strip()
    ]
    assert nameless == []


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (360, False), (320, True)])
def test_it_fits_narrow_screens(slow_echo: Served, open_page: Callable[[str], Browser], width: int, dark: bool) -> None:
    browser = open_page(slow_echo.url)
    browser.resize(width, 740, dark=dark)
    browser.type("A_word_so_long_that_it_has_to_be_broken_somewhere_" * 3)
    browser.evaluate("document.querySelector('#max_tokens').value = 40")
    browser.press("Enter", ctrl=True)
    browser.wait_for(STATUS, lambda status: status.startswith("length"))
    screenshot(browser, f"chat-{width}-{'dark' if dark else 'light'}")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("num_engines", [2, 16])
def test_every_engine_has_a_line_that_fits(open_page: Callable[[str], Browser], num_engines: int) -> None:
    """Issue 5."""
    with serve("echo", "--data-parallel-size", str(num_engines), "--executor-option", "step_time_s=0.02") as served:
        browser = open_page(served.url)
        assert browser.evaluate(HEALTH) == f"{num_engines} engines ready"
        browser.click("label[for=mode-text]")
        browser.click("#prompt")
        browser.type("Hello")
        browser.evaluate("document.querySelector('#max_tokens').value = 5000")
        browser.press("Enter", ctrl=True)
        lines = "[...document.querySelectorAll('#engines .line')].map((line) => line.innerText.split('\\n'))"
        busy = browser.wait_for(lines, lambda found: [line for line in found if "1 running" in line])
        assert [line[0] for line in busy] == [f"Engine {index}" for index in range(num_engines)]
        assert sorted(line[1] for line in busy) == ["0 running"] * (num_engines - 1) + ["1 running"]
        served.engines()[-1].kill()
        browser.wait_for(HEALTH, lambda health: health == f"{num_engines - 1} of {num_engines} ready")
        assert browser.evaluate("document.querySelector('#engines .death').innerText") == "killed by signal 9 (SIGKILL)"
        for width, dark in ((1280, False), (1280, True), (360, True), (320, False)):
            browser.resize(width, 740, dark=dark)
            screenshot(browser, f"engines-{num_engines}-{width}-{'dark' if dark else 'light'}")
            assert browser.evaluate("document.documentElement.scrollWidth") == width
            assert browser.evaluate(TOO_WIDE) == []
        assert browser.complaints() == []


def test_what_the_server_refuses_is_said(slow_echo: Served, open_page: Callable[[str], Browser]) -> None:
    browser = open_page(slow_echo.url)
    browser.wait_for("document.querySelector('#model').options.length")
    browser.type("Hello")
    browser.evaluate("document.querySelector('#model').add(new Option('nobody', 'nobody', true, true))")
    browser.press("Enter", ctrl=True)
    assert "nobody" in browser.wait_for("document.querySelector('#error').innerText")
    assert browser.evaluate("document.querySelector('#prompt').value") == "Hello"
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0


def test_a_key_is_asked_for_and_used(open_page: Callable[[str], Browser]) -> None:
    with serve("echo", "--api-key", "secret") as served:
        browser = open_page(served.url)
        browser.wait_for("document.querySelector('#key-row').checkVisibility()")
        browser.click("#key")
        browser.type("secret")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#model').options.length")
        assert not browser.evaluate("document.querySelector('#key-row').checkVisibility()")
        browser.click("#prompt")
        browser.type("Hello")
        browser.press("Enter", ctrl=True)
        browser.wait_for(STATUS, lambda status: "tokens" in status)


def test_model_output_stays_text(slow_echo: Served, open_page: Callable[[str], Browser]) -> None:
    browser = open_page(slow_echo.url)
    browser.click("label[for=mode-text]")
    browser.click("#prompt")
    browser.type("<img src=x onerror=alert(1)><b>bold</b>")
    browser.evaluate("document.querySelector('#max_tokens').value = 39")
    browser.press("Enter", ctrl=True)
    browser.wait_for(STATUS, lambda status: status.startswith("length"))
    assert browser.evaluate(OUTPUT).count("<img src=x onerror=alert(1)>") == 2
    assert browser.evaluate("document.querySelectorAll('#output img, #output b').length") == 0


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    body, headers = page()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy.pop(name))
    assert set(policy.values()) == {"'none'"}
    html = body.decode()
    assert re.findall(r"(?:https?:)?//[\w.]+", html.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"\son\w+=|style=", html), "inline handlers and styles are not covered by the hashes"
    assert len(body) < 40_000
