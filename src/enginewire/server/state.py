"""``ServerState``: what goes on in the server and its engines, in numbers.

The one source of ``GET /state``, of the page at ``/``, and of ``GET /metrics``. Nothing here waits, locks or knows
HTTP; everything is called on the server's event loop. It is all structs: where several server processes share the
engines, they send theirs to each other and add them up, so that whichever answers tells the same.
"""

from __future__ import annotations

import time

from msgspec import Struct

from enginewire.config import EngineConfig
from enginewire.frontend.stats import IterationStats
from enginewire.server.engine_state import EngineState, Health
from enginewire.wire.messages import FinishReason
from enginewire.wire.stats import SchedulerStats


class ServerState(Struct):
    """Everything that is counted. A ``StatLogger``: set it as ``AsyncLLM.stat_logger``.

    Attributes:
        model_name: under which the model is served.
        max_model_len: most tokens of prompt and output together.
        started: monotonic seconds.
        engines: by index, with those that were taken out.
        is_scaling: the number of engines is being changed.
        num_in_flight: completions that the server is busy with, wherever they are.
        responses: HTTP responses by (endpoint, method, status).
        disconnects: requests whose client went away, by endpoint.
        process: CPU time, memory and the like, by Prometheus' names.
    """

    model_name: str
    max_model_len: int | None
    started: float
    engines: dict[int, EngineState] = {}
    is_scaling: bool = False
    num_in_flight: int = 0
    responses: dict[tuple[str, str, int], int] = {}
    disconnects: dict[str, int] = {}
    process: dict[str, float] = {}

    @classmethod
    def of(cls, config: EngineConfig, model_name: str, now: float | None = None) -> ServerState:
        """Make the state of a server that starts.

        Args:
            config: the engines', with what they reported.
            model_name: under which the model is served.
            now: monotonic seconds.
        """
        state = cls(model_name, config.max_model_len, time.monotonic() if now is None else now)
        for index in config.managed_ranks:
            state.engine(index)
        return state

    # What the frontend says.

    def record(
        self, engine_index: int, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
    ) -> None:
        """Take in what a message of an engine brought."""
        self.engine(engine_index).record(scheduler_stats, iteration_stats)

    def record_unfinished(self, engine_index: int, reason: FinishReason) -> None:
        """Take note of a completion that was aborted or failed."""
        self.engine(engine_index).finished[reason] += 1

    # What the server says.

    def response_sent(self, endpoint: str, method: str, status: int) -> None:
        """Count a response.

        Args:
            endpoint: the route's pattern, not the path: a path is the client's choice and would make endless labels.
        """
        key = (endpoint, method, status)
        self.responses[key] = self.responses.get(key, 0) + 1

    def client_disconnected(self, endpoint: str) -> None:
        """Count a request that was aborted because its client went away."""
        self.disconnects[endpoint] = self.disconnects.get(endpoint, 0) + 1

    # What everybody asks.

    def engine(self, index: int) -> EngineState:
        """Return an engine's state; one that nobody has heard of begins to exist."""
        if index not in self.engines:
            self.engines[index] = EngineState.new(index, self.max_model_len or 1, self.started)
            self.engines = dict(sorted(self.engines.items()))
        return self.engines[index]

    @property
    def present(self) -> list[EngineState]:
        """The engines that there are now."""
        return [engine for engine in self.engines.values() if not engine.is_removed]

    def add(self, other: ServerState) -> None:
        """Add another server process's, which is used up."""
        self.started = min(self.started, other.started)
        self.num_in_flight += other.num_in_flight
        for index, engine in other.engines.items():
            if index in self.engines:
                self.engines[index].add(engine)
            else:
                self.engines[index] = engine
        for key, count in other.responses.items():
            self.responses[key] = self.responses.get(key, 0) + count
        for endpoint, count in other.disconnects.items():
            self.disconnects[endpoint] = self.disconnects.get(endpoint, 0) + count
        for name, value in other.process.items():
            known = self.process.get(name)
            together = min if name == "process_start_time_seconds" else float.__add__
            self.process[name] = value if known is None else together(known, value)

    def retire(self) -> None:
        """Keep what was counted and nothing of what is: the process that counted it is gone."""
        self.num_in_flight = 0
        self.process = {name: value for name, value in self.process.items() if name.endswith("_total")}
        for engine in self.engines.values():
            engine.health, engine.num_in_flight, engine.reported_at = Health.READY, 0, 0.0
