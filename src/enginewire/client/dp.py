"""The asyncio clients of deployments with several engines, under the names that readers of vLLM look for.

What they do is :class:`~enginewire.client.mp.MPClient`'s: routing, losses and returns are the same for one engine and
for many, and for the sync face, too.
"""

from __future__ import annotations

from enginewire.client.async_mp import AsyncMPClient


class DPAsyncMPClient(AsyncMPClient):
    """One engine of several, each with a frontend of its own: somebody else spreads the load (external)."""


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Several engines, between which this client spreads its requests (internal and hybrid)."""
