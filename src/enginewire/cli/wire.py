"""``enginewire wire``: record what frontends and engines say to each other, and show it in words."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginewire.cli.terminal import say
from enginewire.errors import AddressError, ConfigError, EngineClientError

if TYPE_CHECKING:
    from enginewire.recorder.entry import Entry
    from enginewire.recorder.reading import Message

USAGE = "{record,show} [FILE] [options]"

DESCRIPTION = """\
record: sit between engines and a frontend, pass on everything unchanged, and show it. Start the engines with the
address that the recorder listens on; the frontend notices nothing. show: print a recorded file again."""

EXAMPLES = """\
  enginewire wire record --listen tcp://127.0.0.1:29551 --frontend tcp://127.0.0.1:29550 -o conversation.json
  vllm serve MODEL --headless --data-parallel-rpc-port 29551    # an engine, behind the recorder
  enginewire wire show conversation.json --type add --type outputs --request-id cmpl-17
  enginewire wire show conversation.json --json | jq .content.scheduler_stats"""

DEFAULT_LISTEN: Final = "tcp://127.0.0.1:29551"
DEFAULT_FRONTEND: Final = "tcp://127.0.0.1:29550"

WAKE_S: Final = 0.2
"""How soon it is noticed that it is to stop, or that nobody reads the output any more."""

SWITCH_INTERVAL_S: Final = 0.0001
"""How long printing may keep the relay waiting for the interpreter; Python's default would be 5 ms per message."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("action", choices=("record", "show"), metavar="{record,show}", help="what to do")
    parser.add_argument("file", metavar="FILE", nargs="?", help="to show; golden vectors are such files too")
    group = parser.add_argument_group("record")
    add = group.add_argument
    add(
        "--listen",
        metavar="ADDRESS",
        default=DEFAULT_LISTEN,
        help="where engines say HELLO; this host only unless another address is given (default: %(default)s)",
    )
    add(
        "--frontend",
        metavar="ADDRESS",
        default=DEFAULT_FRONTEND,
        help="the frontend's handshake socket (default: %(default)s)",
    )
    add("-o", "--output", metavar="FILE", help="write the messages to this file, in the format of the golden vectors")
    group = parser.add_argument_group("what is shown")
    add = group.add_argument
    add("--engine", metavar="N", type=int, action="append", help="of this engine only; repeatable")
    add("--type", metavar="TYPE", action="append", help="of this type only, as in add, abort, outputs; repeatable")
    add("--request-id", metavar="TEXT", help="about requests whose id contains this")
    add("--json", action="store_true", help="a line of JSON for each message")
    add("--full", action="store_true", help="nothing shortened, arrays with their values, fields with their defaults")
    parser.add_argument("-v", "--verbose", action="store_true", help="show where errors come from")


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    view = View(args)
    if args.action == "show":
        if args.file is None:
            raise ConfigError("show needs the FILE to show")
        show(Path(args.file), view)
    elif args.file is not None:
        raise ConfigError(f"record writes to a file that is given with -o; got {args.file!r} without")
    else:
        record(args, view)


class View:
    """Prints messages and notices to stdout, those that the command line asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        from enginewire.recorder.kinds import TYPES
        from enginewire.recorder.printing import Printer
        from enginewire.recorder.reading import Reader

        self._reader = Reader(is_full=args.full)
        self._printer = Printer(is_full=args.full)
        self._is_json = args.json
        self._engines = args.engine
        self._types = [name.upper().replace("-", "_") for name in args.type or ()]
        self._request_id = args.request_id
        if unknown := sorted(set(self._types) - set(TYPES)):
            raise ConfigError(f"no message is of type {', '.join(unknown)}; types: {', '.join(TYPES).lower()}")

    def __call__(self, item: Entry | tuple[float, str]) -> None:
        """Print a message, or a notice with its time."""
        if isinstance(item, tuple):
            if not self._is_json:
                self._write(f"{item[0]:>10.4f}  * {item[1]}")
            return
        message = self._reader.read(item)
        if self._is_wanted(message):
            self._write(self._printer.json(message) if self._is_json else self._printer.text(message))

    def _is_wanted(self, message: Message) -> bool:
        return (
            (not self._engines or message.engine_index in self._engines)
            and (not self._types or message.type in self._types)
            and (not self._request_id or any(self._request_id in it for it in message.request_ids))
        )

    def _write(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def show(path: Path, view: View) -> None:
    """Print a file's messages.

    Raises:
        EngineClientError: there is no such file.
        DecodeError: it is no such file.
    """
    from enginewire.recorder.entry import read_file

    try:
        entries, problem = read_file(path)
    except OSError as exc:
        raise EngineClientError(f"cannot read {path}: {exc.strerror}") from exc
    for entry in entries:
        view(entry)
    if problem:
        say(f"enginewire: warning: {problem}")


def record(args: argparse.Namespace, view: View) -> None:
    """Relay and record until Ctrl-C or SIGTERM; the file is whole at any moment.

    Raises:
        AddressError: somebody else listens there.
        ConfigError: an address is none.
        EngineClientError: the file cannot be made.
    """
    from enginewire.recorder.journal import Journal
    from enginewire.recorder.pair import Taps
    from enginewire.recorder.recording import Recording
    from enginewire.recorder.relay import Relay

    _check_listen(args.listen)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with contextlib.ExitStack() as stack:
        try:
            journal = stack.enter_context(Journal(Path(args.output))) if args.output else None
        except OSError as exc:
            raise EngineClientError(f"cannot write {args.output}: {exc.strerror}") from exc
        recording = stack.enter_context(Recording(journal, view))
        taps = Taps(recording.message, lambda text: recording.notice(relay.now, text))
        try:
            relay = stack.enter_context(Relay(args.listen, args.frontend, taps))
        except AddressError:
            raise
        except OSError as exc:
            raise ConfigError(f"{exc.strerror}; --listen and --frontend take addresses as {DEFAULT_LISTEN}") from exc
        say(f"enginewire: engines say HELLO at {relay.address}, the frontend is at {args.frontend}; Ctrl-C ends it")
        stack.callback(lambda: say(f"enginewire: {recording.summary()}"))
        told_to_stop = _signals()
        while recording.failure is None and not told_to_stop:
            relay.run_once(WAKE_S)
    if recording.failure is not None:
        raise recording.failure
    if signal.SIGTERM in told_to_stop:
        raise SystemExit(128 + signal.SIGTERM)


def _signals() -> list[int]:
    """Return a list that SIGINT and SIGTERM append themselves to: a message is passed on and written as a whole."""
    came: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: came.append(number))
    return came


def _check_listen(address: str) -> None:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not address.startswith("tcp://") or not host or host in ("*", "0.0.0.0", "::"):
        raise ConfigError(
            f"--listen must be the tcp address that engines connect to, as {DEFAULT_LISTEN}; got {address}"
        )
    if not (host.startswith("127.") or host in ("localhost", "::1")):
        say(f"enginewire: warning: whoever can reach {host} can talk to the engines and the frontend behind it")
