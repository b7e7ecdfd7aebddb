"""Which launcher starts the engines of a client: ``EngineConfig.data_parallel_backend`` says."""

from __future__ import annotations

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError
from enginewire.host.launcher import EngineLauncher
from enginewire.host.manager import CoreEngineProcManager


def make_launcher(config: EngineConfig) -> EngineLauncher:
    """Make a launcher without engines.

    Raises:
        ConfigError: Ray is wanted and not installed, or its cluster cannot be reached.
    """
    if config.data_parallel_backend != "ray":
        return CoreEngineProcManager([], forward_log=config.forward_engine_log)
    try:
        from enginewire.host.ray_actors import CoreEngineActorManager
    except ImportError as exc:
        raise ConfigError(
            f'data_parallel_backend="ray" needs Ray ({exc}): pip install "enginewire[ray]", here and on each node'
        ) from exc
    return CoreEngineActorManager(config.ray_resources, forward_log=config.forward_engine_log)
