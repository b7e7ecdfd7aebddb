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
from enginewire.wire.capabilities import EngineInfo
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
        request_from: the other way, for what was decoded: an adapter in it becomes 0.25's.
    """

    vllm_version: str
    request: type[EngineCoreRequest]
    outputs: type[EngineCoreOutputs]
    received_outputs: type[ReceivedOutputs]
    ready: type[EngineCoreReadyResponse]
    request_of: Callable[[EngineCoreRequest], EngineCoreRequest]
    outputs_of: Callable[[EngineCoreOutputs], EngineCoreOutputs]
    lora_of: Callable[[LoRARequest], LoRARequest | v0_32.LoRARequest]
    request_from: Callable[[EngineCoreRequest], EngineCoreRequest]

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
    v0_32.request_from,
)

PROFILES: Final = (V0_25, V0_32)
"""Every layout that is spoken, oldest first."""

NEW_KEY: Final = "tensor_parallel_size"
"""In a ready response of 0.32 and none of 0.25; surer than the version, which builds from source often lack."""


def profile_named(version: str) -> WireProfile | None:
    """Find the layout of a version of vLLM, ``"0.25.1"`` or ``"0.32"``; ``None``: it is not known."""
    release = _release_in(version)
    return next((profile for profile in PROFILES if profile.release == release), None)


def profile_of_ready(response: Mapping[str, object] | EngineCoreReadyResponse) -> WireProfile:
    """Find the layout to speak with the engine that sent a ready response, decoded without a schema or with one.

    An engine of this package says which it speaks (:class:`EngineInfo`), or that it follows its frontend's first
    request: then 0.25's is spoken, though its keys are those of 0.32 as well. With vLLM's, a version that is not known
    is taken for the known one that its keys resemble, with a warning.

    Raises:
        DecodeError: the version is of 0.32 or newer, and the keys are not; or it is one that nobody here knows.
    """
    stated: object
    ours: object
    if isinstance(response, EngineCoreReadyResponse):
        is_new, stated = isinstance(response, v0_32.EngineCoreReadyResponse), response.vllm_version
        ours = response.enginewire
    else:
        is_new, stated = NEW_KEY in response, response.get("vllm_version")
        ours = _engine_info(response)
    if isinstance(ours, EngineInfo):
        return _profile_of_ours(ours)
    profile = V0_32 if is_new else V0_25
    release = _release_in(stated)
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


def _profile_of_ours(info: EngineInfo) -> WireProfile:
    if info.wire_version is None:
        return V0_25
    if (profile := profile_named(info.wire_version)) is None:
        raise DecodeError(
            f"an engine of enginewire {info.version} speaks the layout of vLLM {reprlib.repr(info.wire_version)}, "
            f"which is not known here; give it another wire_version: {' or '.join(p.vllm_version for p in PROFILES)}"
        )
    return profile


def _engine_info(response: Mapping[str, object]) -> EngineInfo | None:
    try:
        return msgspec.convert(response["enginewire"], EngineInfo) if "enginewire" in response else None
    except msgspec.ValidationError as exc:
        raise DecodeError(f"the ready response's enginewire: {exc}") from exc


def _release_in(version: object) -> tuple[int, int] | None:
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version) if isinstance(version, str) else None
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def decode_ready(frames: Sequence[Buffer]) -> tuple[WireProfile, EngineCoreReadyResponse]:
    """Decode a ready response by the layout it turns out to have. Raises :class:`DecodeError`."""
    response = MsgpackDecoder(EngineCoreReadyResponse).decode(frames)  # what the layouts have in common
    profile = profile_of_ready(msgspec.msgpack.decode(frames[0]))
    return profile, response if profile is V0_25 else MsgpackDecoder(profile.ready).decode(frames)


def is_complete_request(payload: Buffer) -> bool:
    """Whether an ADD's length tells its version: frontends that leave trailing defaults out send fewer elements."""
    return array_length(payload) >= len(V0_25.request.__struct_fields__)


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


def adapter_from_wire(value: object) -> LoRARequest:
    """Read an adapter of either layout: at position 4, 0.32 has a boolean, and 0.25 a map or nothing.

    Raises:
        ValueError: it is none (``msgspec.ValidationError``).
    """
    if isinstance(value, list) and len(value) > 4 and isinstance(value[4], bool):
        return v0_32.lora_from(msgspec.convert(value, v0_32.LoRARequest))
    return msgspec.convert(value, LoRARequest)
