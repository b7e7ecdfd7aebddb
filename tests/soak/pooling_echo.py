"""An echo engine that pools, too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from enginewire import EngineConfig, EngineCoreOutput, EngineCoreRequest, FinishReason
from enginewire.executors import EchoExecutor
from enginewire.wire.arrays import Tensor


class PoolingEcho(EchoExecutor):
    """The vector of a prompt is its tokens, one step after it came."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capabilities = msgspec.structs.replace(self.capabilities, tasks=("generate", "embed"))
        self._pools: dict[str, list[int]] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.pooling_params is not None:
            self._pools[request.request_id] = list(request.prompt_token_ids or ())
        else:
            super().add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        for request_id in request_ids:
            self._pools.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        outputs = super().step()
        pools, self._pools = self._pools, {}
        for request_id, tokens in pools.items():
            vector = Tensor.from_numpy(np.array(tokens, dtype=np.float32))
            outputs.append(EngineCoreOutput(request_id, [], pooling_output=vector, finish_reason=FinishReason.STOP))
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._pools) or super().has_unfinished_requests()
