"""``enginewire top``: what the engines of a server are doing, in a terminal."""

from __future__ import annotations

import argparse
import http.client
import shutil
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from enginewire import envs
from enginewire.cli.terminal import Screen, say
from enginewire.errors import EngineClientError

if TYPE_CHECKING:
    from enginewire.cli.top_frame import Frame
    from enginewire.server.snapshot import StateSnapshot

USAGE = "[URL] [options]"

DESCRIPTION = """\
Watch the engines of a server: what they run, how full their caches are, who died, of what, and what became of the
requests. It reads GET /state, as the page at / does. q or Ctrl-C leaves. Where there is no terminal, it prints frame
after frame."""

EXAMPLES = """\
  enginewire top
  enginewire top http://10.0.0.1:8000 --api-key "$KEY" --interval 0.5
  enginewire top --once"""

DEFAULT_URL: Final = "http://127.0.0.1:8000"

TIMEOUT_S: Final = 3.0
"""How long an answer may take; that of several server processes takes up to a second."""

TICK_S: Final = 0.1
"""How soon a key, or another size of the terminal, is noticed."""

MAX_WIDTH: Final = 140


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "url", metavar="URL", nargs="?", type=_url, default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="if the server wants one; also $ENGINEWIRE_API_KEY")
    parser.add_argument(
        "--interval", metavar="S", type=_interval, default=1.0, help="seconds between two looks (default: %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and leave; status 1: no server answers")
    parser.add_argument("-v", "--verbose", action="store_true", help="show where errors come from")


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    source = Source(args.url, args.api_key or envs.api_key())
    if args.once:
        sys.stdout.write(_text(source.read()))
    elif sys.stdout.isatty():
        _watch(source, args.interval)
    else:
        _follow(source, args.interval)


class NoAnswerError(EngineClientError):
    """The server does not answer, or not yet. It may later."""


class Source:
    """A server that is watched.

    Args:
        url: without a path.
        api_key: if it wants one.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        from enginewire.server.snapshot import StateSnapshot

        self.url = url
        self._request = urllib.request.Request(f"{url}/state")
        if api_key:
            self._request.add_header("Authorization", f"Bearer {api_key}")
        # Without proxies: a server on this host, or beside it, is not behind one.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._decoder = msgspec.json.Decoder(StateSnapshot)

    def read(self) -> Frame:
        """Return what the server says now.

        Raises:
            NoAnswerError: nothing, or that it is starting.
            EngineClientError: what no second try would change.
        """
        from enginewire.cli.top_frame import Frame

        try:
            with self._opener.open(self._request, timeout=TIMEOUT_S) as response:
                return Frame(self.url, self._decode(response.read()))
        except urllib.error.HTTPError as exc:
            with exc:
                raise self._refused(exc.code, exc.read()) from None
        except (OSError, http.client.HTTPException) as exc:
            reason = getattr(exc, "reason", exc)
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise NoAnswerError(f"no answer from {self.url}: {why}") from exc

    def _decode(self, body: bytes) -> StateSnapshot:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise EngineClientError(f"{self.url}/state is not the state of an enginewire server: {exc}") from exc

    def _refused(self, status: int, body: bytes) -> EngineClientError:
        try:
            message = str(msgspec.json.decode(body)["error"]["message"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
            message = ""
        if status == 401:
            return EngineClientError(f"{self.url} wants an API key: --api-key KEY, or $ENGINEWIRE_API_KEY")
        if status == 503 and message:
            return NoAnswerError(f"{self.url}: {message}")
        return EngineClientError(f"{self.url}/state: HTTP status {status}; is that an enginewire server?")


def _watch(source: Source, interval_s: float) -> None:
    """Draw frame over frame until q is pressed."""
    with Screen() as screen:
        frame, note = None, f"asking {source.url} …"
        due, size = 0.0, screen.size()
        while True:
            screen.draw(_lines(source, frame, note, size))
            if time.monotonic() >= due:
                due = time.monotonic() + interval_s
                try:
                    frame, note = source.read(), ""
                except NoAnswerError as exc:
                    note = f"{exc}; trying again"
                continue
            while time.monotonic() < due and screen.size() == size:
                if screen.key(TICK_S) in ("q", "Q"):
                    return
            size = screen.size()


def _lines(source: Source, frame: Frame | None, note: str, size: tuple[int, int]) -> list[str]:
    from enginewire.cli.top_frame import NOTE, painted

    lines = [] if frame is None else frame.lines(*size, note=note)
    return painted(lines or [[(NOTE, note)]], size[0], in_colour=True)


def _follow(source: Source, interval_s: float) -> None:
    """Print frame after frame, until nobody reads them."""
    while True:
        try:
            sys.stdout.write(_text(source.read()) + "\n")
            sys.stdout.flush()
        except NoAnswerError as exc:
            say(f"enginewire: {exc}; trying again")
        time.sleep(interval_s)


def _text(frame: Frame) -> str:
    from enginewire.cli.top_frame import painted

    width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
    return "".join(f"{line}\n" for line in painted(frame.lines(width), width, in_colour=False))


def _url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"expected the URL of a server, as {DEFAULT_URL}; got {text!r}")
    return url.rstrip("/")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, got {text!r}")
    return seconds
