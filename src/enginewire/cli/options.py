"""The options that commands share, and what they are turned into."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from enginewire.cli.data_parallel import add_data_parallel_options, data_parallel_settings
from enginewire.cli.terminal import fetch, status
from enginewire.errors import ConfigError

if TYPE_CHECKING:
    from enginewire import LLM, EngineConfig, SamplingParams

DEFAULT_MODEL_NAME: Final = "smollm2-135m"
"""As in ``enginewire.config``, which takes longer to load than a help text may."""


def add_engine_options(parser: argparse.ArgumentParser, *, for_server: bool = False) -> None:
    """Add where and how the engine runs; a server has it in a process of its own and always shows its log."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        metavar="NAME",
        help="openvino, echo, vllm, another registered executor, or module:Class; default: by model",
    )
    group.add_argument("--engine-python", metavar="PATH", help="vllm: the Python of an environment that has vLLM")
    group.add_argument("--engine-args", metavar="ARGS", help='vllm: more arguments of its, e.g. "--dtype bfloat16"')
    group.add_argument(
        "--executor-option",
        metavar="KEY=VALUE",
        type=_key_value,
        action="append",
        default=[],
        help="for the executor; repeatable; VALUE is JSON or else text",
    )
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=_key_value,
        action="append",
        default=[],
        help="any setting of EngineConfig, e.g. max_model_len=4096; repeatable",
    )
    add_data_parallel_options(parser, for_server=for_server)
    if for_server:
        parser.set_defaults(verbose=True)
        return
    group.add_argument("--inproc", action="store_true", help="run the engine in this process, not in one of its own")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the engine's log, and where errors come from"
    )


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add how tokens are chosen."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", metavar="N", type=int, default=max_tokens, help="most new tokens (default: %(default)s)")
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="0 always takes the likeliest token; up to 2 (default: 0)",
    )
    add("--top-p", metavar="P", type=float, default=1.0, help="only the likeliest tokens of this probability")
    add("--top-k", metavar="K", type=int, default=0, help="only this many likeliest tokens; 0: off")
    add("--min-p", metavar="P", type=float, default=0.0, help="no tokens below this share of the likeliest one's")
    add("--repetition-penalty", metavar="R", type=float, default=1.0, help="above 1: fewer repetitions")
    add("--seed", metavar="N", type=int, help="repeat a sampled text")
    add("--stop", metavar="TEXT", action="append", help="end the text here; repeatable")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Make the sampling parameters, for a stream of deltas.

    Raises:
        InvalidRequestError: one is out of range.
    """
    from enginewire import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        output_kind=RequestOutputKind.DELTA,
    )


def engine_config(args: argparse.Namespace, defaults: dict[str, Any]) -> EngineConfig:
    """Make the engine's settings from the command line, and fetch the model.

    Args:
        args: of a command that has MODEL and :func:`add_engine_options`.
        defaults: settings that ``--set`` overrides.

    Raises:
        ConfigError: a setting that cannot be.
        ModelError: the model cannot be fetched.
    """
    from enginewire.engine.registry import find_executor
    from enginewire.frontend.setup import make_config
    from enginewire.host.vllm import VLLM, vllm_options
    from enginewire.models import ALIASES

    if args.engine and ":" in args.engine and "" not in sys.path:
        sys.path.append("")  # a console script's path lacks the working directory, where module:Class may be
    settings: dict[str, Any] = {**defaults, **data_parallel_settings(args), **dict(args.set)}
    if clashes := sorted({"model", "executor", "executor_options"} & set(settings)):
        raise ConfigError(f"--set cannot set {', '.join(clashes)}: MODEL, --engine and --executor-option do")
    config = make_config(args.model, args.engine, None, _executor_options(args), settings)
    if config.starts_engines:  # before a download that an unknown engine would have no use for
        vllm_options(config) if config.executor == VLLM else find_executor(config.executor)
    if config.model in ALIASES:
        fetch(config.model)
    return config


def _executor_options(args: argparse.Namespace) -> dict[str, Any]:
    """Gather what is for the executor; ``--engine-python`` and ``--engine-args`` are the options of ``vllm``."""
    options = dict(args.executor_option)
    for flag, name in (("engine_python", "python"), ("engine_args", "args")):
        if (value := getattr(args, flag)) is None:
            continue
        if args.engine != "vllm":
            raise ConfigError(f"--{flag.replace('_', '-')} is for --engine vllm; others take --executor-option")
        options[name] = shlex.split(value) if name == "args" else value
    return options


@contextlib.contextmanager
def started_llm(args: argparse.Namespace) -> Iterator[tuple[LLM, float]]:
    """Fetch the model, start the engine, load the tokenizer; yield the frontend and how many seconds that took.

    The download does not count.
    """
    from enginewire import LLM

    config = engine_config(args, {"forward_engine_log": args.verbose})
    if args.inproc and (config.restart_engine or config.failover != "none"):
        raise ConfigError(
            "--inproc has the engine in this process, where it is neither started again nor replaced; leave out "
            "--restart-engine and --failover, or --inproc"
        )
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        with status(f"loading {config.model} …", enabled=not args.verbose):
            llm = stack.enter_context(LLM(config=config, multiprocess_mode=not args.inproc))
            _ = llm.tokenizer
        yield llm, time.monotonic() - begin


def _key_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
