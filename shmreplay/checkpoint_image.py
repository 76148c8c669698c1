"""A copy of a store's index, as of one instant, and what its items refer to.

Only ``Image`` holds others up, while the slots are copied. All arrays that grow with the number of
items lie in a ``Scratch``; what is worked out is worked out piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from shmreplay import _native
from shmreplay.checkpoint_format import (
    BLOCK,
    COLUMN,
    EPISODES,
    RUN,
    SEGMENT,
    SLOT,
    TRAJECTORY,
    Array,
)
from shmreplay.checkpoint_scratch import Scratch, pieces, unique
from shmreplay.table import TableConfig

__all__ = ["Image", "Objects", "Stripe"]

_ROOM_SLOTS: Final = 4096
"""Slots that a stripe may take into use between two looks at it."""
_KIND_MASK: Final = np.uint64(7)
_BLOCK_KIND: Final = 1


class Stripe(NamedTuple):
    """A copy of a share of a table."""

    slots: Array
    orders: list[Array]
    heads: list[int]
    free_head: int
    touch_next: int

    @property
    def items(self) -> int:
        """Slots that have an item."""
        refs = self.slots["object"]
        return sum(int(np.count_nonzero(refs[part])) for part in pieces(len(refs)))

    def schemas(self) -> set[int]:
        """Numbers of the structures of its items."""
        found: set[int] = set()
        for part in pieces(len(self.slots)):
            slots = self.slots[part]
            found.update(np.unique(slots["schema"][slots["object"] != 0]).tolist())
        return found


class Image:
    """A copy of the store's index; what it refers to is held from then on."""

    def __init__(
        self, native: _native.Store, configs: Sequence[TableConfig], scratch: Scratch
    ) -> None:
        """Copies it; the caller has claimed the hold, and releases it."""
        self.native = native
        self.n_stripes = sum(config.stripes for config in configs)
        while True:
            used = _native.slots_used(native, self.n_stripes)
            room = [n + n // 8 + _ROOM_SLOTS for n in used]
            # Populated: under the locks there is no time to make pages.
            slots = _parts(scratch.array(sum(room), SLOT, populate=True), room)
            order = scratch.array(2 * sum(room), np.uint32, populate=True)
            each = _parts(order, [n for n in room for _ in range(2)])
            orders = [each[i : i + 2] for i in range(0, len(each), 2)]
            taken = _native.snapshot(native, len(configs), slots, orders)
            if taken is not None:
                break
        held_ns, stripes, self.counts = taken
        self.held_s = held_ns / 1e9
        self.stripes = [
            Stripe(s[:n], [o[0][:n0], o[1][:n1]], [h0, h1], free, touch)
            for s, o, (n, n0, n1, h0, h1, free, touch) in zip(slots, orders, stripes, strict=True)
        ]

    @property
    def items(self) -> int:
        """Items of all tables."""
        return sum(stripe.items for stripe in self.stripes)

    def refs(self) -> list[Array]:
        """Returns the references of all slots, piece by piece; 0 of a free one."""
        return [
            stripe.slots["object"][part]
            for stripe in self.stripes
            for part in pieces(len(stripe.slots))
        ]


def _parts(array: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(array, np.cumsum(sizes)[:-1])


class Objects:
    """What the items refer to, copied while it is held; and blocks put in order of their making."""

    def __init__(self, image: Image, session: _native.Session, scratch: Scratch) -> None:
        """Copies all but the rows of blocks, whose places ``session`` holds from then on."""
        self._scratch = scratch
        native = image.native
        self.traj_offs, block_offs = self._offs(image)
        self.trajs = scratch.array(len(self.traj_offs), TRAJECTORY)
        _native.image_traj_heads(native, self.traj_offs, self.trajs)
        total = {
            name: int(self.trajs[name].sum(dtype=np.uint64)) for name in TRAJECTORY.fields or ()
        }
        of_trajs = scratch.array(total["blocks"], np.uint64)
        self.cols = scratch.array(total["columns"] + len(self.trajs), COLUMN)
        self.segs = scratch.array(total["segments"], SEGMENT)
        _native.image_trajs(native, self.traj_offs, self.trajs, of_trajs, self.cols, self.segs)

        offs = scratch.array(len(block_offs) + len(of_trajs), np.uint64)
        offs[: len(block_offs)] = block_offs
        offs[len(block_offs) :] = of_trajs
        self._sorted_offs = unique(offs)
        self._copy_blocks(native, session)
        self.traj_blocks = scratch.array(len(of_trajs), np.uint32)
        for part in pieces(len(of_trajs)):
            self.traj_blocks[part] = self.block_numbers(of_trajs[part])
        self.row_bytes = scratch.array(int(self.blocks["columns"].sum(dtype=np.uint64)), np.uint64)
        self.runs = scratch.array(int(self.blocks["runs"].sum(dtype=np.uint64)), RUN)
        _native.image_blocks(native, self.block_offs, self.blocks, self.row_bytes, self.runs)
        self._copy_episodes(native)

    def _offs(self, image: Image) -> tuple[Array, Array]:
        """Where the trajectories are, and the blocks of which items are rows; each once."""
        found = {True: 0, False: 0}
        for refs in image.refs():
            of_block = int(np.count_nonzero((refs & _KIND_MASK) == _BLOCK_KIND))
            found[True] += of_block
            found[False] += int(np.count_nonzero(refs)) - of_block
        offs = {kind: self._scratch.array(n, np.uint64) for kind, n in found.items()}
        filled = {True: 0, False: 0}
        for refs in image.refs():
            of_block = (refs & _KIND_MASK) == _BLOCK_KIND
            for kind, mine in ((True, of_block), (False, ~of_block & (refs != 0))):
                part = np.unique(refs[mine] & ~_KIND_MASK)
                offs[kind][filled[kind] : filled[kind] + len(part)] = part
                filled[kind] += len(part)
        return unique(offs[False][: filled[False]]), unique(offs[True][: filled[True]])

    def _copy_blocks(self, native: _native.Store, session: _native.Session) -> None:
        offs, make = self._sorted_offs, self._scratch.array
        blocks, rows = make(len(offs), BLOCK), make(len(offs), np.uint64)
        _native.image_block_heads(session, offs, blocks, rows)
        order = np.argsort(blocks["uid"], kind="stable")
        self._rank = make(len(offs), np.uint32)
        self.block_offs, self.block_rows = make(len(offs), np.uint64), make(len(offs), np.uint64)
        self.blocks = make(len(offs), BLOCK)
        for part in pieces(len(offs)):
            at = order[part]
            self._rank[at] = np.arange(part.start, part.stop, dtype=np.uint32)
            self.block_offs[part], self.block_rows[part] = offs[at], rows[at]
            self.blocks[part] = blocks[at]

    def _copy_episodes(self, native: _native.Store) -> None:
        named = self.runs["episode"]
        at = self._scratch.array(len(named), np.uint64)
        at[:] = named
        at = unique(at)
        for part in pieces(len(named)):
            named[part] = np.searchsorted(at, named[part])
        self.episodes = self._scratch.array(len(at), EPISODES)
        _native.image_episodes(native, at, self.episodes)

    def block_numbers(self, offs: Array) -> Array:
        """Returns the numbers of blocks at these offsets."""
        return self._rank[np.searchsorted(self._sorted_offs, offs)]

    def name_objects(self, image: Image) -> None:
        """Puts numbers in the place of references: 1 + 2 * number, and 1 more for a block."""
        for refs in image.refs():
            offs, of_block = refs & ~_KIND_MASK, (refs & _KIND_MASK) == _BLOCK_KIND
            of_traj = (refs != 0) & ~of_block
            refs[of_block] = 2 * self.block_numbers(offs[of_block]).astype(np.uint64) + 2
            numbers = np.searchsorted(self.traj_offs, offs[of_traj])
            refs[of_traj] = 2 * numbers.astype(np.uint64) + 1
