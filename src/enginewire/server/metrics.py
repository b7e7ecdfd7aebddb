"""The server's state in Prometheus' text format, under the names that dashboards of vLLM know.

The numbers live in :mod:`enginewire.server.state`; they are put into ``prometheus_client``'s families only when
somebody asks. Nothing is registered globally.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from enginewire._version import __version__
from enginewire.server.engine_state import EngineState, Health
from enginewire.server.meters import Histogram
from enginewire.server.state import ServerState

Read = Callable[[EngineState], float]

LABELS: Final = ("model_name", "engine")

DOWN: Final = (Health.STARTING, Health.LOST, Health.DEAD)

GAUGES: Final[list[tuple[str, str, Read]]] = [
    ("vllm:num_requests_running", "Requests in the executor.", lambda e: e.num_running),
    ("vllm:num_requests_waiting", "Requests in the engine's queue.", lambda e: e.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", lambda e: e.kv_cache_usage),
    ("vllm:gpu_cache_usage_perc", "Former name of kv_cache_usage_perc.", lambda e: e.kv_cache_usage),
    ("enginewire:engine_up", "Whether the engine is there and answers.", lambda e: e.health not in DOWN),
    ("enginewire:engine_requests_in_flight", "Completions that the engine was sent.", lambda e: e.num_in_flight),
]

COUNTERS: Final[list[tuple[str, str, Read]]] = [
    ("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.", lambda e: e.num_prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda e: e.num_generation_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda e: e.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda e: e.prefix_cache_hits),
    ("enginewire:engine_deaths", "How often the engine died or was lost.", lambda e: e.num_deaths),
    ("enginewire:engine_restarts", "How often the engine was started again.", lambda e: e.num_restarts),
    ("enginewire:requests_resumed", "Completions that went on elsewhere when it was gone.", lambda e: e.num_moved),
    ("enginewire:requests_lost", "Completions that failed because it was gone.", lambda e: e.num_lost),
]

HISTOGRAMS: Final[list[tuple[str, str, Callable[[EngineState], Histogram]]]] = [
    ("vllm:time_to_first_token_seconds", "From arrival to the first token.", lambda e: e.time_to_first_token),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a completion.", lambda e: e.inter_token_latency),
    (
        "vllm:time_per_output_token_seconds",
        "Former name of inter_token_latency_seconds.",
        lambda e: e.inter_token_latency,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between tokens of a completion.",
        lambda e: e.time_per_output_token,
    ),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end.", lambda e: e.e2e_latency),
    ("vllm:request_queue_time_seconds", "Waiting in the engine's queue.", lambda e: e.queue_time),
    ("vllm:request_prefill_time_seconds", "From the queue's end to the first token.", lambda e: e.prefill_time),
    ("vllm:request_decode_time_seconds", "From the first token to the last.", lambda e: e.decode_time),
    ("vllm:request_prompt_tokens", "Tokens of a prompt.", lambda e: e.prompt_len),
    ("vllm:request_generation_tokens", "Tokens of a completion.", lambda e: e.generation_len),
    ("vllm:request_params_max_tokens", "How many tokens a completion could have.", lambda e: e.max_tokens),
]


class ServerMetrics(Collector):
    """Renders a server's state.

    Args:
        state: what to render.
        now: monotonic seconds.
    """

    def __init__(self, state: ServerState, now: float | None = None) -> None:
        self._state = state
        self._now = time.monotonic() if now is None else now

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and the content type for a request that accepts ``accept``."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encoder, content_type = choose_encoder(accept)
        return encoder(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family; called by the encoder."""
        yield from self._engine_families()
        yield from self._server_families()
        yield from self._process_families()

    def _engine_families(self) -> Iterator[Metric]:
        # Those that were taken out keep their counters: a sum would go back without them, and a rate over a series that
        # collects them would count them twice.
        engines = [((self._state.model_name, str(engine.index)), engine) for engine in self._state.engines.values()]
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, engine in engines:
                if not engine.is_removed:
                    gauge.add_metric(labels, read(engine))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, engine in engines:
                counter.add_metric(labels, read(engine))
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Completions by why they ended.", labels=(*LABELS, "finished_reason")
        )
        for labels, engine in engines:
            for reason, count in engine.finished.items():
                finished.add_metric((*labels, str(reason)), count)
        yield finished
        for name, text, find in HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, engine in engines:
                histogram = find(engine)
                family.add_metric(labels, _buckets(histogram), histogram.total)
            yield family

    def _server_families(self) -> Iterator[Metric]:
        state = self._state
        model = state.model_name
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        for engine in state.present:
            cache.add_metric((model, str(engine.index), str(engine.block_size), str(engine.num_gpu_blocks)), 1)
        yield cache
        in_flight = GaugeMetricFamily(
            "enginewire:num_completions_in_flight",
            "Completions that the server is busy with.",
            labels=["model_name"],
        )
        in_flight.add_metric([model], state.num_in_flight)
        yield in_flight
        responses = CounterMetricFamily(
            "enginewire:http_requests", "HTTP responses.", labels=["endpoint", "method", "status"]
        )
        for (endpoint, method, status), count in state.responses.items():
            responses.add_metric([endpoint, method, str(status)], count)
        yield responses
        disconnects = CounterMetricFamily(
            "enginewire:client_disconnects", "Requests aborted because their client went away.", labels=["endpoint"]
        )
        for endpoint, count in state.disconnects.items():
            disconnects.add_metric([endpoint], count)
        yield disconnects
        yield GaugeMetricFamily(
            "enginewire:uptime_seconds", "Seconds since the server's start.", self._now - state.started
        )
        yield InfoMetricFamily(
            "enginewire:build", "Versions.", {"version": __version__, "python": platform.python_version()}
        )

    def _process_families(self) -> Iterator[Metric]:
        for name, value in self._state.process.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name, "Of the server's processes, without the engines'.", value)


def process_numbers() -> dict[str, float]:
    """Return this process's CPU time, memory and the like, by the names that Prometheus' client libraries use."""
    families = ProcessCollector(registry=None).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return pairs of upper bound and count up to it, as Prometheus wants them."""
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
