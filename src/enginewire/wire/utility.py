"""Utility calls: a frontend calls a method of the engine by name. Source: protocol section F."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from msgspec.msgpack import Ext

from enginewire.errors import DecodeError
from enginewire.wire.extensions import PICKLE_CODES, PICKLE_REFUSED, unpickled

_MAY_HOLD_PICKLES: Final = frozenset((list, dict, Ext))
"""As msgpack has them, which makes no subclasses: ``isinstance`` with three takes as long as the rest of a result."""


class UtilityCall(Struct, array_like=True):
    """A call of one of the engine's methods."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class UtilityOutput(Struct, array_like=True):
    """Answer to a utility call. Source: protocol D.12.

    Attributes:
        call_id: of the call, 0 … 2^64 - 1; negative: a notification.
        failure_message: set if it failed.
        result: ``[typeinfo, value]``; typeinfo is nil unless pickle is switched on.
    """

    call_id: int
    failure_message: str | None = None
    result: Any = None


class ReconfigureDistributedRequest(Struct, kw_only=True):
    """Elastic scaling: -1 keeps the current rank, -2 shuts the rank down. Source: protocol D.14."""

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int
    new_data_parallel_master_port_list: list[int]
    coord_store_port: int


def utility_output(call_id: int, value: object = None, *, failure_message: str | None = None) -> UtilityOutput:
    """Make the answer to a utility call: a value, or why there is none."""
    if failure_message is not None:
        return UtilityOutput(call_id, failure_message)
    return UtilityOutput(call_id, None, [None, value])


def utility_result(output: UtilityOutput, *, allow_pickle: bool = False) -> Any:
    """Return the value that a successful utility call came back with.

    Arrays in it stay ``[dtype, shape, data]``: a result has no schema.

    Raises:
        DecodeError: it is no ``[typeinfo, value]`` pair; or it states Python types or holds a pickle, as a peer with
            pickle switched on sends, and ``allow_pickle`` is off.
    """
    result = output.result
    if result is None:
        return None
    if not isinstance(result, list) or len(result) != 2:
        raise DecodeError(f"a utility result must be [typeinfo, value], got {type(result).__name__}")
    typeinfo, value = result
    if typeinfo is not None and not allow_pickle:
        raise DecodeError(PICKLE_REFUSED)
    return _without_pickles(value, allow_pickle=allow_pickle) if type(value) in _MAY_HOLD_PICKLES else value


def _without_pickles(value: Any, *, allow_pickle: bool) -> Any:
    """Unpickle or refuse the pickles in ``value``, in place where they sit in a list or map."""
    root = [value]
    pending: list[Any] = [root]  # not recursive: a peer chooses how deep it nests
    while pending:
        container = pending.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, (list, dict)):
                pending.append(item)
            elif isinstance(item, Ext) and item.code in PICKLE_CODES:
                container[key] = unpickled(bytes(item.data), allow_pickle=allow_pickle)
    return root[0]
