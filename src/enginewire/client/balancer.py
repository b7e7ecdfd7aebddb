"""Load balancers: which of several engines gets a request.

A policy is a small object. Yours is a class in any module, named as ``load_balancer="my_module:Sticky"``::

    from enginewire.client.balancer import LoadBalancer

    class Sticky(LoadBalancer):
        def choose(self, request, engines):
            return engines[hash(request.external_req_id) % len(engines)]

:class:`Score` and :class:`InFlight` are vLLM 0.25's and 0.32's own policies. docs/data-parallel.md compares them all.
"""

from __future__ import annotations

import importlib
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, Final

from enginewire.client.prefix_index import PrefixIndex
from enginewire.errors import ConfigError
from enginewire.wire.messages import EngineCoreRequest

TOKENS_PER_REQUEST: Final = 512
"""How many cached tokens outweigh one request more in an engine's queue (``prefix``)."""


@dataclass(slots=True)
class EngineLoad:
    """What a client knows of an engine's load.

    Attributes:
        index: global rank.
        in_flight: this client's requests on it, exact.
        waiting, running: all clients' requests, as last reported.
        kv_cache_usage: 0 to 1, as last reported; vLLM 0.25 does not report it: 0.
        added: this client's requests since that report, so that a burst between two reports does not all go one way.
    """

    index: int
    in_flight: int = 0
    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    added: int = 0

    def add(self) -> None:
        """Count a request that is being sent to this engine."""
        self.in_flight += 1
        self.added += 1

    def finish(self) -> None:
        """Count a request that ended there, however it ended."""
        self.in_flight -= 1

    def report(self, waiting: int, running: int, kv_cache_usage: float = 0.0) -> None:
        """Take in what the engine or the coordinator reports."""
        self.waiting, self.running, self.kv_cache_usage = waiting, running, kv_cache_usage
        self.added = 0


class LoadBalancer(ABC):
    """Picks engines for requests. Called by one client, one call at a time.

    Args:
        client_count: how many frontends send to these engines.
        client_index: which of them this one is.
    """

    def __init__(self, *, client_count: int = 1, client_index: int = 0) -> None:
        self.client_count = client_count
        self.client_index = client_index

    def pick(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> int:
        """Return the index of the engine that gets a request. The caller counts it (:meth:`EngineLoad.add`).

        What belongs together for an engine's own sake stays together under every policy: the documents of a
        late-interaction query go where its embeddings are. Source: protocol J.5.

        Args:
            request: has no ``data_parallel_rank``; that would have been decided already.
            engines: those that take requests, at least one, in the order of their ranks.

        Raises:
            ConfigError: the policy returned something else than an engine.
        """
        if query_key := _late_interaction_key(request):
            return engines[zlib.crc32(query_key.encode()) % len(engines)].index
        chosen: object = engines[0] if len(engines) == 1 else self.choose(request, engines)
        if not isinstance(chosen, EngineLoad):
            raise ConfigError(
                f"load balancer {type(self).__name__} chose {chosen!r}, not one of the engines it was given"
            )
        return chosen.index

    @abstractmethod
    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        """Return one of ``engines``, of which there are at least two. This is the policy."""

    def removed(self, index: int) -> None:  # noqa: B027 - most policies remember nothing
        """Forget what an engine held: it died, was restarted, or emptied its prefix cache."""


class LeastLoaded(LoadBalancer):
    """The engine with the lowest :meth:`score`; where several have it, frontends begin at different ones and rotate."""

    def __init__(self, *, client_count: int = 1, client_index: int = 0) -> None:
        super().__init__(client_count=client_count, client_index=client_index)
        self._start: int | None = None

    def score(self, load: EngineLoad) -> float:
        """Weigh an engine's load, in requests or anything else that compares."""
        raise NotImplementedError

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return self.lowest(engines, self.score)

    def lowest(self, engines: Sequence[EngineLoad], score: Callable[[EngineLoad], float]) -> EngineLoad:
        """Return the first engine with the lowest score in a scan that starts one further every time."""
        count = len(engines)
        start = count * self.client_index // self.client_count if self._start is None else self._start % count
        self._start = start + 1
        return min([*engines[start:], *engines[:start]], key=score)


class Score(LeastLoaded):
    """``score``: vLLM 0.25's 4 · waiting + running, own additions counted as waiting. Source: protocol J.5."""

    def score(self, load: EngineLoad) -> float:
        return 4 * (load.waiting + self.client_count * load.added) + load.running


class InFlight(LeastLoaded):
    """``inflight``: vLLM 0.32's policy: own requests, exact, or what is reported if that is more. Source: protocol M.3.

    Queues of engines whose KV cache is filling up weigh more: who waits there waits for memory.
    """

    def score(self, load: EngineLoad) -> float:
        own, reported = self.client_count * load.in_flight, load.waiting + load.running
        score: float = own if own > reported else reported
        if load.waiting and load.kv_cache_usage > 0.5:
            score += 6 * load.waiting * (load.kv_cache_usage - 0.5)
        return score


class TwoChoices(InFlight):
    """``two-choices``: the better, by ``inflight``'s score, of two engines drawn at random.

    Looks at two engines however many there are, and frontends that all see the same stale report do not all run to
    the same engine.
    """

    def __init__(self, *, client_count: int = 1, client_index: int = 0, rng: random.Random | None = None) -> None:
        super().__init__(client_count=client_count, client_index=client_index)
        self._rng = rng or random.Random()

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return min(self._rng.sample(engines, 2), key=self.score)


class Prefix(InFlight):
    """``prefix``: where the prompt's prefix was computed before, unless that engine has too much to do.

    ``inflight``'s score less one request for every :data:`TOKENS_PER_REQUEST` tokens that need not be computed again:
    short prompts spread as they do without, long ones are worth a queue.
    """

    def __init__(
        self, *, client_count: int = 1, client_index: int = 0, tokens_per_request: int = TOKENS_PER_REQUEST
    ) -> None:
        super().__init__(client_count=client_count, client_index=client_index)
        self._tokens_per_request = tokens_per_request
        self._index = PrefixIndex()

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        prefixes = self._index.prefixes(request)
        cached = self._index.cached(prefixes)
        chosen = self.lowest(
            engines, lambda load: self.score(load) - cached.get(load.index, 0) / self._tokens_per_request
        )
        self._index.add(prefixes, chosen.index)
        return chosen

    def removed(self, index: int) -> None:
        self._index.forget(index)


BALANCERS: Final[Mapping[str, type[LoadBalancer]]] = MappingProxyType(
    {"inflight": InFlight, "score": Score, "two-choices": TwoChoices, "prefix": Prefix}
)
"""The policies that have a name."""


def make_balancer(name: str, client_count: int = 1, client_index: int = 0) -> LoadBalancer:
    """Make the load balancer of a client.

    Args:
        name: one of :data:`BALANCERS`, or ``module:Class`` for a subclass of :class:`LoadBalancer`.
        client_count: how many frontends send to these engines.
        client_index: which of them this one is.

    Raises:
        ConfigError: there is none of this name (the message lists those there are), or it is no load balancer.
    """
    found: Any = _imported(name) if ":" in name else BALANCERS.get(name)
    if found is None:
        known = ", ".join(BALANCERS)
        raise ConfigError(f"unknown load balancer {name!r}; known: {known}, or name one as 'module:Class'")
    if not (isinstance(found, type) and issubclass(found, LoadBalancer)):
        raise ConfigError(f"load balancer {name!r} is {found!r}, not a subclass of {__name__}.LoadBalancer")
    return found(client_count=client_count, client_index=client_index)


def _imported(reference: str) -> object:
    module_name, _, qualname = reference.partition(":")
    try:
        return reduce(getattr, qualname.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"load balancer {reference!r} cannot be imported: {exc}") from exc


def _late_interaction_key(request: EngineCoreRequest) -> str | None:
    pooling = request.pooling_params
    late = pooling and pooling.late_interaction_params
    return late.query_key if late else None
