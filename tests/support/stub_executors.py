"""Executors that engine processes of the tests load by name: ``stub_executors:Class``, with this folder in sys_path."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from enginewire.engine.executor import Executor, ExecutorCapacity
from enginewire.errors import InvalidRequestError, ModelError
from enginewire.executors import EchoExecutor
from enginewire.executors.lock_step import LockStepEchoExecutor
from enginewire.wire.capabilities import Capabilities
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest


class HoldsGil(EchoExecutor):
    """An echo that claims to hold the interpreter lock, and so runs in a process of its own."""

    holds_gil = True

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Also: ``pid``, ``kill`` (itself)."""
        if method == "pid":
            return [os.getpid()]
        if method == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collective_rpc(method, timeout, args, kwargs)


class Forks(HoldsGil):
    """Forks a process that keeps every descriptor open and outlives it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if os.fork() == 0:
            signal.pause()


class HogsGil(HoldsGil):
    """Its steps hold the interpreter lock for ``step_time_s``, as native code may."""

    def step(self) -> list[EngineCoreOutput]:
        """Sleep through the foreign function interface that does not release the lock."""
        ctypes.PyDLL(None).usleep(int(self._options.step_time_s * 1e6))
        options, self._options = self._options, type(self._options)()
        try:
            return super().step()
        finally:
            self._options = options


class HogsGilLoading(HoldsGil):
    """Holds the interpreter lock while it loads, for longer than any test waits."""

    def __init__(self, config: Any) -> None:
        sys.stderr.write(f"loading in pid={os.getpid()}\n")
        ctypes.PyDLL(None).sleep(600)
        super().__init__(config)


class FailsToLoad(EchoExecutor):
    """Raises in its constructor, as a missing model file would."""

    def __init__(self, config: Any) -> None:
        raise ModelError("no such file: /nowhere/model.gguf")


class FailsToLoadInChild(FailsToLoad):
    """The same, in a process of its own."""

    holds_gil = True


class ExitsWhileLoading(EchoExecutor):
    """Ends the process from native code, without a word."""

    def __init__(self, config: Any) -> None:
        os._exit(7)


class Prints(EchoExecutor):
    """Prints to standard output: from Python, and from a process of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        print("printed by the executor")
        subprocess.run(["echo", "printed by a child"], check=True)


class Misbehaves(Executor):
    """Refuses, breaks or garbles requests by the first token of their prompt; echoes the others."""

    REFUSE, BREAK, GARBLE, LOSE = range(100, 104)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.capacity = ExecutorCapacity(max_model_len=1000, num_gpu_blocks=100, block_size=10)
        self.capabilities = Capabilities(prefix_caching=True)
        self._live: dict[str, int] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in, or not."""
        assert request.prompt_token_ids is not None
        token_id = request.prompt_token_ids[0]
        if token_id == self.REFUSE:
            raise InvalidRequestError("I do not like 100")
        if token_id == self.BREAK:
            raise KeyError("broken")
        if token_id != self.LOSE:
            self._live[request.request_id] = token_id

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        """Echo."""
        outputs = [EngineCoreOutput(request_id, [token_id]) for request_id, token_id in self._live.items()]
        for output in outputs:
            if output.new_token_ids == [self.GARBLE]:
                output.kv_transfer_params = {"what": object()}
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether any is live."""
        return bool(self._live)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Fail, as a device would."""
        raise RuntimeError("the cache cannot be reset")


class LockStepHoldsGil(LockStepEchoExecutor):
    """Ranks in lock-step whose executors run in processes of their own."""

    holds_gil = True
