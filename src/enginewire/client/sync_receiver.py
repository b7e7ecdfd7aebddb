"""The receiver of ``SyncMPClient``: a thread, and whoever waits.

One thread at a time reads the output sockets: whoever holds the *role*. Handing a message from a thread to its caller
takes as long as the message's way through ZeroMQ, so a caller who waits takes the role and reads for itself, for a
while. The thread does all else: it looks after the engines, has the role whenever no caller is quick to take it, and
takes it for each look. See decision 18.
"""

from __future__ import annotations

import contextlib
import select
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

import zmq

from enginewire.client.inbox import Arrival
from enginewire.client.link import HEAR_OUT_POLL_S, LAST_OUTPUTS_S, RECONNECT_S, Link
from enginewire.transport.sockets import inproc_pair, receive_frame, receive_message, rest_of_message

if TYPE_CHECKING:
    from enginewire.client.mp import MPClient
    from enginewire.wire.messages import EngineCoreOutputs

DIRECT_MS: Final = 50
"""How long a caller reads before it leaves that to the thread; a loss is told so much later."""

CALLERS_MS: Final = 250
"""How often the thread finds out whether callers still read: what comes while nobody does stays with ZeroMQ, where it
takes twice the memory."""

SURE_S: Final = RECONNECT_S - DIRECT_MS / 1000
"""How long after a look at a link's connections a caller may begin to read: what it gets then comes before its engine
can have another connection."""

BATCH: Final = 64
"""Messages taken at once."""

BURST_S: Final = 50e-6
"""Messages that are asked for so soon one after the other, or waited for no longer, are a burst: more are likely to be
there. Any other is handed over alone and at once: to find out that nothing follows costs a tenth of a call."""

BURST_BYTES: Final = 24_000
"""What a caller takes at once, with the role: to take turns with decoding, message by message, costs a quarter of a
small one and a twentieth of one of 64 outputs; and what was taken is decoded from the processor's cache."""

JOIN_S: Final = 5.0

NOBODY: Final = -1
"""No thread's identity."""

End = Callable[[], BaseException]


class SyncReceiver:
    """Receives for one client, and holds no reference to it.

    Attributes:
        arrived: what waits for the consumer, in order.
        end: makes the error that everybody gets once ``arrived`` is empty; ``None``: there is more to come.
    """

    def __init__(self, client: MPClient) -> None:
        self.arrived: deque[Arrival] = deque()
        self.end: End | None = None
        self._inbox = client.inbox
        self._engines = client.engines
        self._lookout = client.lookout
        self._resources = client.resources
        # Knows its owner, who can give it back without knowing where an exception has come from.
        self._role = threading.RLock()
        self._reader: int | None = None
        """The thread that has the role."""
        self._direct: Link | None = None
        """The only link, if there is only one."""
        self._open: Link | None = None
        """The same while callers may read it; otherwise the receiver's thread is to have the role."""
        self._is_asked = False
        """A caller has waited long enough to have the receiver's thread wait instead."""
        self._burst_until = 0.0
        """Until when a caller who asks again asks in a burst; set anew by whoever receives."""
        self._news = threading.Condition()
        """Told to those who wait while somebody else reads. Its lock guards the number of those."""
        self._num_followers = 0
        self._wake_reader, self._wake_writer = inproc_pair(client.resources.context, "wake")
        self._wake_lock = threading.Lock()  # a socket may be used by one thread at a time
        self._links: tuple[Link, ...] = ()
        self._sources: dict[zmq.Socket[bytes], Link] = {}
        self._signs, self._all = select.poll(), zmq.Poller()
        """Descriptors of what the thread looks after, also while it has not the role; and that with the links."""
        self._next_look = monotonic()
        self._is_stopping = False
        self._is_left_alone = False
        self._thread = threading.Thread(target=self._run, name="enginewire-receiver", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look after the engines at once."""
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # it has ended already
            self._wake_writer.send(b"", zmq.NOBLOCK)

    def stop(self) -> bool:
        """End it, and have it close its sockets; ``False``: it does not end, or later and releases the others then."""
        # A signal handler's doing, in the middle of a wait: that ends first. Or that of a callback in the thread.
        self._is_left_alone = self._reader == get_ident()
        self._is_stopping = True
        self.wake()
        if self._is_left_alone:
            return False
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return False
        with self._wake_lock:  # somebody may be about to wake it, who must not find the socket being closed
            self._wake_writer.close(linger=0)
        return True

    def finish(self, make_error: End) -> None:
        """End everybody who waits, and everybody who will, with an error. The first one stays."""
        self.end = self.end or make_error
        self._open = None
        self._inbox.calls.close(make_error)
        self._tell_followers()

    # The callers' side.

    def has_arrived(self) -> bool:
        """Whether a consumer need not wait."""
        return bool(self.arrived) or self.end is not None

    def receive(self) -> EngineCoreOutputs | None:
        """Receive one message for its consumer, who has found nothing that has arrived, and decode it.

        The usual way of a message, without what :meth:`wait` and :meth:`Inbox.take` consider besides. ``None``: it has
        arrived, with others or for others; or none came, or this is somebody else's to do, and then :meth:`wait` has
        to.
        """
        message = None
        try:
            if self._open is None or not self._role.acquire(False):  # a keyword costs as much as the lock
                return None
            if self._reader is not None:  # this thread, interrupted by a signal handler
                self._role.release()
                return None
            self._reader = get_ident()
            link = self._open
            try:
                if link is None or self.arrived:
                    pass
                elif (began := monotonic()) < link.sure_until or self._is_sure(link, began):
                    is_burst = began < self._burst_until
                    self._burst_until = began + BURST_S
                    frame = receive_frame(link.output_socket, 0, False)
                    if frame.more or (message := self._inbox.take_single(link, frame.bytes)) is None:
                        self._take(link, rest_of_message(link.output_socket, frame))
                    if is_burst and 0 < len(frame) < BURST_BYTES // 2:
                        self._drain(link, min(BATCH, BURST_BYTES // len(frame) - 1))
                        self._burst_until = began + BURST_S * (1 + len(self.arrived))
            except zmq.Again:
                pass
            except Exception as exc:  # noqa: BLE001 - as below
                self._fail(exc)
            self._reader = None
            self._role.release()
            if self._num_followers:
                self._tell_followers()
        except BaseException:
            self._give_back()
            raise
        return message

    def wait(self, is_there: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until ``is_there``, which someone who receives makes true; ``False``: the deadline passes first.

        Raises:
            RuntimeError: this thread was interrupted while it receives, and would wait for itself.
        """
        if self._reader == get_ident():
            raise RuntimeError(
                "this thread was interrupted, by a signal handler or a callback, while it receives for the client; "
                "what is to wait for an engine then has to do so in another thread"
            )
        try:
            while not is_there():
                is_tired = False
                if self._open is not None and self._role.acquire(False):
                    has_come = self._read(is_there, deadline)
                    self._leave()
                    if has_come:
                        break
                    is_tired = self._open is not None
                limit = None if deadline is None else deadline - monotonic()
                if limit is not None and limit <= 0:
                    return is_there()
                self._follow(is_there, limit, is_tired=is_tired)
        except BaseException:
            self._give_back()
            raise
        return True

    def _read(self, is_there: Callable[[], bool], deadline: float | None) -> bool:
        """Read until ``is_there``; ``False``: nothing comes, or the thread is to read."""
        self._reader = get_ident()
        try:
            while (link := self._open) is not None:
                began = monotonic()
                self._burst_until = began + BURST_S
                if began > link.sure_until and not self._is_sure(link, began):
                    return False
                if deadline is not None and deadline - began < DIRECT_MS / 1000:
                    link.output_socket.poll(max(0, round((deadline - began) * 1000)))
                    self._take(link, receive_message(link.output_socket))
                else:
                    self._take(link, receive_message(link.output_socket, 0))
                if self.arrived and monotonic() - began < BURST_S:
                    self._drain(link)
                if is_there():
                    return True
                self._tell_followers()  # it was another's
        except zmq.Again:
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(exc)
        return False

    def _follow(self, is_there: Callable[[], bool], limit: float | None, *, is_tired: bool) -> None:
        """Wait until somebody else has received something, or has left the role."""
        with self._news:
            self._num_followers += 1
            try:
                if self._reader is None and self._open is not None:
                    if not is_tired:
                        return
                    self._is_asked = True
                    self.wake()
                if not is_there():
                    self._news.wait(limit)
            finally:
                self._num_followers -= 1

    def _give_back(self) -> None:
        """Have the role kept by nobody whom an exception leads out of here: Ctrl-C comes between any two steps."""
        if self._reader == get_ident():
            self._reader = None
        with contextlib.suppress(RuntimeError):  # it is not, or no longer, this thread's
            while True:
                self._role.release()
        self._tell_followers()

    def _leave(self) -> None:
        self._reader = None
        self._role.release()
        self._tell_followers()

    def _tell_followers(self) -> None:
        if self._num_followers:
            with self._news:
                self._news.notify_all()

    # Whoever has the role.

    def _take(self, link: Link, frames: list[bytes]) -> None:
        if self._inbox.sort(link, frames):
            self.arrived.append((link, frames))
        elif self._inbox.marked:
            self.wake()

    def _is_sure(self, link: Link, now: float) -> bool:
        """Find out whether a caller may read a link: not if there is a gap before what is there."""
        if self._lookout.has_loss(link):
            self.wake()  # the thread was slow to see it, or cannot any more, as note is taken of it here
            if self._lookout.has_gap(link):
                return False
        link.sure_until = now + SURE_S
        return True

    def _drain(self, link: Link, limit: int = BATCH) -> bool:
        """Take what is there, up to a limit, without waiting; whether that is known to be all."""
        socket, heads, append = link.output_socket, link.heads, self.arrived.append
        try:
            for _ in range(limit):
                frames = receive_message(socket)
                if len(frames) == 1 and frames[0][:3] in heads:  # nearly always
                    append((link, frames))
                else:
                    self._take(link, frames)
        except zmq.Again:
            return True
        return False

    def _fail(self, exc: Exception) -> None:
        message = f"the receiver failed: {exc!r}"
        self.finish(lambda: RuntimeError(message))

    # The thread.

    def _run(self) -> None:
        self._enter()
        try:
            self._receive()
            self._hear_out()
        except Exception as exc:  # noqa: BLE001 - as above
            self._fail(exc)
        finally:  # with the role, which nobody gets any more; a later thread may have this one's identity
            self._reader = NOBODY
            for link in self._inbox.links:
                link.output_socket.close(linger=0)
            self._wake_reader.close(linger=0)
            self._tell_followers()
        if self._is_left_alone:
            self._resources.release_sockets()

    def _enter(self) -> None:
        """Get the role, from a caller who has it for a while."""
        self._open = None
        self._role.acquire()
        self._reader = get_ident()

    def _receive(self) -> None:
        are_callers_quick = False
        self._use(self._inbox.links)
        while not self._is_stopping and self.end is None:
            has_received = self._step(0.0 if are_callers_quick else self._lookout.interval_s)
            if self._direct is not None and (are_callers_quick or (has_received and self._num_followers)):
                are_callers_quick = self._let_callers_read()

    def _use(self, links: tuple[Link, ...]) -> None:
        """Read these links from now on, and no others."""
        self._links = links
        self._sources = {link.output_socket: link for link in links}
        self._direct = links[0] if len(links) == 1 else None
        if self._direct is not None:
            self._direct.output_socket.setsockopt(zmq.RCVTIMEO, DIRECT_MS)
        self._signs, self._all = select.poll(), zmq.Poller()
        signs: list[zmq.Socket[bytes] | int] = [self._wake_reader, *(event for link in links for event in link.events)]
        if self._lookout.coordination is not None:  # the socket itself is used by those who send, too
            signs.append(self._lookout.coordination.descriptor)
        for sign in signs:
            self._signs.register(sign if isinstance(sign, int) else sign.fileno(), select.POLLIN)
            self._all.register(sign, zmq.POLLIN)
        for socket in self._sources:
            self._all.register(socket, zmq.POLLIN)

    def _step(self, limit_s: float) -> bool:
        """Wait for something and see to it; whether anything was received."""
        began = monotonic()
        ready = self._all.poll(max(0, round(min(limit_s, self._next_look - began) * 1000)))
        now = monotonic()
        is_due = now >= self._next_look
        for socket, _ in ready:
            is_due = is_due or socket not in self._sources
            if socket is self._wake_reader:
                self._wake_reader.recv()
        is_drained = True
        links = self._links if is_due else [self._sources[socket] for socket, _ in ready]
        limit = BATCH if is_due or now - began < BURST_S else 1
        for link in links:
            if self._lookout.drops(link):
                is_due = True
            else:
                link.sure_until = now + SURE_S
                is_drained = self._drain(link, limit) and is_drained
        # What an engine sent before it died or was lost comes first.
        if (is_due and is_drained) or self._inbox.marked:
            self._next_look = now + self._lookout.interval_s
            self._look(now)
        if links:
            self._tell_followers()
        return bool(links)

    def _look(self, now: float) -> None:
        with self._resources.send_lock:
            news = self._lookout.look(now)
        self.arrived.extend(news)
        if self._links is not self._inbox.links:
            self._use(self._inbox.links)  # before callers may read: some have been closed
        if self._lookout.has_found:
            self._next_look = now
        elif self._engines.death is not None:
            self.finish(self._engines.death.exception)

    def _let_callers_read(self) -> bool:
        """Leave the role to callers until none is quick to take it, or it is needed; whether they still are quick."""
        self._is_asked = False
        self._open = self._direct if self.end is None else None
        self._leave()
        while True:
            burst_until = self._burst_until
            has_signs = bool(self._signs.poll(CALLERS_MS))
            are_quick = self._burst_until != burst_until and not self._is_asked
            if has_signs or not are_quick or self._is_stopping or monotonic() >= self._next_look:
                break
        self._enter()
        return are_quick

    def _hear_out(self) -> None:
        """Take what engines sent before they were stopped; those who wait are told afterwards that this is the end."""
        deadline = monotonic() + LAST_OUTPUTS_S
        while True:
            is_over = self._lookout.has_heard_out()  # asked first: then all is there to be taken
            for link in self._inbox.links:
                is_over = self._drain(link) and is_over
            self._tell_followers()
            if is_over or monotonic() > deadline:
                return
            sleep(HEAR_OUT_POLL_S)
