"""ZeroMQ and nothing else: addresses (``endpoints``) and socket options (``sockets``).

Imports ``errors`` and ``config``. The only package that makes a socket.
"""
