"""The one list of operations: twins, parity with the engine core, and the factory."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

from enginewire import EngineConfig, EngineCoreClient
from enginewire.client import async_mp, dp, sync_mp
from enginewire.client.async_mp import AsyncMPClient
from enginewire.client.inproc import InprocClient
from enginewire.client.mp import MPClient
from enginewire.client.sync_mp import SyncMPClient
from enginewire.engine.core import EngineCore
from enginewire.engine.utilities import UTILITIES
from enginewire.errors import ConfigError

C_03 = {
    "add_request", "abort_requests", "get_output", "get_supported_tasks", "profile", "reset_mm_cache",
    "reset_prefix_cache", "reset_encoder_cache", "sleep", "wake_up", "is_sleeping", "pause_scheduler",
    "resume_scheduler", "is_scheduler_paused", "execute_dummy_batch", "add_lora", "remove_lora", "list_loras",
    "pin_lora", "save_sharded_state", "collective_rpc",
}  # fmt: skip
"""Every operation with a blocking and an awaited form."""

WITHOUT_TWIN = {"engine_index_of", "dp_engines_running", "engine_statuses", "scale_elastic_ep", "shutdown"}

PRIMITIVES = {"add_request", "abort_requests", "get_output", "call_utility"}
"""Those that a face implements; all others are utility calls."""

LOOSER = {"get_supported_tasks": (tuple[str, ...], list[str]), "wake_up": (type(None), bool)}
"""Where the client gives another type than the core: a tuple cannot be changed by mistake; who wakes an engine up can
ask ``is_sleeping``."""


def public(owner: type) -> dict[str, Any]:
    """Return the public functions that a class has, inherited ones too."""
    return {name: it for name, it in inspect.getmembers(owner, callable) if not name.startswith("_")}


def shape(function: Any, *, leave_out: frozenset[str] = frozenset()) -> tuple[list[Any], Any]:
    """Return a function's parameters (name, kind, default, type) and what it returns."""
    hints = typing.get_type_hints(function)
    parameters = [
        (parameter.name, parameter.kind, parameter.default, hints.get(parameter.name))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in leave_out
    ]
    return parameters, hints.get("return")


def test_every_operation_is_named_once_with_its_twin() -> None:
    """C-03."""
    names = set(public(EngineCoreClient))
    assert names >= C_03
    assert {f"{name}_async" for name in C_03 | {"call_utility"}} <= names
    assert names >= WITHOUT_TWIN
    known = C_03 | {"call_utility"} | WITHOUT_TWIN | {"make_client", "make_async_mp_client"}
    assert {name.removesuffix("_async") for name in names} == known


@pytest.mark.parametrize("name", sorted(C_03 | {"call_utility"}))
def test_twins_take_and_return_the_same(name: str) -> None:
    """C-03."""
    twin = getattr(EngineCoreClient, f"{name}_async")
    assert inspect.iscoroutinefunction(twin)
    assert not inspect.iscoroutinefunction(getattr(EngineCoreClient, name))
    # An awaited wait is bounded by asyncio.timeout; a blocking one needs a parameter.
    left_out = frozenset({"timeout"}) if name == "get_output" else frozenset()
    assert shape(getattr(EngineCoreClient, name), leave_out=left_out) == shape(twin)


@pytest.mark.parametrize("name", sorted(C_03 - PRIMITIVES))
def test_the_core_offers_what_the_client_calls(name: str) -> None:
    """C-03, C-11: names, parameters, return types."""
    assert name in UTILITIES
    ours, gives = shape(getattr(EngineCoreClient, name))
    theirs, returns = shape(getattr(EngineCore, name))
    assert ours == theirs[: len(ours)]
    assert len(ours) == len(theirs) or name == "profile"  # vLLM 0.32's frontends send more
    if name in LOOSER:
        assert (gives, returns) == LOOSER[name]
    else:  # a deferred result is a future of nothing
        assert returns == gives or type(None) in typing.get_args(returns)


@pytest.mark.parametrize("face", [InprocClient, SyncMPClient, AsyncMPClient, dp.DPLBAsyncMPClient])
def test_a_face_changes_no_signature_and_adds_no_operation(face: type[EngineCoreClient]) -> None:
    """C-03: rule 2 of the style guide, written once."""
    for name, function in public(face).items():
        if name in ("ensure_alive", "start_engine_core_monitor"):
            assert issubclass(face, MPClient)
        else:
            assert shape(function) == shape(getattr(EngineCoreClient, name)), name


def test_in_one_process_asyncio_is_refused_with_the_reason() -> None:
    """C-01."""
    with pytest.raises(NotImplementedError, match="asyncio needs the engine in another process"):
        EngineCoreClient.make_client(False, True, EngineConfig.create("echo"))


@pytest.mark.parametrize(("asyncio_mode", "face"), [(False, "SyncMPClient"), (True, "AsyncMPClient")])
def test_the_factory_passes_on_what_it_was_given(
    asyncio_mode: bool, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-01, C-02."""
    calls: list[tuple[Any, ...]] = []
    module = async_mp if asyncio_mode else sync_mp
    monkeypatch.setattr(module, face, lambda *args, **kwargs: calls.append((args, kwargs)))
    config = EngineConfig.create("echo")
    EngineCoreClient.make_client(True, asyncio_mode, config, "module:Class", False)
    ((args, kwargs),) = calls
    assert args == (config, "module:Class", False)
    if asyncio_mode:
        assert kwargs == {"client_addresses": None, "client_count": 1, "client_index": 0}
        EngineCoreClient.make_async_mp_client(config, client_addresses={"a": "b"}, client_count=3, client_index=2)
        assert calls[1][1] == {"client_addresses": {"a": "b"}, "client_count": 3, "client_index": 2}


@pytest.mark.parametrize(
    ("settings", "face"),
    [
        ({"data_parallel_size": 2}, "DPLBAsyncMPClient"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "DPLBAsyncMPClient"),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True, "data_parallel_rank": 1}, "DPAsyncMPClient"),
    ],
)
def test_the_factory_picks_the_client_for_several_engines(
    settings: dict[str, Any], face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-02."""
    calls: list[str] = []
    for name in ("DPAsyncMPClient", "DPLBAsyncMPClient"):
        monkeypatch.setattr(dp, name, lambda *args, name=name, **kwargs: calls.append(name))
    EngineCoreClient.make_async_mp_client(EngineConfig.create("echo", **settings))
    assert calls == [face]


@pytest.mark.parametrize("settings", [{"data_parallel_size": 2}, {"data_parallel_size_local": 0}])
def test_an_engine_in_this_process_is_one(settings: dict[str, int]) -> None:
    """Several engines, or engines elsewhere, need another process."""
    with pytest.raises(ConfigError, match=r"one engine, started here.*multiprocess_mode=True"):
        EngineCoreClient.make_client(False, False, EngineConfig.create("echo", **settings))
