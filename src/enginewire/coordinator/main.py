"""How a coordinator's process starts: ``python -m enginewire.coordinator.main --lifeline-fd N``.

N is one end of a socket pair, as with engines. The parent sends a ``CoordinatorSpec`` and gets a ``CoordinatorStarted``
(:mod:`enginewire.coordinator.server`); when its end closes, however that came about, this process ends.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from enginewire.coordinator.server import CoordinatorServer, CoordinatorSpec, CoordinatorStarted
from enginewire.engine.channel import Channel
from enginewire.engine.process_setup import send_stdout_to_stderr


def main() -> int:
    """Run a coordinator for the parent that started this process."""
    if len(sys.argv) != 3 or sys.argv[1] != "--lifeline-fd":
        sys.stderr.write("usage: python -m enginewire.coordinator.main --lifeline-fd N (started by enginewire)\n")
        return 2
    lifeline = Channel.adopt(int(sys.argv[2]))
    send_stdout_to_stderr()
    log_format = "%(asctime)s %(levelname)s coordinator %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=log_format)
    payload = lifeline.receive()
    if payload is None:
        return 1  # the parent was gone before it said anything
    try:
        server = CoordinatorServer(msgspec.msgpack.decode(payload, type=CoordinatorSpec))
    except OSError as exc:
        lifeline.send(msgspec.msgpack.encode(CoordinatorStarted(addresses=None, error=str(exc))))
        return 1
    lifeline.send(msgspec.msgpack.encode(CoordinatorStarted(addresses=server.addresses)))
    server.run(lifeline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
