"""The stop rules."""

from __future__ import annotations

from typing import Any

import pytest

from enginewire.engine.stop import Stop, StopRules
from enginewire.wire.messages import FinishReason
from enginewire.wire.sampling import RepetitionDetectionParams, SamplingParams

EOS = 2


def rules(*, prompt: int = 4, max_model_len: int = 100, eos: int | None = EOS, **params: Any) -> StopRules:
    params.setdefault("max_tokens", 50)
    return StopRules(SamplingParams(eos_token_id=eos, **params), prompt, max_model_len)


def stop_after(rules: StopRules, token_ids: list[int]) -> tuple[int, Stop] | None:
    """Feed one token at a time; return where it stopped."""
    for position, token_id in enumerate(token_ids, start=1):
        if (stop := rules.advance([token_id])) is not None:
            return position, stop
    return None


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [5, 6, EOS, 7], (3, Stop(1, FinishReason.STOP))),
        ({"eos": None}, [5, EOS, 7], None),
        ({"stop_token_ids": [9]}, [5, 9, EOS], (2, Stop(1, FinishReason.STOP, 9))),
        ({"stop_token_ids": [EOS]}, [5, EOS], (2, Stop(1, FinishReason.STOP))),
        ({"max_tokens": 3}, [5, 6, 7, 8], (3, Stop(1, FinishReason.LENGTH))),
        ({"max_tokens": 3}, [5, 6, EOS], (3, Stop(1, FinishReason.STOP))),
        ({"max_model_len": 6}, [5, 6, 7], (2, Stop(1, FinishReason.LENGTH))),
        ({"max_tokens": None, "max_model_len": 7}, [5, 6, 7, 8], (3, Stop(1, FinishReason.LENGTH))),
        ({"min_tokens": 3}, [EOS, EOS, EOS], (3, Stop(1, FinishReason.STOP))),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [9, 9, 5, 9], (4, Stop(1, FinishReason.STOP, 9))),
        ({"min_tokens": 5, "max_model_len": 6}, [5, 6, 7], (2, Stop(1, FinishReason.LENGTH))),
    ],
    ids=str,
)
def test_rules_apply_per_token_in_their_order(
    params: dict[str, Any], tokens: list[int], expected: tuple[int, Stop] | None
) -> None:
    """Protocol D.6: min_tokens, EOS, stop token, length."""
    assert stop_after(rules(**params), tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 6, EOS, 7, 8], Stop(3, FinishReason.STOP)),
        ([5, 6, 7], None),
        ([5, 6, 7, 8, 9], Stop(4, FinishReason.LENGTH)),
        ([], None),
    ],
    ids=str,
)
def test_several_tokens_at_once_end_where_single_ones_would(tokens: list[int], expected: Stop | None) -> None:
    rules_ = rules(max_tokens=4)
    assert rules_.advance(tokens) == expected
    assert rules_.num_output_tokens == (len(tokens) if expected is None else expected.num_tokens)


@pytest.mark.parametrize(
    ("sizes", "count", "tokens", "stops_at"),
    [
        ((1, 1), 3, [5, 5, 5], 3),
        ((1, 1), 3, [5, 5, 6, 5, 5, 5], 6),
        ((2, 2), 2, [1, 2, 1, 2], 4),
        ((2, 2), 3, [1, 2, 1, 2, 1, 2], 6),
        ((2, 2), 2, [1, 1, 1, 1], 4),
        ((0, 3), 2, [1, 2, 3, 1, 2, 3], 6),
        ((2, 3), 2, [1, 1, 1], None),
        ((1, 2), 3, [1, 2, 1, 3, 1, 2, 1, 2], None),
        ((3, 3), 2, [9, 9, 9, 9, 1, 2, 3, 1, 2, 3], 10),
    ],
    ids=str,
)
def test_a_pattern_that_occurs_often_enough_ends_the_request(
    sizes: tuple[int, int], count: int, tokens: list[int], stops_at: int | None
) -> None:
    detection = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    found = stop_after(rules(eos=None, repetition_detection=detection), tokens)
    if stops_at is None:
        assert found is None
    else:
        assert found == (stops_at, Stop(1, FinishReason.REPETITION, "repetition_detected"))


def test_repetition_is_found_far_into_an_output() -> None:
    """What it remembers is trimmed as the output grows."""
    detection = RepetitionDetectionParams(min_pattern_size=1, max_pattern_size=7, min_count=3)
    varied = [(i * i) % 1009 + 10 for i in range(200)]
    found = stop_after(
        rules(max_tokens=500, max_model_len=1000, repetition_detection=detection), varied + [3, 4, 5] * 3
    )
    assert found is not None
    assert found[0] == 209


def test_patterns_longer_than_the_output_can_hold_cost_nothing() -> None:
    """A request that asked for patterns of 2**40 tokens took all memory."""
    detection = RepetitionDetectionParams(max_pattern_size=2**40, min_count=3)
    found = stop_after(rules(max_tokens=30, repetition_detection=detection), [11, 12, 13, 14, 15] * 3)
    assert found == (15, Stop(1, FinishReason.REPETITION, "repetition_detected"))


def test_repetition_below_min_tokens_counts_but_does_not_stop() -> None:
    detection = RepetitionDetectionParams(min_pattern_size=1, max_pattern_size=1, min_count=2)
    assert stop_after(rules(min_tokens=4, repetition_detection=detection), [5, 5, 5, 5]) == (
        4,
        Stop(1, FinishReason.REPETITION, "repetition_detected"),
    )
