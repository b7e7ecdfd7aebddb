"""Executors that misbehave, for engine processes to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from enginewire import EngineConfig
from enginewire.executors import EchoExecutor


class Raises(EchoExecutor):
    """Cannot be constructed."""

    def __init__(self, config: EngineConfig) -> None:
        print("about to load", flush=True)
        raise RuntimeError("the weights are upside down")


class Exits(EchoExecutor):
    """Leaves while it is constructed."""

    def __init__(self, config: EngineConfig) -> None:
        print("leaving early", flush=True)
        sys.exit(7)


class ExitsHard(EchoExecutor):
    """Leaves without a word to anybody."""

    def __init__(self, config: EngineConfig) -> None:
        print("gone", flush=True)
        os._exit(9)


class KillsItself(EchoExecutor):
    """Is killed while it loads, as by the out-of-memory killer."""

    def __init__(self, config: EngineConfig) -> None:
        print("allocating everything", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(EchoExecutor):
    """Never finishes loading."""

    def __init__(self, config: EngineConfig) -> None:
        print("loading and loading", flush=True)
        threading.Event().wait()


class IgnoresSigterm(EchoExecutor):
    """Never finishes loading and cannot be asked to stop."""

    def __init__(self, config: EngineConfig) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        threading.Event().wait()


class Obedient(EchoExecutor):
    """Does what ``collective_rpc`` tells it."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        match method:
            case "exit":
                print("told to exit", flush=True)
                os._exit(*args)
            case "spawn":  # a child that outlives us unless somebody sees to it
                return [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid]
            case "hang":
                threading.Event().wait()
            case "big":
                return ["x" * args[0]]
            case "pid":
                return [os.getpid()]
        return super().collective_rpc(method, timeout, args, kwargs)


class InChildProcess(Obedient):
    """Runs in a child of the engine's process."""

    holds_gil = True


class SpawnsThenHangs(EchoExecutor):
    """Starts a child and never finishes loading."""

    def __init__(self, config: EngineConfig) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child={child.pid}", flush=True)
        threading.Event().wait()


class WorksOnce(EchoExecutor):
    """Works as often as the option ``works`` says (1); those that are made later raise, or never finish loading.

    The option ``then`` says which; the option ``mark`` is the path of a file that counts.
    """

    def __init__(self, config: EngineConfig) -> None:
        options = config.executor_options
        mark, then, works = options.pop("mark"), options.pop("then"), options.pop("works", 1)
        with open(mark, "a") as file:
            file.write("x")
        if os.path.getsize(mark) > works:
            if then == "hang":
                threading.Event().wait()
            raise RuntimeError("it worked once" if works == 1 else f"it worked {works} times")
        super().__init__(config)
