"""The client's end of the line, as callers see it: they post requests and wait for answers."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

import zmq

from shmreplay import errors, limits
from shmreplay.bridge import protocol
from shmreplay.bridge.link_thread import LinkThread, body_of, is_much
from shmreplay.bridge.pending import Entry, Pending, WriterLog, frames_of
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.wire import Reader, Writer

__all__ = ["Link"]

_log = logging.getLogger(__name__)

_SLICE_S = limits.WAIT_SLICE_MS / 1000
_LEAST_S = 1.0
_LOOK_EVERY_S = 0.5
# Seconds for sending what a call gave up on, before the connection is made anew, and after that.
_LENT_S = 2.0
# Requests of callers, beyond which they wait.
_MOST_OPEN = limits.BRIDGE_REQUESTS * 3 // 4


class Link(LinkThread):
    """A connection to a bridge, made anew whenever it breaks. Thread-safe; not usable after a fork.

    Lost for good (`lost` says why) when the server was out of reach for `timeout` seconds, knows
    the client no more, or refuses it.
    """

    @property
    def forked(self) -> bool:
        """Whether this process got the link from its parent."""
        return self._pid != os.getpid()

    @property
    def connected(self) -> bool:
        """Whether the server has welcomed the connection, and it has not broken since."""
        return self._connected

    def connect(self, within: float | None = None) -> Reader:
        """Connects; returns what the server said of itself.

        Args:
            within: Seconds that it may take; never fewer than a connection needs.

        Raises:
            DeadlineExceededError: It took longer.
            ServerClosedError: It was not reached within the timeout.
            AuthenticationError, VersionMismatchError, ProtocolError: It refused.
        """
        self._thread.start()
        _links.add(self)
        end = math.inf if within is None else time.monotonic() + max(within, _LEAST_S)
        while not self._welcomed.wait(_SLICE_S):
            if self.lost is not None:
                raise self.lost
            if time.monotonic() > end:
                raise errors.DeadlineExceededError(
                    f"the server at {self.address} was not reached within {within} s: {self._why}."
                    " Expected it to answer: look whether it runs there, or give a longer timeout"
                )
        if self.welcome is None:
            raise self._lost_error()
        return self.welcome

    def token(self) -> int:
        """A number that this client gives to nothing else."""
        with self._lock:
            self._tokens += 1
            return self._tokens

    def post(
        self,
        kind: Kind,
        body: Writer,
        callback: Callable[[Pending], None] | None = None,
        *,
        wait: bool = True,
        note: Callable[[Pending], tuple[WriterLog, Entry]] | None = None,
    ) -> Pending:
        """Sends a request; its answer comes into what this returns.

        Args:
            kind: One of `protocol.REQUESTS`.
            body: The message.
            callback: Called with the answer, by the link's thread.
            wait: Wait while too much is on its way.
            note: Makes the entry of a writer's message in its log.

        Raises:
            InvalidArgumentError: The message is too large.
            ServerClosedError: The server is gone.
        """
        body.check_size(kind.name.lower())
        pending = Pending(kind, frames_of(body), callback)
        with self._lock:
            if wait:
                self._wait_for_room(pending.nbytes, math.inf)
            if self.lost is not None:
                raise self._lost_error()
            if note is not None:
                pending.log, pending.entry = note(pending)
                self._messages += 1
                pending.entry.order = self._messages
                pending.log.message(pending.entry)
            self._waiting += 1
            self._bytes += pending.nbytes
            self._outbox.append(pending)
        self._line.wake()
        return pending

    def soon(self, action: Callable[[], None]) -> None:
        """Has something done by the link's thread, before it sends what there is.

        Raises:
            ServerClosedError: The server is gone.
        """
        with self._lock:
            if self.lost is not None:
                raise self._lost_error()
            self._soon.append(action)
        self._line.wake()

    def wait_for_room(self, timeout: float) -> None:
        """Waits while too much is on its way to send more.

        Raises:
            DeadlineExceededError: It is still, after so many seconds.
        """
        with self._lock:
            self._wait_for_room(0, timeout)

    def _wait_for_room(self, nbytes: int, timeout: float) -> None:
        began = time.monotonic()
        log_at = began + limits.WAIT_LOG_AFTER_S
        while self._is_full(nbytes) and self.lost is None:
            now = time.monotonic()
            what = f"{self._waiting} requests of {self._bytes} bytes wait for the server to take"
            if now - began >= timeout:
                raise errors.DeadlineExceededError(
                    f"the server at {self.address} did not take more within {timeout} s: {what}"
                    " them. Nothing was sent: it must catch up first. Give a longer timeout."
                )
            if now > log_at:
                log_at = now + 2 * limits.WAIT_LOG_AFTER_S
                _log.warning("%s: %s them", self.address, what)
            self._seekers += 1
            try:
                self._changed.wait(min(_SLICE_S, max(began + timeout - now, 0.0)))
            finally:
                self._seekers -= 1

    def _is_full(self, nbytes: int) -> bool:
        if not self._waiting:
            return False
        return self._waiting >= _MOST_OPEN or is_much(self._bytes, nbytes)

    def open_writer(self, log: WriterLog) -> Pending:
        """Opens a writer at the server, and again at each that takes the place of one that died."""
        with self._lock:
            self._logs[log.number] = log
        body = Writer()
        body.meta += log.open_frames[0]
        log.opened = self.post(Kind.WRITER_OPEN, body)
        return log.opened

    def settled(self, log: WriterLog, item: int) -> None:
        """A writer's items up to this one are in their tables, or were refused."""
        with self._lock:
            log.settled = max(log.settled, item)

    def forget_writer(self, log: WriterLog) -> None:
        """A writer is closed."""
        with self._lock:
            self._logs.pop(log.number, None)

    def tell(self, kind: Kind, body: Writer) -> None:
        """Sends what has no answer and may get lost with the connection."""
        with self._lock:
            self._outbox.append(protocol.encode(kind, body))
        self._line.wake()

    def release(self, sequence: int) -> None:
        """The items of this answer were delivered."""
        if sequence in self.held:
            self.held.discard(sequence)
            self.tell(Kind.RELEASE, body_of(sequence))

    def call(
        self, kind: Kind, body: Writer, timeout: float | None = None, *, cancel: bool = False
    ) -> Reader:
        """Sends a request and waits for the answer; see `answer`."""
        return self.answer(self.post(kind, body), timeout, cancel=cancel)

    def answer(
        self, pending: Pending, timeout: float | None = None, *, cancel: bool = False
    ) -> Reader:
        """Waits for an answer.

        The server keeps the deadline; here it counts only while the server is out of reach, or has
        no room for the request.

        Args:
            pending: The request.
            timeout: Seconds; None: for ever.
            cancel: The request has no deadline that the server knows: once the time is over, it is
                told to wait no longer, and answers what it has done.

        Raises:
            DeadlineExceededError: The server is out of reach or the request was not sent, and the
                time is over.
            ServerClosedError: It is gone for good.
        """
        end = None if timeout is None else time.monotonic() + timeout + 1.0
        try:
            if cancel and timeout is not None and not pending.wait(max(timeout, 0.0)):
                self.cancel(pending)
            while not pending.wait(_LOOK_EVERY_S):
                self.look()
                if end is not None and not self._connected and time.monotonic() > end:
                    raise errors.DeadlineExceededError(
                        f"no answer within {timeout} s: the server at {self.address} is out of"
                        f" reach ({self._why}). Whether the call was carried out is not known; it"
                        " must answer for that. Look whether it runs, or give a longer timeout."
                    )
                if end is not None and time.monotonic() > end and self._withdraw(pending):
                    raise errors.DeadlineExceededError(
                        f"the server at {self.address} had no room for this call, or for a large"
                        f" one before it, within {timeout} s; expected some. Nothing was sent."
                        " Try again, or give a longer timeout."
                    )
        except BaseException:
            self.cancel(pending)
            self.own(pending)
            raise
        if self.lost is not None:
            self.own(pending)
        return pending.result()

    def _withdraw(self, pending: Pending) -> bool:
        """Takes a request back that was never sent. False where it was, or may have been."""
        with self._lock:
            if pending.sequence or pending.log is not None or self._behind:
                return False
            try:
                self._outbox.remove(pending)
            except ValueError:  # the link is lost, and so it is answered
                return False
            self._waiting -= 1
            self._bytes -= pending.nbytes
            self._changed.notify_all()
            return True

    def own(self, pending: Pending) -> None:
        """Lets the caller of a request that was given up have its arrays back, to change them.

        What was not sent yet is copied. What libzmq has of it is still read where it lies, so this
        waits until it has sent it. Where the server takes nothing, the connection is made anew:
        what was begun is void then, and sent again from the copy. All of it is bounded in time.
        """
        if len(pending.frames) < 2 and not pending.lent:
            return  # none of its frames is an array
        with self._lock:
            waits = pending.sequence == 0
            if waits:
                pending.own()
        if not waits:  # its frames may be on their way to libzmq at this moment
            self._have_done(pending.own)
        if _have_gone(pending.lent):
            return
        self._have_done(lambda: self._broken("it does not take what a call gave up on"))
        if not _have_gone(pending.lent):
            _log.warning(
                "%s: arrays of a call that was given up are still being sent", self.address
            )

    def _have_done(self, action: Callable[[], None]) -> None:
        """Has something done by the link's thread, if it still runs."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        try:
            self.soon(act)
        except errors.ReverbError:
            return  # it is lost, and sends no more
        done.wait(_LENT_S)

    def cancel(self, pending: Pending) -> None:
        """Asks the server to stop waiting on behalf of a request; it is answered in any case."""
        with self._lock:
            pending.cancelled = True
            if pending.sequence:
                self._outbox.append(protocol.encode(Kind.CANCEL, body_of(pending.sequence)))
        self._line.wake()

    def close(self) -> None:
        """Takes leave of the server and ends the thread. Idempotent, bounded in time."""
        if self.forked:
            return
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._line.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(limits.BRIDGE_CLOSE_S)


def _have_gone(lent: list[zmq.MessageTracker]) -> bool:
    """Waits until all of these were sent, or dropped; False if they are not in time."""
    end = time.monotonic() + _LENT_S
    try:
        for tracker in list(lent):
            tracker.wait(max(end - time.monotonic(), 0.0))
    except zmq.NotDone:
        return False
    return True


# ---------------------------------------------------------------------- the end of the process

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _at_exit() -> None:
    """Takes leave, so that servers need not wait for what will not come."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_links.clear)
atexit.register(_at_exit)
