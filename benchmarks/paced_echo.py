"""The echo engine at a pace that each request chooses: ``"vllm_xargs": {"pace_s": 0.05}`` is 20 steps a second.

So one engine and one server do for all paces. vLLM's server passes ``vllm_xargs`` on as ours does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from enginewire.config import EngineConfig
from enginewire.executors.echo import EchoExecutor
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest

NEVER = threading.Event()


class PacedEcho(EchoExecutor):
    """Steps no faster than the slowest live request wants it; without a wish as fast as it can.

    A new request's first token comes at once, so that the time to it is the server's.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._paces: dict[str, float] = {}
        self._next_step = 0.0
        self._new: list[str] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take in a request, and its pace."""
        super().add_request(request)
        params = request.sampling_params
        if pace := ((params and params.extra_args) or {}).get("pace_s"):
            self._paces[request.request_id] = pace
            self._new.append(request.request_id)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests. The engine says so of those that have ended, too."""
        super().abort_requests(request_ids)
        for request_id in request_ids:
            self._paces.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        """Give new requests their first token, or wait until the next step is due and give all of them one."""
        if not self._paces:
            return super().step()
        live = self._live
        try:
            self._live = {request_id: live[request_id] for request_id in self._new if request_id in live}
            self._new.clear()
            if not self._live:
                self._live = live
                now = time.monotonic()
                NEVER.wait(max(0.0, self._next_step - now))
                self._next_step = max(self._next_step, now) + max(
                    self._paces.values()
                )  # late steps are not made up for
            return super().step()
        finally:
            self._live = live
