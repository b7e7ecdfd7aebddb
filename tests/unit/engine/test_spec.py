"""What goes over the lifeline, and how executors are found and named."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from enginewire.config import EngineConfig
from enginewire.engine.channel import Channel
from enginewire.engine.executor import Executor
from enginewire.engine.registry import executor_reference, find_executor, load_executor_class
from enginewire.engine.spec import DeathNote, EngineSpec, describe, describe_failure, receive_death_note
from enginewire.errors import ConfigError, DecodeError, EncodeError, ModelError
from enginewire.executors import EchoExecutor


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    large = bytes(range(256)) * 8192

    def send() -> None:
        for message in (b"", b"a", large):
            ours.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [theirs.receive() for _ in range(3)] == [b"", b"a", large]
    sender.join()


def test_a_peer_that_is_gone_is_the_end(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    ours.send(b"last")
    ours._socket.sendall(b"\x00\x00\x00\x09half")
    ours.close()
    ours.close()
    assert theirs.receive() == b"last"
    assert theirs.receive() is None
    with pytest.raises(OSError):
        theirs.send(b"too late")


def test_closing_wakes_a_receiver_in_another_thread(channels: tuple[Channel, Channel]) -> None:
    ours, _ = channels
    received: list[bytes | None] = []
    thread = threading.Thread(target=lambda: received.append(ours.receive()))
    thread.start()
    ours.hang_up()
    thread.join(10)
    assert received == [None]


def test_a_spec_arrives_as_it_was_sent() -> None:
    config = EngineConfig.create(
        "echo", executor_options={"step_time_s": 0.5, "names": ["a"]}, max_model_len=77, shutdown_timeout_s=3
    )
    spec = EngineSpec(config=config, engine_index=3, handshake_address="ipc:///x", executor_pickle=b"\x00\xff")
    back = EngineSpec.decode(spec.encode())
    assert back == spec
    assert back.executor == "echo"
    assert back.config.executor_options == config.executor_options


def test_paths_among_the_options_arrive_as_text() -> None:
    spec = EngineSpec(config=EngineConfig.create("echo", executor_options={"folder": Path("/models")}))
    assert EngineSpec.decode(spec.encode()).config.executor_options == {"folder": "/models"}


def test_options_that_cannot_leave_the_process_are_refused_with_the_way_out() -> None:
    spec = EngineSpec(config=EngineConfig.create("echo", executor_options={"callback": print}))
    with pytest.raises(EncodeError, match=r"builtin_function_or_method.*multiprocess_mode=False"):
        spec.encode()


def test_a_broken_spec_is_refused() -> None:
    with pytest.raises(DecodeError, match="not a valid EngineSpec"):
        EngineSpec.decode(b"\x93\x01\x02\x03")


def test_a_death_note_says_what_happened(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    try:
        raise KeyError("weights")
    except KeyError as exc:
        DeathNote.of("startup", exc).send(ours)
    note = receive_death_note(theirs)
    assert note is not None
    assert (note.stage, note.cause) == ("startup", "KeyError: 'weights'")
    assert note.traceback_tail[-1] == "KeyError: 'weights'"
    assert len(note.traceback_tail) <= 20


def test_a_refused_model_needs_no_traceback_but_a_failure_in_a_step_does() -> None:
    try:
        raise ModelError("no such file: /m.gguf")
    except ModelError as exc:
        at_start, later = DeathNote.of("startup", exc), DeathNote.of("running", exc)
    assert at_start.cause == "ModelError: no such file: /m.gguf"
    assert at_start.traceback_tail == []
    assert later.traceback_tail[-1] == "enginewire.errors.ModelError: no such file: /m.gguf"


def test_no_note_is_no_note(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    ours.send(b"\xc1 not a note")
    assert receive_death_note(theirs) is None
    ours.close()
    assert receive_death_note(theirs) is None
    DeathNote(stage="running", cause="nobody reads this").send(ours)  # does not raise


@pytest.mark.parametrize(
    ("exc", "cause", "failure"),
    [
        (ValueError("bad"), "ValueError: bad", "bad"),
        (KeyError("x"), "KeyError: 'x'", "KeyError: 'x'"),
        (ModelError("no file"), "ModelError: no file", "no file"),
        (AssertionError(), "AssertionError", "AssertionError"),
    ],
)
def test_causes_name_the_class_and_failures_where_the_text_does_not_do(
    exc: Exception, cause: str, failure: str
) -> None:
    assert describe(exc) == cause
    assert describe_failure(exc) == failure


def test_executors_are_found_by_name_and_by_path() -> None:
    """C: section 9, found by class or by entry point."""
    assert find_executor("echo") is EchoExecutor
    assert find_executor("enginewire.executors.echo:EchoExecutor") is EchoExecutor
    assert find_executor(executor_reference(EchoExecutor)) is EchoExecutor


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("ecco", r"unknown executor 'ecco'; known: echo, openvino"),
        ("no_such_module:Class", "cannot be imported: No module named 'no_such_module'"),
        ("enginewire.executors.echo:Nothing", "cannot be imported: .* has no attribute 'Nothing'"),
        ("enginewire.config:EngineConfig", "not a subclass of enginewire.Executor"),
    ],
)
def test_an_executor_that_cannot_be_found_is_explained(reference: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_executor(reference)


def test_an_executor_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[enginewire.executors]\nother = enginewire.executors.echo:EchoExecutor\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_executor("other") is EchoExecutor


def test_a_class_that_no_other_process_can_import_has_no_reference() -> None:
    class Local(EchoExecutor):
        pass

    with pytest.raises(ConfigError, match="move it into a module"):
        executor_reference(Local)


def test_a_class_travels_by_value() -> None:
    class Local(EchoExecutor):
        pass

    config = EngineConfig.create("echo")
    spec = EngineSpec(config=config, executor="test:Local", executor_pickle=cloudpickle.dumps(Local))
    loaded = load_executor_class(EngineSpec.decode(spec.encode()))
    assert issubclass(loaded, EchoExecutor)
    assert loaded.__qualname__ == Local.__qualname__


@pytest.mark.parametrize(
    ("pickled", "text"), [(b"not a pickle", "cannot be rebuilt"), (pickle.dumps(7), "sent as int")], ids=["bad", "int"]
)
def test_a_value_that_is_no_executor_is_refused(pickled: bytes, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_executor_class(EngineSpec(config=EngineConfig.create("echo"), executor_pickle=pickled))


def test_the_minimal_executor_of_the_documentation_is_complete() -> None:
    assert Executor.__abstractmethods__ == {"add_request", "abort_requests", "step", "has_unfinished_requests"}
