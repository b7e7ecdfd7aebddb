"""The coordinator of a deployment with several engines: who has how much to do, and waves of lock-step engines.

Imports ``host``, ``engine``, ``transport`` and what lies below; clients start it. Start with :class:`Coordinator`, which
decides; ``run`` has the sockets, and :class:`DPCoordinator` is what a client holds.
"""
