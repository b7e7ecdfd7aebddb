"""Policies choose from loads alone."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence

import pytest

from enginewire import ConfigError
from enginewire.client.balancer import BALANCERS, EngineLoad, InFlight, LoadBalancer, TwoChoices, make_balancer
from enginewire.config import EngineConfig
from enginewire.wire.messages import EngineCoreRequest, LateInteractionParams, PoolingParams

ANY = EngineCoreRequest("any", [1, 2, 3])


class Last(LoadBalancer):
    """What a user might write."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return engines[-1]


class Index(LoadBalancer):
    """What a user might write by mistake."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return engines[-1].index  # type: ignore[return-value]


def send(balancer: LoadBalancer, loads: list[EngineLoad], count: int, request: EngineCoreRequest = ANY) -> list[int]:
    """Send requests and return where they went."""
    by_index = {load.index: load for load in loads}
    chosen = []
    for _ in range(count):
        chosen.append(balancer.pick(request, loads))
        by_index[chosen[-1]].add()
    return chosen


@pytest.mark.parametrize("engines", [2, 4, 5, 16])
@pytest.mark.parametrize("name", [name for name in BALANCERS if name != "two-choices"])
def test_a_first_burst_of_20_equal_requests_splits_evenly(name: str, engines: int) -> None:
    chosen = Counter(send(make_balancer(name), [EngineLoad(index) for index in range(engines)], 20))
    assert max(chosen.values()) - min(chosen.values()) <= (20 % engines > 0)
    assert len(chosen) == engines


def test_score_is_four_times_waiting_plus_running() -> None:
    """C-51, protocol J.5."""
    loads = [
        EngineLoad(0, waiting=1, running=0),
        EngineLoad(1, waiting=0, running=3),
        EngineLoad(2, waiting=0, running=5),
    ]
    assert make_balancer("score").pick(ANY, loads) == 1


def test_score_counts_own_additions_until_the_next_report() -> None:
    """C-51: each counts ``client_count`` times, since the other frontends do the same."""
    balancer = make_balancer("score", client_count=3)
    loads = [EngineLoad(0), EngineLoad(1, running=13)]
    assert send(balancer, loads, 3) == [0, 0, 1]  # 0, 12, 24 against 13
    loads[0].report(waiting=0, running=2)
    loads[1].report(waiting=0, running=14)
    assert send(balancer, loads, 2) == [0, 0]  # 2, then 14 against 14 in a scan from engine 0


@pytest.mark.parametrize(("client_index", "first"), [(0, 0), (1, 1), (2, 3), (3, 4)])
def test_frontends_begin_their_scans_at_different_engines(client_index: int, first: int) -> None:
    """Protocol J.5: start = n * client_index // client_count, one further each time."""
    balancer = make_balancer("score", client_count=4, client_index=client_index)
    loads = [EngineLoad(index) for index in range(6)]
    order = [balancer.pick(ANY, loads) for _ in range(8)]
    assert order == [(first + step) % 6 for step in range(8)]


def test_the_scan_goes_on_when_engines_come_and_go() -> None:
    balancer = make_balancer("inflight")
    loads = [EngineLoad(index) for index in range(4)]
    assert [balancer.pick(ANY, loads) for _ in range(3)] == [0, 1, 2]
    assert balancer.pick(ANY, [loads[1], loads[3]]) == 3  # position 3 mod 2
    assert balancer.pick(ANY, loads[1:2]) == 1


@pytest.mark.parametrize(
    ("load", "score"),
    [
        (EngineLoad(0, in_flight=3), 6),  # two clients: the other one has as many
        (EngineLoad(0, in_flight=3, waiting=4, running=5), 9),
        (EngineLoad(0, waiting=4, running=5, kv_cache_usage=0.5), 9),
        (EngineLoad(0, waiting=4, running=5, kv_cache_usage=0.75), 15),
        (EngineLoad(0, running=5, kv_cache_usage=1.0), 5),
    ],
)
def test_inflight_takes_the_larger_of_its_own_and_the_reported_load(load: EngineLoad, score: float) -> None:
    """Protocol M.3."""
    assert InFlight(client_count=2).score(load) == score


def test_inflight_is_exact_between_reports() -> None:
    balancer = make_balancer("inflight")
    loads = [EngineLoad(0), EngineLoad(1)]
    send(balancer, loads, 6)
    loads[1].finish()
    loads[1].finish()
    assert send(balancer, loads, 2) == [1, 1]


def test_two_choices_takes_the_better_of_two() -> None:
    balancer = TwoChoices(rng=random.Random(5))
    loads = [EngineLoad(0, in_flight=9), EngineLoad(1, in_flight=1), EngineLoad(2, in_flight=5)]
    chosen = Counter(balancer.pick(ANY, loads) for _ in range(300))
    assert chosen[0] == 0, "the worst of three loses every draw"
    assert 160 < chosen[1] < 240, "the best wins two draws of three"


def test_two_choices_keeps_the_spread_small() -> None:
    loads = [EngineLoad(index) for index in range(64)]
    chosen = Counter(send(TwoChoices(rng=random.Random(5)), loads, 640))
    assert max(chosen.values()) <= 14, "a plain draw would give someone about 20"


@pytest.mark.parametrize("name", BALANCERS)
def test_documents_go_where_their_late_interaction_query_is(name: str) -> None:
    """Protocol J.5: crc32 of the key, whatever the loads."""
    pooling = PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "query-ß"))
    request = EngineCoreRequest("doc", [1, 2], pooling_params=pooling)
    loads = [EngineLoad(index) for index in range(8)]
    expected = zlib.crc32("query-ß".encode()) % 8
    loads[expected].report(waiting=50, running=50)
    assert set(send(make_balancer(name), loads, 5, request)) == {expected}
    empty = PoolingParams(late_interaction_params=LateInteractionParams("score_doc", ""))
    assert make_balancer(name).pick(EngineCoreRequest("doc", [1], pooling_params=empty), loads) != expected


def prompt(*parts: tuple[int, int]) -> list[int]:
    """Make a prompt of ``(token, how many)``."""
    return [token for token, count in parts for _ in range(count)]


def test_prefix_goes_where_the_prefix_is() -> None:
    balancer = make_balancer("prefix")
    loads = [EngineLoad(index) for index in range(4)]
    first = {who: balancer.pick(EngineCoreRequest("a", prompt((who, 4096))), loads) for who in range(4)}
    assert sorted(first.values()) == [0, 1, 2, 3]
    for who, engine in first.items():
        assert balancer.pick(EngineCoreRequest("b", prompt((who, 4096), (9, 50))), loads) == engine


@pytest.mark.parametrize(
    ("tokens", "loads", "chosen"),
    [
        (2048, (3, 2), 0),
        (2048, (30, 9), 0),
        (2048, (32, 8), 1),  # twice the average of the three
        (2048, (1, 0), 1),  # an idle engine is at hand
        (320, (13, 10), 0),
        (320, (16, 10), 1),  # five requests' worth of tokens, not six
        (250, (9, 9), 1),  # too short to matter, so the scan goes on
    ],
)
def test_prefix_weighs_what_is_cached_against_the_queue(tokens: int, loads: tuple[int, int], chosen: int) -> None:
    balancer = make_balancer("prefix")
    engines = [EngineLoad(0), EngineLoad(1), EngineLoad(2)]
    request = EngineCoreRequest("a", prompt((1, tokens)))
    assert balancer.pick(request, engines) == 0
    for engine, load in zip(engines, (*loads, loads[1]), strict=True):
        engine.report(waiting=0, running=load)
    assert balancer.pick(request, engines) == chosen


@pytest.mark.parametrize("engines", [2, 4, 16])
@pytest.mark.parametrize("tokens", [50, 255, 500, 5000])
def test_prefix_splits_a_first_burst_evenly_though_its_prompts_are_equal(tokens: int, engines: int) -> None:
    """The first of them is not computed yet when the others come: there is nothing to share."""
    request = EngineCoreRequest("a", prompt((1, tokens)))
    chosen = Counter(send(make_balancer("prefix"), [EngineLoad(index) for index in range(engines)], 20, request))
    assert len(chosen) == engines
    assert max(chosen.values()) - min(chosen.values()) <= 1


def test_prefix_spreads_short_prompts_even_if_each_ends_before_the_next_comes() -> None:
    loads = [EngineLoad(index) for index in range(16)]
    request = EngineCoreRequest("a", prompt((1, 200)))
    balancer = make_balancer("prefix")
    assert [balancer.pick(request, loads) for _ in range(32)] == [*range(16), *range(16)]


def test_prefix_forgets_an_engine_that_was_removed() -> None:
    balancer = make_balancer("prefix")
    loads = [EngineLoad(0, running=1), EngineLoad(1, running=2)]
    request = EngineCoreRequest("a", prompt((1, 4096)))
    assert balancer.pick(request, loads) == 0
    loads[0].report(waiting=0, running=2)
    loads[1].report(waiting=0, running=1)
    assert balancer.pick(request, loads) == 0
    balancer.removed(0)
    assert balancer.pick(request, loads) == 1


def conversations(num_frontends: int, num_engines: int) -> tuple[float, Counter[int]]:
    """Let 200 conversations of six turns go through frontends drawn at random; 60 requests are in flight.

    Returns:
        the share of prompts after the first turn that met an engine which had the turn before, and where all went.
    """
    rng = random.Random(7)
    frontends = [make_balancer("prefix", num_frontends, index) for index in range(num_frontends)]
    loads = [[EngineLoad(index) for index in range(num_engines)] for _ in frontends]
    in_flight: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    hits = 0
    went: Counter[int] = Counter()
    for turn in range(6):
        for talk in rng.sample(range(200), 200):
            system, own = [5] * 800, range(1_000_000 * talk, 1_000_000 * talk + 400 * (turn + 1))
            frontend = rng.randrange(num_frontends)
            engine = frontends[frontend].pick(EngineCoreRequest("a", [*system, *own]), loads[frontend])
            went[engine] += 1
            hits += engine == last.get(talk)
            last[talk] = engine
            loads[frontend][engine].add()
            in_flight.append((frontend, engine))
            if len(in_flight) > 60:
                frontend, engine = in_flight.pop(rng.randrange(60))
                loads[frontend][engine].finish()
            counts = Counter(engine for _, engine in in_flight)
            for known in loads:
                for load in known:
                    load.report(waiting=0, running=counts[load.index])
    return hits / 1000, went


def test_prefix_of_several_frontends_agrees_without_a_word() -> None:
    """Each sees a quarter of the turns, and most conversations stay where they are."""
    alone, _ = conversations(1, 8)
    together, went = conversations(4, 8)
    assert alone > 0.95
    assert together > 0.55, "an eighth would be chance"
    assert max(went.values()) < 2 * min(went.values())


def test_prefix_of_several_frontends_expects_nothing_where_nothing_comes_twice() -> None:
    prefix, inflight = make_balancer("prefix", 4, 1), make_balancer("inflight", 4, 1)
    loads = [EngineLoad(index) for index in range(8)]
    rng = random.Random(3)
    for talk in range(200):
        request = EngineCoreRequest("a", list(range(10_000 * talk, 10_000 * talk + 5000)))
        chosen = prefix.pick(request, loads)
        assert chosen == inflight.pick(request, loads)
        loads[chosen].add()
        loads[rng.randrange(8)].report(waiting=0, running=rng.randrange(10))


def test_prefix_spreads_prompts_of_embeddings_by_load() -> None:
    loads = [EngineLoad(index) for index in range(4)]
    assert sorted(send(make_balancer("prefix"), loads, 4, EngineCoreRequest("a", None))) == [0, 1, 2, 3]


def test_one_engine_gets_everything() -> None:
    for name in BALANCERS:
        assert send(make_balancer(name), [EngineLoad(7)], 3) == [7, 7, 7]


def test_a_policy_of_ones_own_is_named_by_its_module() -> None:
    balancer = make_balancer(f"{__name__}:Last", client_count=4, client_index=3)
    assert (balancer.client_count, balancer.client_index) == (4, 3)
    assert balancer.pick(ANY, [EngineLoad(3), EngineLoad(5)]) == 5
    balancer.removed(5)


def test_a_policy_that_returns_no_engine_is_named() -> None:
    with pytest.raises(ConfigError, match="load balancer Index chose 5, not one of the engines it was given"):
        make_balancer(f"{__name__}:Index").pick(ANY, [EngineLoad(3), EngineLoad(5)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "round-robin",
            "unknown load balancer 'round-robin'; known: inflight, score, two-choices, prefix, or name one",
        ),
        ("no_such_module:Policy", "'no_such_module:Policy' cannot be imported: No module named 'no_such_module'"),
        ("enginewire.config:Nothing", "'enginewire.config:Nothing' cannot be imported: .* has no attribute 'Nothing'"),
        ("enginewire.config:EngineConfig", "'enginewire.config:EngineConfig' is .*, not a subclass of .*LoadBalancer"),
    ],
)
def test_a_name_that_is_no_policy_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_balancer(name)


def test_the_default_setting_is_one_of_the_policies() -> None:
    assert EngineConfig.create("echo").load_balancer in BALANCERS
