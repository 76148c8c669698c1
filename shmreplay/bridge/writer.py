"""The remote trajectory writer: a local one, on a private store, whose steps and items are sent on.

Everything that `TrajectoryWriter` checks and says, it checks and says here before anything is sent.
Each step crosses once: the server has a writer of its own that is fed with the same steps in the
same order, and items name them by column and number.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import zmq

from shmreplay import errors, limits
from shmreplay._native import append_elsewhere, stage_item, stage_step, step_bytes
from shmreplay.binding_support import table_not_found
from shmreplay.bridge.pending import Pending
from shmreplay.bridge.protocol import (
    INSERTED,
    ITEM,
    LISTED,
    REFERENCE,
    REPLACE,
    SQUEEZED,
    Kind,
    Op,
)
from shmreplay.bridge.wire import Writer, steps_of_a_run
from shmreplay.bridge.writer_stream import Run, Stream
from shmreplay.table_checks import checked_compress
from shmreplay.trajectory_writer import TrajectoryWriter

if TYPE_CHECKING:
    from shmreplay.bridge.client import RemoteConnection

__all__ = ["RemoteTrajectoryWriter"]

_NAN: Final = float("nan")
# Within so many seconds most messages are answered.
_SOON_S: Final = 0.05


class RemoteTrajectoryWriter(TrajectoryWriter):
    """As `TrajectoryWriter`, at a server on another host."""

    in_native_code = False

    def __init__(
        self,
        connection: RemoteConnection,
        num_keep_alive_refs: int,
        *,
        validate_items: bool = True,
        confirm: bool = True,
        compress: str | None = None,
    ) -> None:
        """See `Client.trajectory_writer`."""
        asked = checked_compress(compress)
        # What waits here to be sent is not worth it.
        super().__init__(
            connection, num_keep_alive_refs, validate_items=validate_items, compress="none"
        )
        self._remote = connection
        self._confirm = confirm
        # Held while steps and items get their order, never while waiting for an answer.
        self._order = threading.RLock()
        self._run: Run | None = None
        # Columns of the last step, where it was too large to wait for others.
        self._alone: tuple[int, ...] | None = None
        self._items = bytearray()
        self._stream = Stream(connection, num_keep_alive_refs, validate_items, asked)

    # ------------------------------------------------------------------ steps

    def append(self, data: Any, *, partial_step: bool = False) -> None:
        """As `TrajectoryWriter.append`; the step is sent with the next item, or with others.

        Raises:
            ArenaFullError: The server had no room for an earlier step. The writer is of no use any
                more.
        """
        stream = self._stream
        try:
            with self._order:
                if stream.error is not None:
                    self._raise_remote()
                if partial_step or not self._append_again(data):
                    super().append(data, partial_step=partial_step)
                    self._note_row(not partial_step)
        finally:
            if stream.missed:
                self._push_what_waits()

    def _append_again(self, data: Any) -> bool:
        """Appends a step that is just like the last. False where it is not: nothing was done."""
        run = self._run
        if run is not None:
            if run.room <= 1 or not run.close:
                return False
            if not stage_step(self, run.numbers, run.buffers, data):
                return False
            run.room -= 1
            return True
        numbers = self._alone
        if numbers is None:
            return False
        views = step_bytes(self, numbers, data)
        if views is None:
            return False
        # In memory of libzmq's own: nobody has to be told that it was sent.
        buffers = [zmq.Frame(view, copy=True) for view in views]
        if not append_elsewhere(self, numbers):
            return False
        run = self._run = Run(numbers, True, 1)
        run.buffers = buffers
        self._end_run(run)
        return True

    def place_close(self, keep: bool) -> None:
        """Ends a step that was written in place."""
        try:
            with self._order:
                placed = self.in_place
                super().place_close(keep)
                if placed and keep:
                    self._note_row(True)
        finally:
            self._push_what_waits()

    def _note_row(self, close: bool) -> None:
        """A row was appended: it joins the run of rows of the same columns."""
        numbers, run = self.row_columns or (), self._run
        if run is None or run.numbers != numbers or not (run.close and close):
            self._encode_run()
            nbytes = sum(self.columns[k].row_bytes for k in numbers)
            run = self._run = Run(numbers, close, steps_of_a_run(nbytes))
            self._alone = numbers if run.most == 1 and close and numbers else None
        if run.most == 1 and numbers:
            run.buffers = [zmq.Frame(view, copy=True) for view in self.row_views()]
        elif numbers:
            self.stage_row(run.buffers)
        if run.room <= 1 or not close:
            self._end_run(run)
        else:
            run.room -= 1

    def _end_run(self, run: Run) -> None:
        """The last step of a run was appended."""
        run.room -= 1
        self._encode_run()
        stream = self._stream
        if stream.nbytes >= limits.BRIDGE_RUN_BYTES and stream.worth_sending:
            self._push()

    def _encode_run(self) -> None:
        """Puts the run into the message, and after it the items that were created meanwhile.

        The steps that they refer to may by then be older by a run than the writer keeps within
        reach: the server keeps as many more.
        """
        run, self._run = self._run, None
        body = self._stream.body
        if run is not None:
            self._declare_columns()
            stream = self._stream
            body.u8(Op.ROWS)
            body.u16(len(run.numbers))
            steps = run.count
            for number in run.numbers:
                body.u16(number)
                body.u64(stream.counts[number])
                stream.counts[number] += steps
                stream.ends[number] = stream.counts[number]
            body.u32(steps)
            body.u8(1 if run.close else 0)
            for number, buffer in zip(run.numbers, run.buffers, strict=True):
                column = self.columns[number]
                body.raw(column.code, (steps, *column.shape), buffer)
        body.meta += self._items
        self._items.clear()

    def _declare_columns(self) -> None:
        stream = self._stream
        for column in self.columns[stream.columns :]:
            record = Writer()
            record.u8(Op.COLUMN)
            record.u16(stream.columns)
            record.text(_path_text(column.path))
            record.u8(column.code & 0xFF)
            record.u8(len(column.shape))
            if column.code > 0xFF:  # text
                record.u32(column.code >> 8)
            for size in column.shape:
                record.u64(size)
            stream.body.meta += record.meta
            stream.log.columns.append(bytes(record.meta))
            stream.columns += 1
            stream.counts.append(0)
            stream.before.append(0)
            keep = stream.keeps.get(column.path)
            if keep is not None:
                stream.log.keeps[column.number] = keep

    # ------------------------------------------------------------------ items

    def create_item(
        self,
        table: str,
        priority: float | None,
        trajectory: Any,
        timeout: float | None = None,
    ) -> int | None:
        """As `TrajectoryWriter.create_item`.

        With a timeout, it waits for what the writer sent before.

        Returns:
            The item's key; None where the limiter holds it back, and of a writer that was made
            with `confirm=False`: its items are on their way, and `flush` waits for them.
        """
        if (
            timeout is None
            and not self._confirm
            and self._create_again(table, priority, trajectory)
        ):
            return None
        number = self.tables.get(table) if isinstance(table, str) else None
        if number is None:
            raise table_not_found(table, self.tables, for_item=True)
        seconds = limits.checked_timeout(timeout)
        try:
            with self._turn(limits.WRITER_WINDOW_ITEMS - 1, seconds, "create_item") as left:
                self._encode_item(number, table, priority, trajectory, _NAN)
                if self._confirm:
                    pending = self._push()
                else:
                    self._push_soon()
        finally:
            self._push_what_waits()
        return self._key_of(pending, left, cancel=True) if self._confirm else None

    def _create_again(self, table: str, priority: float | None, trajectory: Any) -> bool:
        """Creates an item that is like one before. False where it is not: nothing was done."""
        stream = self._stream
        try:
            with self._order:
                if stream.error is not None or stream.item_error is not None:
                    return False
                if not stage_item(
                    self, self._items, stream.number, stream.schemas, table, priority, trajectory
                ):
                    return False
                stream.items += 1
                # What the link's thread was asked to send waits for it until it pays.
                if not stream.asked or stream.items >= limits.BRIDGE_GATHER_ITEMS:
                    self._push_soon()
                return True
        finally:
            if stream.missed:
                self._push_what_waits()

    def replace_data(
        self, t: int, table: str, key: int, trajectory: Any, timeout: float | None = None
    ) -> bool | int:
        """Gives the item of this key other data. False where it is gone."""
        try:
            with self._turn(2**32 - 1, timeout, "replace_item") as left:
                self._encode_replacement(t, table, key, trajectory)
                pending = self._push(awaited=True)
        finally:
            self._push_what_waits()
        return self._key_of(pending, left, cancel=True) is not None

    def insert_now(
        self,
        t: int,
        table: str,
        priority: float | None,
        trajectory: Any,
        timeout: float | None,
        describe: Callable[[], str],
    ) -> int:
        """Inserts an item, waiting as the limiter demands. Gives the key."""
        # The client has checked it, and made NaN of None.
        given = None if priority is None or math.isnan(priority) else priority
        try:
            with self._order:
                seconds = math.inf if timeout is None else timeout
                self._encode_item(t, table, given, trajectory, seconds)
                pending = self._push()
        finally:
            self._push_what_waits()
        key = self._key_of(pending, timeout)
        return key or 0

    def _encode_item(
        self, number: int, table: str, priority: float | None, trajectory: Any, seconds: float
    ) -> None:
        value, schema, references = self._references(number, table, priority, trajectory)
        self._items += ITEM.pack(Op.ITEM, number, schema, value, seconds, len(references))
        self._encode_references(references)

    def _encode_replacement(self, number: int, table: str, key: int, trajectory: Any) -> None:
        _, schema, references = self._references(number, table, None, trajectory)
        self._items += REPLACE.pack(Op.REPLACE, number, schema, key, len(references))
        self._encode_references(references)

    def _references(
        self, number: int, table: str, priority: float | None, trajectory: Any
    ) -> tuple[float, int, list[Any]]:
        """Priority (NaN for None), structure as the server knows it, reference of each column."""
        self._raise_remote()
        value, schema, references = self.item_references(number, table, priority, trajectory)
        owner: Any
        for reference in references:
            owner = reference[0]
            if owner is not self:
                owner.push()  # before this item is sent, its steps are
        return value, self._schema_number(schema), references

    def _encode_references(self, references: list[Any]) -> None:
        for owner, column, squeezed, first, stride, length, values in references:
            flags = (SQUEEZED if squeezed else 0) | (LISTED if values is not None else 0)
            number = owner.stream_number
            self._items += REFERENCE.pack(number, column, flags, length, first, stride)
            if values is not None:
                self._items += struct.pack(f"<{len(values)}q", *values)
        self._stream.items += 1

    @property
    def stream_number(self) -> int:
        """By which messages name this writer."""
        return self._stream.number

    def _schema_number(self, number: int) -> int:
        """Number by which the server knows a structure of the private store."""
        stream = self._stream
        known = stream.schemas.get(number)
        if known is None:
            known = stream.schemas[number] = len(stream.schemas)
            record = Writer()
            record.u8(Op.SCHEMA)
            record.u32(known)
            record.text(self._remote.native.schema_text(number))
            stream.body.meta += record.meta
            stream.log.schemas.append(bytes(record.meta))
        return known

    def _key_of(
        self, pending: Pending | None, timeout: float | None = None, *, cancel: bool = False
    ) -> int | None:
        """The key of the last item of a message, which was answered."""
        assert pending is not None
        self._remote.link.answer(pending, timeout, cancel=cancel)
        last = len(pending.states) - 1
        state, key = pending.states[last]
        for place, failed in pending.failures.items():
            if place == last:
                raise failed
            self._stream.item_error = self._stream.item_error or failed
        # 0: the item was inserted by a server that died, and another one after it.
        return key if state == INSERTED else None

    # ------------------------------------------------------------------ sending

    def push(self) -> tuple[Pending | None, int]:
        """Sends what was not sent yet. Gives the last message, and how many items were sent."""
        with self._order:
            self._push()
            return self._stream.last, self._stream.created

    def _push(self, wait: bool = True, awaited: bool = False) -> Pending | None:
        """Sends what there is; of `awaited`, the caller reads the answer."""
        stream = self._stream
        stream.asked = stream.missed = False
        self._encode_run()
        awaited = awaited or self._confirm
        sent = stream.send(lambda pending: self._answered(pending, awaited), wait)
        stream.count(0 if sent is None else 1)  # if it was answered already, back to what it was
        return sent

    def _push_soon(self) -> None:
        """Sends once it pays; what is the first on its way, as soon as the link's thread runs.

        What is created until then is in the same message.
        """
        stream = self._stream
        if stream.in_flight == 0 and not stream.missed and not stream.pays:
            if not stream.asked:
                stream.asked = True
                stream.link.soon(self._push_asked)
        elif stream.worth_sending:
            self._push()

    def _push_asked(self) -> None:
        """On the link's thread: sends what there is, or leaves it to whoever has the lock."""
        stream = self._stream
        stream.missed = True
        if self._order.acquire(blocking=False):
            try:
                if stream.error is None and not self.closed:
                    self._push(wait=False)
            except errors.ReverbError as error:
                stream.fail(error)
            finally:
                stream.asked = stream.missed = False
                self._order.release()

    def _push_what_waits(self) -> None:
        """After each use of the lock: what the link's thread found it held for is sent now.

        After one that failed as well: nobody else would.
        """
        stream = self._stream
        while stream.missed and stream.error is None and not self.closed:
            with self._order:
                stream.asked = stream.missed = False  # before it looks: that thread may come again
                if stream.items and stream.worth_sending:
                    self._push()

    def _answered(self, pending: Pending, awaited: bool) -> None:
        """A message was answered, on the link's thread: remember what failed, send what waits."""
        stream = self._stream
        stream.count(-1)
        if pending.error is not None:
            stream.fail(pending.error)
        elif not awaited:
            for error in pending.failures.values():
                stream.item_error = stream.item_error or error
        if not stream.items or not stream.worth_sending:
            return
        stream.missed = True  # whoever has the lock looks again after giving it back
        if self._order.acquire(blocking=False):
            try:
                stream.missed = False
                if stream.items and stream.error is None:
                    self._push(wait=False)
            finally:
                self._order.release()

    def _raise_remote(self) -> None:
        """Raises what went wrong at the server: for one item once, for the writer each time."""
        stream = self._stream
        if stream.error is not None:
            raise type(stream.error)(
                f"{stream.error} This writer's steps did not all arrive; make a new one."
            )
        error, stream.item_error = stream.item_error, None
        if error is not None:
            raise error

    # ------------------------------------------------------------------ waiting, episodes, closing

    @contextmanager
    def _turn(self, n: int, timeout_s: float | None, what: str) -> Iterator[float | None]:
        """Holds the writer's order, for one message. Gives the seconds left.

        With a timeout, no earlier message holds up the one that comes now: where one does to the
        end, nothing is sent.

        Args:
            n: Items that may be held back at the server.
            timeout_s: Seconds; None: the message waits in line.
            what: The call.

        Raises:
            DeadlineExceededError: Earlier messages are not dealt with, or more items held back.
        """
        if timeout_s is None:
            with self._order:
                yield None
            return
        end, left = time.monotonic() + timeout_s, timeout_s
        while True:
            self._wait_for(n, left, what)
            with self._order:
                left = max(end - time.monotonic(), 0.0)
                if self._stream.in_flight == 0:
                    yield left
                    return
            if left == 0.0:
                raise errors.DeadlineExceededError(
                    f"{what} did not complete within the provided timeout of {timeout_s} s: other "
                    "calls of this writer are at work, and must end first. Nothing was changed. "
                    "Give a longer timeout."
                )

    def _wait_for(self, n: int, timeout_s: float | None, what: str) -> None:
        """Waits until at most n items are held back at the server or on their way to it.

        Mostly the answer to the last message says that none is. Where it does not, or takes long,
        the server is asked.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if timeout_s is not None:
            self._remote.link.wait_for_room(timeout_s)
        last, created = self.push()
        self._raise_remote()
        if last is not None and not last.done:
            last.wait(min(_SOON_S, max(end - time.monotonic(), 0.0)))
            if last.done and last.error is None and self._stream.log.settled >= created:
                self._raise_remote()
                return
        body = Writer()
        body.u32(self._stream.number)
        body.u32(min(n, 2**32 - 1))
        body.timeout(round(max(end - time.monotonic(), 0.0), 3))  # as the error says it
        body.text(what)
        reader = self._remote.link.call(Kind.FLUSH, body, timeout_s)
        self._remote.link.settled(self._stream.log, reader.u64())
        self._raise_remote()

    def finish_episode(self, clear_buffers: bool) -> None:
        """A new episode, step 0."""
        try:
            with self._order:
                self._encode_run()
                super().finish_episode(clear_buffers)
                self._stream.body.u8(Op.EPISODE)
                self._stream.body.u8(1 if clear_buffers else 0)
        finally:
            self._push_what_waits()

    def configure_column(self, path: tuple[Any, ...], keep: int, max_rows: int | None) -> None:
        """Sets a column's window and the longest block."""
        try:
            with self._order:
                self._encode_run()
                self._declare_columns()
                super().configure_column(path, keep, max_rows)
                record, stream = Writer(), self._stream
                record.u8(Op.CONFIGURE)
                record.text(_path_text(path))
                record.u32(keep)
                record.u32(max_rows or 0)
                stream.body.meta += record.meta
                stream.log.configured[path] = bytes(record.meta)
                stream.keeps[path] = keep
                for column in self.columns:
                    if column.path == path:
                        stream.log.keeps[column.number] = keep
        finally:
            self._push_what_waits()

    def shut(self) -> int:
        """Closes the writer; the number of items that were held back and are lost."""
        if self._remote.store.forked or self.closed:
            return super().shut()
        with self._order:
            usable = self._stream.error is None and not self._remote.unusable
            if usable and not self.in_place:
                self._push()
            super().shut()
            pending = self._stream.close()
        if pending is None or not pending.wait(limits.BRIDGE_CLOSE_S) or pending.error is not None:
            return 0
        return pending.result().u32()


def _path_text(path: tuple[Any, ...]) -> str:
    return json.dumps(list(path), separators=(",", ":"), default=str)
