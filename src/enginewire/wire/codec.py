"""Messages to frames and back: msgpack, with large arrays in frames of their own, not copied.

Source: protocol section E. An encoder or decoder belongs to one thread at a time.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Ext

from enginewire.errors import INTERNAL_PREFIX, DecodeError, EncodeError
from enginewire.wire.arrays import RAW_VIEW, Tensor, fill_in_frames, nbytes, tensor_from_wire
from enginewire.wire.frames import Buffer
from enginewire.wire.messages import (
    ARRAY_SLOTS,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ReceivedOutput,
    ReceivedOutputs,
)

T = TypeVar("T")

PICKLE: Final = 1
CLOUDPICKLE: Final = 2

DEFAULT_ZERO_COPY_THRESHOLD: Final = 256
"""Arrays of at least this many bytes get a frame of their own. The reference's default; decoders accept any."""

MIN_REQUEST_ELEMENTS: Final = 9
"""An EngineCoreRequest of fewer elements lacks required fields."""


class MsgpackEncoder:
    """Encodes one message at a time into a payload frame and auxiliary frames.

    Args:
        zero_copy_threshold: bytes from which an array travels in its own frame.
        allow_pickle: pickle what msgpack has no form for. Off: such a value is refused.
    """

    def __init__(self, *, zero_copy_threshold: int = DEFAULT_ZERO_COPY_THRESHOLD, allow_pickle: bool = False) -> None:
        self._threshold = zero_copy_threshold
        self._allow_pickle = allow_pickle
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)
        self._aux: list[Buffer] = []

    def encode(self, message: object) -> list[Buffer]:
        """Encode ``message``; the first frame is the payload, the rest are the bytes of large arrays, not copied.

        Raises:
            EncodeError: it holds a value that has no form on the wire.
        """
        aux: list[Buffer] = [b""]
        self._aux = aux
        try:
            aux[0] = self._encoder.encode(message)
        except EncodeError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise EncodeError(f"cannot encode {type(message).__name__}: {exc}") from exc
        finally:
            self._aux = []
        return aux

    def _enc_hook(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return value.dtype, value.shape, self._place(value.data, nbytes(value.data))
        if isinstance(value, slice):
            return value.start, value.stop, value.step
        numpy = sys.modules.get("numpy")  # a value cannot be an array if nobody has imported numpy
        if numpy is not None:
            if isinstance(value, numpy.ndarray) and value.dtype.kind not in "OVMm":
                return self._ndarray(numpy, value)
            if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
                return value.item()
        if self._allow_pickle:
            return Ext(PICKLE, pickle.dumps(value))
        raise EncodeError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} has no form on the wire"
        )

    def _ndarray(self, numpy: Any, array: Any) -> tuple[str, tuple[int, ...], Ext | int]:
        contiguous = array if array.flags.c_contiguous else numpy.ascontiguousarray(array)
        if array.ndim == 0:
            return array.dtype.str, (), Ext(RAW_VIEW, contiguous.tobytes())
        # A byte view: zero-sized and unicode arrays have no memoryview cast of their own.
        data = contiguous.reshape(-1).view(numpy.uint8).data if contiguous.nbytes else b""
        return array.dtype.str, array.shape, self._place(data, contiguous.nbytes)

    def _place(self, data: Buffer, size: int) -> Ext | int:
        """Put array bytes inline or into the next auxiliary frame, whose number is returned."""
        if size < self._threshold:
            return Ext(RAW_VIEW, data)
        self._aux.append(data)
        return len(self._aux) - 1


class MsgpackDecoder(Generic[T]):
    """Decodes messages of one type.

    Types are checked strictly: an int passes for a float, nothing else is converted. Pickled values are refused
    unless ``allow_pickle``.
    """

    def __init__(self, message_type: type[T], *, allow_pickle: bool = False) -> None:
        self._type = message_type
        self._allow_pickle = allow_pickle
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._dec_hook)
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Sequence[Buffer]) -> T:
        """Decode a payload and its auxiliary frames.

        Raises:
            DecodeError: it is not such a message; says what was expected and where it differs.
        """
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.DecodeError, DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise DecodeError(f"not a valid {self._type.__name__}: {exc}") from exc
        finally:
            self._frames = ()

    def _dec_hook(self, expected: type, value: object) -> object:
        if expected is Tensor:
            return tensor_from_wire(value, self._frames)
        raise DecodeError(f"no way to decode {expected}")


class RequestDecoder:
    """Decodes ADD payloads, and finds out whom to tell when one cannot be decoded."""

    def __init__(self, request_type: type[EngineCoreRequest] = EngineCoreRequest) -> None:
        self._decoder = MsgpackDecoder(request_type)
        self._elements = msgspec.msgpack.Decoder(list[msgspec.Raw])

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreRequest:
        """Decode a request. Raises :class:`DecodeError`."""
        if array_length(frames[0]) < MIN_REQUEST_ELEMENTS:
            raise DecodeError(
                f"not a valid EngineCoreRequest: an array of at least {MIN_REQUEST_ELEMENTS} elements was expected, "
                f"got {max(array_length(frames[0]), 0)}"
            )
        request = self._decoder.decode(frames)
        for feature in request.mm_features or ():
            for item in (feature.data or {}).values():
                fill_in_frames(item.get("data") if isinstance(item, dict) else item, frames)
        return request

    def sender(self, frames: Sequence[Buffer]) -> tuple[str, int] | None:
        """Recover ``(request_id, client_index)`` of a request that cannot be decoded; ``None``: hopeless."""
        try:
            elements = self._elements.decode(frames[0])
            request_id = msgspec.msgpack.decode(elements[0], type=str)
            client_index = msgspec.msgpack.decode(elements[11], type=int) if len(elements) > 11 else 0
        except (msgspec.DecodeError, IndexError, RecursionError):
            return None
        return request_id, client_index


class OutputsDecoder:
    """Decodes what engines send, containing damage to the request it concerns."""

    def __init__(self, outputs_type: type[EngineCoreOutputs] = ReceivedOutputs) -> None:
        self._decoder = MsgpackDecoder(outputs_type)
        self._elements = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._output: MsgpackDecoder[Any] = MsgpackDecoder(ReceivedOutput)
        self._type = outputs_type

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreOutputs:
        """Decode a message of outputs.

        An output that is malformed becomes an ERROR output of its request, if its id can be read; the others are
        delivered.

        Raises:
            DecodeError: nothing can be made of it.
        """
        try:
            message = self._decoder.decode(frames)
        except DecodeError as exc:
            message = self._salvage(frames, exc)
        if len(frames) > 1:
            for output in message.outputs:
                for slot in ARRAY_SLOTS:
                    fill_in_frames(slot.__get__(output), frames)
            if message.utility_output is not None:
                fill_in_frames(message.utility_output.result, frames)
        return message

    def _salvage(self, frames: Sequence[Buffer], cause: DecodeError) -> EngineCoreOutputs:
        try:
            elements = self._elements.decode(frames[0])
            raw_outputs = self._elements.decode(elements[1])
            engine_index = msgspec.msgpack.decode(elements[0], type=int)
        except (msgspec.DecodeError, IndexError, RecursionError):
            raise cause from None
        message = self._type(engine_index=engine_index)
        for raw in raw_outputs:
            try:
                message.outputs.append(self._output.decode([raw, *frames[1:]]))
            except DecodeError as exc:
                message.outputs.append(self._failed(raw, exc, cause))
        if not any(output.stop_reason for output in message.outputs if output.finish_reason is FinishReason.ERROR):
            raise cause  # the damage is elsewhere in the message
        return message

    def _failed(self, raw: msgspec.Raw, why: DecodeError, cause: DecodeError) -> ReceivedOutput:
        try:
            request_id = msgspec.msgpack.decode(self._elements.decode(raw)[0], type=str)
        except (msgspec.DecodeError, IndexError, RecursionError):
            raise cause from None
        return ReceivedOutput(
            request_id,
            [],
            finish_reason=FinishReason.ERROR,
            stop_reason=f"{INTERNAL_PREFIX}its output: {why}",
        )


def array_length(payload: Buffer) -> int:
    """Return the length that a msgpack array's header states, -1 if it is no array."""
    head = payload[0] if len(payload) else 0
    if head & 0xF0 == 0x90:
        return head & 0x0F
    if head == 0xDC and len(payload) >= 3:
        return int.from_bytes(payload[1:3], "big")
    if head == 0xDD and len(payload) >= 5:
        return int.from_bytes(payload[1:5], "big")
    return -1
