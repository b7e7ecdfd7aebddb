"""``LockStepEchoExecutor``: an echo whose ranks meet in every step, to develop and test waves without a model."""

from __future__ import annotations

from typing import Any

from enginewire.engine.ranks import RankGroup
from enginewire.executors.echo import EchoExecutor
from enginewire.wire.messages import EngineCoreOutput

JOIN_TIMEOUT_S = 60.0
"""How long the other ranks may take; they have met before."""


class LockStepEchoExecutor(EchoExecutor):
    """Echoes prompts; a step ends when all ranks have begun it. Options: as of ``echo``."""

    lock_step = True
    _group: RankGroup | None = None

    def join_group(self, rank: int, parallel_config: dict[str, Any]) -> None:
        """Meet the other ranks."""
        size, host = parallel_config["data_parallel_size"], parallel_config["data_parallel_master_ip"]
        self._group = RankGroup(rank, size, host, parallel_config["data_parallel_master_port"], JOIN_TIMEOUT_S)

    def step(self) -> list[EngineCoreOutput]:
        """Give every request its next token, and wait for the others' step."""
        self._meet()
        return super().step()

    def execute_dummy_batch(self) -> None:
        """Take as long as a step, and wait for the others'."""
        self._meet()
        super().execute_dummy_batch()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()

    def _meet(self) -> None:
        if self._group is not None:
            self._group.agree()
