"""``Pauses``: the scheduler is paused, and what was to be done then is done once nothing runs any more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, get_args

from enginewire.engine.executor import Executor
from enginewire.engine.scheduler import PauseState, Scheduler

PauseMode = Literal["abort", "wait", "keep"]


class Pauses:
    """Pauses and resumes a scheduler, and remembers who waits for a pause (protocol section H).

    Attributes:
        need_agreement: pauses are complete when all ranks in lock-step are ready for them; see :class:`LockStepLoop`.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.need_agreement = False
        self._scheduler = scheduler
        self._executor = executor
        self._pending: list[tuple[Future[None], Callable[[], None]]] = []
        """Those that wait for running requests to end, each with what is to be done then."""

    @property
    def is_pending(self) -> bool:
        """Whether somebody waits for a pause."""
        return bool(self._pending)

    @property
    def is_ready(self) -> bool:
        """Whether nothing runs that a pause has to wait for."""
        return self._scheduler.pause_state is PauseState.PAUSED_ALL or not self._scheduler.num_running

    def begin(self, mode: str, then: Callable[[], None]) -> Future[None] | None:
        """Pause, and call ``then`` when the pause is complete; a future if that is not yet.

        Raises:
            ValueError: no such mode. Whatever ``then`` raises, if it is called at once.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"Invalid pause mode: {mode}")
        scheduler = self._scheduler
        if mode == "abort":
            scheduler.abort_all()
        scheduler.pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        if self.need_agreement or (mode == "wait" and scheduler.num_running):
            future: Future[None] = Future()
            self._pending.append((future, then))
            return future
        self._forget_aborted()
        then()
        return None

    def resume(self) -> None:
        """Go on.

        Raises:
            RuntimeError: ranks in lock-step have not agreed yet on a pause: some would go on, and some not.
        """
        if self._pending and self.need_agreement:
            raise RuntimeError("resume_scheduler called while pause is still in flight; wait for its answer")
        self.fail("the scheduler was resumed before the pause was complete")
        self._scheduler.pause_state = PauseState.UNPAUSED

    def post_step(self) -> None:
        """Complete pauses whose requests have ended, once the outputs of that step are on their way."""
        if self._pending and not self.need_agreement and not self._scheduler.num_running:
            self.complete()

    def complete(self) -> None:
        """Do what was to be done in the pauses, and tell those who wait for them."""
        self._forget_aborted()
        pending, self._pending = self._pending, []
        for future, then in pending:
            _complete(future, then)

    def fail(self, why: str) -> None:
        """Tell those who wait for a pause that it will not come."""
        pending, self._pending = self._pending, []
        for future, _ in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(why))

    def _forget_aborted(self) -> None:
        """Make the executor idle now, not at the next step: what follows may be a cache reset or sleep."""
        if aborts := self._scheduler.take_aborts():
            self._executor.abort_requests(aborts)


def _complete(future: Future[None], then: Callable[[], None]) -> None:
    """Finish a pause. Whatever goes wrong is its caller's to know, not the loop's to die of (defect 10)."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        then()
    except Exception as exc:  # noqa: BLE001 - see above
        future.set_exception(exc)
    else:
        future.set_result(None)
