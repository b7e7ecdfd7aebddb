"""Requests that move from a lost engine to another, byte by byte: engines are mocks, links are cut and restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client_harness import MP_FACES, PATIENCE_S, Face, mock_faces, mp_client, output, request
from enginewire import FinishReason
from enginewire.testing import MockEngine, wait_until
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, PrefillStats
from enginewire.wire.profile import V0_25, V0_32

pytestmark = pytest.mark.usefixtures("quick_looks")


@pytest.fixture(params=MP_FACES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Face, list[MockEngine]]]:
    """Two engines that speak different versions."""
    with mock_faces(request.param, settings={"failover": "resume"}, profiles=(V0_25, V0_32)) as pair:
        yield pair


def send_to(face: Face, engines: list[MockEngine], one: EngineCoreRequest, rank: int) -> None:
    """Send a request to one engine, and see it there."""
    one.data_parallel_rank = rank
    face.add_request(one)
    assert engines[rank].expect_add().request_id == one.request_id


def first(request_id: str, tokens: list[int]) -> EngineCoreOutput:
    """Make a first output, with what comes with the first only."""
    made = output(request_id, tokens)
    made.prefill_stats = PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    return made


def test_a_request_goes_on_where_it_was_and_its_consumer_sees_no_seam(pair: tuple[Face, list[MockEngine]]) -> None:
    """Failover: prompt and delivered tokens, less of the limit, first-token extras once, ids mapped back."""
    face, engines = pair
    send_to(face, engines, request("r", max_tokens=10, temperature=0), 0)
    engines[0].send_outputs([first("r", [5])])
    engines[0].send_outputs([output("r", [6, 7])])
    assert [it.new_token_ids for it in face.outputs(2)] == [[5], [6, 7]]
    engines[0].vanish()
    taking = face.start("get_output")
    again = engines[1].expect_add()
    assert again.sampling_params is not None
    assert (again.request_id, again.prompt_token_ids) == ("r~2", [1, 2, 3, 5, 6, 7])
    assert (again.sampling_params.max_tokens, again.data_parallel_rank) == (7, None)
    engines[1].send_outputs([first("r~2", [8])])
    (seen,) = taking.result(PATIENCE_S).outputs
    assert (seen.request_id, seen.new_token_ids, seen.prefill_stats) == ("r", [8], None)
    engines[1].send_outputs([output("r~2", [9], finished=True)])
    (last,) = face.outputs(1)
    assert (last.request_id, last.new_token_ids, last.finish_reason) == ("r", [9], FinishReason.LENGTH)
    assert mp_client(face).inbox.live == set()
    statuses = face.client.engine_statuses()
    assert [(it.num_moved, it.num_lost) for it in statuses] == [(1, 0), (0, 0)]


def test_what_had_arrived_but_was_not_taken_is_delivered_and_counts(pair: tuple[Face, list[MockEngine]]) -> None:
    """No gap, no repeated token: a loss waits its turn behind what the engine sent before."""
    face, engines = pair
    send_to(face, engines, request("r", max_tokens=10), 0)
    for token in (5, 6, 7):
        engines[0].send_outputs([output("r", [token])])
    engines[0].leave()
    wait_until(lambda: face.client.engine_statuses()[0].num_deaths, PATIENCE_S, "the loss")
    assert [it.new_token_ids for it in face.outputs(3)] == [[5], [6], [7]]
    taking = face.start("get_output")
    assert engines[1].expect_add().prompt_token_ids == [1, 2, 3, 5, 6, 7]
    engines[1].send_outputs([output("r~2", [8], finished=True)])
    assert taking.result(PATIENCE_S).outputs[0].new_token_ids == [8]


def test_an_engine_that_was_only_cut_off_aborts_what_has_moved(pair: tuple[Face, list[MockEngine]]) -> None:
    """Remote engines: it went on meanwhile; nobody gets that."""
    face, engines = pair
    send_to(face, engines, request("r", max_tokens=10), 0)
    engines[0].send_outputs([output("r", [5])])
    face.outputs(1)
    engines[0].vanish()
    taking = face.start("get_output")
    assert engines[1].expect_add().request_id == "r~2"
    engines[0].connect()
    engines[0].send_outputs([output("r", [66])])
    wait_until(lambda: face.client.engine_statuses()[0].state == "ready", PATIENCE_S, "its return")
    engines[0].send_outputs([output("r", [67], finished=True)])
    engines[1].send_outputs([output("r~2", [6], finished=True)])
    outputs = taking.result(PATIENCE_S).outputs
    while not outputs:
        outputs = face.get_output().outputs
    assert [(it.request_id, it.new_token_ids) for it in outputs] == [("r", [6])]
    wait_until(lambda: not mp_client(face).engines[0].stale, PATIENCE_S, "the end of what was left there")


def test_the_id_of_a_request_that_moves_stays_in_use_and_can_be_aborted(pair: tuple[Face, list[MockEngine]]) -> None:
    """Duplicate ids; C-51."""
    face, engines = pair
    send_to(face, engines, request("r~2"), 1)
    send_to(face, engines, request("r", max_tokens=10), 0)
    engines[0].vanish()
    taking = face.start("get_output")
    assert engines[1].expect_add().request_id == "r~3", "the frontend has chosen an id of our kind"
    with pytest.raises(ValueError, match="this id is still in use"):
        face.add_request(request("r"))
    face.abort_requests(["r"])
    assert engines[1].expect_abort() == ["r~3"]
    engines[1].send_outputs([output("r~3", [1]), output("r~2", [7], finished=True)])
    assert [(it.request_id, it.new_token_ids) for it in taking.result(PATIENCE_S).outputs] == [("r~2", [7])]
    assert mp_client(face).inbox.live == set()
