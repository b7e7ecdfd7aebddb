"""Starting an engine process fails, at any point: the error says why, at once, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_executors
import pytest

from client_harness import MP_FACES, Face, echo_face, fake_python, make_client, request
from enginewire import ConfigError, EngineConfig, EngineStartupError, ModelError
from enginewire.client import launch, link, mp, resources, returns
from enginewire.client.async_mp import AsyncMPClient
from enginewire.client.sync_mp import SyncMPClient
from enginewire.errors import EncodeError, EngineStartupTimeout
from enginewire.host import executor_source, manager

NOTICED_WITHIN_S = 5.0
"""Far below any time-out; a process takes a quarter of a second to start."""


def start(kind: str = "sync", executor_class: Any = None, **settings: Any) -> None:
    """Start a client, which is expected to fail."""
    config = EngineConfig.create("echo", **{"forward_engine_log": False, **settings})
    client = make_client(kind, config, executor_class)
    client.shutdown()  # it did not
    pytest.fail("the client started")


@pytest.mark.parametrize("kind", MP_FACES[:2])
@pytest.mark.parametrize(
    ("executor_class", "cause", "exit_code", "last_words"),
    [
        (fault_executors.Raises, "RuntimeError: the weights are upside down", 1, "about to load"),
        (fault_executors.Exits, "status 7|SystemExit: 7", None, "leaving early"),
        (fault_executors.ExitsHard, "exited with status 9", 9, "gone"),
        (fault_executors.KillsItself, r"killed by signal 9 \(SIGKILL\)", -9, "allocating everything"),
    ],
)
def test_an_engine_that_ends_while_it_starts_is_noticed_at_once(
    kind: str, executor_class: type, cause: str, exit_code: int | None, last_words: str
) -> None:
    """C-24: with exit status and the tail of what it printed."""
    began = time.monotonic()
    with pytest.raises(EngineStartupError, match=f"engine 0 could not start: .*({cause})") as caught:
        start(kind, executor_class)
    assert time.monotonic() - began < NOTICED_WITHIN_S
    assert not isinstance(caught.value, TimeoutError)
    assert last_words in str(caught.value)
    assert exit_code is None or caught.value.exit_code == exit_code
    assert caught.value.engine_index == 0


@pytest.mark.parametrize("executor_class", [fault_executors.Hangs, fault_executors.IgnoresSigterm])
def test_an_engine_that_hangs_while_it_loads_is_ended_at_the_deadline(executor_class: type) -> None:
    """C-24, C-22."""
    with pytest.raises(EngineStartupTimeout, match="not ready within 4 s: engine 0 has said HELLO") as caught:
        start("sync", executor_class, ready_timeout_s=4.0)  # HELLO takes a second on a busy machine
    assert caught.value.log_tail


def test_a_process_that_does_not_speak_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-24: the tighter limit for a local process to say HELLO."""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "print('asleep', flush=True)\nwait_for_parent()"))
    with pytest.raises(EngineStartupTimeout, match=r"no word .* within 0\.5 s: engine 0 has not said HELLO") as caught:
        start(hello_timeout_s=0.5)
    assert "hello_timeout_s" in str(caught.value)
    assert caught.value.stage == "hello"


def test_a_process_that_does_not_even_listen_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told may be larger than a socket's buffer: writing it blocked for ever."""
    deaf = "import time\ntime.sleep(600)"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, deaf, head=""))
    with pytest.raises(EngineStartupTimeout, match="no word"):
        start(hello_timeout_s=0.4, executor_options={"big": "x" * 10_000_000})


def test_a_program_that_cannot_be_run_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineStartupError, match="cannot start an engine process with '/no/such/python'") as caught:
        start()
    assert caught.value.stage == "launch"


def test_an_unknown_executor_is_refused_before_anything_starts() -> None:
    """Issue 2."""
    for kind in ("sync", "inproc"):
        with pytest.raises(ConfigError, match=r"unknown executor 'no_such_thing'; known: .*echo"):
            start(kind, executor="no_such_thing")
        with pytest.raises(ConfigError, match="cannot be imported"):
            start(kind, executor="no.such.module:Class")
        with pytest.raises(ConfigError, match="not a subclass"):
            start(kind, executor="pathlib:Path")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="has no option colour") as caught:
        start(executor_options={"colour": "blue"})
    assert isinstance(caught.value, EngineStartupError)  # one class to catch in either mode, and what it was besides
    with pytest.raises(ConfigError, match="has no option colour"):
        start("inproc", executor_options={"colour": "blue"})


def test_an_option_that_cannot_travel_is_refused() -> None:
    with pytest.raises(EncodeError, match="settings of executor 'echo' cannot be sent"):
        start(executor_options={"load_time_s": object()})


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("here")


def _fail_to_start(name: str) -> Callable[[threading.Thread], None]:
    begin = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        if thread.name == name:
            raise ZeroDivisionError("here")
        begin(thread)

    return start_thread


@pytest.mark.parametrize("is_running", [True, False])
def test_ctrl_c_while_the_monitor_thread_starts_leaves_nothing(
    is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-21: the thread watches what was made by then, or finds that there is nothing left to watch."""
    begin = threading.Thread.start
    interrupted = threading.Event()
    watch = manager.CoreEngineProcManager._watch
    watching = threading.Event()

    def watch_when_told(self: manager.CoreEngineProcManager) -> None:
        watching.set()
        if not is_running:
            interrupted.wait(NOTICED_WITHIN_S)
        watch(self)

    def start_thread(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "enginewire-monitor":
            assert watching.wait(NOTICED_WITHIN_S)
            raise KeyboardInterrupt

    monkeypatch.setattr(manager.CoreEngineProcManager, "_watch", watch_when_told)
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    with pytest.raises(KeyboardInterrupt):
        start()
    interrupted.set()


@pytest.mark.parametrize("kind", MP_FACES[:2])
@pytest.mark.parametrize(
    "point",
    [
        "choose_endpoints",
        "bind_router",
        "bind_pull",
        "executor_source",
        "launch",
        "monitor thread",
        "wait_for_engines",
        "apply_ready_responses",
        "receiver",
        "start_engine_core_monitor",
        "context",
    ],
)
def test_a_constructor_that_fails_anywhere_leaves_nothing(
    kind: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-21: the leak check around every test is the proof."""
    match point:
        case "launch":
            monkeypatch.setattr(subprocess, "Popen", _fail)
        case "monitor thread":
            monkeypatch.setattr(threading.Thread, "start", _fail_to_start("enginewire-monitor"))
        case "receiver" if kind == "sync":
            monkeypatch.setattr(threading.Thread, "start", _fail_to_start("enginewire-receiver"))
        case "receiver":
            monkeypatch.setattr(AsyncMPClient, "_ensure_receiver", _fail)
        case "start_engine_core_monitor":
            monkeypatch.setattr(mp.MPClient, point, _fail)
        case "bind_pull":
            monkeypatch.setattr(link, point, _fail)
        case "executor_source":
            monkeypatch.setattr(executor_source, point, _fail)
        case "apply_ready_responses":
            monkeypatch.setattr(returns, point, _fail)
        case "context":
            monkeypatch.setattr(resources, "make_context", _fail)
        case _:
            monkeypatch.setattr(launch, point, _fail)
    config = EngineConfig.create("echo", forward_engine_log=False)
    with pytest.raises(ZeroDivisionError, match="here"):
        Face(kind, lambda: make_client(kind, config))


def test_ctrl_c_while_it_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C-21; issue 2, KeyboardInterrupt."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start(executor_options={"load_time_s": 60})
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def test_ready_time_is_from_launch_to_ready() -> None:
    """C-24: one limit, however long each part takes."""
    with pytest.raises(EngineStartupTimeout, match=r"not ready within 0\.6 s"):
        start(executor_options={"load_time_s": 30}, ready_timeout_s=0.6)


# Where the sockets go.


def test_a_temporary_folder_of_150_characters_means_tcp_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "d" * (150 - len(base)))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with echo_face("sync") as face:
            assert face.client.engines[0].link.input_address.startswith("tcp://127.0.0.1:")
            assert face.is_sleeping() is False
        assert list(folder.iterdir()) == []
        with pytest.raises(ConfigError, match=r"ipc' is not possible: ipc paths in .* longer than 103 bytes"):
            start(transport="ipc")


@pytest.mark.parametrize("folder", ["/proc", "/no/such/folder"])
def test_a_folder_that_cannot_be_written_to_means_tcp_on_loopback(folder: str) -> None:
    """Issue 2."""
    with echo_face("asyncio", ipc_dir=folder) as face:
        assert face.client.resources.endpoints.folder is None
        assert face.is_sleeping() is False
    with pytest.raises(ConfigError, match=f"no folder for ipc sockets can be made in {folder}"):
        start(transport="ipc", ipc_dir=folder)


def test_the_ipc_folder_is_private_and_goes_with_the_client(tmp_path: Path) -> None:
    """C-20, C-22; ``VLLM_RPC_BASE_PATH`` is honoured by its setting."""
    base = Path(tempfile.mkdtemp(prefix="ipc-"))
    try:
        with echo_face("sync", ipc_dir=str(base)) as face:
            (folder,) = base.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
            assert face.client.resources.endpoints.folder == str(folder)
        assert list(base.iterdir()) == []
    finally:
        base.rmdir()


def test_tcp_is_used_where_it_is_asked_for() -> None:
    with echo_face("sync", transport="tcp") as face:
        assert face.client.engines[0].link.input_address.startswith("tcp://127.0.0.1:")
        face.add_request(request())
        assert len(face.outputs(4)) == 4


# Executor classes that no other process can import.


def test_a_class_inside_a_function_travels_by_value() -> None:
    """Issue 2."""
    answer = 42

    class Local(fault_executors.Obedient):
        def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
            return [answer]

    with echo_face("sync", Local) as face:
        assert face.collective_rpc("anything") == [42]


def test_without_cloudpickle_such_a_class_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2."""

    class Local(fault_executors.Obedient):
        pass

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"cannot import .*Local: it lives in a script"):
        start(executor_class=Local)
    source = executor_source.executor_source(fault_executors.Obedient)
    assert source.reference == "fault_executors:Obedient"
    assert source.pickled is None


def test_a_class_that_cannot_be_pickled_is_refused_with_the_reason() -> None:
    lock = threading.Lock()

    class Local(fault_executors.Obedient):
        guard = lock

    with pytest.raises(ConfigError, match=r"cannot be sent to the engine process: .*lock"):
        start(executor_class=Local)


def test_a_model_file_that_is_missing_is_said(tmp_path: Path) -> None:
    """Issue 2, for the executor that loads models; the echo executor needs none."""
    if importlib.util.find_spec("openvino_genai") is None:
        pytest.skip("openvino_genai is not installed")
    with pytest.raises((EngineStartupError, ModelError), match=r"no_such_model\.gguf"):
        config = EngineConfig.create(str(tmp_path / "no_such_model.gguf"), forward_engine_log=False)
        make_client("sync", config).shutdown()


def test_a_model_file_that_is_no_model_is_said_in_a_line_without_tracebacks(tmp_path: Path) -> None:
    """Issue 2: the file, what came, what was expected."""
    if importlib.util.find_spec("openvino_genai") is None:
        pytest.skip("openvino_genai is not installed")
    path = tmp_path / "page.gguf"
    path.write_text("<html>404</html>")
    with pytest.raises(ModelError, match=r"page\.gguf: not a GGUF file: it starts with b'<htm'") as caught:
        make_client("sync", EngineConfig.create(str(path), forward_engine_log=False)).shutdown()
    assert isinstance(caught.value, EngineStartupError)
    assert "Traceback" not in str(caught.value)


def test_a_client_can_be_made_in_a_worker_thread() -> None:
    """Issue 2: and outlives that thread."""
    made: list[SyncMPClient] = []

    def make() -> None:
        client = make_client("sync", EngineConfig.create("echo", forward_engine_log=False))
        assert isinstance(client, SyncMPClient)
        made.append(client)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(30)
    with made[0] as client:
        client.add_request(request(max_tokens=1))
        assert client.get_output(timeout=10).outputs
    assert os.getpid()
