"""``enginewire chat``: a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Final

from enginewire.cli.options import (
    DEFAULT_MODEL_NAME,
    add_engine_options,
    add_sampling_options,
    sampling_params,
    started_llm,
)
from enginewire.cli.terminal import one_line, say

if TYPE_CHECKING:
    from enginewire import LLM, SamplingParams

USAGE = "[MODEL] [options]"

DESCRIPTION = """\
Talk with a model. It is told the whole conversation each time.

On a terminal, Ctrl-C stops an answer and Ctrl-D leaves. Otherwise each line of standard input is a message."""

EXAMPLES = """\
  enginewire chat
  enginewire chat --system "You answer in rhymes." --temperature 0.7
  printf 'My name is Ada.\\nWhat is my name?\\n' | enginewire chat"""

HELP: Final = """\
/reset   forget the conversation
/exit    leave, as does Ctrl-D
/help    this text
Ctrl-C stops an answer."""

PROMPT_SIGN: Final = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"alias, path of a .gguf file or model folder, or echo (default: {DEFAULT_MODEL_NAME})",
    )
    parser.add_argument("--system", metavar="TEXT", help="how the model shall behave")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    params = sampling_params(args)
    with started_llm(args) as (llm, _):
        conversation = Conversation(llm, params, args.system)
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and history
            say(f"{llm.config.model}. /help lists commands, Ctrl-D leaves.")
        while (line := _read_line(is_interactive)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                say(HELP)
            elif line:
                _answer(conversation, line, stops_at_interrupt=is_interactive)


def _read_line(is_interactive: bool) -> str | None:
    """Return what the user says next, without spaces around it; ``None`` at the end."""
    while True:
        try:
            return input(PROMPT_SIGN if is_interactive else "").strip()
        except EOFError:
            if is_interactive:
                say("")
            return None
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            say("\nCtrl-D or /exit leaves.")


def _answer(conversation: Conversation, message: str, *, stops_at_interrupt: bool) -> None:
    """Print an answer as it comes. A request that fails leaves the conversation as it was."""
    from enginewire import RequestError

    try:
        conversation.answer(message)
    except KeyboardInterrupt:
        if not stops_at_interrupt:
            raise
        say("\n(stopped)")
    except RequestError as exc:
        say(f"enginewire: error: {one_line(exc)} (/reset begins a new conversation)")


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._system)

    def answer(self, message: str) -> None:
        """Print the answer to a message. What was said before an interruption stays said."""
        messages = [*self._messages, {"role": "user", "content": message}]
        said: list[str] = []
        try:
            with contextlib.closing(self._llm.stream(messages, self._params)) as outputs:
                for output in outputs:
                    for completion in output.outputs:
                        said.append(completion.text)
                        sys.stdout.write(completion.text)
                        sys.stdout.flush()
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        sys.stdout.write("\n")
        sys.stdout.flush()
