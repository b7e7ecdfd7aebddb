"""Bytes to messages and back: the engine-core protocol of vLLM 0.25 and 0.32.

Imports nothing of ours but ``errors``; knows no socket, thread, loop or clock policy, and numpy only when arrays are
used. Start with ``messages`` (requests and outputs; with ``sampling``, ``stats``, ``utility``), then ``codec``
(frames; with ``arrays``, ``extensions``), ``frames`` (the multipart layout), ``handshake`` (start-up),
``capabilities`` (what an engine says it can do), ``profile`` (which version a peer speaks; ``v0_32`` is the second).
"""
