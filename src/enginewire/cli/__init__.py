"""The command ``enginewire``: one module per command.

May import everything. It alone sets up logging and signals, as a program and not as a library.
Start reading in ``main.py``; nothing is imported before it is needed, so that ``--help`` is fast.
"""
