"""``Recording``: what becomes of the messages that pass a relay: a file, a view of them, and totals."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Final

from enginewire.recorder.entry import Entry
from enginewire.recorder.journal import Journal
from enginewire.recorder.kinds import type_of
from enginewire.recorder.reading import Versions

MAX_UNSEEN: Final = 10_000
"""Messages that wait for a slow terminal; what comes on top is not shown. The file has it."""


class Recording:
    """Takes messages from a relay's thread. Writes each to the file at once; a thread shows them, however slowly.

    Args:
        journal: the file, if there is one.
        show: called in the thread, for each message and for each notice (a text with its time).
    """

    def __init__(self, journal: Journal | None, show: Callable[[Entry | tuple[float, str]], None]) -> None:
        self._journal, self._show = journal, show
        self._versions = Versions()
        self._names: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._unseen: queue.Queue[Entry | tuple[float, str] | None] = queue.Queue(MAX_UNSEEN)
        self._num_not_shown = 0
        self.failure: BaseException | None = None
        """Why nothing is shown any more."""
        self._thread = threading.Thread(target=self._run, name="recording-view", daemon=True)

    def __enter__(self) -> Recording:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Show what is left, unless the terminal takes nothing any more."""
        with contextlib.suppress(queue.Full):
            self._unseen.put(None, timeout=1.0)
            self._thread.join(2.0)

    def message(self, entry: Entry) -> None:
        """Take a message."""
        type_ = type_of(entry)
        kind = f"{entry.group or 'message'}.{type_.lower()}"
        self._names[kind] += 1
        entry = dataclasses.replace(entry, name=f"{kind}.{self._names[kind]}", version=self._versions.of(entry, type_))
        self._messages[type_] += 1
        self._bytes[type_] += sum(map(len, entry.frames))
        if self._journal is not None:
            try:
                self._journal.write(entry, type_)
            except OSError as exc:  # the conversation goes on
                self.notice(entry.t or 0.0, f"the file ends here, it cannot be written: {exc}")
                self._journal.close()
                self._journal = None
        self._put(entry)

    def notice(self, t: float, text: str) -> None:
        """Take a remark about connections."""
        self._put((t, text))

    def summary(self) -> str:
        """Say how much of what passed."""
        parts = [f"{type_} {count} ({_size(self._bytes[type_])})" for type_, count in self._messages.most_common()]
        total = f"{self._messages.total()} messages, {_size(self._bytes.total())}"
        unseen = f"; {self._num_not_shown} were not shown: the output was too slow" if self._num_not_shown else ""
        return f"{total}{': ' if parts else ''}{', '.join(parts)}{unseen}"

    def _put(self, item: Entry | tuple[float, str]) -> None:
        try:
            self._unseen.put_nowait(item)
        except queue.Full:
            self._num_not_shown += 1

    def _run(self) -> None:
        while (item := self._unseen.get()) is not None:
            if self.failure is None:
                try:
                    self._show(item)
                except Exception as exc:  # noqa: BLE001 - whoever runs the relay raises it
                    self.failure = exc


def _size(count: int) -> str:
    for unit, size in (("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
