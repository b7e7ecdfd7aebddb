"""The registry of utility calls, for futures of threads and of loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginewire import ClientClosedError, EngineDeadError, UtilityCallError
from enginewire.client.utilities import UtilityCalls, fail, resolve
from enginewire.errors import EngineDeath
from enginewire.wire.messages import UtilityOutput, utility_output

Future = Any


@pytest.fixture(params=["concurrent", "asyncio"])
def make_future(request: pytest.FixtureRequest) -> Iterator[Callable[[], Future]]:
    """C-30: one registry serves both faces, only the future type differs."""
    if request.param == "concurrent":
        yield concurrent.futures.Future
        return
    loop = asyncio.new_event_loop()
    yield loop.create_future
    loop.close()


def test_an_answer_resolves_its_call_and_nobody_elses(make_future: Callable[[], Future]) -> None:
    """C-30."""
    calls = UtilityCalls()
    one, two = make_future(), make_future()
    id_one, id_two = calls.start("m", one), calls.start("m", two)
    assert id_one != id_two
    calls.finish(utility_output(id_two, [1, 2]))
    assert two.result() == [1, 2]
    assert not one.done()
    assert len(calls) == 1


def test_call_ids_fit_the_wire() -> None:
    """Protocol F: 0 … 2^64 - 1; negative ones are reserved."""
    calls = UtilityCalls()
    ids = [calls.start("m", concurrent.futures.Future()) for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(0 <= call_id < 1 << 64 for call_id in ids)


def test_a_failure_is_the_callers(make_future: Callable[[], Future]) -> None:
    """C-31."""
    calls = UtilityCalls()
    waiter = make_future()
    calls.finish(utility_output(calls.start("profile", waiter), failure_message="Call to profile method failed: x"))
    with pytest.raises(UtilityCallError, match="Call to profile method failed: x") as caught:
        waiter.result()
    assert caught.value.method == "profile"


@pytest.mark.parametrize("call_id", [0, -1, -2, 99, (1 << 64) - 1])
def test_an_answer_to_nobody_is_dropped_with_a_line(call_id: int, caplog: pytest.LogCaptureFixture) -> None:
    """C-31; defect 17."""
    UtilityCalls().finish(utility_output(call_id, 1))
    assert f"call_id={call_id}" in caplog.text


def test_an_answer_to_a_cancelled_call_is_dropped(make_future: Callable[[], Future]) -> None:
    """Defect 18: the two future types raise unrelated InvalidStateErrors."""
    calls = UtilityCalls()
    waiter = make_future()
    call_id = calls.start("m", waiter)
    waiter.cancel()
    calls.finish(utility_output(call_id, 1))
    assert waiter.cancelled()
    assert len(calls) == 0


def test_a_future_that_is_cancelled_while_its_answer_is_set_ends_nothing() -> None:
    """Defect 18: between the check and the setting."""

    class Race(concurrent.futures.Future[Any]):
        def done(self) -> bool:
            self.cancel()
            return False

    resolve(Race(), 1)
    fail(Race(), ValueError())


def test_forgetting_is_idempotent() -> None:
    """C-32."""
    calls = UtilityCalls()
    call_id = calls.start("m", concurrent.futures.Future())
    calls.forget(call_id)
    calls.forget(call_id)
    assert len(calls) == 0


def test_death_fails_each_with_an_exception_of_its_own_and_the_first_cause_stays(
    make_future: Callable[[], Future],
) -> None:
    """C-32; defect 16."""
    calls = UtilityCalls()
    waiters = [make_future() for _ in range(3)]
    for waiter in waiters:
        calls.start("m", waiter)
    calls.close(EngineDeath(0, "killed by signal 9 (SIGKILL)").exception)
    errors = [waiter.exception() for waiter in waiters]
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert len({id(error) for error in errors}) == 3
    calls.close(lambda: ClientClosedError("closed"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        calls.start("m", make_future())
    assert len(calls) == 0


def test_a_restart_fails_what_is_in_flight_and_welcomes_what_follows(make_future: Callable[[], Future]) -> None:
    """Defect 21."""
    calls = UtilityCalls()
    lost = make_future()
    calls.start("m", lost)
    calls.fail_pending(lambda: UtilityCallError("restarted", method=""))
    assert isinstance(lost.exception(), UtilityCallError)
    found = make_future()
    calls.finish(utility_output(calls.start("m", found), 5))
    assert found.result() == 5


@pytest.mark.parametrize("result", [[["builtins", "int"], 1], "x", [1], {"a": 1}, 7])
def test_a_result_that_is_no_result_fails_its_call(result: object) -> None:
    """Defect 19."""
    calls = UtilityCalls()
    waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
    calls.finish(UtilityOutput(calls.start("m", waiter), None, result))
    with pytest.raises(UtilityCallError, match="the result of m cannot be decoded"):
        waiter.result()


def test_what_a_peer_with_pickle_on_sends_is_taken_if_it_is_on_here() -> None:
    """Protocol E.6."""
    calls = UtilityCalls(allow_pickle=True)
    waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
    calls.finish(UtilityOutput(calls.start("m", waiter), None, [["builtins", "bool"], True]))
    assert waiter.result() is True
