"""``Inbox``: what arrives is sorted, what makes no sense is counted and dropped."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from client_harness import output
from enginewire import EngineConfig, EngineCoreOutputs, FinishReason
from enginewire.client.engines import Engine, Engines
from enginewire.client.inbox import Failures, Inbox
from enginewire.wire.codec import MsgpackEncoder
from enginewire.wire.frames import ENGINE_CORE_DEAD, Buffer
from enginewire.wire.messages import SchedulerStats, utility_output
from enginewire.wire.profile import V0_25, V0_32, WireProfile

encode = MsgpackEncoder().encode


def fake_link() -> Any:
    """Make what an inbox needs of a link."""
    return SimpleNamespace(engines=[], sole=None, heads=frozenset(), answer_heads=frozenset(), decoders={})


class Correspondence:
    """An inbox, and engines that write to it over links of their own or a shared one."""

    def __init__(self, *profiles: WireProfile, shared: bool = False) -> None:
        self.engines = Engines(None)
        link = fake_link()
        for index, profile in enumerate(profiles):
            engine = Engine(index, link if shared else fake_link(), is_ours=False)
            engine.use_profile(profile)
            self.engines.add(engine)
        self.inbox = Inbox(EngineConfig.create("echo", max_frames=4), self.engines)

    def sort(self, frames: list[Buffer], index: int = 0) -> bool:
        return self.inbox.sort(self.engines[index].link, frames)

    def take(self, frames: list[Buffer], index: int = 0) -> EngineCoreOutputs | None:
        return self.inbox.take((self.engines[index].link, frames))

    def admit(self, *request_ids: str, index: int = 0) -> None:
        engine = self.engines[index]
        engine.live.update(dict.fromkeys(request_ids))
        self.engines.owners.update(dict.fromkeys(request_ids, engine))


@pytest.fixture
def one() -> Correspondence:
    return Correspondence(V0_25)


@pytest.mark.parametrize(
    ("frames", "is_for_consumer"),
    [
        (encode(EngineCoreOutputs(outputs=[output()])), True),
        (encode(EngineCoreOutputs()), True),
        (encode(EngineCoreOutputs(utility_output=utility_output(1, 2))), False),
        ([b"\xc1"], True),  # the consumer finds out
        ([b""], False),
        ([ENGINE_CORE_DEAD], False),
        ([ENGINE_CORE_DEAD, b""], True),
        ([b"\x90", b"", b"", b"", b""], False),
    ],
)
def test_messages_are_sorted_without_decoding_outputs(
    one: Correspondence, frames: list[Buffer], is_for_consumer: bool
) -> None:
    assert one.sort(frames) is is_for_consumer


@pytest.mark.parametrize("engine_index", [0, 5, 127, 128, 255, 256, 65535, 65536, 1 << 32])
def test_an_answer_is_recognised_whatever_the_width_of_the_engine_index(one: Correspondence, engine_index: int) -> None:
    """A utility caller must not wait for a slow consumer."""
    frames = encode(EngineCoreOutputs(engine_index=engine_index, utility_output=utility_output(1, 2)))
    assert one.sort(frames) is False


def test_a_death_marker_is_left_to_the_lookout(one: Correspondence) -> None:
    """C-27: what came before it is handed over first."""
    one.sort([ENGINE_CORE_DEAD])
    assert list(one.inbox.marked) == [one.engines[0].link]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b"\x07"],
        encode(EngineCoreOutputs(engine_index=1, outputs=[output()])),
        encode(EngineCoreOutputs(engine_index=-1, outputs=[output()])),
    ],
)
def test_what_makes_no_sense_is_counted(
    one: Correspondence, frames: list[Buffer], caplog: pytest.LogCaptureFixture
) -> None:
    """Defect 19."""
    assert one.take(frames) is None
    assert one.inbox.dropped == 1
    assert "dropped" in caplog.text


def test_a_request_lives_to_its_last_output(one: Correspondence) -> None:
    one.admit("r")
    one.take(encode(EngineCoreOutputs(outputs=[output("r")])))
    assert one.inbox.live == {"r"}
    one.take(encode(EngineCoreOutputs(outputs=[output("r", finished=True)])))
    assert one.inbox.live == set()


def test_an_engine_is_heard_on_its_own_link_only() -> None:
    """Remote engines: one engine's peer cannot touch another's requests or calls."""
    two = Correspondence(V0_25, V0_25)
    two.admit("r", index=1)
    assert two.take(encode(EngineCoreOutputs(engine_index=1, outputs=[output("r", finished=True)])), index=0) is None
    assert two.inbox.live == {"r"}
    waiter: Future[Any] = Future()
    call = two.inbox.calls.start("m", waiter, 1)
    answer = encode(EngineCoreOutputs(engine_index=1, utility_output=utility_output(call.call_id, 2)))
    assert two.sort(answer, index=0) is False
    assert not waiter.done()
    two.sort(answer, index=1)
    assert waiter.result() == 2
    assert two.inbox.dropped == 2


@pytest.mark.parametrize("shared", [False, True])
def test_each_engines_outputs_are_read_by_its_own_layout(shared: bool) -> None:
    """Protocol M.1: the layouts differ in the middle; never a wrong decode."""
    two = Correspondence(V0_25, V0_32, shared=shared)
    for index, profile in enumerate((V0_25, V0_32)):
        one = output("r")
        one.trace_headers = {"a": "b"}
        sent = profile.outputs_of(EngineCoreOutputs(engine_index=index, outputs=[one]))
        message = two.take(encode(sent), index)
        assert message is not None
        assert message.outputs[0].trace_headers == {"a": "b"}
    assert two.take(encode(EngineCoreOutputs(engine_index=7, outputs=[output()]))) is None
    assert two.inbox.dropped == 1


def test_what_a_restarted_engine_sent_before_is_read_as_it_was_sent() -> None:
    """A message may wait for the consumer while its sender is replaced by one of another version."""
    two = Correspondence(V0_25)
    engine = two.engines[0]
    one = output("r")
    one.trace_headers = {"a": "b"}
    waiting = (engine.link, encode(EngineCoreOutputs(outputs=[one])))
    engine.use_link(fake_link())
    engine.use_profile(V0_32)
    message = two.inbox.take(waiting)
    assert message is not None
    assert message.outputs[0].trace_headers == {"a": "b"}


def test_failures_spare_what_has_ended_meanwhile(one: Correspondence) -> None:
    """C-55: whatever comes first, a request's last output or the loss of its engine, it ends once."""
    one.admit("a", "b")
    failed = Failures(one.engines[0], ["a", "b"], "engine_lost: engine 0: gone")
    one.take(encode(EngineCoreOutputs(outputs=[output("a", finished=True)])))
    message = one.inbox.take(failed)
    assert message is not None
    assert [(it.request_id, it.finish_reason, it.stop_reason) for it in message.outputs] == [
        ("b", FinishReason.ERROR, "engine_lost: engine 0: gone")
    ]
    assert one.inbox.live == set()


def test_outputs_for_nobody_are_left_out_and_their_requests_noted_for_abort(one: Correspondence) -> None:
    """Remote engines: late outputs of requests that failed with the connection, or of another frontend's."""
    engine = one.engines[0]
    engine.is_haunted = True
    one.admit("mine")
    outputs = [output("mine"), output("ghost"), output("past", finished=True)]
    message = one.take(encode(EngineCoreOutputs(outputs=outputs)))
    assert message is not None
    assert [it.request_id for it in message.outputs] == ["mine"]
    assert engine.stale == {"ghost"}


def test_reports_of_load_reach_the_balancers_view(one: Correspondence) -> None:
    """C-51."""
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    one.take(encode(EngineCoreOutputs(outputs=[output()], scheduler_stats=stats)))
    load = one.engines[0].load
    assert (load.running, load.waiting, load.kv_cache_usage) == (3, 3, 0.5)
