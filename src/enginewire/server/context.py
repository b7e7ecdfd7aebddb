"""What every endpoint can reach, and what an endpoint is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from enginewire.frontend.async_llm import AsyncLLM
from enginewire.server.admission import Admission
from enginewire.server.errors import NotFoundError
from enginewire.server.generation import Generation
from enginewire.server.health import EngineMonitor
from enginewire.server.http import Reply, Request
from enginewire.server.metrics import process_numbers
from enginewire.server.settings import ServerSettings
from enginewire.server.state import ServerState


class Siblings(Protocol):
    """The server's other processes over the same engines, where there are any."""

    async def collect(self, own: ServerState) -> ServerState:
        """Return the sum of this process's state and theirs."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """A server's parts."""

    llm: AsyncLLM
    settings: ServerSettings
    admission: Admission
    state: ServerState
    monitor: EngineMonitor
    generation: Generation
    siblings: Siblings | None = None

    @classmethod
    def create(cls, llm: AsyncLLM, settings: ServerSettings, siblings: Siblings | None = None) -> Context:
        """Make the parts of a server for ``llm``."""
        admission = Admission(_places(llm, settings))
        state = ServerState.of(llm.config, settings.model_name)
        monitor = EngineMonitor(llm, state, settings.stall_timeout_s)
        generation = Generation(llm, admission, monitor)
        return cls(llm, settings, admission, state, monitor, generation, siblings)

    def own_state(self) -> ServerState:
        """Return what this process knows, as of now."""
        self.monitor.look()
        self.state.num_in_flight = self.admission.num_in_flight
        self.state.max_model_len = self.llm.config.max_model_len
        self.state.process = process_numbers()
        return self.state

    async def collect_state(self) -> ServerState:
        """Return what all of the server's processes know, to be read at once."""
        return self.own_state() if self.siblings is None else await self.siblings.collect(self.own_state())

    def fit_admission(self) -> None:
        """Take in as many completions as there is room for now that the number of engines has changed."""
        self.admission.resize(_places(self.llm, self.settings))

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


def _places(llm: AsyncLLM, settings: ServerSettings) -> int:
    """Return how many completions run on the engines and wait; each server process has its share."""
    limit = llm.config.max_num_seqs * len(llm.config.managed_ranks) + settings.max_queue
    return -(-limit // settings.api_server_count)


Handler: TypeAlias = Callable[[Context, Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter in a URL's query or in a header, for the server's own description."""

    name: str
    type: Any  # a type, or a Literal
    summary: str
    place: Literal["query", "header"] = "query"


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
        parameters: in the URL's query, or headers.
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
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = field(default=())
