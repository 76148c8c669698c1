"""Sampled items as they travel: groups of items that are alike, each column one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shmreplay import _native, limits
from shmreplay.bridge.link import Link
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.errors import InvalidArgumentError, ProtocolError
from shmreplay.item_schema import Column, ItemSchema
from shmreplay.replay_sample import INFO_DTYPES
from shmreplay.spec import DTYPE_CODES

if TYPE_CHECKING:
    from shmreplay.bridge.client import RemoteSession

__all__ = ["RemoteBatch", "read_samples", "write_samples"]

Array = npt.NDArray[Any]

_INFO = (*INFO_DTYPES, np.dtype(np.uint64))
"""Dtypes of what is said of each item: the fields of an info, and when it was inserted."""

_WIDE: Final = [dtype.itemsize == 8 for dtype in _INFO]

_WORD: Final = DTYPE_CODES[np.dtype(np.uint64)]


class _Lease:
    """The server's pins on the items of one answer, which go when all of them were delivered."""

    def __init__(self, link: Link, sequence: int) -> None:
        self._link = link
        self._sequence = sequence
        self.parts = 1
        link.held.add(sequence)

    def give_back(self) -> None:
        self.parts -= 1
        if self.parts == 0:
            self._link.release(self._sequence)


class _Group:
    """Items of one structure and the same lengths: arrays [count, ...]."""

    def __init__(
        self, schema: int, info: Sequence[Array], columns: Sequence[Array], lease: _Lease | None
    ) -> None:
        self.schema = schema
        self.info = list(info)
        self.columns = list(columns)
        self.lease = lease

    def __len__(self) -> int:
        return len(self.info[0])

    def shape(self) -> list[tuple[int, ...]]:
        return [column.shape[1:] for column in self.columns]

    def split(self, n: int) -> tuple[_Group, _Group]:
        if self.lease is not None:
            self.lease.parts += 1
        return tuple(  # type: ignore[return-value]
            _Group(
                self.schema,
                [array[part] for array in self.info],
                [array[part] for array in self.columns],
                self.lease,
            )
            for part in (slice(None, n), slice(n, None))
        )


class RemoteBatch:
    """Items that were drawn at the server and received: what a native `Batch` of them would say."""

    def __init__(self, session: RemoteSession, table: int, groups: list[_Group]) -> None:
        """See `read_samples`."""
        self.owner = session
        self.table = table
        self._groups = groups

    def __len__(self) -> int:
        """Number of items."""
        return sum(map(len, self._groups))

    @property
    def schema(self) -> int:
        """Number of the items' structure; -1 where they differ."""
        numbers = {group.schema for group in self._groups}
        return numbers.pop() if len(numbers) == 1 else -1

    @property
    def pinned(self) -> bool:
        """Whether the server keeps the items until they were delivered: none is drawn again."""
        return any(group.lease is not None for group in self._groups)

    def lend(self, on_release: list[Any]) -> None:
        """The items are the borrower's: what was received is a copy, and nothing stays pinned."""
        self._give_back()
        on_release.append(self.owner)

    def release(self) -> None:
        """The items were delivered. Idempotent."""
        self._give_back()
        self._groups = []

    def _give_back(self) -> None:
        for group in self._groups:
            if group.lease is not None:
                group.lease.give_back()
                group.lease = None

    def split(self, k: int, other: RemoteSession) -> RemoteBatch:
        """The first k items as a batch of another session; the rest stays."""
        if not 0 < k < len(self):
            raise InvalidArgumentError(
                f"Got {k} items to take of {len(self)}; expected at most those. Give less."
            )
        first: list[_Group] = []
        while k > 0:
            group = self._groups.pop(0)
            if len(group) > k:
                group, rest = group.split(k)
                self._groups.insert(0, rest)
            first.append(group)
            k -= len(group)
        return RemoteBatch(other, self.table, first)

    def absorb(self, other: RemoteBatch) -> None:
        """Takes all items of another batch behind one's own; it is then empty."""
        self._groups += other._groups
        other._groups = []

    def _at(self, i: int) -> tuple[_Group, int]:
        for group in self._groups:
            if i < len(group):
                return group, i
            i -= len(group)
        raise IndexError(
            f"Got an item beyond a batch of {len(self)}; expected one in it. Use a smaller index."
        )

    def schema_of(self, i: int) -> int:
        """Number of one item's structure."""
        return self._at(i)[0].schema

    def info_of(self, i: int) -> tuple[Any, ...]:
        """(key, probability, table_size, priority, times_sampled) of one item."""
        group, k = self._at(i)
        return tuple(array[k].item() for array in group.info)

    def columns(self, i: int) -> list[tuple[int, bool, int]]:
        """For each column of item i: (length, squeezed, bytes of a row)."""
        group, _ = self._at(i)
        schema = self.owner.connection.schema(group.schema)
        out = []
        for column, array in zip(schema.columns, group.columns, strict=True):
            length = 1 if column.squeezed else array.shape[1]
            out.append((length, column.squeezed, array[0].nbytes // max(length, 1)))
        return out

    def shapes(self, plan: _native.StackPlan) -> list[tuple[int, ...]]:
        """Shapes of the arrays that `stack` fills."""
        return [(len(self), *shape) for shape in self._groups[0].shape()]

    def stack(
        self, plan: _native.StackPlan, out: list[Array] | None
    ) -> tuple[tuple[Array, ...], list[Array]] | int:
        """(info arrays, column arrays), or the number of the first item that does not fit."""
        first, at = self._groups[0], 0
        if out is None and len(self._groups) == 1:
            return tuple(first.info), [_joined([column]) for column in first.columns]
        for group in self._groups:
            if group.shape() != first.shape():
                return at
            at += len(group)
        info = tuple(_joined([g.info[k] for g in self._groups]) for k in range(len(_INFO)))
        columns = []
        for k in range(len(first.columns)):
            parts = [group.columns[k] for group in self._groups]
            if out is not None:
                np.concatenate(parts, out=out[k], casting="no")
                columns.append(out[k])
            else:
                columns.append(_joined(parts))
        return info, columns

    def copies(self, i: int, plan: _native.StackPlan) -> list[Array]:
        """New arrays, each on memory of its own, with the columns of item i."""
        group, k = self._at(i)
        return [_copied(array, k) for array in group.columns]

    def views(self, i: int, plan: _native.StackPlan) -> list[Array | None]:
        """Read-only arrays of item i."""
        group, k = self._at(i)
        out: list[Array | None] = []
        for column in group.columns:
            view = column[k, ...]
            view.flags.writeable = False
            out.append(view)
        return out


def _joined(parts: list[Array]) -> Array:
    if len(parts) == 1 and parts[0].flags.writeable and parts[0].flags.c_contiguous:
        return parts[0]
    return np.concatenate(parts)


def read_samples(session: RemoteSession, table: int, sequence: int, reader: Reader) -> RemoteBatch:
    """Takes an answer to SAMPLE apart.

    Raises:
        ProtocolError: It is no such answer.
    """
    connection = session.connection
    lease = _Lease(connection.link, sequence) if reader.u8() else None
    groups: list[_Group] = []
    for _ in range(reader.count(limits.MAX_BATCH, "groups")):
        number = reader.u32()
        if reader.u8():
            connection.learn_schema(number, reader.blob())
        count = reader.count(limits.MAX_BATCH, "items")
        info = _read_info(reader, count)
        schema = connection.schema(number)
        columns = [reader.array() for _ in schema.columns]
        _check_group(schema, count, columns)
        groups.append(_Group(number, info, columns, lease))
    reader.finish()
    if lease is not None:
        lease.parts = len(groups)
    return RemoteBatch(session, table, groups)


def _read_info(reader: Reader, count: int) -> list[Array]:
    """The arrays of what is said of each item, which travel as one."""
    words = reader.array()
    if words.shape != (len(_INFO), count) or words.dtype != np.uint64:
        raise ProtocolError(f"infos of shape {list(words.shape)} of {count} items")
    return [
        row.view(dtype) if wide else row.view(np.int64).astype(dtype)
        for row, dtype, wide in zip(words, _INFO, _WIDE, strict=True)
    ]


def _write_info(body: Writer, info: Sequence[Array]) -> None:
    """One array: at a few items, each that is sent takes longer than its bytes."""
    words = [array if array.itemsize == 8 else array.astype(np.int64) for array in info]
    data = b"".join([array.tobytes() for array in words])
    body.raw(_WORD, (len(info), len(info[0])), data)


def _check_group(schema: ItemSchema, count: int, columns: Sequence[Array]) -> None:
    good = True
    for column, array in zip(schema.columns, columns, strict=True):
        lead = 1 if column.squeezed else 2
        good = good and array.dtype == column.dtype and array.ndim == lead + len(column.shape)
        good = good and array.shape[0] == count and array.shape[lead:] == column.shape
    if not good:
        raise ProtocolError("the columns of sampled items are not what their structure says")


# ---------------------------------------------------------------------- the server's side


def write_samples(
    body: Writer,
    batch: _native.Batch,
    schemas: dict[int, ItemSchema],
    texts: dict[int, bytes],
    pinned: bool,
) -> None:
    """Appends a batch: one group where its items can be stacked, else a group an item.

    Args:
        body: The message.
        batch: Pinned items.
        schemas: Structures by number, of at least those in the batch.
        texts: JSON of the same; each is sent once.
        pinned: Whether the items stay pinned until the client releases them.
    """
    body.u8(1 if pinned else 0)
    if batch.schema >= 0:
        stacked = batch.stack(schemas[batch.schema].plan, None)
        if not isinstance(stacked, int):
            body.u32(1)
            _write_group(body, batch.schema, texts, *stacked)
            return
    body.u32(len(batch))
    for i in range(len(batch)):
        number = batch.schema_of(i)
        lengths = [length for length, _, _ in batch.columns(i)]
        columns = [
            np.empty(_shape(column, length), column.dtype)
            for column, length in zip(schemas[number].columns, lengths, strict=True)
        ]
        batch.gather(columns, i, 1)
        info = [
            np.array([value], dtype) for value, dtype in zip(batch.info_of(i), _INFO, strict=True)
        ]
        _write_group(body, number, texts, info, columns)


def _shape(column: Column, length: int) -> tuple[int, ...]:
    return (1, *column.shape) if column.squeezed else (1, length, *column.shape)


def _write_group(
    body: Writer,
    number: int,
    texts: dict[int, bytes],
    info: Sequence[Array],
    columns: Sequence[Array],
) -> None:
    body.u32(number)
    text = texts.pop(number, None)
    body.u8(0 if text is None else 1)
    if text is not None:
        body.text(text)
    body.u32(len(info[0]))
    _write_info(body, info)
    for array in columns:
        body.array(array)


def _copied(array: Array, k: int) -> Array:
    """A copy of one row on a 64-byte boundary, from the pool."""
    # Any: before Python 3.12 types cannot say that an object has a buffer.
    memory: Any = _native.Buffer(array.nbytes // len(array))
    copy: Array = np.ndarray(array.shape[1:], array.dtype, memory)
    copy[...] = array[k]
    return copy
