"""The process that holds a client ends, is killed, forks, or is no file at all: real scripts, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_client_death import is_running

from client_harness import PATIENCE_S
from enginewire.testing import wait_until

HEAD = """
import json, os, sys, threading, time
from enginewire import EngineConfig, EngineCoreClient, EngineCoreRequest, EngineDeadError, SamplingParams
from enginewire.executors import EchoExecutor

def make(executor_class=None, asyncio_mode=False, **settings):
    config = EngineConfig.create("echo", **{"forward_engine_log": False, **settings})
    return EngineCoreClient.make_client(True, asyncio_mode, config, executor_class)

def tell(**facts):
    print(json.dumps(facts), flush=True)

def serve(client):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    client.add_request(EngineCoreRequest("a", [1, 2], sampling_params=params))
    tokens = []
    while len(tokens) < 3:
        tokens += [token for it in client.get_output(timeout=30).outputs for token in it.new_token_ids]
    return tokens

def about(client):
    process = client.resources.engine_manager.processes[0].popen
    return {"pid": process.pid, "folder": client.resources.endpoints.folder}
"""


def run_script(script: str, *, how: str = "file", folder: Path, env: dict[str, str] | None = None) -> Any:
    """Run a script to its end in one of the ways people run Python; return the last line it told."""
    source = HEAD + textwrap.dedent(script)
    arguments, stdin = [sys.executable], None
    match how:
        case "file":
            (folder / "script.py").write_text(source)
            arguments.append(str(folder / "script.py"))
        case "-c":
            arguments += ["-c", source]
        case "stdin":
            arguments.append("-")
            stdin = source
    done = subprocess.run(
        arguments,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def running_script(script: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Run a script in the background; yields it once it has told something."""
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def assert_gone(*pids: int, folder: str | None = None) -> None:
    """Wait until these processes, and the folder of their sockets, are gone."""
    wait_until(lambda: not any(map(is_running, pids)), PATIENCE_S, f"the end of {pids}")
    if folder is not None:
        wait_until(lambda: not os.path.exists(folder), PATIENCE_S, "the removal of the socket folder")


# However the script is run.


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_a_script_without_a_main_guard_works(how: str, tmp_path: Path) -> None:
    """C-40; issue 2: the engine does not run the caller's ``__main__`` again."""
    script = """
    with make() as client:
        tell(tokens=serve(client))
    """
    assert run_script(script, how=how, folder=tmp_path) == {"tokens": [1, 2, 1]}


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_an_executor_class_may_live_in_the_script(how: str, tmp_path: Path) -> None:
    """Issue 2."""
    script = """
    class Mine(EchoExecutor):
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            return [method.upper()]

    with make(Mine) as client:
        tell(result=client.collective_rpc("abc"), tokens=serve(client))
    """
    assert run_script(script, how=how, folder=tmp_path) == {"result": ["ABC"], "tokens": [1, 2, 1]}


def test_a_module_beside_the_script_is_found_by_the_engine(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "from enginewire.executors import EchoExecutor\nclass Mine(EchoExecutor): ...\n"
    )
    script = """
    from beside import Mine
    with make(Mine) as client:
        tell(tokens=serve(client))
    """
    assert run_script(script, folder=tmp_path) == {"tokens": [1, 2, 1]}


def test_files_in_the_current_folder_do_not_shadow_the_engines_modules(tmp_path: Path) -> None:
    """A script beside a file named like a standard module is common, and breaks its own imports only."""
    (tmp_path / "platform.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(HEAD + "with make() as client:\n    tell(tokens=serve(client))\n")
    done = subprocess.run([sys.executable, "sub/script.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tokens": [1, 2, 1]}


def test_a_client_that_is_never_shut_down_ends_with_the_interpreter(tmp_path: Path) -> None:
    """C-22: interpreter exit."""
    told = run_script("client = make()\ntell(tokens=serve(client), **about(client))", folder=tmp_path)
    assert_gone(told["pid"], folder=told["folder"])


def test_an_exception_in_user_code_ends_the_engine_too(tmp_path: Path) -> None:
    """C-22."""
    script = """
    client = make()
    tell(**about(client))
    def fail():
        held = client
        raise SystemExit(0)
    fail()
    """
    told = run_script(script, folder=tmp_path)
    assert_gone(told["pid"], folder=told["folder"])


def test_the_end_of_the_interpreter_works_where_warnings_are_errors(tmp_path: Path) -> None:
    """C-22: ``python -W error``."""
    script = "client = make()\ntell(**about(client))"
    told = run_script(script, folder=tmp_path, env={"PYTHONWARNINGS": "error"})
    assert_gone(told["pid"], folder=told["folder"])


def test_an_asyncio_client_ends_with_the_interpreter(tmp_path: Path) -> None:
    """C-22, C-23: its loop is closed by then."""
    script = """
    import asyncio
    async def main():
        client = make(asyncio_mode=True)
        assert await client.is_sleeping_async() is False
        return client
    client = asyncio.run(main())
    tell(**about(client))
    """
    told = run_script(script, folder=tmp_path)
    assert_gone(told["pid"], folder=told["folder"])


# Signals to the parent.

SERVING = """
client = make(Mine)
(child,) = client.collective_rpc("spawn")
tell(child=child, tokens=serve(client), **about(client))
threading.Event().wait()
"""

LOADING = """
def watch():
    import psutil
    while True:
        for engine in psutil.Process().children():
            for child in engine.children():
                tell(pid=engine.pid, child=child.pid, folder=None)
                return
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
make(Loads)
"""

CLASSES = """
import subprocess

def spawn():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

class Mine(EchoExecutor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [spawn()]

class Loads(EchoExecutor):
    def __init__(self, config):
        spawn()
        threading.Event().wait()
"""


@pytest.mark.parametrize("phase", [LOADING, SERVING], ids=["loading", "serving"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_engine_does_not_outlive_its_parent(number: signal.Signals, phase: str, tmp_path: Path) -> None:
    """C-62; issue 2: in every phase, with its children, and the socket folder goes too."""
    before = set(os.listdir(os.environ["TMPDIR"]))
    with running_script(CLASSES + phase, tmp_path) as (parent, told):
        parent.send_signal(number)
        assert_gone(told["pid"], told["child"], folder=told["folder"])
        assert parent.wait(PATIENCE_S) != 0
    wait_until(lambda: set(os.listdir(os.environ["TMPDIR"])) <= before, PATIENCE_S, "the removal of the socket folder")


def test_an_engine_is_not_kept_alive_by_the_parents_other_children(tmp_path: Path) -> None:
    """C-62: a forked child held a copy of the lifeline, so the engine did not notice that its parent was killed."""
    script = """
    client = make()
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        time.sleep(600)
    tell(child=child, **about(client))
    threading.Event().wait()
    """
    with running_script(script, tmp_path) as (parent, told):
        try:
            parent.kill()
            assert_gone(told["pid"], folder=told["folder"])
            assert is_running(told["child"])
        finally:
            os.kill(told["child"], signal.SIGKILL)


def test_a_terminals_ctrl_c_does_not_reach_the_engine(tmp_path: Path) -> None:
    """It goes to the foreground process group; the engine has its own, and its client decides."""
    script = """
    client = make()
    tell(parents=os.getpgrp(), engines=os.getpgid(about(client)["pid"]))
    client.shutdown()
    """
    told = run_script(script, folder=tmp_path)
    assert told["parents"] != told["engines"]


# Fork.

FORKED = """
import asyncio, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of forks in processes with threads
client = make(asyncio_mode=ASYNCIO)

def refusal(operation):
    try:
        result = operation()
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    except RuntimeError as exc:
        return str(exc)
    return "nothing"

suffix = "_async" if ASYNCIO else ""
request = EngineCoreRequest("x", [1], sampling_params=SamplingParams(max_tokens=1))
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(reader)
    refusals = {
        name: refusal(lambda: getattr(client, name + suffix)(*args))
        for name, args in {
            "add_request": [request], "abort_requests": [["x"]], "get_output": [],
            "call_utility": ["is_sleeping"], "is_sleeping": [],
        }.items()
    }
    client.shutdown()
    os.write(writer, json.dumps(refusals).encode())
    os.close(writer)
    del client
    sys.exit(0)  # with finalizers and atexit handlers

os.close(writer)
refusals = json.loads(os.fdopen(reader).read())
assert os.waitpid(child, 0)[1] == 0
alive = asyncio.run(client.is_sleeping_async()) if ASYNCIO else client.is_sleeping()
client.shutdown()
tell(refusals=refusals, alive=alive)
"""


@pytest.mark.parametrize("asyncio_mode", [False, True])
def test_a_forked_child_is_refused_and_its_end_is_not_the_engines(asyncio_mode: bool, tmp_path: Path) -> None:
    """C-41: a clear error rather than hanging; sockets do not survive a fork."""
    told = run_script(FORKED.replace("ASYNCIO", str(asyncio_mode)), folder=tmp_path)
    assert told["alive"] is False
    assert len(told["refusals"]) == 5
    for name, text in told["refusals"].items():
        assert "do not survive a fork" in text, (name, text)


def test_a_forked_child_that_leaves_by_os_exit_or_multiprocessing_changes_nothing(tmp_path: Path) -> None:
    script = """
    import multiprocessing, warnings
    warnings.simplefilter("ignore")
    client = make()
    workers = [multiprocessing.get_context("fork").Process(target=int) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    tell(tokens=serve(client), codes=[worker.exitcode for worker in workers])
    client.shutdown()
    """
    assert run_script(script, folder=tmp_path) == {"tokens": [1, 2, 1], "codes": [0, 0, 0]}


def test_a_daemon_without_standard_streams_can_start_an_engine(tmp_path: Path) -> None:
    """Descriptors 0, 1 and 2 are sockets of ours then, and the engine's standard streams are others."""
    result = tmp_path / "result.json"
    script = f"""
    with make(forward_engine_log=True) as client:
        tokens = serve(client)
    with open({str(result)!r}, "w") as file:
        json.dump(tokens, file)
    """
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(script))
    command = f"exec {sys.executable} {path} <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], timeout=60, check=False).returncode == 0
    assert json.loads(result.read_text()) == [1, 2, 1]
