"""Bytes to messages and back: the engine-core protocol of vLLM 0.25.

Imports nothing of ours but ``errors``; knows no socket, thread, loop or clock policy.
Start with ``messages`` (the structs), then ``codec`` (frames), ``frames`` (the multipart layout),
``handshake`` (start-up), ``capabilities`` (what an engine says it can do).
"""
