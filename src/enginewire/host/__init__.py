"""Engine processes: started with a fresh interpreter, watched, and never left behind.

Imports ``engine.spec`` (what an engine process is told), ``config`` and ``errors``. Start with ``manager``.
"""
