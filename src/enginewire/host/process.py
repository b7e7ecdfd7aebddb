"""``EngineProcess``: one engine process, as whoever started it sees it: its lifeline, its log, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import site
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from enginewire.engine.channel import LENGTH_BYTES
from enginewire.engine.spec import READY, DeathNote, EngineSpec
from enginewire.errors import EngineDeath, EngineStartupError, describe_exit
from enginewire.host.incarnations import Incarnation
from enginewire.host.vllm import VLLM, vllm_command, vllm_end, vllm_environment

LOG_TAIL_LINES: Final = 40
VLLM_LOG_TAIL_LINES: Final = 120
"""Its engine and its launcher both write a traceback, and the cause is in the first."""

MAX_LOG_LINE_BYTES: Final = 4096

_READY_WORDS: Final = len(READY).to_bytes(LENGTH_BYTES, "big") + READY


class EngineProcess(Incarnation):
    """One engine process: its pid, its lifeline, the tail of its log. Everything here is called by the manager.

    Args:
        spec: what it is told.
        forward_log: pass its log on to our stderr.
        on_ready: is told its index when it says that it is ready.
    """

    def __init__(self, spec: EngineSpec, *, forward_log: bool, on_ready: Callable[[int], None]) -> None:
        super().__init__(spec.engine_index)
        self.forward_log = forward_log
        self.is_vllm = spec.executor == VLLM
        self.log_tail: deque[str] = deque(maxlen=VLLM_LOG_TAIL_LINES if self.is_vllm else LOG_TAIL_LINES)
        self.is_leaving = False
        self.is_status_lost = False
        self._on_ready = on_ready
        self._was_ready = False
        self._partial_line = b""
        self._words = b""
        payload = spec.encode()
        self.lifeline, theirs = socket.socketpair()
        # A process that does not read its spec must not hold us up longer than one that does not speak.
        self.lifeline.settimeout(spec.config.hello_timeout_s)
        try:
            self.popen = _start(spec, theirs.fileno())
        except BaseException:
            self.lifeline.close()
            raise
        finally:
            theirs.close()
        assert self.popen.stdout is not None
        self.log = self.popen.stdout
        os.set_blocking(self.log.fileno(), False)
        with contextlib.suppress(OSError):  # dead or deaf: start-up will say so
            self.lifeline.sendall(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        self.lifeline.setblocking(False)

    @property
    def is_running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.popen.returncode is None

    def has_ended(self) -> bool:
        """Whether it has ended, without reaping it: until then its id and its group's cannot be used again."""
        try:
            return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody waits for all children of this process
            self.is_status_lost = True
            return True

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to it and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.popen.pid, number)

    def reap(self) -> EngineDeath:
        """Kill what is left of its group, collect status and last words, and say why it ended."""
        self.signal(signal.SIGKILL, group=True)
        status: int | None = self.popen.wait()
        while self.read_lifeline():
            pass
        self.read_log()
        self.log.close()
        self.lifeline.close()
        if self.is_vllm:
            status, how = None, vllm_end(self.log_tail)
        elif self.is_status_lost:  # what `wait` returns then is made up
            status, how = None, "ended, and something else in this process took its exit status (waitpid, SIGCHLD)"
        else:
            how = describe_exit(self.popen.returncode)
        note = DeathNote.decode(self._words.removeprefix(_READY_WORDS)[LENGTH_BYTES:])
        tail = tuple(self.log_tail)[-LOG_TAIL_LINES:]
        if note is None:
            return EngineDeath(self.engine_index, how, status, tail)
        if note.traceback_tail and note.traceback_tail[-1] not in tail:  # later lines have pushed it out
            tail += tuple(note.traceback_tail)
        return EngineDeath(self.engine_index, f"{note.cause} (its process {how})", status, tail)

    def read_log(self) -> bool:
        """Take in what it printed; ``False`` once there will be no more."""
        while True:
            try:
                data = os.read(self.log.fileno(), 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            *lines, rest = (self._partial_line + data).split(b"\n")
            if not data or len(rest) > MAX_LOG_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._partial_line = rest
            for line in lines:
                self._log_line(line)
            if not data:
                return False

    def read_lifeline(self) -> bool:
        """Take in what it says on its lifeline; ``False`` once there is no more."""
        try:
            data = self.lifeline.recv(65536)
        except OSError:
            return False
        self._words += data
        self.is_leaving = not data
        if not self._was_ready and self._words.startswith(_READY_WORDS):
            self._was_ready = True
            self._on_ready(self.engine_index)
        return bool(data)

    def _log_line(self, line: bytes) -> None:
        text = line[:MAX_LOG_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if not text:
            return
        self.log_tail.append(text)
        if self.forward_log:
            # Our own stderr may be closed, gone, or anything an application put there; deaths are to be noticed still.
            with contextlib.suppress(Exception):
                sys.stderr.write(f"{text}\n")


def _start(spec: EngineSpec, lifeline_fd: int) -> subprocess.Popen[bytes]:
    if spec.executor == VLLM:
        command, environment = vllm_command(spec, lifeline_fd), vllm_environment(spec)
    else:
        # -P: the current folder must not shadow modules; the engine takes over our sys.path.
        command = [sys.executable, "-P", "-m", "enginewire.engine.main", "--lifeline-fd", str(lifeline_fd)]
        environment = child_environment()
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(lifeline_fd,),
            start_new_session=True,
            env=environment,
        )
    except OSError as exc:
        raise EngineStartupError(
            f"cannot start an engine process with {command[0]!r}: {exc.strerror}",
            stage="launch",
            engine_index=spec.engine_index,
        ) from exc


def child_environment() -> dict[str, str]:
    """Our environment, and a way to import this package where it is not installed but found through ``sys.path``."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    root = str(Path(__file__).resolve().parents[2])
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return environment
