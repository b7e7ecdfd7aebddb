"""``MockCoordinator``: the engines' side of a coordinator, of raw sockets, which does what a test tells it.

With one :class:`~enginewire.testing.mock_frontend.MockFrontend` per engine::

    with MockCoordinator() as coordinator, MockFrontend(coordinator=coordinator) as frontend:
        frontend.launch(EngineConfig.create("echo"))
        frontend.expect_handshake("HELLO")
        frontend.send_init()
        coordinator.wait_subscribed(1)
        coordinator.say_ready()
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from enginewire.transport.sockets import bind_publisher, bind_pull, make_context
from enginewire.wire.codec import OutputsDecoder
from enginewire.wire.frames import ALL_ENGINES_LISTEN, START_DP_WAVE, SUBSCRIBE_ALL
from enginewire.wire.messages import EngineCoreOutputs

TIMEOUT_S: Final = 10.0
MAX_FRAME_BYTES: Final = 1 << 20


class MockCoordinator:
    """Two sockets; everything that engines report is kept in ``reports``.

    Attributes:
        input_address: what INIT calls ``coordinator_input``: engines listen there.
        output_address: ``coordinator_output``: they report there.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ew-mock-")
        self.reports: list[EngineCoreOutputs] = []
        self._context = make_context()
        self._decoder = OutputsDecoder()
        self.input_address = f"ipc://{self.folder}/publisher"
        self._publisher, _ = bind_publisher(self._context, self.input_address, MAX_FRAME_BYTES)
        self._reports, self.output_address = bind_pull(self._context, f"ipc://{self.folder}/reports", MAX_FRAME_BYTES)

    def restart(self) -> None:
        """Forget who listens, as a coordinator does that was started again."""
        self._publisher.close(0)
        self._publisher, _ = bind_publisher(self._context, self.input_address, MAX_FRAME_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._publisher.close(0)
        self._reports.close(0)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_subscribed(self, num_engines: int) -> None:
        """Wait until so many engines more listen."""
        for _ in range(num_engines):
            if not self._publisher.poll(int(TIMEOUT_S * 1000)):
                raise TimeoutError("no subscription came in time")
            assert self._publisher.recv() == SUBSCRIBE_ALL

    def say_ready(self) -> None:
        """Tell the engines that all of them listen."""
        self._publisher.send(ALL_ENGINES_LISTEN)

    def start_wave(self, wave: object, exclude: object = None) -> None:
        """Tell the engines to run."""
        self.publish(START_DP_WAVE, msgspec.msgpack.encode([wave, exclude]))

    def publish(self, *frames: bytes) -> None:
        """Send any message to every engine."""
        self._publisher.send_multipart(frames)

    def wait_report(
        self, which: Callable[[EngineCoreOutputs], bool], what: str, timeout_s: float = TIMEOUT_S
    ) -> EngineCoreOutputs:
        """Wait for a report like this, among those that have come already too.

        It is forgotten, and so is what its engine reported before; between engines there is no order.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for position, report in enumerate(self.reports):
                if which(report):
                    earlier = self.reports[:position]
                    others = [each for each in earlier if each.engine_index != report.engine_index]
                    self.reports[: position + 1] = others
                    return report
            if not self._reports.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
                raise TimeoutError(f"no report of {what} came in time; there are {self.reports}")
            self.receive()

    def wait_load(self, num_running: int, num_waiting: int, *, engine_index: int = 0) -> EngineCoreOutputs:
        """Wait until an engine reports so many requests."""

        def is_it(report: EngineCoreOutputs) -> bool:
            stats = report.scheduler_stats
            return (
                stats is not None
                and report.engine_index == engine_index
                and (stats.num_running_reqs, stats.num_waiting_reqs) == (num_running, num_waiting)
            )

        return self.wait_report(is_it, f"{num_running} running and {num_waiting} waiting at engine {engine_index}")

    def wait_complete(self, wave: int) -> EngineCoreOutputs:
        """Wait for the end of a wave."""
        return self.wait_report(lambda report: report.wave_complete == wave, f"the end of wave {wave}")

    def wait_start(self, wave: int, *, engine_index: int) -> EngineCoreOutputs:
        """Wait for an engine's word that it has started a wave."""
        return self.wait_report(
            lambda report: (report.start_wave, report.engine_index) == (wave, engine_index),
            f"the start of wave {wave} by engine {engine_index}",
        )

    def receive(self) -> None:
        """Receive one report."""
        self.reports.append(self._decoder.decode(self._reports.recv_multipart()))

    def receive_rest(self) -> list[EngineCoreOutputs]:
        """Receive what is there already, and return all reports."""
        while self._reports.poll(0):
            self.receive()
        return self.reports
