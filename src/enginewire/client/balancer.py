"""Load balancers: which of several engines gets a request.

A policy is a small object. Yours is a class in any module, named as ``load_balancer="my_module:Sticky"``::

    from enginewire.client.balancer import LoadBalancer

    class Sticky(LoadBalancer):
        def choose(self, request, engines):
            return engines[hash(request.external_req_id) % len(engines)]

:class:`Score` and :class:`InFlight` are vLLM 0.25's and 0.32's own policies. docs/data-parallel.md compares them all.
"""

from __future__ import annotations

import bisect
import importlib
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, Final

from enginewire.client.prefix_index import Prefixes, PrefixIndex
from enginewire.errors import ConfigError
from enginewire.wire.messages import EngineCoreRequest

TOKENS_PER_REQUEST: Final = 64
"""How many tokens that need not be computed again outweigh one request in an engine's queue (``prefix``). Fewer: longer
queues at popular engines; more: prompts are computed twice. Measured by benchmarks/balancer_sim.py."""

OVERLOAD: Final = 2.0
"""An engine with so many times the average load gets no request for the sake of its cache (``prefix``)."""


REMEMBERED_REQUESTS: Final = 64
"""Over about so many requests a client averages how much of its prompts it has seen before (``prefix``)."""


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
        return self.lowest(engines, [self.score(load) for load in engines])

    def lowest(self, engines: Sequence[EngineLoad], scores: Sequence[float]) -> EngineLoad:
        """Return the first engine with the lowest score, in a scan that starts one further every time."""
        count = len(engines)
        start = count * self.client_index // self.client_count if self._start is None else self._start % count
        self._start = start + 1
        return engines[min([*range(start, count), *range(start)], key=scores.__getitem__)]


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
    """``prefix``: where the beginning of the prompt was computed before, unless that engine has too much to do.

    An engine's score is ``inflight``'s, less one request for every :data:`TOKENS_PER_REQUEST` tokens that it need not
    compute again. Not so for engines with :data:`OVERLOAD` times the average load, nor, while there is less than one
    request for each engine, for any that has one. So short prompts, unknown ones, and a first burst of equal ones
    spread as they would without.

    Frontends do not tell each other what they sent where; they agree without. See :meth:`_expect`.
    """

    def __init__(self, *, client_count: int = 1, client_index: int = 0) -> None:
        super().__init__(client_count=client_count, client_index=client_index)
        self._index = PrefixIndex()
        self._known_share = 0.0

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        prefixes = self._index.prefixes(request)
        if not prefixes.keys:
            return super().choose(request, engines)
        saved: dict[int, float] = {**self._index.cached(prefixes)}
        if self.client_count > 1:
            self._expect(prefixes, saved, engines)
        scores = [self.score(load) for load in engines]
        if saved:
            mean = sum(scores) / len(scores)
            limit = OVERLOAD * mean if mean >= 1 else 1
            for position, load in enumerate(engines):
                if scores[position] < limit:
                    scores[position] -= saved.get(load.index, 0) / TOKENS_PER_REQUEST
        chosen = self.lowest(engines, scores)
        self._index.add(prefixes, chosen.index)
        return chosen

    def _expect(self, prefixes: Prefixes, saved: dict[int, float], engines: Sequence[EngineLoad]) -> None:
        """Add to ``saved`` what other frontends have probably sent, to the engine where each of them would expect it.

        That is the one engine that has the longest part of the prompt known here: a conversation goes on where it
        was. A part that several engines have, or none, says nothing (it is a system prompt that everybody uses);
        then the hash of what comes next points to an engine, the same one in every frontend. How much of the rest
        they have sent is taken to be what this one has seen of its own prompts: nothing, if none ever come again.
        """
        known = max(saved.values(), default=0)
        self._known_share += (known / prefixes.lengths[-1] - self._known_share) / REMEMBERED_REQUESTS
        position = bisect.bisect_right(prefixes.lengths, known)
        if position == len(prefixes.keys):
            return
        holders = [index for index, length in saved.items() if length == known]
        if len(holders) == 1:
            (home,) = holders
        else:
            rank = prefixes.keys[position] % (engines[-1].index + 1)
            home = engines[bisect.bisect_left(engines, rank, key=_index_of)].index
        saved[home] = known + (prefixes.lengths[-1] - known) * self._known_share

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


def _index_of(load: EngineLoad) -> int:
    return load.index


def _late_interaction_key(request: EngineCoreRequest) -> str | None:
    pooling = request.pooling_params
    late = pooling and pooling.late_interaction_params
    return late.query_key if late else None
