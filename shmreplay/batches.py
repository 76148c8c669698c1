"""From pinned items to numpy: stacked batches, single items, views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, tree
from shmreplay.connection import Connection
from shmreplay.item_schema import Column
from shmreplay.replay_sample import ReplaySample, SampleInfo

_ITEM_BYTES_INFO = 8 + 8 + 8 + 8 + 4


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array on a 64-byte boundary, from the pool."""
    count = 1
    for d in shape:
        count *= d
    return np.ndarray(shape, dtype, _native.Buffer(count * dtype.itemsize))


def _info(batch: _native.Batch, n: int) -> SampleInfo:
    buffer = _native.Buffer(n * _ITEM_BYTES_INFO)
    key = np.ndarray(n, np.uint64, buffer, 0)
    probability = np.ndarray(n, np.float64, buffer, 8 * n)
    table_size = np.ndarray(n, np.int64, buffer, 16 * n)
    priority = np.ndarray(n, np.float64, buffer, 24 * n)
    times_sampled = np.ndarray(n, np.int32, buffer, 32 * n)
    batch.info_arrays(key, probability, table_size, priority, times_sampled)
    return SampleInfo(key, probability, table_size, priority, times_sampled)


def _shape_of(column: Column, length: int, n: int) -> tuple[int, ...]:
    return (n, *column.shape) if column.squeezed else (n, length, *column.shape)


def gather(connection: Connection, batch: _native.Batch, out: Any) -> ReplaySample:
    """Stacks a batch.

    Raises:
        InvalidArgumentError: The items differ in structure or length, or `out` does not fit.
    """
    n = len(batch)
    number = batch.schema
    if number < 0:
        raise errors.InvalidArgumentError(
            "the sampled items differ in structure, dtype or shape and cannot be stacked; use "
            "Client.sample(emit_timesteps=False) or Client.borrow"
        )
    schema = connection.schema(number)
    shapes = [
        _shape_of(column, length, n)
        for column, (length, _, _) in zip(schema.columns, batch.columns(0), strict=True)
    ]
    if out is None:
        arrays = [_empty(s, c.dtype) for s, c in zip(shapes, schema.columns, strict=True)]
    else:
        arrays = _checked_out(out, shapes, schema.columns, n)
    bad = batch.gather(arrays, 0, n)
    if bad >= 0:
        raise errors.InvalidArgumentError(
            f"item {bad} of the batch has columns of {[c[0] for c in batch.columns(bad)]} steps, "
            f"item 0 of {[c[0] for c in batch.columns(0)]}: items of different length cannot be "
            "stacked; use Client.sample(emit_timesteps=False) or Client.borrow"
        )
    return ReplaySample(_info(batch, n), schema.unflatten(arrays))


def _checked_out(
    out: Any, shapes: Sequence[tuple[int, ...]], columns: Sequence[Column], n: int
) -> list[npt.NDArray[Any]]:
    flat = tree.flatten_with_path(out)
    if len(flat) != len(shapes):
        raise errors.InvalidArgumentError(
            f"out has {len(flat)} arrays, the items have {len(shapes)} columns"
        )
    arrays = []
    for (path, array), shape, column in zip(flat, shapes, columns, strict=True):
        if not isinstance(array, np.ndarray):
            raise errors.ArgumentTypeError(f"out at {path} is {type(array).__name__}, not an array")
        fits = array.dtype == column.dtype and array.shape[1:] == shape[1:] and len(array) >= n
        if not fits or not array.flags.c_contiguous or not array.flags.writeable:
            raise errors.InvalidArgumentError(
                f"out at {path} is {array.dtype}{list(array.shape)}; expected a writable "
                f"C-contiguous array {column.dtype}{list(shape)}"
            )
        arrays.append(array[:n])
    return arrays


def item_arrays(connection: Connection, batch: _native.Batch, i: int) -> tuple[Any, list[Any]]:
    """Copies of one item's columns: (its structure as ItemSchema, arrays in order)."""
    schema = connection.schema(batch.schema_of(i))
    arrays = [
        _empty(_shape_of(column, length, 1), column.dtype)
        for column, (length, _, _) in zip(schema.columns, batch.columns(i), strict=True)
    ]
    bad = batch.gather(arrays, i, 1)
    if bad >= 0:
        raise errors.TableCorruptedError("an item does not have the lengths that it says it has")
    return schema, [a.reshape(a.shape[1:]) for a in arrays]


def item_views(connection: Connection, batch: _native.Batch, i: int) -> Any:
    """Read-only views of one item's columns, in its structure; copies where steps lie apart."""
    schema = connection.schema(batch.schema_of(i))
    lengths = batch.columns(i)
    views: list[npt.NDArray[Any]] = []
    for c, (column, (length, _, _)) in enumerate(zip(schema.columns, lengths, strict=True)):
        window = batch.view(i, c)
        if window is None:
            return _item_copies(connection, batch, i)
        views.append(np.ndarray(_shape_of(column, length, 1)[1:], column.dtype, window))
    return schema.unflatten(views)


def _item_copies(connection: Connection, batch: _native.Batch, i: int) -> Any:
    schema, arrays = item_arrays(connection, batch, i)
    for c, array in enumerate(arrays):
        window = batch.view(i, c)
        if window is not None:
            arrays[c] = np.ndarray(array.shape, array.dtype, window)
        array.flags.writeable = False
    return schema.unflatten(arrays)


class SampleOutput:
    """How `Client.sample` gives an item: by steps or whole, flat or in the signature's structure."""

    def __init__(self, signature: Any, emit_timesteps: bool) -> None:
        """Takes the structure to unpack to (None: a flat list) and whether to split into steps."""
        self._signature = signature
        self._emit_timesteps = emit_timesteps

    def make(self, info: SampleInfo, item: tuple[Any, list[Any]]) -> Any:
        """One item as `Client.sample` yields it."""
        schema, arrays = item
        if not self._emit_timesteps:
            return ReplaySample(info, self._pack(arrays))
        squeezed = [c.squeezed for c in schema.columns]
        if all(squeezed):
            return [ReplaySample(info, self._pack(arrays))]
        lengths = {len(a) for a, s in zip(arrays, squeezed, strict=True) if not s}
        if any(squeezed) or len(lengths) != 1:
            raise errors.InvalidArgumentError(
                "Can't split non timestep trajectory into timesteps. Its columns have shapes "
                f"{[a.shape for a in arrays]}; use emit_timesteps=False."
            )
        return [
            ReplaySample(info, self._pack([a[t, ...] for a in arrays])) for t in range(lengths.pop())
        ]

    def _pack(self, leaves: list[Any]) -> Any:
        if self._signature is None:
            return leaves
        return tree.unflatten_as(self._signature, leaves)
