"""A recorder of the wire: relays what frontends and engines say to each other, keeps it, and shows it in words.

Imports ``wire``, ``transport`` and ``errors``. only ``loop``, ``pair`` and ``relay`` have sockets. Start with
:class:`~enginewire.recorder.reading.Reader`, which makes a readable message of frames.
"""
