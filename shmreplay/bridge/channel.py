"""The server's side of a remote writer: a writer of the store, fed with steps and items."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay import errors, item_schema, limits
from shmreplay._native import Incoming
from shmreplay.bridge.protocol import (
    FAILED,
    GONE,
    HELD,
    INSERTED,
    ITEM,
    LISTED,
    REFERENCE,
    REPLACE,
    SQUEEZED,
    STATE,
    Op,
    encode_error,
    error_code,
    error_of_code,
)
from shmreplay.bridge.receipts import Receipt
from shmreplay.bridge.refusals import Refusals
from shmreplay.bridge.scheduler import Task, Work
from shmreplay.bridge.wire import Reader, Writer, checked_dtype, steps_of_a_run
from shmreplay.connection import Connection
from shmreplay.errors import ProtocolError
from shmreplay.item_schema import ItemSchema
from shmreplay.trajectory_writer import TrajectoryWriter

__all__ = ["Channel"]

# Where the code of an error stands: no error, the item that was to be replaced was not there.
_GONE_CODE: Final = 0xFF


_NAMED = struct.Struct("<HQ")
"""A column, and the number of its first value."""
_RUN = struct.Struct("<IB")
"""Steps, and whether each closes its step."""


class _BridgeWriter(TrajectoryWriter):
    """A writer that never waits and has no thread: the scheduler does both."""

    def window_grew(self) -> None:
        """The channel sees to what is held back."""

    def make_room(self, what: str, timeout: float | None) -> None:
        """The channel has looked: there is room."""


@dataclasses.dataclass(slots=True)
class _Item:
    """An item as it came."""

    number: int
    """Among the writer's items, from 1."""
    table: int
    schema: int
    priority: float
    """NaN: none was given."""
    timeout: float
    key: int
    """Of the item that gets these data; 0 of a new one."""
    references: list[tuple[int, int, int, int, int, int, list[int] | None]]


class Channel:
    """One remote writer."""

    def __init__(
        self,
        connection: Connection,
        number: int,
        keep: int,
        validate: bool,
        channels: Any,
        receipt: Receipt,
        refusals: Refusals,
        compress: str | None = None,
    ) -> None:
        """Opens its place in the store.

        Args:
            connection: To the store.
            number: By which its client names it.
            keep: Steps within reach.
            validate: Whether items are checked against their table's signature.
            channels: All channels of the client by number, for references between writers.
            receipt: Where its items are written down.
            refusals: Where those that are not in their table are.
            compress: As for `Client.trajectory_writer`.
        """
        if not 1 <= keep <= limits.BRIDGE_KEEP_ALIVE:
            raise errors.InvalidArgumentError(
                f"num_keep_alive_refs must be in [1, {limits.BRIDGE_KEEP_ALIVE}] for a remote"
                f" writer, got {keep}. Give a smaller number."
            )
        self.writer = _BridgeWriter(connection, keep, validate_items=validate, compress=compress)
        self._incoming = Incoming(number)
        self.tasks: deque[Task] = deque()
        """Messages that are not finished, the first at work."""
        self.error: errors.ReverbError | None = None
        self.draining = False
        """Whether a task inserts what was held back."""
        self.drain_task: Task | None = None
        self.receipt = receipt
        self.refusals = refusals
        self._last = 0
        """Number of the last item that was dealt with, or is held back."""
        # Column -> number of its next value, and by how much numbers are ahead of the writer's own.
        self._next: list[int] = []
        self._ahead: list[int] = []
        self._connection = connection
        self._number = number
        self._keep = keep
        # Steps within reach and longest block, by the column's path; None: chosen.
        self._keeps: dict[tuple[Any, ...], tuple[int, int | None]] = {}
        self._kept = 0
        self._schemas: list[ItemSchema] = []
        self._channels = channels
        self._names = {n: name for name, n in connection.tables.items()}

    # ------------------------------------------------------------------ a message

    def write(self, reader: Reader) -> Work:
        """Does what a WRITE message says, record by record. Its result is the answer."""
        if self.error is not None:
            raise self.error
        while self.refusals.full and not self.tasks[0].cancelled:
            yield "room", self
        states = Writer()
        first, settled = reader.u64(), reader.u64()
        refused = {
            reader.u64() for _ in range(reader.count(limits.BRIDGE_META_BYTES // 8, "items"))
        }
        if first > limits.BRIDGE_VALUES:
            raise ProtocolError(f"an item of number {first}")
        self.refusals.settled(settled)
        number = first
        # No item is one that was dealt with before, and numbers of values are the writer's own.
        fresh = number > max(settled, self.receipt.done) and not (
            refused or self.refusals.any or any(self._ahead)
        )
        while not reader.at_end:
            op = reader.peek()
            if fresh and op == Op.ITEM and (taken := self._items_alike(reader, number, states)):
                number += taken
                continue
            if op == Op.ITEM or op == Op.REPLACE:
                read = _read_item if op == Op.ITEM else _read_replacement
                item = read(reader, number)
                if number in self.refusals:
                    self._refused_before(item, states)
                elif number <= settled or number <= self.receipt.done or number in refused:
                    self._dealt_with(item, states)
                elif op == Op.REPLACE or self._may_wait(item):
                    yield from self._item(item, op == Op.REPLACE, states)
                else:
                    self._item_at_once(item, states)
                self._last = number
                number += 1
            else:
                self._other(reader.u8(), reader)
                fresh = fresh and not any(self._ahead)
        reader.finish()
        body = Writer()
        body.u64(self.settled)
        body.u32(number - first)
        body.meta += states.meta
        return body

    def _items_alike(self, reader: Reader, number: int, states: Writer) -> int:
        """Inserts items as long as they are like one before; their number."""
        inserted, reader.at = self._incoming.take(
            self.writer, reader.meta, reader.at, self.receipt.number, number
        )
        taken = len(inserted) // STATE.size
        if taken:
            states.meta += inserted
            self._last = number + taken - 1
        return taken

    @property
    def settled(self) -> int:
        """Items up to this one are in their tables, or were refused."""
        held_back = self.writer.pending_number()
        return self._last if held_back is None else held_back - 1

    def _dealt_with(self, item: _Item, states: Writer) -> None:
        """The process before this one inserted it, or refused it and said so."""
        key = self.receipt.key if item.number == self.receipt.done else 0
        states.meta += STATE.pack(INSERTED, key)

    def _refused_before(self, item: _Item, states: Writer) -> None:
        """The process before this one refused it, and its client may not know."""
        code = self.refusals.said_again(item.number, self.tasks[0].sequence)
        if code == _GONE_CODE:
            states.meta += STATE.pack(GONE, 0)
            return
        states.meta += STATE.pack(FAILED, 0)
        text = (
            "an item of this writer was refused, by a process of the server that died before it"
            " said why. It is not in the table; create it again if it is needed."
        )
        encode_error(states, error_of_code(code, text))

    def _refuse(self, item: _Item, error: errors.ReverbError, states: Writer) -> None:
        """It is not in its table: that is written down, then the next one may be."""
        self._note(item, error_code(error))
        states.meta += STATE.pack(FAILED, 0)
        encode_error(states, error)

    def _note(self, item: _Item, code: int) -> None:
        try:
            self.refusals.note(item.number, self.tasks[0].sequence, code)
        except errors.ReverbError as error:
            # After a death nobody would know of this item, if a later one was inserted.
            self.error = error
            raise

    def _other(self, op: int, reader: Reader) -> None:
        """Whatever fails here leaves the writer without what its client believes it has."""
        try:
            match op:
                case Op.COLUMN:
                    self._column(reader)
                case Op.ROWS:
                    self._rows(reader)
                case Op.SCHEMA:
                    self._schema(reader)
                case Op.EPISODE:
                    self.writer.finish_episode(bool(reader.u8()))
                case Op.CONFIGURE:
                    self._configure(reader)
                case _:
                    raise ProtocolError(f"a record of unknown kind {op}")
        except ProtocolError:
            raise
        except errors.ReverbError as error:
            self.error = error
            raise

    def _column(self, reader: Reader) -> None:
        number, path = reader.u16(), _path(reader.text())
        code, ndim = reader.u8(), reader.u8()
        code = reader.width(code)
        dtype = checked_dtype(code)
        if ndim > limits.MAX_DIMS:
            raise ProtocolError(f"a column of {ndim} dimensions")
        shape = tuple(reader.u64() for _ in range(ndim))
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > limits.BRIDGE_MESSAGE_BYTES:
            raise errors.InvalidArgumentError(
                f"column {path}: a value of shape {list(shape)} does not fit a message of at most"
                f" {limits.BRIDGE_MESSAGE_BYTES} bytes. Split it into several columns."
            )
        expected = len(self.writer.columns)
        if number < expected:  # said again
            known = self.writer.columns[number]
            if (known.path, known.code, known.shape) != (path, code, shape):
                raise ProtocolError(f"column {number} is {path} now and was {known.path}")
            return
        keep, rows = self._keeps.get(path, (self._keep, None))
        if path not in self._keeps:
            self._reserve(path, keep, rows)
        self.writer.configure_column(path, keep + steps_of_a_run(nbytes), rows)
        if number != expected or self.writer.declare_column(path, code, shape) != expected:
            raise ProtocolError(f"column {path} was declared twice")
        self._next.append(0)
        self._ahead.append(0)

    def _reserve(self, path: tuple[Any, ...], keep: int, rows: int | None) -> None:
        """Bounds the history, of which every step takes memory whether it is used or not."""
        kept = self._kept - self._keeps.get(path, (0, None))[0] + keep
        if kept > limits.BRIDGE_KEEP_ALIVE:
            raise errors.InvalidArgumentError(
                f"the columns of a remote writer keep {kept} steps within reach; at most"
                f" {limits.BRIDGE_KEEP_ALIVE}. Use a smaller num_keep_alive_refs."
            )
        self._kept = kept
        self._keeps[path] = (keep, rows)

    def _configure(self, reader: Reader) -> None:
        path, keep, rows = _path(reader.text()), reader.u32(), reader.u32()
        if not 1 <= keep <= limits.BRIDGE_KEEP_ALIVE or rows > keep:
            raise ProtocolError(f"column {path} configured to {keep} steps, {rows} rows")
        if path not in self._keeps and len(self._keeps) >= 2 * limits.MAX_COLUMNS:
            raise ProtocolError(f"a writer of more than {len(self._keeps)} columns")
        self._reserve(path, keep, rows or None)
        for column in self.writer.columns:
            if column.path == path:
                keep += steps_of_a_run(column.row_bytes)
                self.writer.configure_column(path, keep, rows or None)

    def _rows(self, reader: Reader) -> None:
        n_columns = reader.u16()
        if n_columns > limits.MAX_COLUMNS:
            raise ProtocolError(f"a step of {n_columns} columns")
        named = [reader.unpack(_NAMED) for _ in range(n_columns)]
        rows, close = reader.unpack(_RUN)
        if not 1 <= rows <= limits.BRIDGE_RUN_STEPS or close > 1:
            raise ProtocolError(f"{rows} steps in a record; 1 to {limits.BRIDGE_RUN_STEPS}")
        columns = self.writer.columns
        arrays: list[npt.NDArray[Any]] = []
        for number, _ in named:
            if number >= len(columns):
                raise ProtocolError("a step has columns that were not declared")
            column, array = columns[number], reader.array()
            if array.dtype != column.dtype or array.shape != (rows, *column.shape):
                raise ProtocolError(f"steps of column {column.path} do not fit it")
            arrays.append(array)
        numbers = tuple([number for number, _ in named])
        self._count(named, rows)
        self.writer.append_rows(numbers, arrays, rows, bool(close))

    def _count(self, named: list[tuple[int, int]], rows: int) -> None:
        """So many values come of these columns, of which each says the number of its first.

        Where some were left out, which a process before this one had, no item refers to them.
        """
        for number, first in named:
            skipped = first - self._next[number]
            if skipped < 0 or first > limits.BRIDGE_VALUES:
                raise ProtocolError(f"value {first} of column {number} after {self._next[number]}")
            self._ahead[number] += skipped
            self._next[number] = first + rows

    def _schema(self, reader: Reader) -> None:
        number, text = reader.u32(), reader.blob()
        if number < len(self._schemas):
            return  # said again
        if number != len(self._schemas):
            raise ProtocolError(f"structure {number} after {len(self._schemas)}")
        if len(self._schemas) >= limits.MAX_NESTING * limits.MAX_COLUMNS:
            raise ProtocolError(f"a writer of more than {len(self._schemas)} item structures")
        try:
            self._schemas.append(item_schema.decode(text))
        except errors.TableCorruptedError as error:
            raise ProtocolError(str(error)) from None

    # ------------------------------------------------------------------ items

    def _may_wait(self, item: _Item) -> bool:
        return (
            not math.isnan(item.timeout) or len(self.writer.pending) >= limits.WRITER_WINDOW_ITEMS
        )

    def _item_at_once(self, item: _Item, states: Writer) -> None:
        """As `_item`, of a new item that never waits: most are, and generators take their time."""
        try:
            name = self._name(item)
            trajectory = self._trajectory(item)
            key = self._create(item, name, trajectory)
            self._incoming.learn(self.writer, item.table, item.schema, trajectory)
        except ProtocolError:
            raise
        except errors.ReverbError as error:
            self._refuse(item, error, states)
        else:
            states.meta += STATE.pack(HELD if key is None else INSERTED, key or 0)

    def _item(self, item: _Item, replace: bool, states: Writer) -> Work:
        """Does what is to be done with an item, and notes what became of it."""
        try:
            name = self._name(item)
            trajectory = self._trajectory(item)
            if replace:
                there = yield from self._replace(item, name, trajectory)
                state, key = (INSERTED, item.key) if there else (GONE, 0)
            elif math.isnan(item.timeout):
                yield from self._window()
                made = self._create(item, name, trajectory)
                state, key = (HELD, 0) if made is None else (INSERTED, made)
            else:
                key = yield from self._insert(item, name, trajectory)
                state = INSERTED
        except ProtocolError:
            raise
        except errors.ReverbError as error:
            self._refuse(item, error, states)
        else:
            if state == GONE:
                self._note(item, _GONE_CODE)
            states.meta += STATE.pack(state, key)

    def _name(self, item: _Item) -> str:
        name = self._names.get(item.table)
        if name is None:
            raise ProtocolError(f"an item for table {item.table}, which is not there")
        return name

    def _window(self) -> Work:
        """Waits where as many items as may be are held back, unless cancelled."""
        writer, task = self.writer, self.tasks[0]
        while len(writer.pending) >= limits.WRITER_WINDOW_ITEMS:
            before = len(writer.pending)
            writer.insert_pending()
            if len(writer.pending) == before:
                if task.cancelled:
                    raise errors.DeadlineExceededError(
                        f"create_item did not complete in time: {self.describe_wait()}. Nothing was"
                        " created."
                    )
                yield self.held_back()

    def _create(self, item: _Item, name: str, trajectory: Any) -> int | None:
        """Inserts an item, or holds it back (None)."""
        priority = None if math.isnan(item.priority) else item.priority
        self.writer.session.use_receipt(self.receipt.number, item.number)
        return self.writer.create_item(name, priority, trajectory)

    def _replace(self, item: _Item, name: str, trajectory: Any) -> Work:
        """Gives an item other data. Its result says whether it is there."""
        while True:
            try:
                return self.writer.replace_item(name, item.key, trajectory, 0.0)
            except errors.DeadlineExceededError:
                if self.tasks[0].cancelled:
                    raise
            yield item.table, "events"

    def _insert(self, item: _Item, name: str, trajectory: Any) -> Work:
        """Inserts an item as the limiter allows, within its time."""
        task, end = self.tasks[0], time.monotonic() + item.timeout
        describe = self._connection.describe_wait(item.table, "insert")
        while True:
            try:
                self.writer.session.use_receipt(self.receipt.number, item.number)
                return self.writer.insert_now(
                    item.table, name, item.priority, trajectory, 0.0, describe
                )
            except errors.DeadlineExceededError:
                if time.monotonic() >= end or task.cancelled:
                    raise errors.DeadlineExceededError(
                        f"0 items inserted within {item.timeout} s, the next was held back:"
                        f" {describe()}"
                    ) from None
            task.deadline = end
            yield item.table, "insert"

    def _trajectory(self, item: _Item) -> Any:
        if item.schema >= len(self._schemas):
            raise ProtocolError(f"an item of structure {item.schema}, which was not declared")
        schema = self._schemas[item.schema]
        if len(item.references) != len(schema.columns):
            raise ProtocolError("an item has another number of columns than its structure")
        columns = []
        for owner, column, flags, length, first, stride, values in item.references:
            channel = self if owner == self._number else self._channels.get(owner)
            if channel is None:
                raise errors.WriterClosedError(
                    "Got an item that refers to steps of a closed writer; expected open ones."
                    " Make the item before."
                )
            columns.append(channel.column_at(column, flags, first, stride, length, values))
        return schema.unflatten(columns)

    def column_at(
        self,
        column: int,
        flags: int,
        first: int,
        stride: int,
        length: int,
        values: list[int] | None,
    ) -> Any:
        """A column of an item, of values as the client numbers them."""
        ahead = self._ahead[column] if column < len(self._ahead) else 0
        if ahead:
            first -= ahead
            values = None if values is None else [value - ahead for value in values]
        return self.writer.column_at(column, bool(flags & SQUEEZED), first, stride, length, values)

    def held_back(self) -> Hashable:
        """What the first item that is held back waits for."""
        return self.writer.pending_table(), "insert"

    def drain(self) -> Work:
        """Inserts what was held back, in order, as the limiter allows."""
        while self.writer.pending:
            if self.writer.insert_pending() is not None:
                yield self.held_back()

    def describe_wait(self) -> str:
        """What its items that are held back wait for."""
        return self.writer._describe_wait()

    def close(self) -> int:
        """Gives the place back; the number of items that were held back and are lost."""
        return self.writer.shut()


def _path(text: str) -> tuple[Any, ...]:
    try:
        path = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a path is not JSON: {error}") from None
    plain = isinstance(path, list) and len(path) <= limits.MAX_NESTING
    if not plain or not all(isinstance(key, str | int | float) for key in path):
        raise ProtocolError(f"the path {text[:80]!r} is not a list of keys")
    return tuple(path)


def _read_item(reader: Reader, number: int) -> _Item:
    _, table, schema, priority, timeout, n = reader.unpack(ITEM)
    return _Item(number, table, schema, priority, timeout, 0, _read_references(reader, n))


def _read_replacement(reader: Reader, number: int) -> _Item:
    _, table, schema, key, n = reader.unpack(REPLACE)
    return _Item(number, table, schema, math.nan, math.nan, key, _read_references(reader, n))


def _read_references(
    reader: Reader, n: int
) -> list[tuple[int, int, int, int, int, int, list[int] | None]]:
    if n > limits.MAX_COLUMNS:
        raise ProtocolError(f"an item of {n} columns")
    references = []
    for _ in range(n):
        owner, column, flags, length, first, stride = reader.unpack(REFERENCE)
        if flags > SQUEEZED | LISTED or not 1 <= length <= limits.BRIDGE_KEEP_ALIVE:
            raise ProtocolError(f"a reference of {length} values, flags {flags}")
        values: list[int] | None = None
        if flags & LISTED:
            values = np.frombuffer(reader.take(8 * length), "<i8").tolist()
        references.append((owner, column, flags, length, first, stride, values))
    return references
