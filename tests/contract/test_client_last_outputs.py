"""What an engine sends last, while its client is shut down, comes before the end (C-22)."""

from __future__ import annotations

import pytest

from client_harness import MP_FACES, mock_face, mp_client, output, request
from enginewire import ClientClosedError
from enginewire.testing import MockEngine

COUNT = 500
"""More than one batch, and more than what is there by chance."""


class Leaving:
    """An engine manager as far as shutting down needs it: its engine sends its last outputs and is gone."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine

    def shutdown(self, timeout: float) -> None:
        """Return as soon as the engine has ended; what it sent is still on its way."""
        for i in range(COUNT):
            self._engine.send_outputs([output("a", [i], finished=i == COUNT - 1)])
        self._engine.leave()


@pytest.mark.parametrize("kind", MP_FACES)
def test_what_an_engine_sent_before_it_left_comes_before_the_end(kind: str) -> None:
    """C-22: its process has ended; its outputs are in the system's buffers, or in ZeroMQ's."""
    with mock_face(kind) as (face, engine):
        client = mp_client(face)
        face.add_request(request("a"))
        engine.expect_add()
        client.engines[0].is_ours = True
        client.resources.engine_manager = client.lookout.returns.launcher = Leaving(engine)  # type: ignore[assignment]
        client.shutdown()
        assert [token for it in face.outputs(COUNT) for token in it.new_token_ids] == list(range(COUNT))
        with pytest.raises(ClientClosedError):
            face.get_output()
