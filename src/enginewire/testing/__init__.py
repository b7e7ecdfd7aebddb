"""For tests of what talks to engines: a fake engine without a model, and waiting under a deadline.

May import anything below the frontends. Start with :class:`MockEngine`.
"""

from enginewire.testing.mock_engine import MockEngine, Received, mock_ready, mock_ready_0_32
from enginewire.testing.ports import free_tcp_port
from enginewire.testing.waiting import wait_until

__all__ = ["MockEngine", "Received", "free_tcp_port", "mock_ready", "mock_ready_0_32", "wait_until"]
