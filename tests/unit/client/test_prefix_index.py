"""``PrefixIndex`` finds the longest prefix each engine has seen."""

from __future__ import annotations

import pytest

from enginewire.client.prefix_index import BLOCK, FIRST_BLOCK, PrefixIndex
from enginewire.wire.messages import (
    EngineCoreRequest,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
)


def request(length: int, *, seed: int = 0, tail: int = 0) -> EngineCoreRequest:
    """Make a request whose prompt begins as all of its seed do, and ends in ``tail`` tokens of its own."""
    return EngineCoreRequest("a", [*range(seed, seed + length - tail), *([7] * tail)])


def cached(index: PrefixIndex, request: EngineCoreRequest) -> dict[int, int]:
    return index.cached(index.prefixes(request))


@pytest.mark.parametrize("length", [0, 1, FIRST_BLOCK - 1])
def test_a_short_prompt_has_no_prefix(length: int) -> None:
    index = PrefixIndex()
    index.add(index.prefixes(request(length)), 0)
    assert len(index) == 0
    assert cached(index, request(length)) == {}


@pytest.mark.parametrize("length", [256, 300, 500, 1000, 4096, 32768, 131072])
def test_a_prompt_is_found_again_to_within_an_eighth(length: int) -> None:
    index = PrefixIndex()
    prefixes = index.prefixes(request(length))
    index.add(prefixes, 3)
    found = cached(index, request(length))[3]
    assert length - max(BLOCK, length // 8) <= found <= length
    assert found % BLOCK == 0
    assert len(prefixes.keys) == len(prefixes.lengths) < 60
    assert prefixes.lengths == sorted(prefixes.lengths)


def test_the_longest_common_prefix_counts() -> None:
    index = PrefixIndex()
    index.add(index.prefixes(request(1000, tail=500)), 0)
    index.add(index.prefixes(request(1000, tail=100)), 1)
    found = cached(index, request(1000))
    assert 440 <= found[0] <= 500
    assert 790 <= found[1] <= 900
    assert cached(index, request(1000, seed=1)) == {}, "the first token differs, so everything does"


def test_engines_far_apart_share_one_number() -> None:
    index = PrefixIndex()
    for engine in (0, 63, 64, 4095):
        index.add(index.prefixes(request(300)), engine)
    assert cached(index, request(300)) == dict.fromkeys((0, 63, 64, 4095), 288)
    assert len(index) == 2


def test_what_separates_caches_separates_prefixes() -> None:
    """The salt, the adapter and the images are part of a block's identity on an engine."""
    plain = request(300)
    salted = EngineCoreRequest("a", plain.prompt_token_ids, cache_salt="s")
    adapted = EngineCoreRequest("a", plain.prompt_token_ids, lora_request=LoRARequest("l", 1, "/l"))
    other = EngineCoreRequest("a", plain.prompt_token_ids, lora_request=LoRARequest("l2", 2, "/l2"))
    where = PlaceholderRange(offset=0, length=1)
    image = MultiModalFeatureSpec(data=None, modality="image", identifier="cat", mm_position=where)
    seen = EngineCoreRequest("a", plain.prompt_token_ids, mm_features=[image])
    requests = [plain, salted, adapted, other, seen]
    index = PrefixIndex()
    for engine, one in enumerate(requests):
        index.add(index.prefixes(one), engine)
    assert [cached(index, one) for one in requests] == [{engine: 288} for engine in range(5)]


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex(max_prefixes=6)
    index.add(index.prefixes(request(300, seed=1000)), 1)
    index.add(index.prefixes(request(300, seed=2000)), 2)
    index.add(index.prefixes(request(300, seed=3000)), 3)
    index.add(index.prefixes(request(300, seed=1000)), 1)  # used again
    index.add(index.prefixes(request(300, seed=4000)), 4)
    assert len(index) == 6
    assert cached(index, request(300, seed=2000)) == {}
    assert cached(index, request(300, seed=1000)) == {1: 288}
    index.add(index.prefixes(request(256, seed=5000)), 5)
    assert cached(index, request(300, seed=3000)) == {3: 256}, "the ends of prompts go before their beginnings"


def test_an_engine_is_forgotten_and_the_others_are_not() -> None:
    index = PrefixIndex()
    index.add(index.prefixes(request(300)), 0)
    index.add(index.prefixes(request(300)), 1)
    index.add(index.prefixes(request(300, seed=500)), 0)
    index.forget(0)
    assert cached(index, request(300)) == {1: 288}
    assert cached(index, request(300, seed=500)) == {}
    assert len(index) == 2
    index.forget(17)
