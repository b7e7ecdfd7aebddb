"""From text to tokens and back: ``LLM`` for scripts, ``AsyncLLM`` for servers.

Both hold an ``EngineCoreClient`` and nothing of an engine. What they share is pure: ``inputs`` makes requests of
prompts, ``processor`` makes outputs of what the engine sends. Imports: client, text, models, wire, config, errors.
Start at ``llm.py``.
"""
