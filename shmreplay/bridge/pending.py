"""Requests of a client that are on their way, and what a writer needs to say again.

As long as a server process lives, it knows what it was told. After its death the next one knows
what is in the tables, and no more. So a client keeps, of each of its writers, the messages with
steps that items may still refer to and with items that are not known to be in their table: a
`WriterLog`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shmreplay import errors
from shmreplay.bridge.protocol import FAILED, STATE, Kind, decode_error
from shmreplay.bridge.wire import Reader, Writer

__all__ = ["Entry", "Pending", "State", "WriterLog", "read_written"]

State = tuple[int, int]
"""What became of an item, and its key."""

# Entries that are looked at, at least, before all of a log are.
_COMPACT_FROM = 32


class Pending:
    """A request on its way, and then its answer."""

    __slots__ = (
        "_answer",
        "again",
        "callback",
        "cancelled",
        "done",
        "entry",
        "error",
        "failures",
        "frames",
        "kind",
        "lent",
        "log",
        "nbytes",
        "reader",
        "sequence",
        "states",
    )

    def __init__(
        self, kind: Kind, frames: list[Any], callback: Callable[[Pending], None] | None = None
    ) -> None:
        """Takes the meta part and the parts that follow it.

        The callback is called by the link's thread with the answer.
        """
        self.kind = kind
        self.frames = frames
        self.nbytes = sum(map(len, frames))
        self.lent: list[Any] = []
        """Of frames that libzmq sends from where they are, what says when it has."""
        self.sequence = 0
        """0: it was not sent yet."""
        self.cancelled = False
        self.again = False
        """Made from a log: nobody waits for it."""
        self.reader: Reader | None = None
        self.error: BaseException | None = None
        self.states: list[State] = []
        """Of the items of a message of a writer."""
        self.failures: dict[int, errors.ReverbError] = {}
        """What was wrong with those that were refused, by their place in it."""
        self.log: WriterLog | None = None
        self.entry: Entry | None = None
        """Where it is noted, of a message of a writer."""
        self.callback = callback
        self.done = False
        """Whether the answer is there."""
        # Given back with the answer. Much less than an Event, and there is one a message.
        self._answer = threading.Lock()
        self._answer.acquire()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the answer; False if it is not there in time."""
        # Locks take no longer time, and no infinite one.
        most = -1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        if not self.done and self._answer.acquire(timeout=most):
            self._answer.release()  # others may wait as well
        return self.done

    def own(self) -> None:
        """Its caller has given it up, and may change its arrays: it is still sent, as it was.

        What libzmq has of it is another matter: see `Link.own`.
        """
        if not self.done:
            self.frames = [bytes(frame) for frame in self.frames]

    def settle(self, reader: Reader | None, error: BaseException | None) -> None:
        """The answer has come."""
        self.reader, self.error = reader, error
        self.frames = []
        callback, self.callback = self.callback, None  # it may refer to the writer
        if callback is not None:
            try:
                callback(self)
            except errors.ReverbError as failure:
                self.error = failure  # an answer that cannot be read
        if not self.done:
            self.done = True
            self._answer.release()

    def result(self) -> Reader:
        """The answer.

        Raises:
            ReverbError: The server could not do it.
        """
        if self.error is not None:
            raise self.error
        assert self.reader is not None
        return self.reader


class Entry:
    """A message of a writer that may have to be said again."""

    __slots__ = ("before", "ends", "first", "frames", "items", "order", "pending")

    def __init__(
        self, pending: Pending, first: int, items: int, before: list[int], ends: dict[int, int]
    ) -> None:
        """See `WriterLog.message`."""
        self.pending: Pending = pending
        self.frames = pending.frames
        self.first = first
        """Number of its first item."""
        self.items = items
        self.before = before
        """Values of each column before this message."""
        self.ends = ends
        """Column -> number after that of the last value in this message."""
        self.order = 0
        """Which came first, of all writers' messages."""


class WriterLog:
    """What the next server needs to know of one writer. Changed under the link's lock."""

    def __init__(self, number: int, keep: int, opened: Pending) -> None:
        """Begins a log.

        Args:
            number: Of the writer.
            keep: Steps within reach, of columns that say nothing else.
            opened: The message that opened it.
        """
        self.number = number
        self.opened = opened
        self.open_frames = list(opened.frames)
        self.keep = keep
        self.keeps: dict[int, int] = {}
        """Steps within reach, of columns that say something else."""
        self.settled = 0
        """Items up to this one are in their tables, or were refused."""
        self.refused: set[int] = set()
        """Items beyond it that were refused."""
        self.columns: list[bytes] = []
        self.configured: dict[tuple[Any, ...], bytes] = {}
        self.schemas: list[bytes] = []
        """Records as they are written in messages."""
        self.entries: list[Entry] = []
        self.failed: Callable[[BaseException], None] = lambda error: None
        """Called where saying it again fails."""
        self.item_failed: Callable[[errors.ReverbError], None] = lambda error: None
        """Called where an item that was held back is refused when it is said again."""
        self._compact_at = _COMPACT_FROM

    def header(self, first: int, body: Writer) -> Writer:
        """Begins a message of the writer whose first item has this number."""
        body.u32(self.number)
        body.u64(first)
        body.u64(self.settled)
        refused = sorted(self.refused)
        body.u32(len(refused))
        for item in refused:
            body.u64(item)
        return body

    def message(self, entry: Entry) -> None:
        """Notes a message that is sent now, and forgets what is not needed any more."""
        self.entries.append(entry)
        needed = self._needed()
        drop = 0
        while drop < len(self.entries) and not needed(self.entries[drop]):
            drop += 1
        del self.entries[:drop]
        if len(self.entries) >= self._compact_at:
            # A column that has a value once in a while keeps an old message, but not those since.
            self.entries = [entry for entry in self.entries if needed(entry)]
            self._compact_at = max(2 * len(self.entries), _COMPACT_FROM)

    def _needed(self) -> Callable[[Entry], bool]:
        waits = (
            e for e in self.entries if e.first + e.items - 1 > self.settled or not e.pending.done
        )
        oldest = next(waits, self.entries[-1])
        # An item refers to steps that were within reach when it was made.
        reach = [count - self.keeps.get(k, self.keep) for k, count in enumerate(oldest.before)]

        def needed(entry: Entry) -> bool:
            return (
                not entry.pending.done
                or (entry.items > 0 and entry.first + entry.items - 1 > self.settled)
                or any(k >= len(reach) or end > reach[k] for k, end in entry.ends.items())
            )

        return needed

    def answered(self, entry: Entry, settled: int) -> None:
        """A message was answered: items up to `settled` are settled, and `states` are known."""
        self.settled = max(self.settled, settled)
        failed = [entry.first + place for place in entry.pending.failures]
        if failed or self.refused:
            self.refused = {n for n in (*self.refused, *failed) if n > self.settled}

    # ------------------------------------------------------------------ saying it again

    def beginning(self) -> list[Pending]:
        """Messages that open the writer again, with its columns and structures."""
        opened = self.opened
        if opened.done:
            opened = self._made(Kind.WRITER_OPEN, self.open_frames)
        body = self.header(self.settled + 1, Writer())
        for record in (*self.configured.values(), *self.columns, *self.schemas):
            body.meta += record
        return [opened, self._made(Kind.WRITE, [bytes(body.meta)])]

    def again(self) -> Iterator[tuple[int, Pending]]:
        """Messages with their place among those of all writers."""
        for entry in self.entries:
            pending = entry.pending
            frames = [self._renewed(entry), *entry.frames[1:]]
            if pending.done:
                pending = self._made(Kind.WRITE, frames)
                pending.callback = functools.partial(self._check_items, entry)
            else:
                pending.frames, pending.nbytes = frames, sum(map(len, frames))
            yield entry.order, pending

    def ending(self) -> list[Pending]:
        """What the oldest of these messages may have changed back."""
        body = self.header(self.settled + 1, Writer())
        for record in self.configured.values():
            body.meta += record
        return [self._made(Kind.WRITE, [bytes(body.meta)])] if self.configured else []

    def _made(self, kind: Kind, frames: list[Any]) -> Pending:
        pending = Pending(kind, frames, self._check)
        pending.again = True
        return pending

    def _renewed(self, entry: Entry) -> bytes:
        """The meta part of a message, with what is settled by now."""
        old = Reader(entry.frames[0])
        old.take(20)
        old.take(8 * old.count(entry.items + 2**20, "items"))
        return bytes(self.header(entry.first, Writer()).meta) + bytes(old.rest())

    def _check(self, pending: Pending) -> None:
        if pending.error is not None:
            self.failed(pending.error)

    def _check_items(self, entry: Entry, pending: Pending) -> None:
        self._check(pending)
        if pending.reader is None:
            return
        for place, error in read_written(pending.reader, entry.items)[2].items():
            number = entry.first + place
            if number > self.settled and number not in self.refused:
                self.refused = {*self.refused, number}
                self.item_failed(error)


def read_written(
    reader: Reader, items: int
) -> tuple[int, list[State], dict[int, errors.ReverbError]]:
    """Takes an answer to WRITE apart.

    Returns:
        Up to where items are settled, what became of those in it, and what was wrong with those
        that were refused, by their place in it.

    Raises:
        ProtocolError: It does not speak of so many items.
    """
    settled, n = reader.u64(), reader.u32()
    if n != items:
        raise errors.ProtocolError(f"an answer about {n} items; {items} were sent")
    states: list[State] = []
    failures: dict[int, errors.ReverbError] = {}
    if reader.left == n * STATE.size:  # as where nothing was refused: that has an error behind it
        raw = bytes(reader.rest())
        if FAILED in raw[:: STATE.size]:
            raise errors.ProtocolError("an answer about an item that was refused does not say why")
        states += STATE.iter_unpack(raw)
    else:
        for place in range(n):
            states.append(reader.unpack(STATE))
            if states[-1][0] == FAILED:
                failures[place] = decode_error(reader)
    reader.finish()
    return settled, states, failures


def frames_of(body: Writer) -> list[Any]:
    """What follows the header of a message."""
    return [bytes(body.meta), *body.parts]


def in_order(logs: Sequence[WriterLog]) -> list[Pending]:
    """All that is to be said again, in an order in which it can be understood."""
    said = [pending for log in logs for pending in log.beginning()]
    again = sorted((place for log in logs for place in log.again()), key=lambda place: place[0])
    said += [pending for _, pending in again]
    return said + [pending for log in logs for pending in log.ending()]
