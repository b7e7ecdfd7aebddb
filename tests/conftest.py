"""Checked around every test: what it starts, it ends."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from enginewire.testing import free_tcp_port

SETTLE_S = 3.0
"""How long what was told to end may take: an exiting process or thread is not a leak."""

MAX_WORKERS = 16
"""More have too little to do."""

SYSTEM_DESCRIPTORS = ("socket:", "pipe:", "anon_inode:[event")
"""Descriptors that are never left open. Files are not counted: libraries open those when they are first used."""

_contexts: weakref.WeakSet[zmq.Context] = weakref.WeakSet()
_make_context = zmq.Context.__init__


def _remembered_context(self: zmq.Context, *args: object, **kwargs: object) -> None:
    _make_context(self, *args, **kwargs)
    _contexts.add(self)


zmq.Context.__init__ = _remembered_context


_temporary_folder = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Give this process a temporary folder of its own, so that what others leave in theirs is not taken for ours.

    And let SIGINT arrive.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if worker := getattr(config, "workerinput", None):
        folder = os.path.join(os.environ["TMPDIR"], worker["workerid"])  # in that of the run, which removes both
        os.mkdir(folder)
    else:
        folder = config.stash[_temporary_folder] = tempfile.mkdtemp(prefix="ew-")  # short: ipc paths are
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    free_tcp_port()  # the first call opens a socket for good


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's temporary folder."""
    if folder := config.stash.get(_temporary_folder, ""):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Say how many processes ``-n auto`` runs the tests in: two per core, as most tests wait for processes.

    None for few tests, as each worker takes seconds to find out which tests there are, nor to see what tests print.
    """
    option = config.option
    names_files = any(Path(argument.split("::")[0]).is_file() for argument in config.args)
    if option.keyword or option.lf or option.capture == "no" or names_files:
        return 0
    return min(2 * len(os.sched_getaffinity(0)), MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the first of several workers begin with all tests of the real model.

    Others take from the end of its list, and so none of these: the model is loaded once per module, and not by several
    workers at a time, each of which would wait for the same cores.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("model") is None)


def _children() -> set[int]:
    """Return the ids of our child processes, without multiprocessing's own helpers, which live until we exit."""
    children = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children.update(map(int, (task / "children").read_text().split()))
        except OSError:  # the thread ended meanwhile
            continue
    return {pid for pid in children if not _is_multiprocessing_helper(pid)}


def _is_multiprocessing_helper(pid: int) -> bool:
    command = _read(f"/proc/{pid}/cmdline")
    return b"multiprocessing.resource_tracker" in command or b"multiprocessing.forkserver" in command


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _descriptors() -> set[str]:
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(SYSTEM_DESCRIPTORS):
            descriptors.add(f"{name} -> {target}")
    return descriptors


def _socket_folders() -> set[str]:
    return {entry.name for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith("enginewire-")}


def _open_contexts() -> set[zmq.Context]:
    return {context for context in _contexts if not context.closed}


class Ledger:
    """What exists at one moment, and what of it is new at a later one."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.contexts = _open_contexts()
        self.children = _children()
        self.descriptors = _descriptors()
        self.folders = _socket_folders()

    def leaks(self) -> list[str]:
        """Name what is there now and was not then."""
        frames = sys._current_frames()
        found = []
        for thread in set(threading.enumerate()) - self.threads:
            frame = frames.get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            found.append(f"thread {thread.name}\n{stack}")
        found += [f"zmq context {context!r}" for context in _open_contexts() - self.contexts]
        for pid in _children() - self.children:
            found.append(f"process {pid}: {_read(f'/proc/{pid}/cmdline').replace(bytes(1), b' ')!r}")
        found += [f"descriptor {descriptor}" for descriptor in _descriptors() - self.descriptors]
        found += [f"folder {name}" for name in _socket_folders() - self.folders]
        return found


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients look after their engines more often: a loss or a return takes one or several looks."""
    from enginewire.client.lookout import Lookout

    monkeypatch.setattr(Lookout, "interval_s", 0.02)


@pytest.fixture(autouse=True, scope="module")
def state_home() -> None:
    """Let frontends remember no engines from before the module: later ones are given their ports again."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a ZeroMQ context, a descriptor or an ipc folder behind."""
    before = Ledger()
    yield
    if not before.leaks():
        return
    gc.collect()  # objects in reference cycles may hold descriptors; that is untidy, not a leak
    deadline = time.monotonic() + SETTLE_S
    while leaks := before.leaks():
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n" + "\n".join(leaks), pytrace=False)
        time.sleep(0.01)
