"""``engine="vllm"``: an unmodified vLLM in an environment of its own, started and watched like an engine of ours.

Nothing of vLLM is loaded here: the Python of that environment runs ``vllm serve MODEL --headless``, one launcher per
rank, since a launcher of several ends them all when one dies. To the client such an engine is one that was started
elsewhere: it reports over tcp, and says so (``local=False, headless=True``).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from enginewire.config import DEFAULT_MODEL, EngineConfig
from enginewire.engine.spec import EngineSpec
from enginewire.errors import ConfigError

VLLM: Final = "vllm"
"""The executor's name. No such executor is registered: it would load vLLM into our process."""

_NAME: Final = r"[A-Z]\w*(?:Error|Exception)"
_ERROR: Final = re.compile(rf"\b{_NAME}: .*|(?:^|(?<=[\])] )){_NAME}$|\berror: .*")
"""The last line of a traceback, behind what vLLM puts in front of lines, or of a wrong command line."""


_ANNOUNCEMENT: Final = re.compile(r"\d validation errors? for \w+$")
"""pydantic's first line, which vLLM's settings are checked with; the second says what is wrong."""


class VLLMOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What ``executor_options`` can hold for the engine ``vllm``.

    Attributes:
        python: the Python of an environment that has vLLM, e.g. ``/opt/vllm/bin/python``.
        args: further arguments of ``vllm serve``, e.g. ``["--enforce-eager"]``. They win over what the settings give.
    """

    python: str = ""
    args: list[str] = field(default_factory=list)


def vllm_options(config: EngineConfig) -> VLLMOptions:
    """Read the options of an engine ``vllm``, and see whether it can be started with them.

    Raises:
        ConfigError: no Python was named or there is none; an option that does not exist; a model that is ours alone.
    """
    try:
        options = msgspec.convert(config.executor_options, VLLMOptions)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"executor_options of the engine vllm: {exc}") from exc
    if not options.python:
        raise ConfigError(
            "the engine vllm needs the Python of an environment that has vLLM: --engine-python PATH, or "
            'executor_options={"python": PATH}'
        )
    if shutil.which(options.python) is None:
        raise ConfigError(f"the engine vllm cannot run {options.python!r}: no such program, or it is not executable")
    from enginewire.models import ALIASES  # here: the store brings hashlib and tokenizers, 5 MB that no client needs

    if config.model in ALIASES:
        default = ", the default here," if config.model == DEFAULT_MODEL else ""
        raise ConfigError(f"{config.model}{default} is a model for openvino; vllm needs a Hugging Face folder or name")
    return options


def vllm_command(spec: EngineSpec, lifeline_fd: int) -> list[str]:
    """Return the command line that runs an engine.

    Raises:
        ConfigError: see :func:`vllm_options`.
    """
    config = spec.config
    options = vllm_options(config)
    host, _, port = spec.handshake_address.removeprefix("tcp://").rpartition(":")
    arguments = {
        "--data-parallel-size": config.data_parallel_size,
        "--data-parallel-size-local": 1,
        "--data-parallel-start-rank": spec.engine_index,
        "--data-parallel-address": host.strip("[]"),
        "--data-parallel-rpc-port": port,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--scheduling-policy": config.scheduling_policy,
        "--shutdown-timeout": round(config.shutdown_timeout_s),
    }
    words = [word for flag, value in arguments.items() if value is not None for word in (flag, str(value))]
    if not spec.log_stats:
        words.append("--disable-log-stats")
    start = [options.python, str(Path(__file__).with_name("vllm_main.py")), str(lifeline_fd)]
    return [*start, "serve", config.model, "--headless", *words, *options.args]


def vllm_environment(spec: EngineSpec) -> dict[str, str]:
    """Return our environment with what lets an engine find the frontend."""
    host = spec.handshake_address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if spec.config.data_parallel_size == 1:  # the flag counts from two engines on
        environment["VLLM_DP_MASTER_IP"] = host
    if host.startswith("127."):
        environment.setdefault("VLLM_HOST_IP", host)  # or its own ports are on an address that others reach
    return environment


def vllm_end(log_tail: Iterable[str]) -> str:
    """Say why a vLLM ended, by its log: its exit status is 0 even after SIGKILL."""
    lines = iter(log_tail)
    error = next((match[0] for line in lines if (match := _ERROR.search(line))), "its log does not say why")
    if _ANNOUNCEMENT.search(error):
        error = f"{error}: {next(lines, '').strip()}"
    return f"vLLM ended: {error}"
