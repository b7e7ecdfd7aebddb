"""``enginewire run``: complete one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from enginewire.cli.options import (
    DEFAULT_MODEL_NAME,
    add_engine_options,
    add_sampling_options,
    sampling_params,
    started_llm,
)
from enginewire.cli.terminal import say

if TYPE_CHECKING:
    from enginewire import LLM, RequestOutput
    from enginewire.frontend.inputs import Prompt

USAGE = "[MODEL] PROMPT [options]"

DESCRIPTION = f"""\
Complete a prompt. The text streams to standard output, statistics go to standard error.

A prompt for a model with a chat template becomes a user's message, so that an instruction-tuned model answers it;
--raw has it continued as it stands. (The model echo repeats it as it stands anyway.)

The default model, {DEFAULT_MODEL_NAME}, is fetched into your cache on first use."""

EXAMPLES = """\
  enginewire run "Why is the sky blue?"
  enginewire run --raw --max-tokens 20 "The capital of France is"
  enginewire run ./my-model.gguf --temperature 0.7 --seed 1 "Tell me a story."
  enginewire run --json "Name three colours." | jq .text
  git diff | enginewire run - --system "Summarise this change in one sentence."
  enginewire run echo "hello" --max-tokens 12 --executor-option step_time_s=0.1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"alias, path of a .gguf file or model folder, or echo (default: {DEFAULT_MODEL_NAME})",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the prompt; no chat template")
    form.add_argument("--chat", action="store_true", help="apply the chat template; fail if there is none")
    parser.add_argument("--system", metavar="TEXT", help="a system message, in front of the prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("-q", "--quiet", action="store_true", help="no statistics")
    add_sampling_options(parser, max_tokens=256)
    add_engine_options(parser)


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    from enginewire import InvalidRequestError

    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if not text:
        raise InvalidRequestError("the prompt is empty", parameter="prompt")
    if args.raw and args.system:
        raise InvalidRequestError("--system needs a chat template, which --raw switches off", parameter="system")
    params = sampling_params(args)
    with started_llm(args) as (llm, ready_s):
        result = Result()
        try:
            for output in llm.stream(_prompt(llm, text, args), params):
                delta = result.add(output)
                if delta and not args.json:
                    sys.stdout.write(delta)
                    sys.stdout.flush()
        except BaseException:
            if result.text and not args.json and sys.stdout.isatty():
                say("")  # what went wrong gets a line of its own
            raise
        model, engine = llm.config.model, llm.config.executor
    if args.json:
        report = {"model": model, "engine": engine, **result.as_json(ready_s)}
        sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
    elif not result.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    if not args.quiet:
        say(result.statistics(ready_s))


class Result:
    """Adds up the deltas of one request."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self._last: RequestOutput | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, output: RequestOutput) -> str:
        """Take a delta; return its text."""
        self._last = output
        delta = ""
        for completion in output.outputs:  # at most one
            delta = completion.text
            self.token_ids += completion.token_ids
            self._finish_reason = completion.finish_reason
            self._stop_reason = completion.stop_reason
        self.text += delta
        return delta

    def as_json(self, ready_s: float) -> dict[str, object]:
        """Return everything there is to tell; times in seconds, ``null`` where there is none."""
        assert self._last is not None
        metrics = self._last.metrics
        end = metrics.last_token_ts
        return {
            "prompt": self._last.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
            "usage": {
                "prompt_tokens": len(self._last.prompt_token_ids),
                "completion_tokens": len(self.token_ids),
                "cached_tokens": self._last.num_cached_tokens,
            },
            "timings": {
                "ready_s": ready_s,
                "first_token_s": metrics.first_token_latency,
                "total_s": None if end is None else end - metrics.arrival_ts,
                "tokens_per_s": metrics.tokens_per_second,
            },
        }

    def statistics(self, ready_s: float) -> str:
        """Put the timings into one line."""
        assert self._last is not None
        metrics = self._last.metrics
        parts = [f"ready in {ready_s:.2f} s"]
        if metrics.first_token_latency is not None:
            parts.append(f"first token after {metrics.first_token_latency:.3f} s")
        parts.append(f"{len(self._last.prompt_token_ids)} prompt + {len(self.token_ids)} new tokens")
        if metrics.tokens_per_second is not None:
            parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
        parts.append(f"finish: {self._finish_reason}")
        return f"[{' | '.join(parts)}]"


def _prompt(llm: LLM, text: str, args: argparse.Namespace) -> Prompt:
    """Make the prompt, a conversation where the model was trained on those."""
    from enginewire.text.tokenizer import ECHO_MODEL

    has_template = llm.tokenizer.chat_template is not None and llm.config.model != ECHO_MODEL
    if args.raw or not (args.chat or args.system or has_template):
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]
