"""``LLM.generate`` over several engines of which some are lost: what was finished is not lost with them (C-55)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from client_harness import PATIENCE_S, Face, mock_faces, output
from enginewire import LLM, EngineDeadError, RequestLostError, RequestOutput, SamplingParams
from enginewire.testing import MockEngine

PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)


pytestmark = pytest.mark.usefixtures("quick_looks")


def generating(
    face: Face, on_error: str, script: Callable[[list[MockEngine], list[str]], None], engines: list[MockEngine]
) -> Future[list[RequestOutput]]:
    """Have two prompts completed, one by each engine, while ``script`` runs with the ids that the engines got."""
    llm = LLM.from_client(face.client)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, [[1, 2], [3, 4]], PARAMS, on_error=on_error, progress=False)
        script(engines, [engine.expect_add().request_id for engine in engines])
        future.exception(PATIENCE_S)
    return future


def first_answers_and_second_goes(engines: list[MockEngine], ids: list[str]) -> None:
    engines[1].vanish()
    engines[0].send_outputs([output(ids[0], [7], finished=True)])


def test_what_the_other_engine_finished_is_returned_with_the_error_in_its_place() -> None:
    with mock_faces("sync") as (face, engines):
        done, lost = generating(face, "return", first_answers_and_second_goes, engines).result()
    assert (done.outputs[0].token_ids, done.error) == ([7], None)
    assert isinstance(lost.error, RequestLostError)
    assert (lost.finished, lost.outputs[0].finish_reason, lost.outputs[0].token_ids) == (True, "error", [])


def test_by_default_the_loss_is_raised_once_the_others_are_done_and_says_how_to_get_them() -> None:
    with mock_faces("sync") as (face, engines):
        future = generating(face, "raise", first_answers_and_second_goes, engines)
    with pytest.raises(RequestLostError, match="the connection to it was lost") as caught:
        future.result()
    assert caught.value.__notes__ == ["1 of 2 requests failed; on_error='return' gives the rest"]


def test_what_was_finished_is_returned_also_if_the_last_engine_dies() -> None:
    """The client is dead: no message says which requests failed."""

    def one_answers_and_both_go(engines: list[MockEngine], ids: list[str]) -> None:
        engines[0].send_outputs([output(ids[0], [7], finished=True)])
        for engine in engines:
            engine.leave()

    with mock_faces("sync", settings={"engine_return_timeout_s": 0}) as (face, engines):
        done, lost = generating(face, "return", one_answers_and_both_go, engines).result()
        assert (done.outputs[0].token_ids, done.error) == ([7], None)
        assert isinstance(lost.error, RequestLostError | EngineDeadError)
        # Nobody takes requests any longer, and that is said for each of them.
        neither = LLM.from_client(face.client).generate([[1], [2]], PARAMS, on_error="return", progress=False)
        assert [type(it.error) for it in neither] == [EngineDeadError] * 2
