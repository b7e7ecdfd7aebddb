"""What is counted, and how Prometheus gets to see it; without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from enginewire import AsyncLLM, SamplingParams
from enginewire.config import EngineConfig
from enginewire.frontend.stats import FinishedRequestStats, IterationStats
from enginewire.server.engine_state import Health
from enginewire.server.meters import HISTORY_S, RATE_WINDOW_S, Histogram, Rate
from enginewire.server.metrics import ServerMetrics
from enginewire.server.snapshot import snapshot
from enginewire.server.state import ServerState
from enginewire.testing.waiting import wait_until
from enginewire.wire.messages import FinishReason
from enginewire.wire.stats import PrefixCacheStats, SchedulerStats

DASHBOARD = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_success_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
]
"""What the panels of vLLM's dashboards ask for."""


def make_state(num_engines: int = 1) -> ServerState:
    """Make the state of a server that started at second 1000."""
    config = EngineConfig.create("echo", max_model_len=4096, data_parallel_size=num_engines)
    return ServerState.of(config, 'a "model"\\', 1000.0)


@pytest.fixture
def state() -> ServerState:
    return make_state()


def samples(state: ServerState) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Render and read back: values by name and labels, without the labels that all of an engine's have."""
    body, content_type = ServerMetrics(state).render()
    assert content_type.startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parse_text(body.decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = {name: text for name, text in sample.labels.items() if name not in ("model_name", "engine")}
            by_labels = found.setdefault(sample.name, {})
            key = tuple(sorted(labels.items()))
            assert key not in by_labels, f"{sample.name} is there twice"
            by_labels[key] = sample.value
    return found


def value(state: ServerState, name: str, **labels: str) -> float:
    return samples(state)[name][tuple(sorted(labels.items()))]


def finished(**changes: object) -> FinishedRequestStats:
    fields = {
        "finish_reason": FinishReason.LENGTH,
        "num_prompt_tokens": 3,
        "num_generation_tokens": 5,
        "max_tokens": 5,
        "e2e_latency": 1.4,
        "queued_time": 0.25,
        "prefill_time": 0.5,
        "decode_time": 0.4,
    }
    return FinishedRequestStats(**(fields | changes))  # type: ignore[arg-type]


# Meters.


@given(st.lists(st.floats(0, 20)))
def test_a_histogram_counts_a_value_in_the_first_bucket_whose_bound_it_does_not_exceed(values: list[float]) -> None:
    bounds = (1.0, 2.5, 10.0)
    one_by_one, at_once, added = Histogram(bounds), Histogram(bounds), Histogram(bounds)
    for one in values:
        one_by_one.observe(one)
        single = Histogram(bounds)
        single.observe(one)
        added.add(single)
    at_once.observe_all(values)
    up_to = [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    expected = [count - before for count, before in zip(up_to, [0, *up_to], strict=False)]
    assert one_by_one.counts == at_once.counts == added.counts == expected
    assert one_by_one.total == at_once.total == pytest.approx(sum(values))


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(1, 9)), max_size=30), st.floats(0, 200))
def test_a_rate_looks_back_five_seconds_and_its_history_a_minute(added: list[tuple[float, int]], waited: float) -> None:
    start = now = 5000.25
    rate, parts = Rate(start), [Rate(start), Rate(start)]
    by_second: Counter[int] = Counter()
    for pause, count in added:
        now += pause
        rate.count(count, now)
        parts[count % 2].count(count, now)
        by_second[int(now)] += count
    now += waited
    parts[0].add(parts[1])
    assert parts[0].history(now) == rate.history(now)
    whole = [by_second[second] for second in range(int(now) - HISTORY_S, int(now))]
    assert rate.history(now) == whole
    recent = sum(whole[-RATE_WINDOW_S:]) + by_second[int(now)]
    assert rate.per_second(now) == pytest.approx(recent / (RATE_WINDOW_S + now % 1))


# The state.


def test_every_name_of_the_dashboards_is_there_before_anything_happened(state: ServerState) -> None:
    """A panel over a name that appears only later is empty, and a rate over it misses the first step."""
    found = samples(state)
    assert [name for name in DASHBOARD if name not in found] == []
    reasons = {dict(labels)["finished_reason"] for labels in found["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


def test_the_document_lists_every_metric_and_no_other(state: ServerState) -> None:
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    documented = set(re.findall(r"^\| `((?:vllm|enginewire):\w+)` \| (\w+) ", text, re.MULTILINE))
    families = ServerMetrics(state).collect()
    suffix = {"counter": "_total", "info": "_info"}
    types = {"info": "gauge"}
    assert documented == {(f.name + suffix.get(f.type, ""), types.get(f.type, f.type)) for f in families}


def test_every_engine_series_names_the_model_and_the_engine(state: ServerState) -> None:
    for family in parse_text(ServerMetrics(state).render()[0].decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ('a "model"\\', "0"), sample


def test_prefix_cache_statistics_are_changes_and_are_added_up(state: ServerState) -> None:
    for hits in (0, 16, 32):
        stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1, queries=40, hits=hits))
        state.record(0, stats, IterationStats(1000.0))
    assert value(state, "vllm:prefix_cache_queries_total") == 120
    assert value(state, "vllm:prefix_cache_hits_total") == 48
    assert snapshot(state, 1000.0).engines[0].prefix_cache_hit_rate == 0.4


def test_gauges_are_those_of_the_last_report(state: ServerState) -> None:
    state.record(0, SchedulerStats(num_running_reqs=9), IterationStats(1000.0))
    state.record(0, SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5), IterationStats(1000.0))
    state.record(0, None, IterationStats(1000.0))
    assert value(state, "vllm:num_requests_running") == 3
    assert value(state, "vllm:num_requests_waiting") == 2
    assert value(state, "vllm:kv_cache_usage_perc") == 0.5


def test_latencies_fall_into_the_buckets_of_vllm(state: ServerState) -> None:
    iteration = IterationStats(
        1000.0,
        num_prompt_tokens=6,
        num_generation_tokens=4,
        time_to_first_tokens=[0.03],
        inter_token_latencies=[0.02, 0.03, 0.6],
        finished_requests=[finished(), finished(finish_reason=FinishReason.STOP, e2e_latency=2.0)],
    )
    state.record(0, None, iteration)
    assert value(state, "vllm:prompt_tokens_total") == 6
    assert value(state, "vllm:generation_tokens_total") == 4
    assert value(state, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert value(state, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(state, f"vllm:{name}_bucket", le="0.025") == 1
        assert value(state, f"vllm:{name}_bucket", le="0.05") == 2
        assert value(state, f"vllm:{name}_count") == value(state, f"vllm:{name}_bucket", le="+Inf") == 3
        assert value(state, f"vllm:{name}_sum") == pytest.approx(0.65)
    assert value(state, "vllm:e2e_request_latency_seconds_bucket", le="1.5") == 1
    assert value(state, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value(state, "vllm:request_queue_time_seconds_sum") == 0.5
    assert value(state, "vllm:request_generation_tokens_bucket", le="5.0") == 2
    assert value(state, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(state, "vllm:request_success_total", finished_reason="length") == 1


def test_what_an_engine_did_not_say_is_not_counted_as_zero(state: ServerState) -> None:
    done = finished(queued_time=None, prefill_time=None, num_generation_tokens=1)
    state.record(0, None, IterationStats(1000.0, finished_requests=[done]))
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_time_per_output_token_seconds"):
        assert value(state, f"vllm:{name}_count") == 0


def test_what_http_did_is_counted(state: ServerState) -> None:
    for _ in range(2):
        state.response_sent("/v1/completions", "POST", 200)
    state.response_sent("/v1/completions", "POST", 429)
    state.client_disconnected("/v1/completions")
    post = {"endpoint": "/v1/completions", "method": "POST"}
    assert value(state, "enginewire:http_requests_total", **post, status="200") == 2
    assert value(state, "enginewire:http_requests_total", **post, status="429") == 1
    assert value(state, "enginewire:client_disconnects_total", endpoint="/v1/completions") == 1


def test_an_engine_that_is_gone_runs_nothing_and_is_not_up(state: ServerState) -> None:
    state.record(0, SchedulerStats(num_running_reqs=3), IterationStats(1000.0))
    state.engine(0).is_gone()
    for health in (Health.STARTING, Health.LOST, Health.DEAD):
        state.engine(0).health = health
        assert value(state, "enginewire:engine_up") == 0
    assert value(state, "vllm:num_requests_running") == 0


def test_a_message_of_an_engine_that_nobody_announced_is_counted(state: ServerState) -> None:
    """An exception here would end the output handler, and with it every stream."""
    state.record(5, None, IterationStats(1000.0, num_generation_tokens=2))
    assert [engine.index for engine in snapshot(state, 1000.0).engines] == [0, 5]
    assert state.engine(5).num_generation_tokens == 2


def test_an_engine_of_an_external_balancer_keeps_its_rank() -> None:
    config = EngineConfig.create("echo", data_parallel_size=4, data_parallel_rank=2, data_parallel_external_lb=True)
    assert list(ServerState.of(config, "m").engines) == [2]


def test_a_snapshot_is_plain_json(state: ServerState) -> None:
    state.num_in_flight = 7
    state.record(0, None, IterationStats(1008.5, num_generation_tokens=50))
    read = msgspec.json.decode(msgspec.json.encode(snapshot(state, 1010.0)))
    (engine,) = read["engines"]
    assert (read["model"], read["uptime_s"], read["num_in_flight"]) == ('a "model"\\', 10.0, 7)
    assert (engine["health"], engine["generation_tokens_per_s"]) == ("ready", 10.0)
    assert engine["generation_history"][-3:] == [0, 50, 0]
    assert len(engine["generation_history"]) == HISTORY_S


def test_a_scraper_that_speaks_openmetrics_gets_it(state: ServerState) -> None:
    body, content_type = ServerMetrics(state).render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert "vllm:generation_tokens" in {family.name for family in parse_openmetrics(body.decode())}


def test_a_completion_that_the_engine_aborted_counts_in_no_latency(state: ServerState) -> None:
    """It may have had no token at all, and says nothing about how long completions take."""
    aborted = finished(finish_reason=FinishReason.ABORT, num_generation_tokens=0, e2e_latency=0.1, decode_time=0.0)
    state.record(0, None, IterationStats(timestamp=0.0, finished_requests=[aborted, finished()]))
    assert value(state, "vllm:request_success_total", finished_reason="abort") == 1
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_generation_tokens"):
        assert value(state, f"vllm:{name}_count") == 1, name


# Several engines, several processes.


def record_something(state: ServerState, number: int) -> None:
    """Have the state count something that depends on ``number`` alone."""
    index, now = number % 3, 1000.0 + number
    report = SchedulerStats(
        num_running_reqs=number, prefix_cache_stats=PrefixCacheStats(queries=10 + number, hits=number)
    )
    ended = finished(finish_reason=FinishReason(number % 3), e2e_latency=number / 8, decode_time=0.5)
    tokens = {"num_prompt_tokens": 6, "num_generation_tokens": 2}
    iteration = IterationStats(
        now, now, **tokens, time_to_first_tokens=[number / 64], inter_token_latencies=[0.25], finished_requests=[ended]
    )
    state.record(index, report, iteration)
    state.record_unfinished(index, FinishReason.ERROR)
    state.response_sent("/v1/completions", "POST", 200 + number % 2)
    state.client_disconnected(f"/{number % 2}")


def test_states_of_several_processes_add_up_to_one_that_has_seen_it_all() -> None:
    """And stay exact on their way from process to process."""
    whole, parts = make_state(3), [make_state(3), make_state(3)]
    for number in range(40):
        record_something(whole, number)
        record_something(parts[number % 2], number)
    received = [msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=ServerState) for part in parts]
    assert received == parts
    merged = received[0]
    merged.add(received[1])
    assert ServerMetrics(merged, 1050.0).render() == ServerMetrics(whole, 1050.0).render()
    assert snapshot(merged, 1050.0) == snapshot(whole, 1050.0)


def test_what_one_process_knows_is_not_lost_beside_others_that_do_not() -> None:
    """A report, and a death, may reach one of them only or first."""
    one, other = make_state(2), make_state(2)
    one.record(0, SchedulerStats(num_running_reqs=5), IterationStats(1002.0, 7.0))  # it was late
    other.record(0, SchedulerStats(num_running_reqs=2), IterationStats(1001.0, 8.0))
    other.engine(1).health, other.engine(1).num_deaths, other.engine(1).death = Health.DEAD, 1, "killed"
    one.engine(1).num_in_flight, other.engine(1).num_in_flight = 3, 4
    one.add(other)
    assert one.engine(0).num_running == 2
    assert (one.engine(1).health, one.engine(1).num_deaths, one.engine(1).death) == (Health.DEAD, 1, "killed")
    assert one.engine(1).num_in_flight == 7


def test_a_process_that_is_gone_leaves_its_counts_and_nothing_else() -> None:
    """Counters must not go back, and nothing of it is in flight."""
    gone, stays = make_state(), make_state()
    gone.num_in_flight = gone.engine(0).num_in_flight = 9
    gone.process = {"process_cpu_seconds_total": 2.0, "process_resident_memory_bytes": 1e6}
    record_something(gone, 0)
    gone.engine(0).health = Health.LOST
    stays.process = {"process_cpu_seconds_total": 1.0, "process_resident_memory_bytes": 3e6}
    stays.record(0, SchedulerStats(num_running_reqs=2), IterationStats(1000.0, 5.0))
    gone.retire()
    stays.add(gone)
    assert value(stays, "vllm:generation_tokens_total") == 2
    assert value(stays, "enginewire:num_completions_in_flight") == 0
    assert value(stays, "enginewire:engine_requests_in_flight") == 0
    assert value(stays, "enginewire:engine_up") == 1
    assert value(stays, "vllm:num_requests_running") == 2
    assert value(stays, "process_cpu_seconds_total") == 3
    assert value(stays, "process_resident_memory_bytes") == 3e6


def test_every_engine_has_series_of_its_own() -> None:
    state = make_state(16)
    for index in range(16):
        state.record(index, None, IterationStats(1000.0, num_generation_tokens=index))
    found = re.findall(
        r'^vllm:generation_tokens_total\{.*engine="(\d+)".*\} (\S+)$',
        ServerMetrics(state).render()[0].decode(),
        re.MULTILINE,
    )
    assert [(int(engine), float(count)) for engine, count in found] == [(index, float(index)) for index in range(16)]


# With an engine.


async def run_three_and_abort_one() -> ServerState:
    """Serve requests of 1, 4 and 10 tokens and one that is left after its first; return the state once all is over."""
    async with await AsyncLLM.create("echo", forward_engine_log=False) as llm:
        state = ServerState.of(llm.config, "echo")
        llm.stat_logger = state

        async def complete(max_tokens: int) -> None:
            async for _ in llm.generate("abcdef", SamplingParams(max_tokens=max_tokens)):
                pass

        await asyncio.gather(*(complete(count) for count in (1, 4, 10)))
        async with contextlib.aclosing(llm.generate("abcdef", SamplingParams(max_tokens=100_000))) as outputs:
            await anext(outputs)
        await asyncio.to_thread(
            wait_until, lambda: state.engine(0).num_running == 0, 10, "the end of the aborted request"
        )
    return state


def test_tokens_of_a_real_engine_are_counted_exactly() -> None:
    state = asyncio.run(run_three_and_abort_one())
    assert value(state, "vllm:request_success_total", finished_reason="length") == 3
    assert value(state, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(state, "vllm:prompt_tokens_total") == 4 * 6
    assert value(state, "vllm:request_generation_tokens_sum") == 15
    assert value(state, "vllm:time_to_first_token_seconds_count") == 4
    assert value(state, "vllm:request_queue_time_seconds_count") == 3
    latencies = value(state, "vllm:inter_token_latency_seconds_count")
    assert latencies == value(state, "vllm:generation_tokens_total") - 4 >= 3 + 9
    assert sum(state.engine(0).finished.values()) == 4
