"""The clients: one abstract ``EngineCoreClient`` and the faces that answer "sync or asyncio?", "which process?".

Imports ``engine`` (for the in-process client and what an engine process is told), ``host``, ``transport``, ``wire``.
Start with ``base`` (operations and factory), then ``mp`` (what both faces share), ``sync_mp`` and ``async_mp``;
``inbox`` sorts what arrives, ``utilities`` keeps calls in flight, ``startup`` shakes hands, ``resources`` cleans up.
"""
