"""Headless Chromium, driven through the DevTools protocol over a pipe: no port, no driver program, no library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium")

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
]

HEALTH = "document.querySelector('#health').innerText"
"""What our page says about the engines, taken together."""

ANSWER_S = 20.0
"""How long an answer, or what a test waits for, may take on a busy machine."""


class Browser:
    """A Chromium with an empty profile, and one tab at a time. A context manager.

    Args:
        profile: an empty folder.

    Attributes:
        events: everything the tab reported so far, as ``(method, params)``.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        their_in, self._write_fd = _pipe()
        self._read_fd, their_out = _pipe()
        try:
            # Chromium reads from descriptor 3 and writes to 4.
            self._process = subprocess.Popen(
                [
                    *("sh", "-c", f'exec "$@" 3</dev/fd/{their_in} 4>/dev/fd/{their_out}', "sh"),
                    *(CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
                ],
                pass_fds=(their_in, their_out),
                env=os.environ | {"HOME": str(profile)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(their_in)
            os.close(their_out)

    @contextlib.contextmanager
    def tab(self) -> Iterator[Self]:
        """Open a tab that knows nothing of earlier ones; the other methods work on it."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            yield self
        finally:
            self._session = None
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the tab; return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive(deadline, f"{method} was not answered")
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, accept: Callable[[Any], bool] = bool) -> Any:
        """Evaluate until the value is accepted; return it."""
        deadline = time.monotonic() + ANSWER_S
        while not accept(value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is still {value!r}; page: {self.text()[:600]}"
            select.select([self._read_fd], [], [], 0.05)
        return value

    def text(self) -> str:
        """Return what a reader of the page sees."""
        return str(self.evaluate("document.body.innerText"))

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False, shift: bool = False) -> None:
        """Press and release a key: ``Tab``, ``Enter``, ``Escape``, ``Space``, ``ArrowRight``."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "ArrowRight": 39, "ArrowLeft": 37}
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        event = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 2 * ctrl + 8 * shift,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        script = """(element) => {
            element.scrollIntoView({block: "nearest"});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
        x, y = self.evaluate(f"({script})(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the tab a size, and the user a taste."""
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Save what the whole page looks like."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and violations of the security policy."""
        found = []
        for method, params in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
                found.append(str(params["args"]))
        return found

    def requested_urls(self) -> list[str]:
        """Return what the page asked for over the network, or tried to."""
        urls = [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def close(self) -> None:
        """End the browser and everything it started."""
        self._session = None
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self._process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own
        self._process.wait()
        os.close(self._write_fd)
        os.close(self._read_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, deadline: float, failure: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{failure} within {ANSWER_S:g} s"
            data = os.read(self._read_fd, 1 << 16)
            assert data, f"{failure}: Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


def _pipe() -> tuple[int, int]:
    """Make a pipe whose descriptors are out of the way of Chromium's 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in low)
    for descriptor in low:
        os.close(descriptor)
    return high[0], high[1]
