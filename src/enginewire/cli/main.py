"""The entry point: finds the command, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Final, NoReturn

from enginewire._version import __version__
from enginewire.cli.terminal import one_line, say
from enginewire.errors import (
    AddressError,
    ConfigError,
    EngineClientError,
    EngineDeadError,
    EngineStartupError,
    InvalidRequestError,
)

COMMANDS: Final = {
    "run": "complete a prompt; stream the text",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP to OpenAI clients",
    "top": "watch the engines of a server in a terminal",
    "pull": "fetch a model",
    "models": "list the models that have a name",
    "wire": "record and show what frontends and engines say to each other",
}
"""Each is a module here: ``USAGE``, ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments(parser)`` and ``execute(args)``."""

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
SIGNALLED: Final = 128
"""Plus the signal's number, as shells report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _top_parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    name: str = parser.parse_args(words[:1]).command
    is_verbose = False
    try:
        _stop_cleanly_on_sigterm()
        command = importlib.import_module(f"enginewire.cli.{name}")
        args = _parse(name, command, words[1:])
        is_verbose = getattr(args, "verbose", False)
        _set_up_logging(is_verbose)
        command.execute(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except BrokenPipeError:  # `| head` has seen enough
        _forget_stdout()
        return SIGNALLED + signal.SIGPIPE
    except EngineClientError as exc:
        say(f"enginewire: error: {one_line(exc)}{_hint(exc, is_verbose)}")
        return exit_code(exc)
    except Exception as exc:
        if is_verbose:
            raise
        say(f"enginewire: error: {type(exc).__name__}: {one_line(exc)} (--verbose shows where)")
        return EXIT_ERROR
    return 0


def exit_code(exc: EngineClientError) -> int:
    """Return whether the command line is wrong, or what it asks for failed: then trying again may help."""
    is_wrong_usage = isinstance(exc, (ConfigError, InvalidRequestError)) and not isinstance(exc, AddressError)
    return EXIT_USAGE if is_wrong_usage else EXIT_ERROR


def _top_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="enginewire",
        usage="enginewire [--version] [--help] COMMAND …",
        description="LLM engines behind one client layer: run a model here, in an engine process of its own.",
        epilog=f"commands:\n{commands}\n\nenginewire COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"enginewire {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _parse(name: str, command: ModuleType, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"enginewire {name}",
        usage=f"enginewire {name} {command.USAGE}".rstrip(),
        description=command.DESCRIPTION,
        epilog=f"examples:\n{command.EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser.parse_intermixed_args(_with_engine_args_joined(words))


def _with_engine_args_joined(words: Sequence[str]) -> list[str]:
    """Join ``--engine-args`` and its value, which argparse would take for a flag of ours: it begins with a dash."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--engine-args":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _stop_cleanly_on_sigterm() -> None:
    """Leave through every ``with`` and ``finally``, so that the engine is stopped and not merely orphaned."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(SIGNALLED + number)

    signal.signal(signal.SIGTERM, leave)


def _set_up_logging(is_verbose: bool) -> None:
    import logging

    logging.basicConfig(
        level=logging.INFO if is_verbose else logging.ERROR,
        stream=sys.stderr,
        format="enginewire: %(levelname)s: %(message)s",
    )


def _hint(exc: EngineClientError, is_verbose: bool) -> str:
    has_more = isinstance(exc, (EngineDeadError, EngineStartupError)) and not is_verbose
    return " (--verbose shows the engine's log)" if has_more else ""


def _forget_stdout() -> None:
    """Have the interpreter's own flush at exit go nowhere instead of raising once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
