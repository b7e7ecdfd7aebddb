"""The coordinator of several engines: who has how much to do, and the waves of engines that run in lock-step.

Imports ``host`` and what lies below it; clients start a :class:`DPCoordinator`. Read ``core`` first, which decides and
has no socket; ``server`` has the sockets, ``process`` runs it.
"""

from enginewire.coordinator.process import DPCoordinator
from enginewire.coordinator.server import CoordinatorAddresses

__all__ = ["CoordinatorAddresses", "DPCoordinator"]
