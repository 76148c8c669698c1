"""From pinned items to numpy: stacked batches, single items, views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, tree
from shmreplay.connection import Connection
from shmreplay.item_schema import ItemSchema
from shmreplay.replay_sample import ReplaySample, SampleInfo


def gather(connection: Connection, batch: _native.Batch, out: Any) -> ReplaySample:
    """Stacks a batch.

    Raises:
        InvalidArgumentError: The items differ in structure or length, or `out` does not fit.
    """
    n = len(batch)
    number = batch.schema
    if number < 0:
        raise errors.InvalidArgumentError(
            f"Got {n} sampled items that differ in structure, dtype or shape and cannot be "
            "stacked; expected items that are alike; use "
            "Client.sample(emit_timesteps=False) or Client.borrow"
        )
    schema = connection.schema(number)
    plan = schema.plan
    arrays = None if out is None else _out_arrays(out, batch.shapes(plan), schema, n)
    stacked = batch.stack(plan, arrays)
    if isinstance(stacked, int):
        raise errors.InvalidArgumentError(
            f"item {stacked} of the batch has columns of {[c[0] for c in batch.columns(stacked)]} "
            f"steps, item 0 of {[c[0] for c in batch.columns(0)]}: expected items of one length, "
            "as others "
            "cannot be stacked; use Client.borrow or Client.sample(emit_timesteps=False), and "
            "shmreplay.padding.pad_batch to stack them padded"
        )
    info, columns = stacked
    return ReplaySample(SampleInfo(*info), schema.unflatten(columns))


def _out_arrays(
    out: Any, shapes: list[tuple[int, ...]], schema: ItemSchema, n: int
) -> list[npt.NDArray[Any]]:
    """The arrays of `out` in the order of the columns."""
    flat = schema.flatten_dict(out)
    if flat is not None:
        for array, shape, column in zip(flat, shapes, schema.columns, strict=False):
            if type(array) is not np.ndarray or array.shape != shape:
                break
            if array.dtype != column.dtype or not array.flags.carray:
                break
        else:
            return flat
    return _checked_out(out, shapes, schema, n)


def _checked_out(
    out: Any, shapes: Sequence[tuple[int, ...]], schema: ItemSchema, n: int
) -> list[npt.NDArray[Any]]:
    flat = tree.flatten_with_path(out)
    if len(flat) != len(shapes):
        raise errors.InvalidArgumentError(
            f"out has {len(flat)} arrays, the items have {len(shapes)} columns; expected an array "
            "for each. Give out the structure of the items."
        )
    if not schema.is_like(out):
        try:
            tree.assert_same_structure(schema.structure, out)
        except errors.InvalidArgumentError as e:
            raise errors.InvalidArgumentError(
                "out must have the structure that the items were created with; make it so, or "
                f"leave out= away. {e}"
            ) from None
    arrays = []
    for (path, array), shape, column in zip(flat, shapes, schema.columns, strict=True):
        if not isinstance(array, np.ndarray):
            raise errors.ArgumentTypeError(
                f"out at {path} is {type(array).__name__}, not an array; expected a numpy array. "
                "Make it with np.empty."
            )
        fits = array.ndim == len(shape) and array.shape[1:] == shape[1:] and len(array) >= n
        fits = fits and array.dtype == column.dtype
        flags = array.flags
        if not fits or not flags.c_contiguous or not flags.writeable:
            raise errors.InvalidArgumentError(
                f"out at {path} is {array.dtype}{list(array.shape)}; expected a writable "
                f"C-contiguous array {column.dtype}{list(shape)}. Make it with np.empty."
            )
        arrays.append(array if len(array) == n else array[:n])
    return arrays


def item_arrays(connection: Connection, batch: _native.Batch, i: int) -> tuple[Any, list[Any]]:
    """Copies of one item's columns: (its structure as ItemSchema, arrays in order)."""
    schema = connection.schema(batch.schema_of(i))
    return schema, batch.copies(i, schema.plan)


def item_views(connection: Connection, batch: _native.Batch, i: int) -> Any:
    """Read-only views of one item's columns, in its structure; copies where steps lie apart."""
    schema = connection.schema(batch.schema_of(i))
    views = batch.views(i, schema.plan)
    if any(v is None for v in views):
        _, copies = item_arrays(connection, batch, i)
        for c, copy in enumerate(copies):
            if views[c] is None:
                copy.flags.writeable = False
                views[c] = copy
    return schema.unflatten(views)


class SampleOutput:
    """How `Client.sample` gives an item: by steps or whole, flat or structured as the signature."""

    def __init__(self, signature: Any, emit_timesteps: bool) -> None:
        """Takes the structure to unpack to (None: a flat list) and whether to split into steps."""
        self._signature = signature
        self._emit_timesteps = emit_timesteps

    def make(self, info: SampleInfo, item: tuple[Any, list[Any]]) -> Any:
        """One item as `Client.sample` yields it."""
        schema, arrays = item
        if not self._emit_timesteps:
            return ReplaySample(info, self._pack(arrays))
        if schema.is_step:
            return [ReplaySample(info, self._pack(arrays))]
        squeezed = [c.squeezed for c in schema.columns]
        lengths = {len(a) for a, s in zip(arrays, squeezed, strict=True) if not s}
        if any(squeezed) or len(lengths) != 1:
            raise errors.InvalidArgumentError(
                "Can't split non timestep trajectory into timesteps. Its columns have shapes "
                f"{[a.shape for a in arrays]}; expected columns of one length; use "
                "emit_timesteps=False."
            )
        return [
            ReplaySample(info, self._pack([a[t, ...] for a in arrays]))
            for t in range(lengths.pop())
        ]

    def _pack(self, leaves: list[Any]) -> Any:
        if self._signature is None:
            return leaves
        return tree.unflatten_as(self._signature, leaves)
