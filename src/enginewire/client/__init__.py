"""The clients: one abstract ``EngineCoreClient`` and the faces that answer "sync or asyncio?", "which process?".

Imports ``engine`` (for the in-process client and what an engine process is told), ``host``, ``transport``, ``wire``.
Start with ``base`` (what a client is; the factory), then ``mp`` (what both faces share), ``sync_mp`` and ``async_mp``.
``launch`` brings engines up; ``inbox`` sorts what arrives, ``outbox`` sends, ``utilities`` keeps calls in flight;
``lookout`` finds out who is lost, ``returns`` who is back; ``resources`` cleans up.
"""
