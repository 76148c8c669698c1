"""Requests of writers: they go in line, one after the other, and wait without a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmreplay import errors, limits
from shmreplay.bridge.channel import Channel
from shmreplay.bridge.refusals import Refusals
from shmreplay.bridge.scheduler import Scheduler, Task, Work
from shmreplay.bridge.shares import Shares
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.connection import Connection
from shmreplay.errors import ProtocolError

if TYPE_CHECKING:
    from shmreplay.bridge.sessions import Session

__all__ = ["Channels"]

Done = Callable[["Session", Task, Any, Exception | None], None]


class Channels:
    """What clients ask of their writers."""

    def __init__(
        self, connection: Connection, scheduler: Scheduler, done: Done, shares: Shares
    ) -> None:
        """Takes what answers a request that is done, and what there is of writers for all."""
        self._shares = shares
        self._connection = connection
        self._scheduler = scheduler
        self._done = done

    def write(self, session: Session, channel: Channel, reader: Reader, task: Task) -> None:
        """Lets a message wait for its turn."""
        channel.tasks.append(task)
        task.finish = lambda t, result, error: self._written(session, channel, t, result, error)
        task.work = channel.write(reader)
        if len(channel.tasks) == 1:
            self._scheduler.start(task, task.work)

    def open(self, session: Session, reader: Reader, task: Task) -> Work:
        """Opens a writer."""
        number, keep, flags = reader.u32(), reader.u32(), reader.u8()
        reader.finish()
        if flags > 5 or flags & 6 == 6:
            raise ProtocolError(f"a writer is opened with the flags {flags}")
        if number == 0:
            raise ProtocolError("a writer of number 0")
        if number in session.channels or len(session.channels) >= limits.BRIDGE_WRITERS:
            raise errors.StoreLimitError(
                f"a remote client has at most {limits.BRIDGE_WRITERS} writers; close those that are"
                " not needed"
            )
        if not session.receipts.was_left(number) and not self._shares.may_take(session.who):
            raise errors.StoreLimitError(
                f"Got a writer too many: {self._shares.describe(session.who)} of those that the"
                " bridge can have; expected fewer of one host, or key. Close some, or give the"
                " server a larger capacity="
            )
        receipt = session.receipts.take(number)
        refusals = Refusals(session.receipts, number)
        try:
            session.channels[number] = Channel(
                self._connection,
                number,
                keep,
                bool(flags & 1),
                session.channels,
                receipt,
                refusals,
                {0: None, 2: "lz4", 4: "none"}[flags & 6],
            )
        except BaseException:
            session.receipts.keep(task.sequence, receipt, *refusals.left())
            raise
        self._shares.take(session.who)
        return Writer()
        yield

    def forget(self, session: Session) -> None:
        """A writer is no more."""
        self._shares.give(session.who)

    def close(self, session: Session, number: int, channel: Channel | None, task: Task) -> Work:
        """Closes a writer. Says how many items were held back, and are lost."""
        lost = 0
        if channel is not None:
            del session.channels[number]
            self.forget(session)
            session.receipts.keep(task.sequence, channel.receipt, *channel.refusals.left())
            for waiting in list(channel.tasks):
                self._scheduler.drop(waiting)
                error = errors.WriterClosedError(
                    "Got a call on a writer that was closed before this was its turn; expected an"
                    " open one. Call flush() before close()."
                )
                self._done(session, waiting, None, error)
            lost = channel.close()
        body = Writer()
        body.u32(lost)
        return body
        yield

    def _written(
        self,
        session: Session,
        channel: Channel,
        task: Task,
        result: Any,
        error: Exception | None,
    ) -> None:
        """A message of a writer was dealt with: the next one's turn."""
        channel.tasks.popleft()
        self._done(session, task, result, error)
        if channel.tasks and channel.tasks[0].work is not None:
            self._scheduler.start(channel.tasks[0], channel.tasks[0].work)
        if channel.writer.pending and not channel.draining:
            channel.draining = True
            drain = Task(lambda t, result, error: self._drained(channel, error))
            self._scheduler.start(drain, channel.drain())
            channel.drain_task = drain

    def _drained(self, channel: Channel, error: Exception | None) -> None:
        channel.draining = False
        if isinstance(error, errors.ReverbError):
            channel.error = error
        elif error is not None:
            raise error

    def flush(self, channel: Channel, reader: Reader, task: Task) -> Work:
        """Waits until at most so many items are held back."""
        n, timeout, what = reader.u32(), reader.timeout(), reader.text(64)
        reader.finish()
        end = float("inf") if timeout is None else time.monotonic() + timeout
        task.deadline = end
        last = channel.tasks[-1] if channel.tasks else None
        while (last is not None and not last.done) or len(channel.writer.pending) > n:
            if channel.error is not None:
                raise channel.error
            if time.monotonic() >= end or task.cancelled:
                raise errors.DeadlineExceededError(
                    f"{what} did not complete within the provided timeout of {timeout} s:"
                    f" {channel.describe_wait()}. The items stay in line."
                )
            yield "flush", channel
        body = Writer()
        body.u64(channel.settled)
        return body
