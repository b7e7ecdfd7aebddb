"""The server's own OpenAPI document, made of its endpoints and the structs that they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from enginewire._version import __version__
from enginewire.server.context import Context, Endpoint
from enginewire.server.errors import ErrorResponse
from enginewire.server.http import JSON, Reply, Request, json_response

REF: Final = "#/components/schemas/{name}"
SECURITY: Final = "apiKey"


def openapi_endpoint(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Make the endpoint that describes the others and itself."""

    async def get_openapi(context: Context, request: Request) -> Reply:
        return json_response(openapi([*endpoints, made], has_keys=bool(context.settings.api_keys)))

    made = Endpoint(
        "GET", "/openapi.json", get_openapi, "This document.", response=dict[str, Any], is_public=True, is_quiet=True
    )
    return made


def openapi(endpoints: Sequence[Endpoint], *, has_keys: bool = False) -> dict[str, Any]:
    """Return the document.

    Args:
        endpoints: what is served.
        has_keys: whether API keys are asked for.
    """
    types = [ErrorResponse, *(kind for e in endpoints for kind in (e.request, e.response) if kind is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, has_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "enginewire",
            "version": __version__,
            "description": "An OpenAI-compatible server with vLLM's extensions.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {SECURITY: {"type": "http", "scheme": "bearer"}}
    return document


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any], has_keys: bool) -> dict[str, Any]:
    success: dict[str, Any] = {}
    if endpoint.response is not None:
        success[JSON] = {"schema": schema_of[endpoint.response]}
    if endpoint.content_type is not None:
        success[endpoint.content_type.partition(";")[0]] = {"schema": {"type": "string"}}
    statuses = {*endpoint.errors}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "responses": {"200": {"description": "Success.", "content": success}},
    }
    parameters = _parameters(endpoint)
    if parameters:
        operation["parameters"] = parameters
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[endpoint.request]}}}
        statuses |= {400, 413, 415}
    if endpoint.parameters:
        statuses.add(400)
    if has_keys and not endpoint.is_public:
        operation["security"] = [{SECURITY: []}]
        statuses.add(401)
    error = {"content": {JSON: {"schema": schema_of[ErrorResponse]}}}
    for status in sorted(statuses):
        operation["responses"][str(status)] = {"description": f"{HTTPStatus(status).phrase}.", **error}
    operation["responses"]["default"] = {"description": "Any other error.", **error}
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": given.name, "in": given.place, "description": given.summary, "schema": msgspec.json.schema(given.type)}
        for given in endpoint.parameters
    ]
    _, has_parameter, name = endpoint.path.partition("{")
    if has_parameter:
        parameters.append({"name": name.rstrip("}"), "in": "path", "required": True, "schema": {"type": "string"}})
    return parameters
