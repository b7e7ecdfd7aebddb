"""When engines in lock-step run and rest: these facts, exactly these decisions."""

from __future__ import annotations

import pytest

from enginewire.engine.waves import LAST_WAVE, SYNC_INTERVAL, Waves


def rank(number: int, *, wave: int = 0) -> Waves:
    waves = Waves(number)
    for _ in range(wave):
        waves.told_to_start(waves.current_wave, None)
        waves.agreed(any_has_work=False, all_pause=False)
    assert (waves.current_wave, waves.is_running) == (wave, False)
    return waves


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("of_request", "then"), [(0, 2), (2, 2), (5, 5)], ids=["late", "right", "early"])
def test_a_request_starts_a_wave_that_the_coordinator_hears_of(number: int, of_request: int, then: int) -> None:
    """J.4: late ones have to be told; the wave of an early one is adopted."""
    waves = rank(number, wave=2)
    assert waves.request_added(of_request) == then
    assert (waves.current_wave, waves.is_running) == (then, True)
    assert waves.request_added(of_request) is None, "it runs already"


def test_a_request_during_a_wave_changes_nothing() -> None:
    waves = rank(1, wave=2)
    waves.told_to_start(2, None)
    assert waves.request_added(9) is None
    assert waves.current_wave == 2


@pytest.mark.parametrize(("excluded", "runs"), [(None, True), (0, True), (1, False)])
def test_the_coordinators_word_starts_a_wave_unless_it_is_this_ranks_own(excluded: int | None, runs: bool) -> None:
    """J.4."""
    waves = rank(1)
    assert waves.told_to_start(0, excluded) is None
    assert waves.is_running is runs


def test_rank_0_says_that_the_engines_run() -> None:
    """M.3: 0.32's coordinator believes nobody else."""
    waves = rank(0)
    assert waves.told_to_start(0, None) == 0
    assert waves.told_to_start(0, None) is None


@pytest.mark.parametrize(("wave", "runs", "then"), [(1, False, 2), (2, True, 2), (7, True, 7)])
def test_a_newer_wave_is_adopted_and_an_older_one_is_over(wave: int, runs: bool, then: int) -> None:
    """J.4, defect 32."""
    waves = rank(1, wave=2)
    waves.told_to_start(wave, None)
    assert (waves.is_running, waves.current_wave) == (runs, then)


def test_no_mistake_makes_a_wave_that_nobody_can_come_after() -> None:
    waves = rank(1)
    waves.told_to_start(LAST_WAVE + 1, None)
    waves.told_to_start(-1, None)
    assert not waves.is_running
    assert waves.request_added(2**63) == 0
    assert waves.request_added(-5) is None


def test_ranks_agree_after_the_first_step_and_then_now_and_again() -> None:
    waves = rank(1)
    waves.told_to_start(0, None)
    due = [step for step in range(1, 3 * SYNC_INTERVAL) if waves.stepped()]
    assert due == [1, 1 + SYNC_INTERVAL, 1 + 2 * SYNC_INTERVAL]


@pytest.mark.parametrize(
    ("any_has_work", "all_pause", "complete"),
    [(True, False, None), (False, False, 3), (True, True, 3), (False, True, 3)],
)
def test_a_wave_ends_when_nobody_has_work_or_all_pause(
    any_has_work: bool, all_pause: bool, complete: int | None
) -> None:
    """J.4, H."""
    waves = rank(1, wave=3)
    waves.told_to_start(3, None)
    waves.stepped()
    assert waves.agreed(any_has_work=any_has_work, all_pause=all_pause) == complete
    if complete is None:
        assert (waves.is_running, waves.current_wave, waves.step_counter) == (True, 3, 1)
    else:
        assert (waves.is_running, waves.current_wave, waves.step_counter) == (False, 4, 0)
    assert waves.is_paused is all_pause


def test_during_an_agreed_pause_nothing_starts_a_wave() -> None:
    """H."""
    waves = rank(0)
    assert waves.pause_pending() == 0, "ranks that rest step once more, to agree"
    assert waves.is_running
    waves.stepped()
    waves.agreed(any_has_work=True, all_pause=True)
    assert waves.request_added(1) is None
    assert waves.told_to_start(5, None) is None
    assert waves.pause_pending() is None
    assert (waves.is_running, waves.current_wave) == (False, 1)
    assert waves.resume() == 1
    assert (waves.is_running, waves.is_paused) == (True, False)
