"""Where two of vLLM's API servers sent their requests, and where our policies of the same version would have."""

from __future__ import annotations

from typing import Any

import pytest
from golden import NEW, OLD, load

from enginewire.client.balancer import EngineLoad, LoadBalancer, make_balancer
from enginewire.wire.messages import EngineCoreRequest

CLIENT_COUNT = 2


def recorded(version: str) -> dict[int, list[tuple[EngineCoreRequest, int]]]:
    """Return what each client sent, in its order, with the engine it chose."""
    adds = [vector for vector in load("frontend-dp2", versions=[version]) if vector.name.endswith(".add")]
    sent: dict[int, list[tuple[EngineCoreRequest, int]]] = {0: [], 1: []}
    for vector in sorted(adds, key=lambda vector: vector.value[1]):  # the last token numbers the requests
        value: Any = vector.value
        request = EngineCoreRequest(value[0], value[1], client_index=value[11])
        sent[request.client_index].append((request, int(vector.group.removeprefix("engine rank "))))
    return sent


@pytest.mark.parametrize(("version", "policy"), [(OLD, "score"), (NEW, "inflight")])
def test_requests_go_where_the_reference_sent_them(version: str, policy: str) -> None:
    """C-51, protocol J.5 and M.3."""
    requests = recorded(version)
    assert sum(map(len, requests.values())) == 6
    for client_index, sent in requests.items():
        balancer: LoadBalancer = make_balancer(policy, client_count=CLIENT_COUNT, client_index=client_index)
        loads = [EngineLoad(0), EngineLoad(1)]
        for request, engine in sent:
            assert balancer.pick(request, loads) == engine
            loads[engine].add()
