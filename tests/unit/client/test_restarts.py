"""``Restarts``: when an engine is started again, and when it is given up."""

from __future__ import annotations

import pytest

from enginewire import ConfigError, EngineConfig
from enginewire.client.restarts import Restarts


def test_an_engine_that_may_not_restart_is_given_up() -> None:
    """The default."""
    restarts = Restarts()
    restarts.serves(0.0)
    assert restarts.ended(1000.0) is None
    assert restarts.in_a_row == 0


def test_pauses_double_up_to_a_limit() -> None:
    """Issue 6: backoff, no storm."""
    restarts = Restarts(limit=9, window_s=60.0)
    moments = [restarts.ended(100.0) for _ in range(10)]
    assert moments == [100.5, 101.0, 102.0, 104.0, 108.0, 116.0, 130.0, 130.0, 130.0, None]
    assert restarts.ended(200.0) is None


def test_who_served_long_enough_has_all_restarts_again() -> None:
    """Issue 6: only a row of quick deaths is a crash loop."""
    restarts = Restarts(limit=2, window_s=60.0)
    restarts.serves(0.0)
    assert restarts.ended(10.0) == 10.5
    restarts.serves(20.0)
    assert restarts.ended(79.0) == 80.0
    restarts.serves(100.0)
    assert restarts.ended(160.0) == 160.5
    assert restarts.in_a_row == 1


def test_a_death_while_starting_counts_and_ends_no_row() -> None:
    restarts = Restarts(limit=1, window_s=60.0)
    restarts.serves(0.0)
    assert restarts.ended(100.0) is not None
    assert restarts.ended(500.0) is None, "it did not serve in these 400 s"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"restart_engine": -1}, "restart_engine must be an integer of at least 0"),
        ({"restart_engine": 1.5}, "restart_engine must be an integer of at least 0"),
        ({"restart_window_s": -1}, "restart_window_s must be a number of seconds"),
        ({"failover": "always"}, "failover must be one of none, resume, exact; got 'always'"),
        ({"failover_timeout_s": float("nan")}, "failover_timeout_s must be a number of seconds"),
        ({"drain_timeout_s": None}, "drain_timeout_s must be a number of seconds"),
        ({"restart_engine": 1, "data_parallel_lock_step": True}, "neither restart nor fail over alone"),
        ({"failover": "resume", "data_parallel_lock_step": True}, "neither restart nor fail over alone"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.create("echo", **settings)


@pytest.mark.parametrize("asked", [{"restart_engine": 1}, {"failover": "resume"}, {"failover": "exact"}], ids=str)
@pytest.mark.parametrize(
    "launcher",
    [
        {},
        {"data_parallel_backend": "ray"},
        {"executor": "vllm", "executor_options": {"python": "/opt/vllm/bin/python"}},
        {"data_parallel_size_local": 0},
    ],
    ids=["processes", "ray", "vllm", "elsewhere"],
)
def test_ranks_in_lock_step_are_said_not_to_restart_or_fail_over(
    launcher: dict[str, object], asked: dict[str, object]
) -> None:
    """Issue 6: as a group, or not at all. It is not, whatever starts them, and the refusal says what to leave out."""
    settings = {"data_parallel_size": 2, "data_parallel_lock_step": True, **launcher}
    EngineConfig.create("echo", **settings)
    with pytest.raises(ConfigError, match=r"stops them all\. Leave out failover and restart_engine"):
        EngineConfig.create("echo", **settings, **asked)
