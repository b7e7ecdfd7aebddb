"""The registry of utility calls, for futures of threads and of loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginewire import ClientClosedError, EngineDeadError, UtilityCallError
from enginewire.client.utilities import Call, UtilityCalls, combined, fail, resolve
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
    id_one, id_two = calls.start("m", one).call_id, calls.start("m", two).call_id
    assert id_one != id_two
    calls.finish(utility_output(id_two, [1, 2]))
    assert two.result() == [1, 2]
    assert not one.done()
    assert len(calls) == 1


def test_call_ids_fit_the_wire() -> None:
    """Protocol F: 0 … 2^64 - 1; negative ones are reserved."""
    calls = UtilityCalls()
    ids = [calls.start("m", concurrent.futures.Future()).call_id for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(0 <= call_id < 1 << 64 for call_id in ids)


def test_a_failure_is_the_callers(make_future: Callable[[], Future]) -> None:
    """C-31."""
    calls = UtilityCalls()
    waiter = make_future()
    calls.finish(
        utility_output(calls.start("profile", waiter).call_id, failure_message="Call to profile method failed: x")
    )
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
    call_id = calls.start("m", waiter).call_id
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


def test_only_the_engine_that_was_asked_can_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Remote engines: one engine's peer cannot touch another's calls."""
    calls = UtilityCalls()
    waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
    call = calls.start("m", waiter, 1)
    calls.finish(utility_output(call.call_id, "forged"), 0)
    assert not waiter.done()
    assert "no waiting call" in caplog.text
    calls.finish(utility_output(call.call_id, "real"), 1)
    assert waiter.result() == "real"


def test_two_registries_do_not_use_the_same_ids() -> None:
    """Frontend restart: an answer to the call of a frontend that was here before fits nobody."""
    ids = [UtilityCalls().start("m", concurrent.futures.Future()).call_id for _ in range(20)]
    assert len(set(ids)) == 20
    assert max(ids) > 1 << 40


def calls_to(method: str, count: int) -> list[Call[Any]]:
    """Make calls of one utility to engines 0, 1, …"""
    return [Call(i, method, i, concurrent.futures.Future()) for i in range(count)]


@pytest.mark.parametrize(
    ("method", "answers", "result"),
    [
        ("list_loras", [[1], [2]], [1]),
        ("is_sleeping", [True, True], True),
        ("reset_prefix_cache", [True, True], True),
        ("reset_prefix_cache", [True, False, True], False),
        ("wake_up", [None, None], None),
        ("wake_up", [True, False], False),
        ("collective_rpc", [["a"]], ["a"]),
        ("collective_rpc", [["a", "b"], ["c", ["d"]]], ["a", "b", "c", ["d"]]),
    ],
)
def test_several_answers_become_one(method: str, answers: list[object], result: object) -> None:
    """C-33; protocol M.3. Of ``collective_rpc`` every worker's result counts (defect 24)."""
    assert combined(calls_to(method, len(answers)), answers) == result


@pytest.mark.parametrize("method", ["is_sleeping", "is_scheduler_paused"])
def test_engines_that_have_to_agree_and_do_not(method: str) -> None:
    """Protocol M.3."""
    with pytest.raises(UtilityCallError, match=rf"the engines disagree on {method} \(0: True, 1: False\)"):
        combined(calls_to(method, 2), [True, False])


def test_a_failure_says_which_engine_failed_and_the_others_are_in_its_notes() -> None:
    """C-33: any engine's failure is raised."""
    outcomes = [None, UtilityCallError("no", method="m", engine_index=1), UtilityCallError("nor I", method="m")]
    with pytest.raises(UtilityCallError, match="engine 1: no") as caught:
        combined(calls_to("m", 3), outcomes)
    assert caught.value.engine_index == 1
    assert caught.value.__notes__ == ["engine 2 failed too: nor I"]


def test_the_failure_of_the_only_engine_is_passed_on_as_it_is() -> None:
    with pytest.raises(UtilityCallError, match="no"):
        combined(calls_to("m", 1), [UtilityCallError("no", method="m")])


def test_forgetting_is_idempotent() -> None:
    """C-32."""
    calls = UtilityCalls()
    call_id = calls.start("m", concurrent.futures.Future()).call_id
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


def test_a_call_that_starts_while_the_client_is_closed_is_failed_or_refused() -> None:
    """C-32: by another thread, at any moment."""
    for _ in range(20):
        calls, filed = UtilityCalls(), list[Future]()
        is_started = threading.Event()

        def start(
            calls: UtilityCalls = calls, filed: list[Future] = filed, begun: threading.Event = is_started
        ) -> None:
            with pytest.raises(ClientClosedError):
                while True:
                    waiter: Future = concurrent.futures.Future()
                    calls.start("m", waiter)
                    filed.append(waiter)
                    begun.set()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(start)
            assert is_started.wait(10)
            calls.close(lambda: ClientClosedError("closed"))
            done.result(10)
        assert all(waiter.done() for waiter in filed)
        assert len(calls) == 0


def test_the_loss_of_an_engine_fails_its_calls_and_nobody_elses(make_future: Callable[[], Future]) -> None:
    """C-55, defect 21; what follows is welcome."""
    calls = UtilityCalls()
    lost, other = make_future(), make_future()
    calls.start("m", lost, 0)
    kept = calls.start("m", other, 1)
    calls.engine_lost(0, "it was restarted")
    error = lost.exception()
    assert isinstance(error, UtilityCallError)
    assert (str(error), error.method, error.engine_index) == ("it was restarted", "m", 0)
    calls.finish(utility_output(kept.call_id, 6), 1)
    assert other.result() == 6
    found = make_future()
    calls.finish(utility_output(calls.start("m", found).call_id, 5))
    assert found.result() == 5


@pytest.mark.parametrize("result", [[["builtins", "int"], 1], "x", [1], {"a": 1}, 7])
def test_a_result_that_is_no_result_fails_its_call(result: object) -> None:
    """Defect 19."""
    calls = UtilityCalls()
    waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
    calls.finish(UtilityOutput(calls.start("m", waiter).call_id, None, result))
    with pytest.raises(UtilityCallError, match="the result of m cannot be decoded"):
        waiter.result()


def test_what_a_peer_with_pickle_on_sends_is_taken_if_it_is_on_here() -> None:
    """Protocol E.6."""
    calls = UtilityCalls(allow_pickle=True)
    waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
    calls.finish(UtilityOutput(calls.start("m", waiter).call_id, None, [["builtins", "bool"], True]))
    assert waiter.result() is True
