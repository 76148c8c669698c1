"""What a remote writer has to say, until it is sent: its message, and the steps before that."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmreplay import errors, limits
from shmreplay.bridge.pending import Entry, Pending, WriterLog, frames_of
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.wire import Writer

if TYPE_CHECKING:
    from shmreplay.bridge.client import RemoteConnection

__all__ = ["Run", "Stream"]


class Stream:
    """What a writer has to say, on its way to the server. Used under the writer's lock."""

    def __init__(
        self, connection: RemoteConnection, keep: int, validate: bool, compress: str | None
    ) -> None:
        """Opens the writer at the server.

        Args:
            connection: To the server.
            keep: Steps within reach.
            validate: Whether items are checked against their table's signature.
            compress: As for `Client.trajectory_writer`.
        """
        self.connection = connection
        self.link = connection.link
        self.number = connection.writer_number()
        self.body = Writer()
        self.begun = 0
        self.items = 0
        self.created = 0
        """Items of all messages so far."""
        self.last: Pending | None = None
        """The last message."""
        self.columns = 0
        self.counts: list[int] = []
        """Values of each column in all messages so far."""
        self.before: list[int] = []
        self.ends: dict[int, int] = {}
        self.schemas: dict[int, int] = {}
        self.keeps: dict[tuple[Any, ...], int] = {}
        self.error: errors.ReverbError | None = None
        self.item_error: errors.ReverbError | None = None
        self.in_flight = 0
        self.counting = threading.Lock()
        self.asked = False
        """Whether the link's thread was asked to send what there is."""
        self.missed = False
        """Whether it could not: whoever has the lock does, before or after giving it back."""
        self.closed = False
        body = Writer()
        body.u32(self.number)
        body.u32(keep)
        body.u8((1 if validate else 0) | {None: 0, "lz4": 2, "none": 4}[compress])
        self.log = WriterLog(self.number, keep, Pending(Kind.WRITER_OPEN, frames_of(body)))
        # The link's log must not keep a writer that nobody else refers to.
        fail = weakref.WeakMethod(self.fail)
        self.log.failed = lambda error: (fail() or _ignore)(error)
        fail_item = weakref.WeakMethod(self.fail_item)
        self.log.item_failed = lambda error: (fail_item() or _ignore)(error)
        self.begin()
        try:
            self.link.answer(self.link.open_writer(self.log))
        except BaseException:
            self.link.forget_writer(self.log)
            raise

    def begin(self) -> None:
        """A new message, with nothing in it."""
        self.body = self.log.header(self.created + 1, self.connection.body())
        self.begun = len(self.body.meta)
        self.items = 0
        self.before, self.ends = list(self.counts), {}

    def fail(self, error: BaseException) -> None:
        """The writer is of no use any more."""
        self.error = _as_remote(error)

    def fail_item(self, error: errors.ReverbError) -> None:
        """An item was refused; of several, the first is told."""
        self.item_error = self.item_error or error

    def count(self, messages: int) -> None:
        """So many more are on their way. The link's thread counts too."""
        with self.counting:
            self.in_flight += messages

    @property
    def empty(self) -> bool:
        """Whether nothing is to be sent."""
        return len(self.body.meta) == self.begun

    @property
    def nbytes(self) -> int:
        """Bytes of the message so far."""
        return len(self.body.meta) + self.body.nbytes

    @property
    def worth_sending(self) -> bool:
        """Whether what there is goes now: a message costs more than many items in it.

        With nothing on its way it does, so that nobody waits; with little on its way once it is as
        much as pays; else when it is several large steps, or an answer comes.
        """
        in_flight = self.in_flight
        if in_flight < limits.BRIDGE_PIPELINE:
            return in_flight == 0 or self.pays
        return self.nbytes >= limits.BRIDGE_GATHER_BYTES

    @property
    def pays(self) -> bool:
        """Whether it is as much as is worth a message of its own."""
        return self.items >= limits.BRIDGE_GATHER_ITEMS or self.nbytes >= limits.BRIDGE_RUN_BYTES

    def send(self, callback: Callable[[Pending], None], wait: bool) -> Pending | None:
        """Sends what there is."""
        if self.empty:
            return None
        body, first, items = self.body, self.created + 1, self.items
        before, ends = self.before, self.ends
        self.created += items
        self.begin()

        def note(pending: Pending) -> tuple[WriterLog, Entry]:
            return self.log, Entry(pending, first, items, before, ends)

        self.last = self.link.post(Kind.WRITE, body, callback, wait=wait, note=note)
        return self.last

    def close(self) -> Pending | None:
        """Closes the writer at the server, where it still is; what will be answered."""
        if self.closed or self.link.lost is not None or self.link.forked:
            return None
        self.closed = True
        body = Writer()
        body.u32(self.number)
        log, link = self.log, self.link
        return link.post(Kind.WRITER_CLOSE, body, lambda _: link.forget_writer(log), wait=False)

    def __del__(self) -> None:
        """A writer that nobody refers to any more gives its place at the server back."""
        if hasattr(self, "error"):
            try:
                self.close()
            except errors.ReverbError:
                return  # the link was lost just now, and with it the place


class Run:
    """Steps of the same columns that are not in a message yet."""

    def __init__(self, numbers: tuple[int, ...], close: bool, most: int) -> None:
        """Has no step yet.

        Args:
            numbers: Of the columns.
            close: Whether each closes its step.
            most: Steps that it may have.
        """
        self.numbers = numbers
        self.buffers: list[Any] = [bytearray() for _ in numbers]
        self.close = close
        self.most = most
        self.room = most
        """Steps that may still come."""

    @property
    def count(self) -> int:
        """Steps."""
        return self.most - self.room


def _as_remote(error: BaseException) -> errors.ReverbError:
    if isinstance(error, errors.ReverbError):
        return error
    return errors.ReverbError(str(error))


def _ignore(error: BaseException) -> None:
    """The writer is gone."""
