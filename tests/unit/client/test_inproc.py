"""``InprocClient`` on an engine core: plain calls, in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from client_harness import request
from enginewire import EngineConfig, EngineCoreOutput, EngineCoreRequest, EngineDeadError, UtilityCallError
from enginewire.client.inproc import InprocClient
from enginewire.engine.core import EngineCore
from enginewire.executors import EchoExecutor


class Watched(EchoExecutor):
    """Remembers the requests it got, and where it was called."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.requests: list[EngineCoreRequest] = []
        self.threads: set[int] = set()
        self.shutdowns = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        super().add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        self.threads.add(threading.get_ident())
        return super().step()

    def shutdown(self) -> None:
        self.shutdowns += 1
        super().shutdown()


@pytest.fixture
def client() -> Iterator[InprocClient]:
    with InprocClient(EngineConfig.create("echo"), Watched) as client:
        yield client


def watched(client: InprocClient) -> Watched:
    """Return the executor of a client."""
    assert isinstance(client.engine_core.executor, Watched)
    return client.engine_core.executor


def test_the_core_is_built_here_and_a_request_is_not_copied(client: InprocClient) -> None:
    """C-10: no thread, no serialisation, no copy."""
    threads = threading.active_count()
    prompt = [1, 2, 3]
    mine = request("a", max_tokens=1)
    mine.prompt_token_ids = prompt
    client.add_request(mine)
    client.get_output()
    assert type(client.engine_core) is EngineCore
    assert watched(client).requests[0] is mine
    assert mine.prompt_token_ids is prompt
    assert watched(client).threads == {threading.get_ident()}
    assert threading.active_count() == threads


def test_get_output_is_one_step_and_its_post_step(client: InprocClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-11."""
    calls: list[str] = []
    step, post_step = client.engine_core.step_fn, client.engine_core.post_step
    client.engine_core.step_fn = lambda: calls.append("step") or step()  # type: ignore[func-returns-value]
    monkeypatch.setattr(client.engine_core, "post_step", lambda: calls.append("post_step") or post_step())
    client.add_request(request("a", prompt=[5, 6], max_tokens=2))
    assert [it.new_token_ids for it in client.get_output().outputs] == [[5]]
    assert calls == ["step", "post_step"]
    assert client.get_output().outputs[0].finished
    assert client.get_output().outputs == []


def test_aborting_nothing_does_not_reach_the_core(client: InprocClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-11."""
    aborted: list[Sequence[str]] = []
    monkeypatch.setattr(client.engine_core, "abort_requests", aborted.append)
    client.abort_requests([])
    client.abort_requests(["a"])
    assert aborted == [["a"]]


@pytest.mark.parametrize("call", ["sleep", "pause_scheduler"])
def test_mode_wait_is_refused(client: InprocClient, call: str) -> None:
    """C-12: nothing else runs in this process that could drain the queue."""
    with pytest.raises(ValueError, match=r"'wait' needs somebody else .*SyncMPClient"):
        getattr(client, call)(mode="wait")
    assert not client.is_sleeping()


def test_a_utility_that_waits_for_requests_takes_their_steps_and_loses_nothing(client: InprocClient) -> None:
    """C-11: through ``call_utility``, which knows no modes."""
    client.add_request(request("a", prompt=[5, 6], max_tokens=3))
    client.get_output()
    client.call_utility("pause_scheduler", "wait", False)
    assert client.is_scheduler_paused()
    tokens = [it.new_token_ids for _ in range(2) for it in client.get_output().outputs]
    assert tokens == [[6], [5]]
    client.resume_scheduler()


def test_a_step_that_raises_is_the_end_and_says_why() -> None:
    """C-27."""
    with InprocClient(EngineConfig.create("echo", executor_options={"fail_at_step": 1})) as client:
        client.add_request(request("a"))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"RuntimeError: .*step 1") as caught:
                client.get_output()
        first_cause = caught.value.death
        for call in (lambda: client.add_request(request("b")), client.is_sleeping):
            with pytest.raises(EngineDeadError) as caught:
                call()
            assert caught.value.death == first_cause
        client.abort_requests(["a"])
        assert "dead" in repr(client)


def test_a_step_that_raises_within_a_utility_is_the_end_too() -> None:
    """C-27."""
    with InprocClient(EngineConfig.create("echo", executor_options={"fail_at_step": 2})) as client:
        client.add_request(request("a"))
        client.get_output()
        with pytest.raises(EngineDeadError, match="step 2"):
            client.call_utility("pause_scheduler", "wait", False)


def test_a_constructor_that_raises_raises_here() -> None:
    class Broken(EchoExecutor):
        def __init__(self, config: EngineConfig) -> None:
            raise FileNotFoundError("no weights")

    with pytest.raises(FileNotFoundError, match="no weights"):
        InprocClient(EngineConfig.create("echo"), Broken)


def test_shutdown_reaches_the_executor_once(client: InprocClient) -> None:
    """C-22."""
    executor = watched(client)
    client.shutdown()
    client.shutdown()
    assert executor.shutdowns == 1


def test_the_callers_configuration_is_not_changed() -> None:
    """C-25."""
    config = EngineConfig.create("echo", executor_options={"max_model_len": 100})
    with InprocClient(config, log_stats=False) as client:
        assert client.config.max_model_len == 100
        assert client.config.log_stats is False
    assert config.max_model_len is None
    assert config.log_stats is True


def test_a_failing_utility_names_its_method(client: InprocClient) -> None:
    """C-31."""
    with pytest.raises(UtilityCallError, match=r"Call to collective_rpc method failed: .*upside down") as caught:
        client.collective_rpc("raise_error", args=("upside down",))
    assert caught.value.method == "collective_rpc"
