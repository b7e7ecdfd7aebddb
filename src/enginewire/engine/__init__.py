"""The engine's end of the wire: what runs behind a client's sockets, or inside its process.

May import ``wire``, ``errors``, ``config`` and the executors; nothing of the clients. Start with ``executor`` (how an
engine plugs in), then ``scheduler`` and ``core`` (what an engine decides), ``proc`` (its process: sockets, threads,
signals), ``main`` (how that process starts) and ``worker`` (a second process for executors that hold the GIL).
"""
