"""One step as an item in each of some tables: what `Client.insert` does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, tree
from shmreplay.binding_support import as_array, as_contiguous, as_plain, bad_priority
from shmreplay.connection import Connection
from shmreplay.item_schema import Leaf
from shmreplay.spec import DTYPE_CODES, dtype_code, is_text
from shmreplay.trajectory_writer import TrajectoryWriter

__all__ = [
    "Inserter",
    "batch_columns",
    "check_priorities",
    "checked_priorities",
    "priorities_of_batch",
]

_Target = tuple[int, str, float]
"""(number of the table, its name, priority: NaN for the largest that it has seen)."""


class _StepInserter:
    """A writer for steps of one make, and what is known of them."""

    __slots__ = ("fits", "schema", "writer")

    def __init__(self, writer: TrajectoryWriter) -> None:
        self.writer = writer
        self.schema = -1
        self.fits: set[int] = set()
        """Tables whose signature such steps fit."""


class Inserter:
    """Inserts steps over one connection. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        open_writer: Callable[[Connection, int], TrajectoryWriter],
        closed: bool = False,
    ) -> None:
        """Makes one.

        Args:
            connection: To the tables.
            open_writer: Makes a writer, from how many steps to keep within reach.
            closed: Keep no writer for the next insert.
        """
        self.connection = connection
        self._open_writer = open_writer
        self._idle: list[_StepInserter] = []  # those used last at the end
        self._lock = threading.Lock()
        self._closed = closed

    def close(self) -> None:
        """Closes the writers. Idempotent. Those at work are closed when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.writer.close()

    def insert(
        self, data: Any, priorities: Mapping[str, float | None], seconds: float | None
    ) -> None:
        """See `Client.insert`."""
        if not isinstance(priorities, Mapping) or not priorities:
            raise errors.InvalidArgumentError(
                "priorities must be a non-empty dict of table name -> priority, got "
                f"{priorities!r}. Give for instance {{'table': 1.0}}."
            )
        targets = [self._target(table, priority) for table, priority in priorities.items()]
        each = self._append_again(data)
        if each is None:
            self._insert_new(data, targets, seconds)
            return
        writer = each.writer

        def insert_one(target: _Target, left: float | None, describe: Callable[[], str]) -> None:
            writer.insert_newest(target[0], each.schema, target[2], left, describe)

        if len(targets) > 1 or targets[0][0] not in each.fits:
            self._check_signatures(each, data, targets)
        self._insert_each(writer, targets, seconds, insert_one)
        self._give(each)

    def _target(self, table: str, priority: Any) -> _Target:
        connection = self.connection
        number = connection.number(table)
        if type(priority) is float:
            if not connection.native.priority_ok(number, priority):
                raise bad_priority(table, priority)
            return number, table, priority
        if priority is None:
            return number, table, math.nan  # which the core takes for the largest seen
        if np.ndim(priority) > 0:
            raise errors.ArgumentTypeError(
                f"the priority for table {table!r} must be one number, got {priority!r:.80}. Use "
                "insert_batch for many items."
            )
        values = checked_priorities(priority, 1)
        check_priorities(connection, table, number, values)
        return number, table, float(values[0])

    # ------------------------------------------------------------------ steps like one before

    def _append_again(self, data: Any) -> _StepInserter | None:
        """A writer that has appended the data; None where it is not just like the data before."""
        for each in reversed(self._idle):
            with self._lock:
                if each not in self._idle:  # another thread was faster
                    continue
                self._idle.remove(each)
            try:
                if each.schema >= 0 and each.writer.append_again(data):
                    return each
            except BaseException:
                each.writer.close()
                raise
            self._give(each)
        return None

    def _check_signatures(self, each: _StepInserter, data: Any, targets: list[_Target]) -> None:
        try:
            for number, _, _ in targets:
                if number not in each.fits:
                    self.connection.check_signature(number, _item_leaves(data))
                    each.fits.add(number)
        except BaseException:
            each.writer.close()
            raise

    # ------------------------------------------------------------------ any step

    def _insert_new(self, data: Any, targets: list[_Target], seconds: float | None) -> None:
        leaves = _item_leaves(data)
        has_text = any(is_text(code) for code, _, _ in leaves)
        if has_text:
            data = self._fit_texts(data, targets)
            leaves = _item_leaves(data)
        for number, _, _ in targets:
            self.connection.check_signature(number, leaves)
        each = self._take(data)
        writer = each.writer
        try:
            if has_text and not writer.columns:
                # Else they would be as wide as another table's signature says.
                for (path, _), (code, shape, _) in zip(
                    tree.flatten_with_path(data), leaves, strict=True
                ):
                    writer.declare_column(path, code, shape[1:])
                writer.structure_grew(data)
            writer.append(data)
            item = tree.map_structure_with_path(lambda path, _: writer.last_of(path), data)
            for number, table, _ in targets:
                writer.check_item(number, table, item)
        except BaseException:
            # Not kept: data that it refused may have left it with columns that nothing has.
            writer.close()
            raise

        def insert_one(target: _Target, left: float | None, describe: Callable[[], str]) -> None:
            writer.insert_now(*target, item, left, describe)

        self._insert_each(writer, targets, seconds, insert_one)
        if writer.in_native_code:
            values = [(code, shape[1:], False) for code, shape, _ in leaves]
            each.schema = self.connection.intern(data, values)
            each.fits.update(number for number, _, _ in targets)
        self._give(each)

    def _fit_texts(self, data: Any, targets: list[_Target]) -> Any:
        """The data as arrays, its texts as wide as the tables' signatures say."""
        columns = [as_array(leaf, path) for path, leaf in tree.flatten_with_path(data)]
        for number, _, _ in targets:
            columns = self.connection.fit_texts(number, columns)
        return tree.unflatten_as(data, columns)

    def _insert_each(
        self,
        writer: TrajectoryWriter,
        targets: list[_Target],
        seconds: float | None,
        insert_one: Callable[[_Target, float | None, Callable[[], str]], None],
    ) -> None:
        done: list[str] = []
        end = None if seconds is None else time.monotonic() + seconds
        try:
            for target in targets:
                describe = self.connection.describe_wait(target[0], "insert")
                # Of the first table what was given, since the message names it.
                left = end - time.monotonic() if end is not None and done else seconds
                insert_one(target, left, describe)
                done.append(target[1])
        except BaseException as e:
            writer.close()
            if len(targets) > 1:
                e.add_note(f"inserted into: {done}")
            raise
        writer.finish_episode(True)

    # ------------------------------------------------------------------ writers at rest

    def _take(self, data: Any) -> _StepInserter:
        """A writer whose columns fit the data: inserts of other types need another one."""
        with self._lock:
            for i, each in enumerate(self._idle):
                if each.writer.accepts(data):
                    return self._idle.pop(i)
            while len(self._idle) > limits.INSERT_WRITERS_MAX:
                self._idle.pop(0).writer.close()
        return _StepInserter(self._open_writer(self.connection, 1))

    def _give(self, each: _StepInserter) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(each)
                return
        each.writer.close()


def _item_leaves(data: Any) -> list[Leaf]:
    """What the columns of the item of a step look like."""
    flat = tree.flatten_with_path(data)
    if not flat:
        raise errors.InvalidArgumentError(
            f"data has no leaves: {data!r}; expected at least one array. Give a column."
        )
    leaves: list[Leaf] = []
    for path, leaf in flat:
        if leaf is None:
            raise errors.ArgumentTypeError(
                f"data at {path} is None; expected an array. Leave the column out of the structure."
            )
        array = as_array(leaf, path)
        leaves.append((dtype_code(array.dtype, path), (1, *array.shape), False))
    return leaves


def checked_priorities(priorities: Any, n: int) -> npt.NDArray[np.float64]:
    """Priorities as float64[n], C-contiguous; one stands for all.

    Raises:
        ArgumentTypeError: They are no numbers, or have a mask.
        PriorityError: One does not fit a float64.
        InvalidArgumentError: There are not n of them.
    """
    try:
        values = _numbers(as_plain(priorities, "priorities"), n)
    except errors.ReverbError:
        raise
    except OverflowError:
        raise errors.PriorityError(
            f"priorities must fit a float64, got {priorities!r:.80}. Use smaller ones."
        ) from None
    except (TypeError, ValueError):
        raise errors.ArgumentTypeError(
            f"priorities must be numbers, got {priorities!r:.80}. Give a float for each item."
        ) from None
    if values.ndim == 0:
        return np.full(n, values)
    return values


def _numbers(given: npt.NDArray[Any], n: int) -> npt.NDArray[np.float64]:
    if given.dtype.kind == "O":  # numpy would make NaN of None
        given = np.array([float(p) for p in given.flat]).reshape(given.shape)
    if given.dtype.kind not in "biuf":  # and numbers of texts
        raise TypeError
    if given.shape not in ((), (n,)):  # before it is copied
        raise errors.InvalidArgumentError(
            f"priorities must be one number or have shape [{n}], got {list(given.shape)}. Give "
            "one for each item."
        )
    return as_contiguous(given, np.float64, "priorities")


def check_priorities(
    connection: Connection, table: str, number: int, values: npt.NDArray[np.float64]
) -> None:
    """Refuses priorities that a table does not take.

    Raises:
        PriorityError: Names the first.
    """
    session = connection.take_session()
    bad = session.first_bad_priority(number, values)
    connection.give_session(session)
    if bad >= 0:
        raise bad_priority(table, float(values[bad]))


def priorities_of_batch(
    connection: Connection, table: str, number: int, priorities: Any, n: int
) -> npt.NDArray[np.float64]:
    """The priority of each of n items, float64[n]; NaN where the core is to take the largest seen.

    Raises:
        ArgumentTypeError, PriorityError, InvalidArgumentError: See `checked_priorities` and
            `check_priorities`.
    """
    if priorities is None:
        return np.full(n, math.nan)
    if type(priorities) is float and connection.native.priority_ok(number, priorities):
        return np.full(n, priorities)
    values = checked_priorities(priorities, n)
    check_priorities(connection, table, number, values)
    return values


def batch_columns(data: Any) -> tuple[list[npt.NDArray[Any]], int]:
    """The columns of a batch of items, C-contiguous, and how many rows each of them has.

    Raises:
        InvalidArgumentError: There are none.
        ArgumentTypeError: One is None, or of a type that cannot be stored.
        SignatureError: There are too many, or they differ in their number of rows.
    """
    usual = type(data) is dict and 0 < len(data) <= limits.MAX_COLUMNS
    if usual and set(map(type, data)) == {str} and all(map(_is_plain, data.values())):
        columns = [data[key] for key in sorted(data)]
        n = len(columns[0])
        if all(len(c) == n for c in columns):
            return columns, n
    return _batch_columns_of_any(data)


def _is_plain(leaf: Any) -> bool:
    """Can the leaf be taken as it is?"""
    return (
        type(leaf) is np.ndarray
        and leaf.dtype in DTYPE_CODES
        and leaf.dtype.isnative
        and leaf.flags.c_contiguous
        and 0 < leaf.ndim <= limits.MAX_SPEC_DIMS
    )


def _batch_columns_of_any(data: Any) -> tuple[list[npt.NDArray[Any]], int]:
    flat = tree.flatten_with_path(data)
    if not flat:
        raise errors.InvalidArgumentError(
            f"data has no leaves: {data!r}; expected at least one array. Give a column."
        )
    if len(flat) > limits.MAX_COLUMNS:
        raise errors.SignatureError(
            f"data has {len(flat)} leaves; at most {limits.MAX_COLUMNS} columns make an item. "
            "Stack small columns into one."
        )
    columns = []
    for path, leaf in flat:
        if leaf is None:
            raise errors.ArgumentTypeError(
                f"data at {path} is None; expected an array. Leave the column out of the structure."
            )
        columns.append(as_array(leaf, path, limits.MAX_SPEC_DIMS))
    for (path, _), column in zip(flat, columns, strict=True):
        if column.ndim == 0:
            raise errors.SignatureError(
                f"data at {path} is a scalar; expected an array [N, ...]. Use insert() for one "
                "item."
            )
        if len(column) != len(columns[0]):
            raise errors.SignatureError(
                f"data at {path} has {len(column)} rows, but {flat[0][0]} has {len(columns[0])}; "
                "every array must have the same leading axis N. Give a row of each column for "
                "each item."
            )
    return columns, len(columns[0])
