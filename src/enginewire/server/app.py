"""The ASGI application: routes a request to its endpoint, and answers whatever happens there.

A request's way: find the endpoint, check the API key, read the body, run the handler and send its reply, both cancelled
at once when the client leaves. Exceptions become responses in one place. Every request ends in the access log and in
the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

from enginewire.errors import EngineClientError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server import admin, status, tokenization
from enginewire.server.access_log import current_request_id, log_access
from enginewire.server.context import Context, Endpoint, Siblings
from enginewire.server.errors import (
    CLIENT_CLOSED_REQUEST,
    ClientGoneError,
    MethodNotAllowedError,
    NotFoundError,
    UnauthorizedError,
    UnsupportedMediaTypeError,
    http_error,
)
from enginewire.server.http import (
    CONNECTION,
    JSON,
    Receive,
    Request,
    ResponseSender,
    Scope,
    Send,
    client_present,
    event,
    json_response,
    read_body,
)
from enginewire.server.openai import chat, completions, models
from enginewire.server.openapi import openapi_endpoint
from enginewire.server.settings import ServerSettings

logger = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
"""What we take from a client as ``X-Request-Id``: it goes into headers and logs."""

UNKNOWN_PATH: Final = "unknown"
"""The endpoint of paths that do not exist, in metrics: a path is the client's choice."""


def build_app(llm: AsyncLLM, settings: ServerSettings, siblings: Siblings | None = None) -> App:
    """Make the server for an ``AsyncLLM``, which stays the caller's to shut down.

    Args:
        siblings: the server's other processes over the same engines.
    """
    endpoints = [*completions.ENDPOINTS, *chat.ENDPOINTS, *models.ENDPOINTS, *tokenization.ENDPOINTS]
    endpoints += status.ENDPOINTS
    if settings.admin:
        endpoints += admin.ENDPOINTS
    return App(Context.create(llm, settings, siblings), endpoints)


class App:
    """The server as an ASGI application. Any ASGI server can run it; ``run.py`` uses uvicorn.

    Attributes:
        context: the parts that endpoints use.
        endpoints: what is served.
    """

    def __init__(self, context: Context, endpoints: Iterable[Endpoint]) -> None:
        self.context = context
        self.endpoints = [*endpoints]
        self.endpoints.append(openapi_endpoint(self.endpoints))
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._prefixes: dict[str, dict[str, Endpoint]] = {}
        for endpoint in self.endpoints:
            prefix, parameter, _ = endpoint.path.partition("{")
            table = self._prefixes if parameter else self._exact
            table.setdefault(prefix, {})[endpoint.method] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the server's start and stop."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise NotImplementedError(f"no {scope['type']} here")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Do what goes on beside requests: watch the engines. ASGI servers with a lifespan do this by themselves."""
        self.context.llm.listen()
        watcher = asyncio.create_task(self.context.monitor.watch(), name="enginewire-engine-watch")
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request = Request(scope, "")
        given = request.headers.get("x-request-id", "")
        request.id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        headers = {"X-Request-Id": request.id}
        if self.context.admission.is_closed:
            headers["Connection"] = "close"
        extension = scope.get("extensions", {}).get(CONNECTION, {})
        sender = ResponseSender(send, headers, extension.get("connection"))
        token = current_request_id.set(request.id)
        endpoint: Endpoint | None = None
        status_code: int | None = None
        try:
            endpoint = self._find(request)
            self._authorize(request, endpoint)
            await self._serve(endpoint, request, receive, sender)
            status_code = sender.status
        except ClientGoneError:
            status_code = CLIENT_CLOSED_REQUEST
            self.context.state.client_disconnected(UNKNOWN_PATH if endpoint is None else endpoint.path)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client is answered
            await self._answer_failure(exc, request, sender)
            status_code = sender.status
        finally:
            path = UNKNOWN_PATH if endpoint is None else endpoint.path
            self.context.state.response_sent(path, _method_label(request.method), status_code or CLIENT_CLOSED_REQUEST)
            is_quiet = endpoint is not None and endpoint.is_quiet
            log_access(request, status_code, time.monotonic() - started, is_quiet=is_quiet)
            current_request_id.reset(token)

    async def _serve(self, endpoint: Endpoint, request: Request, receive: Receive, sender: ResponseSender) -> None:
        request.body = await read_body(receive, request.headers, self.context.settings.max_body_bytes)
        if request.body:
            _check_content_type(request)
        async with client_present(receive, sender):
            reply = await endpoint.handler(self.context, request)
            await reply.send(sender)

    async def _answer_failure(self, exc: Exception, request: Request, sender: ResponseSender) -> None:
        error = http_error(exc)
        request.notes["error"] = error.body.error.code or type(exc).__name__
        if error.status == 500:
            trace = None if isinstance(exc, EngineClientError) else exc  # ours say everything in words
            logger.error("%s %s failed: %s", request.method, request.path, exc, exc_info=trace)
        if sender.status is None:
            await json_response(error.body, error.status, error.headers).send(sender)
        elif not sender.is_complete:  # the status is gone: the error is the stream's last event
            await sender.finish(event(error.body))

    def _find(self, request: Request) -> Endpoint:
        path = request.path
        methods = self._exact.get(path)
        if methods is None:
            for prefix, candidates in self._prefixes.items():
                if path.startswith(prefix) and len(path) > len(prefix):
                    methods, request.tail = candidates, path[len(prefix) :]
        if methods is None:
            raise NotFoundError(f"there is nothing at {path}; /openapi.json lists what there is", code="not_found")
        endpoint = methods.get(request.method)
        if endpoint is None and request.method == "HEAD":
            endpoint = methods.get("GET")  # the ASGI server leaves the body out
        if endpoint is None:
            raise MethodNotAllowedError(request.method, list(methods))
        return endpoint

    def _authorize(self, request: Request, endpoint: Endpoint) -> None:
        keys = self.context.settings.api_keys
        if not keys or endpoint.is_public:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        # All are compared, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(given, known.encode()) for known in keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthorizedError


def _check_content_type(request: Request) -> None:
    """Take JSON only. Web pages elsewhere cannot send that here without being asked, and everything else they can."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        raise UnsupportedMediaTypeError(given)


def _method_label(method: str) -> str:
    """Return a method's name for metrics: clients may make up any number of them."""
    return method if method in ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS") else "other"
