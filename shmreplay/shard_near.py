"""Batches of shards on this machine: drawn in the calling thread, gathered to where they belong.

To hand a draw to another thread and wait for it takes longer than the draw, so it is done only
where a shard has to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, shard_batch, tree
from shmreplay.item_schema import ItemSchema
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.reverb_types import TableInfo
from shmreplay.shard import Pinned, Shard
from shmreplay.shard_group import ShardGroup

__all__ = ["NearBatch", "draw", "weights"]


def weights(infos: Sequence[TableInfo]) -> npt.NDArray[np.float64]:
    """The masses; where all weights are zero every item is as likely as every other."""
    masses = np.array([info.sampling_mass for info in infos], np.float64)
    if masses.sum() > 0:
        return masses
    return np.array([info.current_size for info in infos], np.float64)


class Split:
    """How draws go by the masses of one look: kept until the next, as batches are drawn often."""

    def __init__(self, infos: Sequence[TableInfo]) -> None:
        """Takes what is known of the table on each shard."""
        self._infos = list(infos)
        masses = weights(infos)
        masses[[bool(info.sample_blocked_by) for info in infos]] = 0.0
        total = float(masses.sum())
        self.usable = total > 0
        """Whether there is something to draw that no limiter is known to hold back."""
        shares = masses / total if self.usable else masses
        self.shares: list[float] = shares.tolist()
        size = sum(info.current_size for info in infos)
        self.others = [size - info.current_size for info in infos]
        self._bounds = np.cumsum(shares)[:-1]
        if self.usable:
            # However the sum is rounded: beyond the last that has a share, nothing is drawn.
            self._bounds[np.flatnonzero(shares)[-1] :] = np.inf

    def is_of(self, infos: Sequence[TableInfo]) -> bool:
        """Whether these are the infos that it was made of."""
        mine = self._infos
        return len(infos) == len(mine) and all(a is b for a, b in zip(infos, mine, strict=True))

    def owners(self, n: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """For each of n rows the place of the shard that it is drawn from, int64[n]."""
        return self._bounds.searchsorted(random.random(n), "right").astype(np.int64, copy=False)


class _Part(NamedTuple):
    """What one shard gave."""

    shard: Shard
    share: float
    others: int
    pinned: Pinned

    def keep(self) -> None:
        """It could not be delivered."""
        self.pinned.drawing.keep(self.pinned.number, self.pinned.batch)

    def finish(self) -> None:
        """It was."""
        self.pinned.drawing.finish(self.pinned.batch)

    def schema(self) -> ItemSchema | None:
        """The structure of its items; None where they differ."""
        number = self.pinned.batch.schema
        return None if number < 0 else self.pinned.connection.schema(number)


class NearBatch:
    """What was drawn, and is pinned until it is delivered or kept: either must be called."""

    def __init__(self, parts: list[_Part], owners: npt.NDArray[np.int64], whole: bool) -> None:
        """Takes what each shard gave, and for each row the place among them of its shard."""
        self._parts = parts
        self._owners = owners
        self._whole = whole

    def joined(self, group: ShardGroup, out: Any) -> ReplaySample | None:
        """All as one batch, delivered.

        None where something is missing, or takes a closer look: items that are not of one kind, or
        arrays that do not plainly fit.
        """
        if not self._whole:
            return None
        try:
            sample = self._join(group, out)
        except BaseException:
            self.keep()
            raise
        if sample is not None:
            for part in self._parts:
                part.finish()
        return sample

    def _join(self, group: ShardGroup, out: Any) -> ReplaySample | None:
        schemas = [part.schema() for part in self._parts]
        first = schemas[0]
        if first is None or not _alike(group, schemas):
            return None
        arrays = None
        if out is not None:
            shapes = self._parts[0].pinned.batch.shapes(first.plan)
            arrays = _fitting(first, out, len(self._owners), shapes)
            if arrays is None:
                return None
        joined = _native.join_batches(
            [(p.pinned.batch, p.shard.number, p.share, p.others) for p in self._parts],
            self._owners,
            first.plan,
            shard_batch.KEY_DTYPE,
            arrays,
        )
        if joined is None:
            return None
        info, columns = joined
        return ReplaySample(SampleInfo(*info), first.unflatten(columns))

    def deliver(self, parts: list[ReplaySample]) -> None:
        """Appends what each shard gave, as of all shards together, to a list.

        Raises:
            InvalidArgumentError: Items of a shard cannot be stacked. What is not in the list is
                kept for the next call, where sampling consumes.
        """
        while self._parts:
            part = self._parts.pop(0)
            try:
                sample = part.pinned.drawing.delivered(part.pinned.number, part.pinned.batch, None)
            except BaseException:
                self.keep()
                raise
            info = shard_batch.of_whole(sample.info, part.shard.number, part.share, part.others)
            parts.append(ReplaySample(info, sample.data))

    def keep(self) -> None:
        """It cannot be delivered: where sampling consumes, the next call gets it."""
        while self._parts:
            self._parts.pop().keep()


def draw(group: ShardGroup, table: str, n: int) -> NearBatch | None:
    """Draws n items of shards that are all on this machine, without waiting for their limiters.

    Less where one does not give what was asked of it at once. None, with nothing drawn, where this
    cannot be done: a shard is elsewhere, or none has items that may be sampled.
    """
    shards = group.fresh(table)
    infos = group.of_table(table, shards)
    for shard in shards:
        if not shard.near:
            return None
    split = group.splits.get(table)
    if split is None or not split.is_of(infos):
        split = group.splits[table] = Split(infos)
    if not split.usable:
        return None
    with group.lock:
        owners = split.owners(n, group.random)
    counts = np.bincount(owners, minlength=len(shards)).tolist()
    parts: list[_Part] = []
    got = 0
    try:
        for place, count in enumerate(counts):
            pinned = shards[place].draw_now(table, count) if count else None
            if pinned is not None:
                parts.append(_Part(shards[place], split.shares[place], split.others[place], pinned))
                got += len(pinned.batch)
    except BaseException:
        NearBatch(parts, owners, False).keep()
        raise
    if not parts:
        return None
    if len(parts) < len(counts) and got == n:
        # The place among those that gave something.
        owners = (np.cumsum(np.array(counts) > 0) - 1)[owners]
    return NearBatch(parts, owners, got == n)


def _alike(group: ShardGroup, schemas: Sequence[ItemSchema | None]) -> bool:
    """Whether items of these structures can be stacked: looked at once, as they rarely change."""
    known = group.alike
    if len(known) == len(schemas) and all(a is b for a, b in zip(known, schemas, strict=True)):
        return True
    first, *others = schemas
    for other in others:
        if first is None or other is None or first.columns != other.columns:
            return False
        try:
            tree.assert_same_structure(first.structure, other.structure)
        except errors.InvalidArgumentError:
            return False
    group.alike = tuple(schemas)
    return True


def _fitting(
    schema: ItemSchema, out: Any, n: int, shapes: Sequence[tuple[int, ...]]
) -> list[npt.NDArray[Any]] | None:
    """The arrays of a flat dict that are just right for n items; None where they are not."""
    flat = schema.flatten_dict(out)
    if flat is None:
        return None
    for array, shape, column in zip(flat, shapes, schema.columns, strict=True):
        if type(array) is not np.ndarray or array.dtype != column.dtype:
            return None
        if array.shape != (n, *shape[1:]) or not array.flags.carray:
            return None
    return flat
