"""Batches of items of different length: padded to one length, with their lengths beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, tree
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo

__all__ = ["PaddedBatch", "mask", "pad_batch"]


class PaddedBatch(NamedTuple):
    """What `pad_batch` gives."""

    info: SampleInfo
    """Arrays [B], as `Client.sample_batch` gives them."""

    data: Any
    """Arrays [B, ...] in the structure of the items' data."""

    lengths: Any
    """The same structure of int64[B]: how many entries of the first axis are an item's own. None
    for columns that were stacked as they are."""


def pad_batch(
    samples: Iterable[ReplaySample], *, length: int | None = None, value: Any = 0
) -> PaddedBatch:
    """Stacks items of which columns differ in length.

    A column whose arrays have the same shape in all items is stacked as it is. Any other is padded
    along its first axis, up to the longest.

    Args:
        samples: As `Client.sample(emit_timesteps=False)` yields them or `Client.borrow` lends them,
            all of one structure.
        length: What to pad to in place of the longest, so that all batches have one shape: then
            every column that is no scalar is padded, and none may be longer.
        value: To pad with.

    Returns:
        Arrays of the caller's own.

    Raises:
        InvalidArgumentError: There are no samples; structures, dtypes or other axes differ; an item
            is longer than `length`.
        ArgumentTypeError: What is given are no samples.
    """
    if not isinstance(samples, Iterable):
        raise errors.ArgumentTypeError(
            f"samples must be a list of ReplaySample, got {samples!r}. Give what Client.borrow "
            "lends."
        )
    items = list(samples)
    if not items:
        raise errors.InvalidArgumentError(
            "Got no samples to pad; expected at least one. Take some with Client.borrow."
        )
    for item in items:
        if not isinstance(item, ReplaySample):
            raise errors.ArgumentTypeError(
                "samples must be ReplaySamples, as Client.sample(emit_timesteps=False) yields "
                f"them, got one of type {type(item).__name__}. Give those."
            )
    if length is not None:
        length = limits.checked_int("length", length)
    structure = items[0].data
    for item in items[1:]:
        tree.assert_same_structure(structure, item.data)
    paths = [path for path, _ in tree.flatten_with_path(structure)]
    rows = [tree.flatten(item.data) for item in items]
    padded = [
        _pad_column(path, [np.asarray(leaf) for leaf in leaves], length, value)
        for path, leaves in zip(paths, zip(*rows, strict=True), strict=True)
    ]
    return PaddedBatch(
        _stacked_info([item.info for item in items]),
        tree.unflatten_as(structure, [array for array, _ in padded]),
        tree.unflatten_as(structure, [lengths for _, lengths in padded]),
    )


def mask(lengths: npt.ArrayLike, size: int) -> npt.NDArray[np.bool_]:
    """Returns where a padded column has an item's own entries: bool[B, size].

    Args:
        lengths: Of the column, [B], as in `PaddedBatch.lengths`.
        size: Of the column's second axis.

    Raises:
        InvalidArgumentError: The lengths are not [B], or one is negative or beyond the size.
        ArgumentTypeError: They are no integers: None for a column that was stacked as it is.
    """
    array = np.asarray(lengths)
    entries = limits.checked_int("size", size)
    if array.dtype.kind not in "ui" and array.size:
        raise errors.ArgumentTypeError(
            f"lengths must be integers as in PaddedBatch.lengths, got {lengths!r:.80}. Give one "
            "entry of them."
        )
    if array.ndim != 1:
        raise errors.InvalidArgumentError(
            f"lengths must have shape [B], got {list(array.shape)}. Give one entry of "
            "PaddedBatch.lengths."
        )
    if entries < 0 or (array.size and not 0 <= array.min() <= array.max() <= entries):
        raise errors.InvalidArgumentError(
            f"lengths must be in [0, size={entries}], got {lengths!r:.80}. Give the size of the "
            "padded axis."
        )
    return np.arange(entries) < array[:, None]


def _pad_column(
    path: tree.Path, leaves: list[npt.NDArray[Any]], length: int | None, value: Any
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    first = leaves[0]
    for i, leaf in enumerate(leaves):
        if (
            leaf.ndim != first.ndim
            or leaf.shape[1:] != first.shape[1:]
            or leaf.dtype != first.dtype
        ):
            raise errors.InvalidArgumentError(
                f"Got a column at {path!r} that is {leaf.dtype}{list(leaf.shape)} in item {i} and "
                f"{first.dtype}{list(first.shape)} in item 0; expected one dtype, and shapes that "
                "differ in their first axis alone. Take items that are alike."
            )
    if first.ndim == 0 or (length is None and len({len(leaf) for leaf in leaves}) == 1):
        return np.stack(leaves), None
    lengths = np.array([len(leaf) for leaf in leaves], np.int64)
    size = int(lengths.max()) if length is None else length
    if size < lengths.max():
        raise errors.InvalidArgumentError(
            f"Got a column at {path!r} of {int(lengths.max())} entries; expected at most length="
            f"{length}. Give a larger length."
        )
    padded = np.full((len(leaves), size, *first.shape[1:]), value, first.dtype)
    for row, leaf in zip(padded, leaves, strict=True):
        row[: len(leaf)] = leaf
    return padded, lengths


def _stacked_info(infos: list[SampleInfo]) -> SampleInfo:
    columns: list[Any] = [
        np.array(column, dtype)
        for column, dtype in zip(zip(*infos, strict=True), INFO_DTYPES, strict=True)
    ]
    times = [info.inserted_ns for info in infos]
    columns.append(None if None in times else np.array(times, np.uint64))
    return SampleInfo(*columns)
