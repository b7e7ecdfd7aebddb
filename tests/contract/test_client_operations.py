"""One suite for every client: what a frontend may rely on, whichever face it was given. A real engine that echoes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client_harness import ALL_FACES, CLIENTS, MP_FACES, Face, echo_face, request
from enginewire import ClientClosedError, EngineCoreOutputs, FinishReason, UtilityCallError
from enginewire.errors import DuplicateRequestIdError
from enginewire.wire.messages import LoRARequest


@pytest.fixture(scope="module", params=ALL_FACES)
def shared(request: pytest.FixtureRequest) -> Iterator[Face]:
    with echo_face(request.param) as face:
        face.is_sleeping()  # all connections are made before anybody looks for leaks
        yield face


@pytest.fixture
def face(shared: Face) -> Iterator[Face]:
    """A client with nothing in flight, before and after."""
    yield shared
    assert not shared.is_scheduler_paused()
    if shared.kind != "inproc":
        assert shared.pending_calls() == 0
        assert not shared.client.inbox.live


def tokens_of(face: Face, *request_ids: str) -> dict[str, list[int]]:
    """Collect the outputs of requests until all have ended."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    while unfinished:
        for output in face.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                unfinished.discard(output.request_id)
    return tokens


def test_the_factory_gives_each_answer_its_client(face: Face) -> None:
    """C-01, C-02."""
    assert type(face.client) is CLIENTS[face.kind]


def test_a_request_comes_back_token_by_token(face: Face) -> None:
    """C-11, C-40, C-41."""
    face.add_request(request("a", prompt=[5, 6, 7], max_tokens=5))
    assert tokens_of(face, "a") == {"a": [5, 6, 7, 5, 6]}


def test_requests_run_side_by_side(face: Face) -> None:
    ids = [f"r{i}" for i in range(20)]
    for i, request_id in enumerate(ids):
        face.add_request(request(request_id, prompt=[i, i + 1], max_tokens=3))
    assert tokens_of(face, *ids) == {f"r{i}": [i, i + 1, i] for i in range(20)}


def test_a_live_id_is_refused_and_a_finished_one_may_be_used_again(face: Face) -> None:
    """C-60; section 11, duplicate ids."""
    face.add_request(request("a", max_tokens=50))
    with pytest.raises(DuplicateRequestIdError, match="request a: this id is still in use"):
        face.add_request(request("a"))
    tokens_of(face, "a")
    face.add_request(request("a", max_tokens=2))
    assert tokens_of(face, "a") == {"a": [1, 2]}


def test_an_aborted_request_ends_without_an_output_and_its_id_is_free(face: Face) -> None:
    """Section 11, abort; protocol G."""
    face.add_request(request("a", max_tokens=100_000))
    face.get_output()
    face.abort_requests(["a", "never heard of"])
    face.abort_requests(["a"])
    face.add_request(request("b", prompt=[9], max_tokens=3))
    seen: list[int] = []
    while len(seen) < 3:
        for output in face.get_output().outputs:
            assert output.finish_reason is not FinishReason.ABORT
            if output.request_id == "b":
                seen += output.new_token_ids
    assert seen == [9, 9, 9]
    face.add_request(request("a", prompt=[4], max_tokens=1))
    assert tokens_of(face, "a")["a"][-1] == 4


def test_aborting_nothing_does_nothing(face: Face) -> None:
    """C-11, C-42."""
    face.abort_requests([])


def test_what_the_engine_has_is_in_the_configuration(face: Face) -> None:
    """C-25."""
    config = face.client.config
    assert (config.max_model_len, config.num_gpu_blocks, config.block_size) == (131_072, 65_536, 16)
    assert config.capabilities.deterministic
    assert config.dtype == "float32"


def test_the_utilities_that_read(face: Face) -> None:
    """C-03, C-11, C-30."""
    assert face.get_supported_tasks() == ("generate",)
    assert face.is_sleeping() is False
    assert face.is_scheduler_paused() is False
    assert face.reset_mm_cache() is None
    assert face.reset_encoder_cache() is None
    assert face.reset_prefix_cache() is True
    assert face.execute_dummy_batch() is None


def test_pausing_keeps_requests_until_the_scheduler_resumes(face: Face) -> None:
    """C-03, C-61."""
    face.pause_scheduler(mode="keep", clear_cache=False)
    assert face.is_scheduler_paused()
    face.add_request(request("a", max_tokens=2))
    face.resume_scheduler()
    assert tokens_of(face, "a") == {"a": [1, 2]}


def test_mode_wait_lets_running_requests_finish_where_the_engine_has_its_own_process(face: Face) -> None:
    """C-12: the subprocess clients support it."""
    if face.kind == "inproc":
        with pytest.raises(ValueError, match="'wait'"):
            face.sleep(level=0, mode="wait")
        return
    face.add_request(request("a", max_tokens=1000))
    first = face.outputs(1)  # it runs
    face.sleep(level=0, mode="wait")
    assert face.is_sleeping()
    tokens = sum(len(it.new_token_ids) for it in first) + len(tokens_of(face, "a")["a"])
    face.wake_up()
    assert tokens == 1000


def test_sleeping_and_waking_up(face: Face) -> None:
    """C-03, C-61."""
    face.sleep(level=1)
    assert face.is_sleeping()
    face.wake_up()
    assert not face.is_sleeping()


def test_an_abort_pause_ends_requests_with_an_output(face: Face) -> None:
    """Protocol H."""
    face.add_request(request("a", max_tokens=100_000))
    face.get_output()
    face.pause_scheduler(mode="abort")
    reasons = []
    while not reasons:
        reasons = [output.finish_reason for output in face.get_output().outputs if output.finished]
    assert reasons == [FinishReason.ABORT]
    face.resume_scheduler()


def test_adapters_are_added_listed_and_removed(face: Face) -> None:
    """C-03; a struct and a set as argument and result."""
    assert face.add_lora(LoRARequest("name", 3, "/somewhere")) is True
    assert face.list_loras() == {3}
    assert face.pin_lora(3) is True
    assert face.remove_lora(3) is True
    assert face.list_loras() == set()


@pytest.mark.parametrize("method", ["no_such_method", "_pause", "shutdown", "__init__"])
def test_an_unknown_utility_fails_with_the_engines_words(face: Face, method: str) -> None:
    """C-31; defect 7."""
    with pytest.raises(UtilityCallError, match=f"Call to {method} method failed: .* has no attribute '{method}'") as it:
        face.call_utility(method)
    assert it.value.method == method


def test_arguments_that_do_not_fit_fail_the_call_only(face: Face) -> None:
    """C-31; defect 14."""
    with pytest.raises(UtilityCallError, match=r"Call to is_sleeping method failed: .+"):
        face.call_utility("is_sleeping", 1, 2, 3)
    with pytest.raises(UtilityCallError, match="Invalid pause mode: sideways"):
        face.pause_scheduler(mode="sideways")
    assert face.is_sleeping() is False


def test_what_the_executor_lacks_fails_the_call_only(face: Face) -> None:
    """Section 9."""
    with pytest.raises(UtilityCallError, match="EchoExecutor does not offer save_sharded_state"):
        face.save_sharded_state("somewhere")


def test_one_engine_has_no_waves_and_does_not_scale(face: Face) -> None:
    """C-03."""
    assert face.client.dp_engines_running() is False
    with pytest.raises(NotImplementedError, match="enable_elastic_ep=True"):
        face.client.scale_elastic_ep(2).send(None)


def test_a_prompt_that_cannot_run_fails_alone(face: Face) -> None:
    """Defect 8: the in-process client raises, the others get an ERROR output."""
    bad = request("bad", prompt=[])
    if face.kind == "inproc":
        with pytest.raises(ValueError, match="prompt"):
            face.add_request(bad)
    else:
        face.add_request(bad)
        (error,) = face.outputs(1)
        assert error.finish_reason is FinishReason.ERROR
        assert str(error.stop_reason).startswith("invalid_request: ")
    face.add_request(request("good", max_tokens=1))
    assert tokens_of(face, "good") == {"good": [1]}


@pytest.mark.parametrize("kind", ALL_FACES)
def test_after_shutdown_every_operation_says_so(kind: str) -> None:
    """C-22; section 7 of the style guide: ClientClosedError."""
    with echo_face(kind) as face:
        face.client.shutdown()
        face.client.shutdown(timeout=0)
        with pytest.raises(ClientClosedError, match="shut down"):
            face.add_request(request())
        with pytest.raises(ClientClosedError):
            face.get_output()
        with pytest.raises(ClientClosedError):
            face.is_sleeping()
        face.abort_requests(["r"])
        assert "closed" in repr(face.client)


def test_in_process_there_is_an_empty_message_when_there_is_nothing() -> None:
    """C-11."""
    with echo_face("inproc") as face:
        assert face.get_output().outputs == []
        assert isinstance(face.get_output(), EngineCoreOutputs)


@pytest.mark.parametrize("operation", ["add_request", "abort_requests", "get_output", "call_utility"])
def test_the_other_faces_operations_say_which_client_has_them(operation: str) -> None:
    """C-03."""
    with echo_face("inproc") as face, pytest.raises(NotImplementedError, match="AsyncMPClient has it"):
        getattr(face.client, f"{operation}_async")(*([None] if operation != "get_output" else [])).send(None)
    with echo_face("asyncio") as face, pytest.raises(NotImplementedError, match="SyncMPClient and InprocClient do"):
        getattr(face.client, operation)(*([None] if operation != "get_output" else []))


@pytest.mark.parametrize("kind", MP_FACES)
def test_a_client_is_a_context_manager(kind: str) -> None:
    """C-22."""
    with echo_face(kind) as face:
        if face.loop is None:
            with face.client as entered:
                assert entered is face.client
        else:

            async def use() -> None:
                async with face.client as entered:
                    assert entered is face.client

            face.loop.run(use())
        with pytest.raises(ClientClosedError):
            face.is_sleeping()
