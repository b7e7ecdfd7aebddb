"""Messages to frames and back: msgpack, with large arrays in frames of their own, not copied.

Source: protocol section E. An encoder or decoder belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from time import monotonic
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Ext

from enginewire.errors import INTERNAL_PREFIX, DecodeError, EncodeError, InvalidRequestError
from enginewire.wire.arrays import Tensor, fill_in_frames, nbytes, tensor_from_wire
from enginewire.wire.extensions import PICKLE, PICKLE_CODES, RAW_VIEW, unpickled
from enginewire.wire.frames import Buffer
from enginewire.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ReceivedOutput,
    ReceivedOutputs,
    UtilityCall,
    UtilityOutput,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_ZERO_COPY_THRESHOLD: Final = 256
"""Arrays of at least this many bytes get a frame of their own. The reference's default; decoders accept any."""

MIN_REQUEST_ELEMENTS: Final = 9
"""An EngineCoreRequest of fewer elements lacks required fields."""

LONGEST_COMMON_OUTPUT: Final = 9
"""So many elements of an EngineCoreOutput mean the same in every version."""

_FINISH_REASONS: Final = {int(reason): reason for reason in FinishReason}
"""A request that ends would otherwise pay a hundredth of its way for having its reason converted."""

NOT_DECODABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, IndexError)
"""What bytes that are not a message make of msgspec; ``IndexError``: there are no frames, or too few elements."""

_ELEMENTS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


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
            inline = nbytes(value.data) < self._threshold
            return value.dtype, value.shape, Ext(RAW_VIEW, value.data) if inline else self._frame(value.data)
        if isinstance(value, slice):
            return value.start, value.stop, value.step
        numpy = sys.modules.get("numpy")  # a value cannot be an array if nobody has imported numpy
        if numpy is not None:
            if isinstance(value, numpy.ndarray) and (dtype := dtype_on_wire(value.dtype)) is not None:
                return self._ndarray(numpy, value, dtype)
            if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
                return value.item()
        if self._allow_pickle:
            import pickle

            return Ext(PICKLE, pickle.dumps(value))
        raise EncodeError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} has no form on the wire"
        )

    def _ndarray(self, numpy: Any, array: Any, dtype: str) -> tuple[str, tuple[int, ...], Ext | int]:
        if array.nbytes < self._threshold or array.ndim == 0:
            return dtype, array.shape, Ext(RAW_VIEW, array.tobytes())
        # A byte view: empty and unicode arrays have no memoryview cast of their own.
        flat = numpy.ascontiguousarray(array).reshape(-1)
        return dtype, array.shape, self._frame(flat.view(numpy.uint8).data if array.nbytes else b"")

    def _frame(self, data: Buffer) -> int:
        """Put array bytes into the next auxiliary frame and return its number."""
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
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, dec_hook=self._dec_hook, ext_hook=self._ext_hook
        )
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Sequence[Buffer]) -> T:
        """Decode a payload and its auxiliary frames.

        Raises:
            DecodeError: it is not such a message; says what was expected and where it differs, or which parameter
                is out of range.
        """
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (*NOT_DECODABLE, DecodeError) as exc:
            if isinstance(exc.__cause__, InvalidRequestError):  # a sound message of unsound content
                raise DecodeError(str(exc.__cause__)) from exc
            name = getattr(self._type, "__name__", self._type)  # a union has none
            raise DecodeError(f"not a valid {name}: {exc}") from exc
        finally:
            self._frames = ()

    def _dec_hook(self, expected: type, value: object) -> object:
        assert expected is Tensor, f"no way to decode {expected}"
        return tensor_from_wire(value, self._frames)

    def _ext_hook(self, code: int, data: memoryview) -> object:
        if code in PICKLE_CODES:
            return unpickled(data, allow_pickle=self._allow_pickle)
        return Ext(code, data)


class RequestDecoder:
    """Decodes ADD payloads, and finds out whom to tell when one cannot be decoded."""

    def __init__(self, request_type: type[EngineCoreRequest] = EngineCoreRequest) -> None:
        self._decoder = MsgpackDecoder(request_type)

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreRequest:
        """Decode a request. Raises :class:`DecodeError`."""
        length = array_length(frames[0])
        if length < MIN_REQUEST_ELEMENTS:
            got = "something else" if length < 0 else f"one of {length}"
            raise DecodeError(
                "not a valid EngineCoreRequest: an array of at least "
                f"{MIN_REQUEST_ELEMENTS} elements was expected, got {got}"
            )
        request = self._decoder.decode(frames)
        if len(frames) > 1:
            for feature in request.mm_features or ():
                fill_in_frames(feature.data, frames)
            # A parameter that 0.32 has and 0.25 has not.
            fill_in_frames(getattr(request.sampling_params, "prompt_logprob_token_ids", None), frames)
        return request

    def sender(self, frames: Sequence[Buffer]) -> tuple[str, int] | None:
        """Recover ``(request_id, client_index)`` of a request that cannot be decoded; ``None``: hopeless."""
        try:
            elements = _ELEMENTS.decode(frames[0])
            client_index = msgspec.msgpack.decode(elements[11], type=int) if len(elements) > 11 else 0
            return msgspec.msgpack.decode(elements[0], type=str), client_index
        except NOT_DECODABLE:
            return None


class UtilityCallDecoder:
    """Decodes UTILITY payloads, and finds out whom to tell when one cannot be decoded."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._decoder = MsgpackDecoder(UtilityCall, allow_pickle=allow_pickle)

    def decode(self, frames: Sequence[Buffer]) -> UtilityCall:
        """Decode a call. Raises :class:`DecodeError`."""
        call = self._decoder.decode(frames)
        if len(frames) > 1:
            fill_in_frames(call.args, frames)
        return call

    def sender(self, frames: Sequence[Buffer]) -> tuple[int, int] | None:
        """Recover ``(client_index, call_id)`` of a call that cannot be decoded; ``None``: hopeless."""
        try:
            elements = _ELEMENTS.decode(frames[0])
            return msgspec.msgpack.decode(elements[0], type=int), msgspec.msgpack.decode(elements[1], type=int)
        except NOT_DECODABLE:
            return None


class OutputsDecoder:
    """Decodes what engines send, containing damage to the request or call it concerns.

    Attributes:
        last_end: another object after each output that ends a request. Looking for those among all outputs takes
            a twelfth of a message; several threads may decode, so this is not a flag that one would reset.
        decode_sound: decodes the first frame of a message, of which nothing may be damaged, or raises what
            ``NOT_DECODABLE`` names; msgspec's own method, as one of ours in between costs.
    """

    def __init__(self, outputs_type: type[ReceivedOutputs] = ReceivedOutputs) -> None:
        self._type = outputs_type
        self._output_type = outputs_type.OUTPUT
        self._array_slots = outputs_type.OUTPUT.ARRAY_SLOTS
        # No hook for extensions: it would be called for every array of a step. Array bytes stay what they are until
        # they are read, and pickles stay bytes: no reader takes them.
        self.decode_sound = msgspec.msgpack.Decoder(outputs_type, dec_hook=self._finish_reason).decode
        self._output = msgspec.msgpack.Decoder(self._output_type, dec_hook=self._finish_reason)
        self.last_end: object = None

    def _finish_reason(self, _: type, value: object) -> FinishReason:
        self.last_end = object()
        if type(value) is int and (reason := _FINISH_REASONS.get(value)) is not None:
            return reason
        try:
            return msgspec.convert(value, FinishReason)
        except msgspec.ValidationError as exc:
            raise ValueError(str(exc)) from exc  # to which msgspec adds where it is

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreOutputs:
        """Decode a message of outputs.

        An output that is malformed becomes an ERROR output of its request, a malformed utility answer a failure of
        its call, if their ids can be read; what else is sound is delivered.

        Raises:
            DecodeError: nothing can be made of it.
        """
        try:
            message = self.decode_sound(frames[0])
        except NOT_DECODABLE as exc:
            message = self._salvage(frames[0] if frames else b"", exc)
        if message.timestamp == 0.0:
            message.timestamp = monotonic()
        if len(frames) > 1:
            self._fill_in_arrays(message, frames)
        return message

    def _fill_in_arrays(self, message: ReceivedOutputs, frames: Sequence[Buffer]) -> None:
        for output in message.outputs:
            for slot in self._array_slots:
                fill_in_frames(slot.__get__(output), frames)
        if message.utility_output is not None:
            fill_in_frames(message.utility_output.result, frames)

    def _salvage(self, payload: Buffer, cause: Exception) -> ReceivedOutputs:
        """Read a damaged message piece by piece. What has an owner is reported to it, the rest is left out."""
        message = self._type()
        pieces = _decoded_or(payload, list[msgspec.Raw], []) + [msgspec.Raw(b"\xc0")] * 6
        message.engine_index = _decoded_or(pieces[0], int, 0)
        for raw in _decoded_or(pieces[1], list[msgspec.Raw], []):
            if (output := self._output_or_error(raw)) is not None:
                message.outputs.append(output)
        message.utility_output = _utility_output_or_failure(pieces[4])
        message.finished_requests = _decoded_or(pieces[5], list[str] | None, None)
        if not message.outputs and message.utility_output is None and not message.finished_requests:
            raise DecodeError(f"not a valid {self._type.__name__}: {cause}") from cause
        logger.warning("engine_index=%d: damaged outputs, kept what could be read: %s", message.engine_index, cause)
        return message

    def _output_or_error(self, raw: msgspec.Raw) -> ReceivedOutput | None:
        try:
            return self._output.decode(raw)
        except NOT_DECODABLE as exc:
            request_id = _first_element(raw, str)
            if request_id is None:
                return None
            self.last_end = object()
            reason = f"{INTERNAL_PREFIX}its output cannot be decoded: {exc}"
            length, expected = array_length(memoryview(raw)), len(self._output_type.__struct_fields__)
            if length > LONGEST_COMMON_OUTPUT and length != expected:
                reason += f"; it has {length} elements, not {expected}: an engine of another version of vLLM"
            return self._output_type(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)


def _utility_output_or_failure(raw: msgspec.Raw) -> UtilityOutput | None:
    try:
        return msgspec.msgpack.decode(raw, type=UtilityOutput | None)
    except NOT_DECODABLE as exc:
        call_id = _first_element(raw, int)
        return None if call_id is None else UtilityOutput(call_id, f"its answer cannot be decoded: {exc}")


def _first_element(raw: Buffer | msgspec.Raw, element_type: type[T]) -> T | None:
    elements = _decoded_or(raw, list[msgspec.Raw], [])
    return _decoded_or(elements[0], element_type, None) if elements else None


def _decoded_or(raw: Buffer | msgspec.Raw, expected: Any, default: Any) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=expected)
    except NOT_DECODABLE:
        return default


@lru_cache(maxsize=64)
def dtype_on_wire(dtype: Any) -> str | None:
    """Return how a numpy dtype is written, ``None`` if arrays of it are not sent.

    Remembered: numpy writes the text anew each time, which takes as long as all the rest of a token's logprobs.
    """
    return None if dtype.kind in "OVMm" else dtype.str


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
