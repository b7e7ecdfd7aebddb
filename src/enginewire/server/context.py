"""What every endpoint can reach, and what an endpoint is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server.admission import Admission
from enginewire.server.errors import NotFoundError
from enginewire.server.generation import Generation
from enginewire.server.health import EngineMonitor
from enginewire.server.http import Reply, Request
from enginewire.server.metrics import ServerMetrics
from enginewire.server.settings import ServerSettings
from enginewire.server.state import ServerState


@dataclass(frozen=True, slots=True)
class Context:
    """A server's parts."""

    llm: AsyncLLM
    settings: ServerSettings
    admission: Admission
    state: ServerState
    metrics: ServerMetrics
    monitor: EngineMonitor
    generation: Generation

    @classmethod
    def create(cls, llm: AsyncLLM, settings: ServerSettings) -> Context:
        """Make the parts of a server for ``llm``."""
        admission = Admission(llm.config.max_num_seqs + settings.max_queue)
        state = ServerState(llm.config, settings.model_name, num_in_flight=lambda: admission.num_in_flight)
        monitor = EngineMonitor(llm, state, admission, settings.stall_timeout_s)
        generation = Generation(llm, admission, monitor)
        return cls(llm, settings, admission, state, ServerMetrics(state), monitor, generation)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model; who names none gets what there is.

        Raises:
            NotFoundError: it is not served here.
        """
        if name is not None and name not in self.settings.served_model_names:
            served = ", ".join(self.settings.served_model_names)
            raise NotFoundError(
                f"the model {name!r} does not exist here; served: {served}", param="model", code="model_not_found"
            )


Handler: TypeAlias = Callable[[Context, Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """A parameter in a URL's query, for the server's own description."""

    name: str
    type: Any  # a type, or a Literal
    summary: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path, what answers there, and what the server's own description says of it.

    Attributes:
        path: as OpenAPI writes it. It may end with one parameter, ``/v1/models/{model}``, which takes slashes too.
        summary: one sentence.
        request: the JSON body; ``None``: no body.
        response: the JSON body of a success; ``None``: not JSON, ``content_type`` says what.
        content_type: of a success that is not JSON, or that is an alternative to JSON (streams).
        is_public: needs no API key.
        is_quiet: asked for again and again, so that the access log has it at DEBUG only.
        query: parameters of the URL.
        errors: statuses other than success, besides those that every endpoint may give.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type | None = None
    response: type | None = None
    content_type: str | None = None
    is_public: bool = False
    is_quiet: bool = False
    query: tuple[QueryParameter, ...] = ()
    errors: tuple[int, ...] = field(default=())
