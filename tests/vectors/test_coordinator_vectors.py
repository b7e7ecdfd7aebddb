"""What vLLM's coordinator was told and what it said, replayed against ours with a clock that stands still."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from golden import NEW, OLD, Vector, load, schemaless

from enginewire.coordinator.core import Coordinator

JITTER_S = 0.03
"""The recording's own: its coordinator polled, and its clock was a busy machine's."""


class Replay:
    """Feeds a recording's inputs to a coordinator and keeps what comes out, with its time."""

    def __init__(self, vectors: list[Vector], *, lock_step: bool, version: str) -> None:
        self.to_engines: list[tuple[float, Any]] = []
        self.to_frontends: list[tuple[float, Any]] = []
        self.now = 0.0
        self.coordinator = Coordinator(
            2,
            lock_step=lock_step,
            wire_version=version,
            to_engines=lambda frames: self.to_engines.append((self.now, shown(frames))),
            to_frontends=lambda payload: self.to_frontends.append((self.now, schemaless(payload))),
        )
        subscribers = 0
        for vector in vectors:
            self.advance(vector.time)
            if "XSUB" in vector.direction and vector.direction.startswith("engine->"):
                subscribers += 1
                self.coordinator.subscribed(subscribers, self.now)
            elif vector.direction.startswith("engine->"):
                self.coordinator.reported(vector.frames, self.now)
            elif vector.direction.startswith("frontend->"):
                self.coordinator.asked(vector.frames[0], self.now)

    def advance(self, until: float) -> None:
        """Let time pass, and publish when it is time to."""
        while (due := self.now + self.coordinator.next_publication(self.now)) < until:
            self.now = due
            self.coordinator.publish(due)
        self.now = until


def shown(frames: list[bytes]) -> Any:
    """Return a message to engines as text: READY, or a wave's number and whom it leaves out."""
    if len(frames) == 1:
        return frames[0].decode()
    kind, payload = frames
    assert kind == b"\x02"
    return msgspec.msgpack.decode(payload)


def recorded(vectors: list[Vector], receiver: str) -> list[tuple[float, Any]]:
    """Return what the recorded coordinator sent to engine 0 (and so to all), or to the frontend."""
    to = [v for v in vectors if v.direction.startswith(f"coordinator->{receiver}") and not v.name.endswith("engine1")]
    return [(v.time, v.value) for v in to]


def assert_same(got: list[tuple[float, Any]], expected: list[tuple[float, Any]]) -> None:
    assert [value for _, value in got] == [value for _, value in expected]
    for (time, value), (recorded_time, _) in zip(got, expected, strict=True):
        assert abs(time - recorded_time) < JITTER_S, value


def corrected(expected: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Name an excluded engine by its rank. The reference passes identity bytes on, which no engine has (defect 9)."""
    identity = {"$bin": "0100"}
    return [(t, [v[0], 1] if isinstance(v, list) and v[1] == identity else v) for t, v in expected]


def test_lock_step_engines_of_0_25() -> None:
    """Protocol J.3, J.4."""
    vectors = load("coordinator", versions=[OLD])
    replay = Replay(vectors, lock_step=True, version=OLD)
    # A second FIRST_REQ before any engine said that it runs is passed on: they may have been paused (defect 31).
    again = next(vector.time for vector in vectors if vector.name == "first_req.again")
    engines = [*corrected(recorded(vectors, "engine")), (again, [0, 0])]
    assert_same(replay.to_engines, sorted(engines, key=lambda sent: sent[0]))
    frontends = [*recorded(vectors, "frontend"), (again, [None, 0, True])]
    assert_same(replay.to_frontends, sorted(frontends, key=lambda sent: sent[0]))


def test_lock_step_engines_of_0_32() -> None:
    """Protocol M.3: engines run when they say so, and counts hold the use of the KV cache."""
    vectors = load("coordinator", versions=[NEW])
    replay = Replay(vectors, lock_step=True, version=NEW)
    assert_same(replay.to_engines, corrected(recorded(vectors, "engine")))
    assert_same(replay.to_frontends, recorded(vectors, "frontend"))


def test_engines_that_do_not_run_in_lock_step() -> None:
    """Protocol J.4, last point: no waves. Unlike 0.25, and like 0.32, counts do not wait for other engines' (M.3)."""
    vectors = load("coordinator-nowave", versions=[OLD])
    replay = Replay(vectors, lock_step=False, version=OLD)
    assert [value for _, value in replay.to_engines] == ["READY"]
    states = [value for _, value in replay.to_frontends]
    settled = [value for _, value in recorded(vectors, "frontend")]
    assert [state for state in states if state in settled] == settled
    assert all(wave == 0 and not running for _, wave, running in states)
    times = [time for time, _ in replay.to_frontends]
    assert all(later - earlier >= 0.099 for earlier, later in itertools.pairwise(times))
