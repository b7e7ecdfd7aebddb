"""``enginewire-frontend``: our server in the slot that vLLM has for a frontend of somebody else's.

``VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=$(which enginewire-frontend) vllm serve MODEL``: vLLM starts engines,
shakes hands with them and coordinates them, and starts this program instead of its own server. It tells it little: a
socket to listen on, where the engines come, and the flags of ``vllm serve`` as JSON.

Source: remote-engine facts, "vLLM's frontend slot"; protocol section K.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from enginewire import envs
from enginewire.cli.main import exit_code
from enginewire.cli.terminal import one_line, say
from enginewire.config import EngineConfig
from enginewire.errors import ConfigError, EngineClientError

if TYPE_CHECKING:
    from enginewire.frontend.async_llm import AsyncLLM
    from enginewire.server.settings import ServerSettings

logger = logging.getLogger(__name__)

PARENT_CHECK_S: Final = 1.0
"""How often it is looked whether vLLM is still there: nothing tells us when it is killed."""

EXPECTED: Final = frozenset({"model_tag", "profiler_config", "host", "port", "http_timeout_keep_alive"})
"""Arguments that are always there, or are vLLM's business; not worth a word."""


class ServeArguments(Struct, kw_only=True):
    """The flags of ``vllm serve`` that mean something here, as vLLM writes them: only where not the default."""

    model: str
    served_model_name: list[str] | str | None = None
    tokenizer: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    api_key: list[str] | str | None = None
    shutdown_timeout: float = 0.0
    engine_ready_timeout_secs: float | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    @classmethod
    def read(cls, text: str) -> ServeArguments:
        """Read ``--args-json``; a log line names what is ignored.

        Raises:
            ConfigError: it is no JSON, has a value of another type, or asks for TLS.
        """
        try:
            arguments = msgspec.json.decode(text, type=cls)
            given = msgspec.json.decode(text, type=dict[str, object])
        except msgspec.DecodeError as exc:
            raise ConfigError(f"--args-json: {exc}") from exc
        if arguments.ssl_keyfile or arguments.ssl_certfile:
            raise ConfigError("enginewire-frontend has no TLS; leave --ssl-keyfile and --ssl-certfile to a proxy")
        if ignored := sorted(given.keys() - set(cls.__struct_fields__) - EXPECTED):
            logger.warning("ignored arguments of vllm serve: %s", ", ".join(ignored))
        return arguments

    def server_settings(self) -> ServerSettings:
        """Return what is about the server. Names and keys are those that vLLM's own server would take."""
        from enginewire.server.settings import ServerSettings

        keys = _listed(self.api_key) or _listed(envs.vllm_api_key())
        return ServerSettings(
            served_model_names=tuple(_listed(self.served_model_name) or [self.model]),
            tokenizer=self.tokenizer,
            api_keys=tuple(keys),
            shutdown_timeout_s=self.shutdown_timeout,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until vLLM says SIGTERM or is gone; return the exit status."""
    from enginewire.server.access_log import set_up_logging

    options, unknown = _parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    set_up_logging("INFO")
    if unknown:
        logger.warning("ignored arguments: %s", " ".join(unknown))
    try:
        return Slot(options).run()
    except EngineClientError as exc:
        say(f"enginewire-frontend: error: {one_line(exc)}")
        return exit_code(exc)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginewire-frontend",
        description="enginewire's server in vLLM's frontend slot; vLLM starts it and says where everything is:\n"
        "  VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=$(which enginewire-frontend) vllm serve MODEL",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["frontend"])
    add = parser.add_argument
    add("--listen-fd", type=int, required=True, metavar="FD", help="a TCP socket, bound")
    for name, metavar, what in (("input", "ADDRESS", "requests"), ("output", "ADDRESS", "outputs")):
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument(f"--{name}-address", metavar=metavar, help=f"where to bind for {what} (0.25)")
        group.add_argument(f"--{name}-listener-fd", type=int, metavar="FD", help="a unix socket, listening (0.32)")
    add("--engine-start-index", type=int, default=0, metavar="N", help="the first engine")
    add("--engine-count", type=int, default=1, metavar="N", help="how many there are")
    add("--coordinator-address", metavar="ADDRESS", help="where the coordinator publishes")
    add("--data-parallel-size", type=int, metavar="N", help="engines in the deployment (0.32)")
    add("--args-json", required=True, metavar="JSON", help="the arguments of vllm serve that are not the default")
    return parser


class Slot:
    """The frontend, as vLLM's options say.

    Args:
        options: the parsed command line.

    Raises:
        ConfigError: it makes no sense.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._arguments = arguments = ServeArguments.read(options.args_json)
        self._settings = arguments.server_settings()
        start, end = options.engine_start_index, options.engine_start_index + options.engine_count
        limits: dict[str, Any] = {}
        if arguments.engine_ready_timeout_secs is not None:
            limits["ready_timeout_s"] = arguments.engine_ready_timeout_secs
        self._config = EngineConfig.create(
            arguments.model,
            executor="vllm",
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            data_parallel_size=end,
            data_parallel_size_local=0,
            data_parallel_start_rank=start,
            data_parallel_hybrid_lb=start > 0,
            engine_return_timeout_s=0.0,  # vLLM ends itself and us when an engine dies
            **limits,
        )
        self._addresses = {
            name: value if fd is None else f"fd://{fd}"
            for name, value, fd in (
                ("input_address", options.input_address, options.input_listener_fd),
                ("output_address", options.output_address, options.output_listener_fd),
                ("stats_update_address", options.coordinator_address, None),
            )
            if value is not None or fd is not None
        }
        self._listen_fd: int = options.listen_fd
        self._was_ready = False

    def run(self) -> int:
        """Serve; return the exit status."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(self._serve())
            if not self._was_ready:
                # A thread still waits for engines that will not come, and closing the loop would wait for it.
                os._exit(status)
        return status

    async def _serve(self) -> int:
        from enginewire.server.run import serve_on, stop_signals

        watching = asyncio.create_task(_leave_with_parent(), name="enginewire-parent-watch")
        try:
            os.set_inheritable(self._listen_fd, False)
            with socket.socket(fileno=self._listen_fd) as listener, stop_signals() as stopped:
                return await serve_on(
                    listener, self._make_llm, self._settings, stopped, lambda app: self._say_ready(listener)
                )
        finally:
            watching.cancel()

    async def _make_llm(self) -> AsyncLLM:
        return await asyncio.to_thread(self._connect)

    def _connect(self) -> AsyncLLM:
        from enginewire.client.base import EngineCoreClient
        from enginewire.frontend.async_llm import AsyncLLM

        client = EngineCoreClient.make_async_mp_client(self._config, client_addresses=self._addresses)
        return AsyncLLM.from_client(client, tokenizer=self._settings.tokenizer)

    def _say_ready(self, listener: socket.socket) -> None:
        self._was_ready = True
        host, port, *_ = listener.getsockname()
        logger.info("serving %s at %s port %s in vLLM's frontend slot", self._settings.model_name, host, port)


async def _leave_with_parent() -> None:
    """End this process in order when vLLM has ended without a word."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing reports the end of a parent
        await asyncio.sleep(PARENT_CHECK_S)
    logger.warning("vLLM is gone")
    os.kill(os.getpid(), signal.SIGTERM)


def _listed(value: list[str] | str | None) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main())
