"""Endpoints that stop, change and look into the engine. They exist with ``--admin`` only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from enginewire.config import MOST_ENGINES
from enginewire.errors import (
    ConfigError,
    EngineClientError,
    EngineStartupError,
    InvalidRequestError,
    UtilityCallError,
    UtilityTimeoutError,
)
from enginewire.server.body import decode_body
from enginewire.server.context import Context, Endpoint, Parameter
from enginewire.server.errors import HTTPError
from enginewire.server.http import Reply, Request, json_response


class Done(Struct):
    """It is done."""

    status: Literal["ok"] = "ok"


class IsSleeping(Struct):
    """Whether the engine sleeps or is paused."""

    is_sleeping: bool


class IsPaused(Struct):
    """Whether the engine is paused."""

    is_paused: bool


class ResetResponse(Struct):
    """Whether the cache is empty now; running requests may hold parts of it."""

    success: bool


class CollectiveRPCRequest(Struct, kw_only=True):
    """Which method of the workers to call, with what. ``timeout`` is seconds."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CollectiveRPCResponse(Struct):
    """One result per worker."""

    results: list[Any]


class ScaleRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """How many engines there are to be; the field names are vLLM's.

    Attributes:
        new_data_parallel_size: from 1 to 65,536.
        drain_timeout: seconds that requests may go on at engines that are taken out; default: ``--drain-timeout``.
    """

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=MOST_ENGINES)]
    drain_timeout: Annotated[float, Meta(ge=0)] | None = None


class ScaleResponse(Struct):
    """What was done, in vLLM's words."""

    message: str


class IsScaling(Struct):
    """Whether the number of engines is being changed."""

    is_scaling_elastic_ep: bool


PauseMode = Literal["abort", "wait", "keep"]

MODE = Parameter(name="mode", type=PauseMode, summary="What happens to running requests; default: abort.")


async def sleep(context: Context, request: Request) -> Reply:
    """Pause the engine and have it give up memory."""
    level = _query(request, "level", int, 1)
    mode = _query(request, "mode", PauseMode, "abort")
    offered = (0, *context.llm.config.capabilities.sleep_levels)
    if level not in offered:
        raise InvalidRequestError(
            f"this engine does not sleep at level {level}; it offers {', '.join(map(str, offered))}", parameter="level"
        )
    await context.llm.sleep(level, mode)
    context.monitor.sleeping(level > 0)
    await context.monitor.refresh()
    return json_response(Done())


async def wake_up(context: Context, request: Request) -> Reply:
    """Undo sleep, or parts of it."""
    tags = [tag for tag in request.query.get("tags", "").split(",") if tag]
    if unknown := sorted(set(tags) - {"weights", "kv_cache", "scheduling"}):
        raise InvalidRequestError(
            f"unknown tag {', '.join(unknown)}; known: weights, kv_cache, scheduling", parameter="tags"
        )
    await context.llm.wake_up(tags or None)
    await context.monitor.refresh()
    return json_response(Done())


async def is_sleeping(context: Context, request: Request) -> Reply:
    """Tell whether the engine sleeps."""
    return json_response(IsSleeping(await context.llm.is_sleeping()))


async def pause(context: Context, request: Request) -> Reply:
    """Stop generating."""
    mode = _query(request, "mode", PauseMode, "abort")
    clear_cache = _query(request, "clear_cache", bool, True)
    await context.llm.pause_generation(mode, clear_cache)
    await context.monitor.refresh()
    return json_response(Done())


async def resume(context: Context, request: Request) -> Reply:
    """Undo pause."""
    await context.llm.resume_generation()
    await context.monitor.refresh()
    return json_response(Done())


async def is_paused(context: Context, request: Request) -> Reply:
    """Tell whether the engine is paused."""
    return json_response(IsPaused(await context.llm.is_paused()))


async def reset_prefix_cache(context: Context, request: Request) -> Reply:
    """Forget cached prompt prefixes."""
    reset_running = _query(request, "reset_running_requests", bool, False)
    return json_response(ResetResponse(await context.llm.reset_prefix_cache(reset_running)))


async def collective_rpc(context: Context, request: Request) -> Reply:
    """Call a method of every worker."""
    call = decode_body(CollectiveRPCRequest, request)
    try:
        results = await context.llm.collective_rpc(call.method, call.timeout, call.args, call.kwargs)
    except UtilityTimeoutError:
        raise
    except UtilityCallError as exc:
        # What is called is the client's choice: the engine is fine. Clients would repeat the call after a 500.
        raise HTTPError(400, str(exc), param="method", code="engine_call_failed") from exc
    return json_response(CollectiveRPCResponse(results))


async def scale_elastic_ep(context: Context, request: Request) -> Reply:
    """Change the number of engines, and answer when that is done. A client that leaves calls it off."""
    wanted = decode_body(ScaleRequest, request)
    if (reason := _why_fixed(context)) is not None:
        raise HTTPError(400, f"the number of these engines cannot be changed: {reason}", code="cannot_scale")
    if context.llm.is_scaling:
        raise HTTPError(
            409,
            "the number of engines is being changed already; /is_scaling_elastic_ep tells when that is over",
            code="scaling",
        )
    try:
        await context.llm.scale_elastic_ep(wanted.new_data_parallel_size, wanted.drain_timeout)
    except ConfigError as exc:
        raise HTTPError(400, str(exc), param="new_data_parallel_size") from exc
    except NotImplementedError as exc:
        raise HTTPError(400, str(exc), code="cannot_scale") from exc
    except EngineStartupError as exc:  # not the tail of its log: that may hold anything
        what, *_ = str(exc).splitlines()
        raise HTTPError(500, f"no engine was added: {what}", code="scaling_failed") from exc
    except EngineClientError as exc:
        if type(exc) is not EngineClientError:
            raise  # the engines are dead, or the client is closed: as everywhere
        raise HTTPError(400, str(exc), code="cannot_scale") from exc
    finally:
        context.fit_admission()
        context.monitor.look()
    return json_response(ScaleResponse(f"Scaled to {wanted.new_data_parallel_size} data parallel engines"))


def _why_fixed(context: Context) -> str | None:
    """Return why the number of engines cannot be changed here, as far as the server knows; else the client says it."""
    config = context.llm.config
    if context.settings.api_server_count > 1:
        return "several server processes share them (--api-server-count)"
    if config.data_parallel_external_lb or config.data_parallel_hybrid_lb:
        return "somebody else spreads the load over several servers; start another server with engines of its own"
    return None


async def is_scaling_elastic_ep(context: Context, request: Request) -> Reply:
    """Tell whether the number of engines is being changed."""
    return json_response(IsScaling(context.llm.is_scaling))


def _query(request: Request, name: str, kind: Any, default: Any) -> Any:
    """Read a parameter of the URL: ``?level=1&mode=wait``."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"{name}: {exc}", parameter=name) from exc


ENDPOINTS = [
    Endpoint(
        "POST",
        "/sleep",
        sleep,
        "Pause the engine and have it give up memory.",
        response=Done,
        parameters=(
            Parameter(name="level", type=int, summary="0: only pause; 1, 2: give up memory; default: 1"),
            MODE,
        ),
    ),
    Endpoint(
        "POST",
        "/wake_up",
        wake_up,
        "Undo sleep.",
        response=Done,
        parameters=(Parameter(name="tags", type=str, summary="weights,kv_cache,scheduling; default: all."),),
    ),
    Endpoint("GET", "/is_sleeping", is_sleeping, "Whether the engine sleeps or is paused.", response=IsSleeping),
    Endpoint(
        "POST",
        "/pause",
        pause,
        "Stop generating.",
        response=Done,
        parameters=(
            MODE,
            Parameter(name="clear_cache", type=bool, summary="Forget cached prefixes, too; default: true."),
        ),
    ),
    Endpoint("POST", "/resume", resume, "Undo pause.", response=Done),
    Endpoint("GET", "/is_paused", is_paused, "Whether the engine is paused.", response=IsPaused),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        "Forget cached prompt prefixes.",
        response=ResetResponse,
        parameters=(
            Parameter(name="reset_running_requests", type=bool, summary="Recompute running ones; default: false."),
        ),
    ),
    Endpoint(
        "POST",
        "/collective_rpc",
        collective_rpc,
        "Call a method of every worker.",
        request=CollectiveRPCRequest,
        response=CollectiveRPCResponse,
        errors=(504,),
    ),
    Endpoint(
        "POST",
        "/scale_elastic_ep",
        scale_elastic_ep,
        "Change the number of engines; answers when that is done.",
        request=ScaleRequest,
        response=ScaleResponse,
        errors=(409,),
    ),
    Endpoint(
        "POST",
        "/is_scaling_elastic_ep",
        is_scaling_elastic_ep,
        "Whether the number of engines is being changed.",
        response=IsScaling,
    ),
]
