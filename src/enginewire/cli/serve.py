"""``enginewire serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from enginewire import envs
from enginewire.cli.options import DEFAULT_MODEL_NAME, add_engine_options, engine_config
from enginewire.cli.terminal import announce
from enginewire.errors import EngineClientError

if TYPE_CHECKING:
    from enginewire.server.settings import ServerSettings

USAGE = "[MODEL] [options]"

DESCRIPTION = """\
Serve a model to OpenAI clients: /v1/completions, /v1/chat/completions and more; / is a page to try it.

SIGTERM or Ctrl-C lets running requests finish; a second one leaves at once.

Engines may run elsewhere: `--data-parallel-size-local 0` waits for them at --data-parallel-address and -rpc-port, and
`--headless` there runs them. vLLM's engines will do too, and vLLM's servers can use ours; flags have the same names."""

EXAMPLES = """\
  enginewire serve
  enginewire serve echo --port 0
  enginewire serve ./model.gguf --host 0.0.0.0 --api-key "$KEY" --max-queue 100
  enginewire serve --data-parallel-size 4 --restart-engine 3 --failover resume
  enginewire serve echo --data-parallel-size 2 --data-parallel-size-local 0   # a server, two engines elsewhere
  enginewire serve echo --data-parallel-size 2 --headless                     # these
  enginewire serve ./hf-folder --engine vllm --engine-python /opt/vllm/bin/python --engine-args "--dtype bfloat16" """

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. Their defaults are those of ``ServerSettings``, which takes longer to load than a help may."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"alias, path of a .gguf file or model folder, or echo (default: {DEFAULT_MODEL_NAME})",
    )
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="0: any free one, printed (default: %(default)s)")
    add("--served-model-name", action="append", metavar="NAME", help="name in requests; repeatable (default: MODEL's)")
    add("--api-key", action="append", metavar="KEY", help="wanted from clients; repeatable; also $ENGINEWIRE_API_KEY")
    add("--admin", action="store_true", help="have /sleep, /pause, /scale_elastic_ep and their like")
    add("--max-queue", type=int, default=1024, metavar="N", help="completions that may wait (default: %(default)s)")
    add("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="largest request (default: %(default)s)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="how long running requests may go on after SIGTERM (default: %(default)g)",
    )
    add(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="not ready after so long without progress (default: %(default)g)",
    )
    add("--exit-on-engine-death", action="store_true", help="end with a non-zero status when the engine dies")
    add("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    add_engine_options(parser, for_server=True)
    engine = parser.add_argument_group("model").add_argument
    engine("--tokenizer", metavar="MODEL", help="take the tokenizer and the chat template from here (default: MODEL)")
    engine("--max-model-len", type=int, metavar="N", help="most tokens of prompt and output together")
    engine("--max-num-seqs", type=int, metavar="N", help="most completions that the engine runs at once")


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.headless:
        _run_headless(args)
        return
    try:
        import uvloop

        from enginewire.server.access_log import set_up_logging
        from enginewire.server.run import serve
    except ImportError as exc:
        raise EngineClientError(f'the server needs more packages ({exc}): pip install "enginewire[serve]"') from exc
    may_grow = args.admin and args.api_server_count in (None, 1)  # from one engine, too: several always may
    config = engine_config(args, {"enable_elastic_ep": may_grow, **_limits(args)})
    settings = _settings(args, config.model)
    set_up_logging(args.log_level.upper())
    status = uvloop.run(serve(config, settings, lambda url: announce(f"Serving {settings.model_name} at {url}")))
    if status:
        raise SystemExit(status)


def _run_headless(args: argparse.Namespace) -> None:
    from enginewire.cli.headless import HeadlessNode
    from enginewire.server.access_log import set_up_logging

    config = engine_config(args, {"shutdown_timeout_s": args.shutdown_timeout, **_limits(args)})
    set_up_logging(args.log_level.upper())
    if status := HeadlessNode(config).run():
        raise SystemExit(status)


def _limits(args: argparse.Namespace) -> dict[str, int]:
    limits = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    return {name: value for name, value in limits.items() if value is not None}


def _settings(args: argparse.Namespace, model: str) -> ServerSettings:
    from enginewire.server.settings import ServerSettings, default_model_name

    keys = args.api_key or [key for key in (envs.api_key(),) if key]
    return ServerSettings(
        host=args.host,
        port=args.port,
        tokenizer=args.tokenizer,
        served_model_names=tuple(args.served_model_name or [default_model_name(model)]),
        api_keys=tuple(keys),
        admin=args.admin,
        api_server_count=args.api_server_count or 1,
        max_queue=args.max_queue,
        max_body_bytes=args.max_body_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
        stall_timeout_s=args.stall_timeout,
        exit_on_engine_death=args.exit_on_engine_death,
    )
