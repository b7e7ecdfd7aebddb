"""The OpenAI-compatible HTTP server on top of ``AsyncLLM``.

May import frontend and everything below it; knows the engine only through ``AsyncLLM``. Only ``errors.py`` knows which
exception is which HTTP status, only ``generation.py`` generates. Start reading in ``app.py``: a request's way from the
socket to a handler and back; ``run.py`` is the process around it.
"""
