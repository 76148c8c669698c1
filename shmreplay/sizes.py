"""How much memory a table will need, before there is one.

The numbers come from the code that lays memory out. What they cannot know is how writers behave, so
that is said by arguments, and stated in `TableSize`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from shmreplay import limits, tree
from shmreplay._native import (
    size_of_block,
    size_of_episode,
    size_of_index,
    size_of_trajectory,
)
from shmreplay.errors import InvalidArgumentError
from shmreplay.spec import as_signature
from shmreplay.table import Table

__all__ = ["TableSize", "rows_of_block", "table_size"]

# What a store needs beside a table's own bytes: its fixed part, memory that is committed ahead, and
# gaps between what is freed and what comes. An eighth, and something for small stores.
_SPARE_SHARE = 8
_SPARE_BYTES = 4 << 20


class TableSize(NamedTuple):
    """What a full table takes, in bytes, and of how many parts."""

    data_bytes: int
    """Blocks, records of items and of episodes together: what ``max_bytes`` bounds."""
    block_bytes: int
    """Steps, in blocks, each step once however many items share it."""
    trajectory_bytes: int
    """Records that say which steps an item has; items within one block have none."""
    episode_bytes: int
    index_bytes: int
    """Slots and selectors."""
    total_bytes: int
    """``data_bytes`` and ``index_bytes``."""
    capacity_bytes: int
    """A ``Server(capacity=...)`` that has room for the table and for what a store needs besides."""
    steps: int
    """Steps that are in memory."""
    step_bytes: int
    """Bytes of data of one step."""
    steps_per_block: int
    blocks: int


def rows_of_block(
    step_bytes: int, *, batch: bool = False, max_chunk_length: int | None = None
) -> int:
    """Returns how many steps a full block holds.

    Args:
        step_bytes: Of all columns of a step together.
        batch: Of `Client.insert_batch`; else of a writer.
        max_chunk_length: As given to the writer, if it was.
    """
    nbytes = limits.BATCH_BLOCK_BYTES if batch else limits.BLOCK_BYTES
    most = limits.BATCH_BLOCK_ROWS if batch else limits.BLOCK_ROWS_MAX
    rows = min(max(nbytes // max(step_bytes, 1), 1), most)
    return rows if max_chunk_length is None else min(rows, max_chunk_length)


def table_size(
    table: Table,
    signature: Any = None,
    *,
    steps_per_item: int = 1,
    overlap: int = 0,
    steps_per_episode: int = 1000,
    batch: bool = False,
    max_chunk_length: int | None = None,
    tables: int = 1,
) -> TableSize:
    """Computes what a table takes once it holds ``max_size`` items.

    It is taken that one writer, or `Client.insert_batch`, fills it; that each item has all columns
    of consecutive steps, of one episode; and that the oldest items leave first. With another
    remover blocks stay longer, up to a whole block for each item. Each further writer has one more
    block open.

    Args:
        table: The table. Of several stripes it is taken that one is filled.
        signature: Of one step: a structure of specs with shapes that are known. None: that of the
            table, which is then taken to be of one step.
        steps_per_item: Steps in an item.
        overlap: Steps that an item shares with the next, below ``steps_per_item``.
        steps_per_episode: Steps in an episode.
        batch: Items are rows of `Client.insert_batch`.
        max_chunk_length: As given to the writer, if it is.
        tables: Tables of the server.

    Raises:
        InvalidArgumentError: There is no signature, a shape is not known, or a number is out of
            range.
    """
    row_bytes = _row_bytes(table.signature if signature is None else signature)
    tables = _at_least("tables", tables, 1)
    if max_chunk_length is not None:
        _at_least("max_chunk_length", max_chunk_length, 1)
    _check_steps(steps_per_item, overlap, steps_per_episode, batch)
    config = table.config()
    rows = rows_of_block(sum(row_bytes), batch=batch, max_chunk_length=max_chunk_length)
    # Items do not cross episodes: each has as many as fit, and its last steps may be in none.
    per_episode = (steps_per_episode - steps_per_item) // (steps_per_item - overlap) + 1
    steps = math.ceil(config.max_size * steps_per_episode / per_episode)
    # The oldest item that is left is in the middle of a block, and so is the writer.
    blocks = math.ceil(steps / rows) + (rows > 1)
    block = size_of_block(tables, row_bytes, rows)
    records = 0 if batch else _record_bytes(config.max_size, steps_per_item, rows, row_bytes)
    # A batch is one episode, and so is what is left of the oldest.
    episodes = (1 if batch else math.ceil(steps / steps_per_episode) + 1) * size_of_episode(tables)
    data = blocks * block + records + episodes
    index = size_of_index(config, limits.MAX_BYTES >> 4, config.max_size + 1)
    total = data + index
    return TableSize(
        data_bytes=data,
        block_bytes=blocks * block,
        trajectory_bytes=records,
        episode_bytes=episodes,
        index_bytes=index,
        total_bytes=total,
        capacity_bytes=total + total // _SPARE_SHARE + _SPARE_BYTES,
        steps=steps,
        step_bytes=sum(row_bytes),
        steps_per_block=rows,
        blocks=blocks,
    )


def _check_steps(length: int, overlap: int, episode: int, batch: bool) -> None:
    _at_least("steps_per_item", length, 1)
    _at_least("overlap", overlap, 0)
    _at_least("steps_per_episode", episode, 1)
    if overlap >= length or length > episode or (batch and length != 1):
        raise InvalidArgumentError(
            f"Got items of {length} steps that overlap by {overlap}{' in a batch' * batch}, of"
            f" episodes of {episode}; expected an overlap below the number of steps, items that fit"
            " into an episode, and one step an item in a batch. Give such numbers."
        )


def _record_bytes(items: int, length: int, rows: int, row_bytes: list[int]) -> int:
    """Records of items that begin anywhere in a block; within a single block there is none."""
    columns, total = len(row_bytes), 0
    for start in range(rows):
        blocks = (start + length - 1) // rows + 1
        if blocks > 1:
            total += size_of_trajectory(columns, blocks, blocks * columns)
    return items * total // rows


def _row_bytes(signature: Any) -> list[int]:
    if signature is None:
        raise InvalidArgumentError(
            "Got neither a signature nor a table that has one; expected shape and dtype of each"
            " column of a step. Give signature=."
        )
    sizes = []
    for path, spec in tree.flatten_with_path(as_signature(signature)):
        if any(dim is None for dim in spec.shape):
            raise InvalidArgumentError(
                f"Got the shape {spec.shape} for column {path}; expected one that is known in all"
                " dimensions, of a single step. Give its largest size."
            )
        sizes.append(int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize)
    return sizes


def _at_least(name: str, value: Any, least: int) -> int:
    number = limits.checked_int(name, value)
    if number < least:
        raise InvalidArgumentError(
            f"Got {name} {number}; expected at least {least}. Give a larger number."
        )
    return number
