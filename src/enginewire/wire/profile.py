"""Which layout table a version of the wire uses, and how to tell which one a peer speaks.

Source: protocol section M.1.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from enginewire.errors import DecodeError
from enginewire.wire import v0_32
from enginewire.wire.codec import MIN_REQUEST_ELEMENTS, MsgpackDecoder, array_length
from enginewire.wire.frames import Buffer
from enginewire.wire.handshake import EngineCoreReadyResponse
from enginewire.wire.messages import EngineCoreOutputs, EngineCoreRequest, LoRARequest, ReceivedOutputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireProfile:
    """The structs whose layout differs between versions of vLLM.

    Attributes:
        vllm_version: what a ready response of this profile states.
        request, outputs, received_outputs, ready: its structs; for ``RequestDecoder``, ``OutputsDecoder`` and
            ``MsgpackDecoder``.
        request_of, outputs_of, lora_of: bring what the package makes (0.25's structs) into this layout, before it is
            encoded.
    """

    vllm_version: str
    request: type[EngineCoreRequest]
    outputs: type[EngineCoreOutputs]
    received_outputs: type[ReceivedOutputs]
    ready: type[EngineCoreReadyResponse]
    request_of: Callable[[EngineCoreRequest], EngineCoreRequest]
    outputs_of: Callable[[EngineCoreOutputs], EngineCoreOutputs]
    lora_of: Callable[[LoRARequest], LoRARequest | v0_32.LoRARequest]

    def __str__(self) -> str:
        return f"vLLM {self.vllm_version}"

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number: patch releases do not change the layout."""
        major, minor, *_ = self.vllm_version.split(".")
        return int(major), int(minor)


def _as_it_is(message: Any) -> Any:
    return message


V0_25: Final = WireProfile(
    "0.25.1",
    EngineCoreRequest,
    EngineCoreOutputs,
    ReceivedOutputs,
    EngineCoreReadyResponse,
    _as_it_is,
    _as_it_is,
    _as_it_is,
)

V0_32: Final = WireProfile(
    "0.32.0",
    v0_32.EngineCoreRequest,
    v0_32.EngineCoreOutputs,
    v0_32.ReceivedOutputs,
    v0_32.EngineCoreReadyResponse,
    v0_32.request_of,
    v0_32.outputs_of,
    v0_32.lora_of,
)

PROFILES: Final = (V0_25, V0_32)
"""Every layout that is spoken, oldest first."""

NEW_KEY: Final = "tensor_parallel_size"
"""In a ready response of 0.32 and none of 0.25; surer than the version, which builds from source often lack."""


def profile_of_ready(response: Mapping[str, object] | EngineCoreReadyResponse) -> WireProfile:
    """Find the layout of the engine that sent a ready response, decoded without a schema or with one.

    A version that is not known is taken for the known one that its keys resemble, with a warning.

    Raises:
        DecodeError: the version is of 0.32 or newer, and the keys are not.
    """
    stated: object
    if isinstance(response, EngineCoreReadyResponse):
        is_new, stated = isinstance(response, v0_32.EngineCoreReadyResponse), response.vllm_version
    else:
        is_new, stated = NEW_KEY in response, response.get("vllm_version")
    profile = V0_32 if is_new else V0_25
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", stated) if isinstance(stated, str) else None
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release == profile.release:
        return profile
    if not is_new and release is not None and release >= V0_32.release:
        raise DecodeError(
            f"an engine states version {reprlib.repr(stated)}, and its ready response has no {NEW_KEY}: its layout is "
            f"not known; use an engine of {' or '.join(map(str, PROFILES))}"
        )
    logger.warning(
        "an engine states version %s, which is not known; its ready response has %s %s, so the layout of %s is "
        "assumed; outputs that do not fit it will be refused",
        reprlib.repr(stated),
        "the key" if is_new else "no key",
        NEW_KEY,
        profile,
    )
    return profile


def decode_ready(frames: Sequence[Buffer]) -> tuple[WireProfile, EngineCoreReadyResponse]:
    """Decode a ready response by the layout it turns out to have. Raises :class:`DecodeError`."""
    response = MsgpackDecoder(EngineCoreReadyResponse).decode(frames)  # what the layouts have in common
    profile = profile_of_ready(msgspec.msgpack.decode(frames[0]))
    return profile, response if profile is V0_25 else MsgpackDecoder(profile.ready).decode(frames)


def profile_of_request(payload: Buffer) -> WireProfile:
    """Find the layout of the frontend that sent an ADD, from the number of its elements.

    A reference frontend writes every element: 20 or 22. Fewer come from frontends that leave defaults out.

    Raises:
        DecodeError: it is no request, or of a number of elements that no known version has.
    """
    length = array_length(payload)
    old, new = (len(profile.request.__struct_fields__) for profile in PROFILES)
    if MIN_REQUEST_ELEMENTS <= length <= old:
        return V0_25
    if length >= new:
        if length > new:
            logger.warning(
                "a frontend sends requests of %d elements, which no known version does; the layout of %s is assumed",
                length,
                V0_32,
            )
        return V0_32
    got = "something else" if length < 0 else f"an array of {length}"
    raise DecodeError(
        f"not an EngineCoreRequest of a known version: {old} elements ({V0_25}; at least {MIN_REQUEST_ELEMENTS}) or "
        f"{new} ({V0_32}) were expected, got {got}"
    )
