"""An executor for tests: an echo that refuses to be one of more than two."""

from __future__ import annotations

from enginewire import EngineConfig
from enginewire.executors.echo import EchoExecutor


class PickyExecutor(EchoExecutor):
    """Fails to start where there are too many."""

    def __init__(self, config: EngineConfig) -> None:
        if config.data_parallel_size > 2:
            raise RuntimeError("three are a crowd")
        super().__init__(config)
