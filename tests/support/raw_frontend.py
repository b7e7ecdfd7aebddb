"""A frontend in a process of its own, to be killed or stopped: ``python raw_frontend.py INPUT OUTPUT TTL_S``.

It binds both addresses and then does what it is told on its standard input, one word a line: ``ready`` waits for the
engine, ``add`` sends a request ``a`` of 100,000 tokens, ``read`` waits for an output. It prints ``ok`` after each.
"""

from __future__ import annotations

import sys
import time

import msgspec
import zmq

from enginewire.transport.sockets import HEARTBEAT_S, bind_pull, bind_router, make_context

MAX_FRAME_BYTES = 1 << 20
IDENTITY = bytes(2)
ADD = b"\x00"
REQUEST = ["a", [1, 2], None, {"max_tokens": 100_000}, None, 0.0, None, None, None, None, None]


def main(input_address: str, output_address: str, ttl_s: float) -> None:
    context = make_context()
    heartbeat_s = (0.05, ttl_s) if ttl_s else HEARTBEAT_S
    router, _ = bind_router(context, input_address, MAX_FRAME_BYTES, heartbeat_s)
    pull, _ = bind_pull(context, output_address, MAX_FRAME_BYTES, heartbeat_s)
    for line in sys.stdin:
        match line.split():
            case ["ready"]:
                router.recv_multipart()
            case ["add", client_index]:
                send(router, [IDENTITY, ADD, msgspec.msgpack.encode([*REQUEST, int(client_index)])])
            case ["read"]:
                pull.recv_multipart()
        sys.stdout.write("ok\n")
        sys.stdout.flush()


def send(router: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send to the engine, once this end too knows of the connection that the engine has made."""
    while True:
        try:
            return router.send_multipart(frames)
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
