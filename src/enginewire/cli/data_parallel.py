"""Several engines, and engines elsewhere: the flags, named as vLLM's, and what they are turned into.

Source: protocol section K.1. A flag that was not given is ``None``, so that what goes together can be told.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from enginewire.errors import ConfigError

if TYPE_CHECKING:
    from enginewire import EngineConfig

SETTINGS: Final = (
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "data_parallel_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_backend",
    "load_balancer",
    "wire_version",
    "failover",
    "failover_timeout_s",
    "restart_engine",
    "drain_timeout_s",
)
"""Settings of ``EngineConfig`` that have a flag here."""


def add_data_parallel_options(parser: argparse.ArgumentParser, *, for_server: bool) -> None:
    """Add how many engines there are and where. A command that completes one prompt has no use for most."""
    group = parser.add_argument_group("several engines, or engines elsewhere")
    add = group.add_argument
    add("--data-parallel-size", "-dp", type=int, metavar="N", help="engines in the deployment (default: 1)")
    add(
        "--data-parallel-size-local",
        "-dpl",
        type=int,
        metavar="N",
        help="how many of them start here; 0: all are started elsewhere (default: all, or 1 with external balancing)",
    )
    add("--data-parallel-address", "-dpa", metavar="HOST", help="where engines and frontend meet (default: 127.0.0.1)")
    add("--data-parallel-rpc-port", "-dpp", type=int, metavar="N", help="and on which port (default: 29550)")
    _add_loss_options(parser, for_server=for_server)
    if not for_server:
        return
    add(
        "--data-parallel-start-rank",
        "-dpr",
        type=int,
        metavar="N",
        help="first engine of this node; above 0 and without --headless: means --data-parallel-hybrid-lb",
    )
    add(
        "--data-parallel-rank",
        "-dpn",
        type=int,
        metavar="N",
        help="the one engine of this server; means --data-parallel-external-lb",
    )
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--data-parallel-hybrid-lb",
        action="store_true",
        default=None,
        help="a balancer spreads the load over nodes, this server over its node's engines",
    )
    mode.add_argument(
        "--data-parallel-external-lb",
        action="store_true",
        default=None,
        help="a balancer spreads the load; each engine has a server of its own",
    )
    add(
        "--data-parallel-backend",
        choices=("mp", "ray"),
        help="processes of this machine or a Ray cluster (default: mp)",
    )
    add(
        "--load-balancer",
        metavar="NAME",
        help="who gets a request: prefix (default), inflight, two-choices, score, or module:Class",
    )
    add("--api-server-count", "-asc", type=int, metavar="N", help="server processes over the same engines (default: 1)")
    add("--headless", action="store_true", help="engines only, for a server elsewhere, enginewire's or vLLM's")
    add("--wire-version", metavar="V", help="--headless: the vLLM version to speak (default: what the server shows)")


def _add_loss_options(parser: argparse.ArgumentParser, *, for_server: bool) -> None:
    """Add what happens when an engine is gone."""
    add = parser.add_argument_group("engines that end, or are taken out").add_argument
    add(
        "--restart-engine",
        type=int,
        metavar="N",
        help="start an engine that ended again, up to N times in a row (default: 0)",
    )
    add(
        "--failover",
        choices=("none", "resume", "exact"),
        help="its requests fail (none, default), or go on elsewhere: if the text stays a valid sample of the model "
        "(resume), or only if it is that of an undisturbed run (exact)",
    )
    add(
        "--failover-timeout",
        type=float,
        metavar="S",
        dest="failover_timeout_s",
        help="how long such a request waits for an engine (default: 60)",
    )
    if for_server:
        add(
            "--drain-timeout",
            type=float,
            metavar="S",
            dest="drain_timeout_s",
            help="how long requests may go on at an engine that is taken out, see POST /scale_elastic_ep (default: 30)",
        )


def data_parallel_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the flags give, after a look at whether they go together.

    Raises:
        ConfigError: they do not.
    """
    given = {name: getattr(args, name, None) for name in SETTINGS} | dict(args.set)
    settings: dict[str, Any] = {name: given[name] for name in SETTINGS if given[name] is not None}
    if settings.get("data_parallel_backend") == "ray":
        _check_ray(args)
    if getattr(args, "headless", False):
        _check_headless(settings, args.api_server_count)
        return settings
    if (count := getattr(args, "api_server_count", None)) is not None and count < 1:
        raise ConfigError(
            f"--api-server-count must be at least 1, got {count}; for engines without a server: --headless"
        )
    if "data_parallel_rank" in settings:
        if settings.keys() & {"data_parallel_start_rank", "data_parallel_hybrid_lb"}:
            raise ConfigError(
                "--data-parallel-rank gives this server one engine, --data-parallel-start-rank and "
                "--data-parallel-hybrid-lb several; choose one"
            )
        settings["data_parallel_external_lb"] = True
    elif "data_parallel_external_lb" in settings:
        raise ConfigError("--data-parallel-external-lb needs --data-parallel-rank: which engine is this server's?")
    elif settings.get("data_parallel_start_rank"):  # not 0: the first node of vLLM's is no other for having said so
        settings["data_parallel_hybrid_lb"] = True
    if "data_parallel_hybrid_lb" in settings:
        settings.setdefault("data_parallel_size_local", _size_from_start_rank(settings))
    if "data_parallel_external_lb" in settings and settings.get("data_parallel_size_local", 1) > 1:
        raise ConfigError(
            "with --data-parallel-rank a server has one engine; --data-parallel-size-local must be 1 or 0"
        )
    return settings


def headless_ranks(config: EngineConfig) -> range:
    """Return the ranks whose engines a headless node runs."""
    start = config.data_parallel_start_rank
    return range(start, start + (config.data_parallel_size_local or 0))


def _check_ray(args: argparse.Namespace) -> None:
    """Refuse what contradicts engines that are placed by Ray."""
    if getattr(args, "headless", False):
        raise ConfigError(
            "--headless starts engines on this node, and --data-parallel-backend ray has Ray start them on any; a node "
            "of the cluster needs `ray start` and no command of enginewire's"
        )
    if (getattr(args, "api_server_count", None) or 1) > 1:
        raise ConfigError("--data-parallel-backend ray goes with one server process; leave out --api-server-count")


def _check_headless(settings: dict[str, Any], api_server_count: int | None) -> None:
    """Refuse what contradicts a node without a server, and settle how many engines it has."""
    if settings.get("restart_engine"):
        raise ConfigError(
            "--headless does not start engines again; instead of --restart-engine, have a supervisor start the command "
            "again, with one engine each"
        )
    if of_server := sorted(settings.keys() & {"failover", "failover_timeout_s", "drain_timeout_s"}):
        flags = ", ".join(f"--{name.removesuffix('_s').replace('_', '-')}" for name in of_server)
        raise ConfigError(f"--headless runs no server, and {flags} is for the server; give it there")
    local = settings.setdefault("data_parallel_size_local", _size_from_start_rank(settings))
    if local < 1:
        raise ConfigError(f"--headless runs engines here: --data-parallel-size-local must be at least 1, got {local}")
    if settings.get("data_parallel_rpc_port") == 0:
        raise ConfigError("--headless needs the port on which its frontend waits; --data-parallel-rpc-port 0 is none")
    if api_server_count:
        raise ConfigError(f"--headless runs no server, and --api-server-count {api_server_count} asks for some")
    if settings.keys() & {"data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_rank"}:
        raise ConfigError(
            "--headless runs no server and spreads no load: no --data-parallel-hybrid-lb, --data-parallel-external-lb "
            "or --data-parallel-rank with it; --data-parallel-start-rank says which engine is its first"
        )


def _size_from_start_rank(settings: dict[str, Any]) -> int:
    size, start = settings.get("data_parallel_size", 1), settings.get("data_parallel_start_rank", 0)
    if not (isinstance(size, int) and isinstance(start, int) and start < size):
        return 1  # the configuration says what is wrong
    return size - start
