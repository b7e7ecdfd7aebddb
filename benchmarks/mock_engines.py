"""Many engines in one process, for a client that waits for engines elsewhere: ``mock_engines.py PORT COUNT``.

Each is a mock engine that answers a request with a message for each of its tokens. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from enginewire.testing import MockEngine
from enginewire.wire.messages import EngineCoreOutput, FinishReason

FOREVER_S = 3600.0


def serve(engine: MockEngine) -> None:
    """Answer requests until the engine is closed."""
    with contextlib.suppress(AssertionError):
        engine.wait_started(60)
        while True:
            request = engine.expect_add(FOREVER_S)
            assert request.sampling_params is not None
            num_tokens = request.sampling_params.max_tokens or 1
            for number in range(1, num_tokens + 1):
                finish_reason = FinishReason.LENGTH if number == num_tokens else None
                engine.send_outputs([EngineCoreOutput(request.request_id, [97], finish_reason=finish_reason)])


def main() -> None:
    """Run the engines."""
    port, count = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        for index in range(int(count)):
            engine = stack.enter_context(MockEngine(f"tcp://127.0.0.1:{port}", engine_index=index))
            threading.Thread(target=serve, args=(engine,), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
