"""``GET /v1/models``: what is served."""

from __future__ import annotations

import time
from typing import Final

from enginewire.server.context import Context, Endpoint
from enginewire.server.http import Reply, Request, json_response
from enginewire.server.openai.responses import ModelCard, ModelList

STARTED: Final = int(time.time())


async def list_models(context: Context, request: Request) -> Reply:
    """List the model under all its names."""
    return json_response(ModelList(data=[_card(context, name) for name in context.settings.served_model_names]))


async def get_model(context: Context, request: Request) -> Reply:
    """Describe one model."""
    context.check_model(request.tail)
    return json_response(_card(context, request.tail))


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=STARTED,
        root=context.settings.model_name,
        max_model_len=context.llm.config.max_model_len,
    )


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "List the models that are served.", response=ModelList),
    Endpoint("GET", "/v1/models/{model}", get_model, "Describe a model.", response=ModelCard, errors=(404,)),
]
