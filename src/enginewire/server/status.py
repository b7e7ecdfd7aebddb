"""Endpoints about the server itself: health, readiness, metrics, state, version, the page, and aborting requests."""

from __future__ import annotations

import time

from msgspec import Struct

from enginewire._version import __version__
from enginewire.server.body import decode_body
from enginewire.server.context import Context, Endpoint
from enginewire.server.errors import NotReadyError
from enginewire.server.http import Reply, Request, Response, json_response
from enginewire.server.metrics import ServerMetrics
from enginewire.server.playground import page
from enginewire.server.snapshot import StateSnapshot, snapshot


class Status(Struct):
    """How it is: ``ok``, or ``ready``."""

    status: str


class Version(Struct):
    """The version of enginewire."""

    version: str


class AbortRequest(Struct):
    """Which requests to end.

    Attributes:
        request_ids: ids of responses (``chatcmpl-…``, ``cmpl-…``), or the request ids behind those prefixes.
    """

    request_ids: list[str]


class AbortResponse(Struct):
    """The ids that were asked for. Whether they were still running is not told: they are not now."""

    request_ids: list[str]


async def get_health(context: Context, request: Request) -> Reply:
    """200 unless an engine is dead and stays so."""
    context.monitor.look()
    if (death := context.monitor.first_death()) is not None:
        raise death.exception()
    return json_response(Status("ok"))


async def get_ready(context: Context, request: Request) -> Reply:
    """200 if new work is welcome."""
    if (reason := context.monitor.why_not_ready()) is not None:
        raise NotReadyError(reason)
    return json_response(Status("ready"))


async def get_version(context: Context, request: Request) -> Reply:
    """The version."""
    return json_response(Version(__version__))


async def get_metrics(context: Context, request: Request) -> Reply:
    """Metrics for Prometheus."""
    state = await context.collect_state()
    body, content_type = ServerMetrics(state).render(request.headers.get("accept", ""))
    return Response(body, {"Content-Type": content_type})


async def get_state(context: Context, request: Request) -> Reply:
    """The state for people and the page."""
    return json_response(snapshot(await context.collect_state(), time.monotonic()))


async def get_page(context: Context, request: Request) -> Reply:
    """The page."""
    body, headers = page()
    return Response(body, headers)


async def abort_requests(context: Context, request: Request) -> Reply:
    """End requests early. Their clients get what there is, with finish reason ``abort``."""
    wanted = decode_body(AbortRequest, request)
    ids = [id for given in wanted.request_ids for id in (given, f"cmpl-{given}", f"chatcmpl-{given}")]
    await context.generation.abort(ids)
    return json_response(AbortResponse(wanted.request_ids))


ENDPOINTS = [
    Endpoint(
        "POST",
        "/abort_requests",
        abort_requests,
        "End requests early; their clients get what there is, with finish reason abort.",
        request=AbortRequest,
        response=AbortResponse,
    ),
    Endpoint(
        "GET",
        "/health",
        get_health,
        "200 unless an engine is dead and will not be restarted.",
        response=Status,
        is_public=True,
        is_quiet=True,
        errors=(503,),
    ),
    Endpoint(
        "GET",
        "/ready",
        get_ready,
        "200 if an engine takes new work, and none is paused or asleep.",
        response=Status,
        is_public=True,
        is_quiet=True,
        errors=(503,),
    ),
    Endpoint("GET", "/version", get_version, "The server's version.", response=Version, is_public=True),
    Endpoint(
        "GET",
        "/metrics",
        get_metrics,
        "Metrics in Prometheus' text format.",
        content_type="text/plain",
        is_public=True,
        is_quiet=True,
    ),
    Endpoint("GET", "/state", get_state, "What goes on now.", response=StateSnapshot, is_quiet=True),
    Endpoint(
        "GET", "/", get_page, "A page to try the model and watch the engines.", content_type="text/html", is_public=True
    ),
]
