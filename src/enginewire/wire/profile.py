"""Which layout table a version of the wire uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest, ReceivedOutputs


@dataclass(frozen=True, slots=True)
class WireProfile:
    """The structs whose layout differs between versions of vLLM.

    Attributes:
        vllm_version: what a ready response of this profile states.
        request, outputs, received_outputs, ready: its structs.
    """

    vllm_version: str
    request: type[EngineCoreRequest]
    outputs: type[EngineCoreOutputs]
    received_outputs: type[ReceivedOutputs]
    ready: type[EngineCoreReadyResponse]


V0_25: Final = WireProfile("0.25.1", EngineCoreRequest, EngineCoreOutputs, ReceivedOutputs, EngineCoreReadyResponse)
