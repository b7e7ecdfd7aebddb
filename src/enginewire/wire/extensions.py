"""Extension codes, and the switch that guards pickle. Source: protocol E.6."""

from __future__ import annotations

from typing import Any, Final

from enginewire.errors import DecodeError

PICKLE: Final = 1
CLOUDPICKLE: Final = 2
RAW_VIEW: Final = 3
"""Inline bytes of an array."""

PICKLE_CODES: Final = (PICKLE, CLOUDPICKLE)

PICKLE_REFUSED: Final = (
    "it holds Python objects, as a peer with VLLM_ALLOW_INSECURE_SERIALIZATION=1 sends; switch that off there, or "
    "allow pickle here if whoever reaches this socket may run code"
)


def unpickled(data: bytes | bytearray | memoryview, *, allow_pickle: bool) -> Any:
    """Unpickle an extension's bytes if that is allowed.

    Raises:
        DecodeError: it is not, or the bytes are no pickle that can be loaded here.
    """
    if not allow_pickle:
        raise DecodeError(PICKLE_REFUSED)
    import pickle  # as good as nobody's

    try:
        return pickle.loads(data)
    except Exception as exc:  # unpickling runs code and may raise anything
        raise DecodeError(f"cannot unpickle a value: {exc}") from exc
