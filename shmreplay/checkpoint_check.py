"""What a checkpoint says, looked at: every number in its range, every reference to what is there.

``load`` reads all of the index, and raises ``CheckpointError`` with file and offset where anything
in it does not hold together. Steps are read when they are restored or verified.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shmreplay import item_schema
from shmreplay.checkpoint_format import (
    BLOCK,
    COLUMN,
    EPISODES,
    PLACE,
    RUN,
    SEGMENT,
    SLOT,
    TRAJECTORY,
    Array,
    Reader,
)
from shmreplay.errors import ReverbError
from shmreplay.table import TableConfig

__all__ = ["Contents", "SavedStripe", "SavedTable", "load"]

SQUEEZED: Final = np.uint32(0x80000000)
FREE_END: Final = 0xFFFFFFFF

PACKED: Final = 1
"""The encoding of blocks whose rows are compressed: the bytes that the store had of them."""

_PACKED_BYTES: Final = 64
_PACKED_COLUMN_BYTES: Final = 40
_COLUMNS_MAX: Final = 256
_COUNTS: Final = (
    *("inserts", "samples", "deletes", "num_deleted_episodes", "num_unique_samples", "rng"),
    *("next_seq", "missed_updates", "max_priority_bits", "slot_bits"),
)


class SavedStripe(NamedTuple):
    """A share of a table's items."""

    slots: Array
    """``SLOT``, those that are free included (object 0)."""
    orders: list[Array]
    """For each of two selectors, the slots in the order in which draws number them; or empty."""
    heads: list[int]
    free: Array
    """Free slots, in the order in which they are used next."""
    touch_next: int

    @property
    def live(self) -> Array:
        """Which slots have an item."""
        return np.asarray(self.slots["object"] != 0)


class SavedTable(NamedTuple):
    """A table."""

    config: TableConfig
    """Its settings as they were when it was saved."""
    counts: dict[str, int]
    stripes: list[SavedStripe]

    @property
    def size(self) -> int:
        """Items in it."""
        return sum(int(s.live.sum()) for s in self.stripes)


class Contents(NamedTuple):
    """All of the index."""

    reader: Reader
    tables: list[SavedTable]
    schemas: dict[int, str]
    episodes: Array
    blocks: Array
    places: Array
    row_bytes: Array
    runs: Array
    trajectories: Array
    trajectory_blocks: Array
    trajectory_columns: Array
    segments: Array

    @property
    def data_bytes(self) -> int:
        """Bytes of steps that the items need, as they are stored."""
        return int(self.blocks["bytes"].sum())


def load(reader: Reader) -> Contents:
    """Reads the index of a checkpoint and checks all of it.

    Raises:
        CheckpointError: It is damaged; says where.
    """
    c = Contents(
        reader,
        [],
        reader.schemas(),
        reader.section("episodes", EPISODES),
        reader.section("blocks", BLOCK),
        reader.section("block_places", PLACE),
        reader.section("block_columns", "<u8"),
        reader.section("block_runs", RUN),
        reader.section("trajectories", TRAJECTORY),
        reader.section("trajectory_blocks", "<u4"),
        reader.section("trajectory_columns", COLUMN),
        reader.section("trajectory_segments", SEGMENT),
    )
    _check_blocks(c)
    rows = _check_trajectories(c)
    for number, entry in enumerate(reader.tables()):
        c.tables.append(_table(reader, number, entry))
    names = [t.config.name for t in c.tables]
    if len(set(names)) != len(names):
        raise reader.bad("two tables have one name")
    _check_items(c, rows)
    return c


def _first_bad(ok: Array) -> int | None:
    return None if bool(ok.all()) else int(np.flatnonzero(~ok)[0])


def _require(reader: Reader, name: str, size: int, ok: Array, what: str) -> None:
    bad = _first_bad(ok)
    if bad is not None:
        raise reader.bad_section(name, bad, size, what)


def _firsts(counts: Array, total: int, reader: Reader, name: str, size: int) -> Array:
    """Where the parts begin that have these sizes, one after the other and `total` together."""
    ends = np.cumsum(counts, dtype=np.uint64)
    there = int(ends[-1]) if len(ends) else 0
    if there != total:
        raise reader.bad_section(name, 0, size, f"{there} parts are named and {total} are there")
    return np.concatenate(([0], ends)).astype(np.int64)


# --- objects ------------------------------------------------------------------------------------


def _check_blocks(c: Contents) -> None:
    r, b = c.reader, c.blocks
    size = BLOCK.itemsize
    ok = (b["columns"] >= 1) & (b["columns"] <= _COLUMNS_MAX) & (b["rows"] >= 1) & (b["runs"] >= 1)
    _require(r, "blocks", size, ok & (b["runs"] <= b["rows"]), "a block has impossible sizes")
    _require(r, "blocks", size, b["encoding"] <= PACKED, "the encoding of a block is not known")
    first = _firsts(b["columns"], len(c.row_bytes), r, "blocks", size)
    _require(r, "block_columns", 8, c.row_bytes < 2**46, "a row is impossibly long")
    # In floating point first: what does not fit 62 bits must not wrap.
    sums = np.add.reduceat(c.row_bytes, first[:-1]) if len(b) else c.row_bytes
    wide = sums.astype(np.float64) * b["rows"]
    raw = sums * b["rows"].astype(np.uint64) == b["bytes"]
    least = _PACKED_BYTES + _PACKED_COLUMN_BYTES * b["columns"].astype(np.uint64)
    right = (wide < 2.0**62) & np.where(b["encoding"] == PACKED, b["bytes"] >= least, raw)
    _require(r, "blocks", size, right, "the size of a block is not that of its rows")
    runs = _firsts(b["runs"], len(c.runs), r, "blocks", size)
    _require(
        r, "block_runs", RUN.itemsize, c.runs["episode"] < len(c.episodes), "there is no episode"
    )
    _require(r, "block_runs", RUN.itemsize, c.runs["rows"] >= 1, "a run has no rows")
    rows = c.runs["rows"].astype(np.uint64)
    found = np.add.reduceat(rows, runs[:-1]) if len(b) else rows
    _require(r, "blocks", size, found == b["rows"], "the episodes of a block are not its rows")
    if len(c.places) != len(b):
        raise r.bad_section("block_places", 0, 1, f"{len(c.places)} places for {len(b)} blocks")
    _require(
        r, "block_places", PLACE.itemsize, c.places["file"] < len(r.files), "there is no such file"
    )
    if len(b):
        sizes = np.array([size for _, size in r.files], np.uint64)[c.places["file"]]
        inside = (b["bytes"] <= sizes) & (c.places["offset"] <= sizes - b["bytes"])
        _require(r, "block_places", PLACE.itemsize, inside, "a block lies beyond its file")


def _check_trajectories(c: Contents) -> Array:
    """Checks them, and gives the bytes of a row of each of their columns."""
    r, t = c.reader, c.trajectories
    size = TRAJECTORY.itemsize
    ok = (t["columns"] >= 1) & (t["columns"] <= _COLUMNS_MAX) & (t["segments"] >= 1)
    _require(r, "trajectories", size, ok & (t["blocks"] >= 1), "a trajectory is empty")
    first_block = _firsts(t["blocks"], len(c.trajectory_blocks), r, "trajectories", size)
    first_seg = _firsts(t["segments"], len(c.segments), r, "trajectories", size)
    each = t["columns"].astype(np.uint64) + 1
    first_col = _firsts(each, len(c.trajectory_columns), r, "trajectories", size)
    _require(
        r, "trajectory_blocks", 4, c.trajectory_blocks < len(c.blocks), "there is no such block"
    )
    if not len(t):
        return np.empty(0, np.uint64)
    s, of = c.segments, np.repeat(np.arange(len(t)), t["segments"])
    _require(
        r, "trajectory_segments", 16, s["block"] < t["blocks"][of], "there is no such block in it"
    )
    block = c.trajectory_blocks[first_block[of] + s["block"]]
    _require(
        r,
        "trajectory_segments",
        16,
        s["column"] < c.blocks["columns"][block],
        "the block has no such column",
    )
    rows = c.blocks["rows"][block].astype(np.int64)
    start, count = s["start"].astype(np.int64), s["count"].astype(np.int64)
    last = start + s["stride"].astype(np.int64) * (count - 1)
    inside = (count >= 1) & (start < rows) & (last >= 0) & (last < rows)
    _require(r, "trajectory_segments", 16, inside, "rows are not in the block")
    block_first = np.concatenate(([0], np.cumsum(c.blocks["columns"], dtype=np.int64)))
    seg_bytes = c.row_bytes[block_first[block] + s["column"]]
    return _check_columns(c, first_col, first_seg, seg_bytes)


def _check_columns(c: Contents, first_col: Array, first_seg: Array, seg_bytes: Array) -> Array:
    r, t, cols = c.reader, c.trajectories, c.trajectory_columns
    name, size = "trajectory_columns", COLUMN.itemsize
    of = np.repeat(np.arange(len(t)), t["columns"].astype(np.int64) + 1)
    at = cols["first_segment"].astype(np.int64)
    _require(r, name, size, at <= t["segments"][of], "there is no such segment")
    is_last = np.zeros(len(cols), bool)
    is_last[first_col[1:] - 1] = True
    begin = np.zeros(len(cols), bool)
    begin[first_col[:-1]] = True
    _require(r, name, size, ~begin | (at == 0), "the first column does not begin the segments")
    _require(r, name, size, ~is_last | (at == t["segments"][of]), "segments are left over")
    real = np.flatnonzero(~is_last)
    a, z = first_seg[of[real]] + at[real], first_seg[of[real]] + at[real + 1]
    grows = np.ones(len(cols), bool)
    grows[real] = a < z
    _require(r, name, size, grows, "a column has no segments")
    ends = np.concatenate(([0], np.cumsum(c.segments["count"], dtype=np.int64)))
    length = (cols["length"][real] & ~SQUEEZED).astype(np.int64)
    right = np.ones(len(cols), bool)
    right[real] = ends[z] - ends[a] == length
    _require(r, name, size, right, "the length of a column is not that of its segments")
    squeezed = (cols["length"][real] & SQUEEZED) != 0
    right[real] = ~squeezed | (length == 1)
    _require(r, name, size, right, "a column without a time axis has several rows")
    # All segments of a column have rows of one size: that of its first.
    column_of_seg = np.repeat(np.arange(len(real)), z - a)
    row_bytes = seg_bytes[a]
    same = np.asarray(seg_bytes == row_bytes[column_of_seg])
    _require(r, "trajectory_segments", SEGMENT.itemsize, same, "rows of two sizes in one column")
    return np.asarray(row_bytes)


# --- tables -------------------------------------------------------------------------------------


def _config(reader: Reader, settings: Any) -> TableConfig:
    """Settings of a table: of those that were not there yet when it was saved, the default."""
    if not isinstance(settings, dict):
        raise reader.bad("a table has no settings")
    values = {}
    for field in dataclasses.fields(TableConfig):
        if field.name in settings:
            values[field.name] = settings[field.name]
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    try:
        return TableConfig.from_json(json.dumps(values))
    except ReverbError as error:
        raise reader.bad(f"the settings of a table are damaged ({error})") from error


def _table(reader: Reader, number: int, entry: Any) -> SavedTable:
    if not isinstance(entry, dict):
        raise reader.bad(f"table {number} is damaged")
    config = _config(reader, entry.get("settings"))
    counts, stripes = entry.get("counts"), entry.get("stripes")
    if not isinstance(counts, dict) or not isinstance(stripes, list):
        raise reader.bad(f"table {config.name!r} is damaged")
    for key in _COUNTS:
        if type(counts.get(key)) is not int or not 0 <= counts[key] < 2**64:
            raise reader.bad(f"table {config.name!r} has no count {key!r}")
        if key in _COUNTS[:5] and counts[key] >= 2**62:
            raise reader.bad(f"table {config.name!r} has an impossible count {key!r}")
    if not 1 <= counts["slot_bits"] <= 32 or len(stripes) != config.stripes:
        raise reader.bad(f"table {config.name!r} has impossible stripes")
    made = [_stripe(reader, number, k, each) for k, each in enumerate(stripes)]
    table = SavedTable(config, counts, made)
    if counts["inserts"] - counts["deletes"] != table.size:
        raise reader.bad(f"table {config.name!r} does not hold as many items as its counts say")
    return table


def _stripe(reader: Reader, table: int, number: int, entry: Any) -> SavedStripe:
    where = f"tables/{table}/stripes/{number}"
    match entry:
        case {"touch_next": int(touch), "free_head": int(free), "heads": [int(h0), int(h1)]}:
            heads = [h0, h1]
        case _:
            raise reader.bad(f"{where} is damaged")
    slots = reader.section(f"{where}/slots", SLOT)
    orders = [reader.section(f"{where}/order_{k}", "<u4") for k in range(2)]
    stripe = SavedStripe(slots, orders, heads, _free_list(reader, where, slots, free), touch)
    live = np.flatnonzero(stripe.live)
    for k, order in enumerate(orders):
        if len(order) and not np.array_equal(np.sort(order), live):
            raise reader.bad_section(f"{where}/order_{k}", 0, 4, "draws are not over the items")
        if not 0 <= heads[k] <= len(order):
            raise reader.bad(f"{where} has drawn more than it has")
    priority = slots["priority"][live]
    ok = np.ones(len(slots), bool)
    ok[live] = ~np.isnan(priority) & (slots["key"][live] != 0)
    _require(reader, f"{where}/slots", SLOT.itemsize, ok, "an item has no key or no priority")
    touches = slots["touch"][live]
    if not 0 <= touch < 2**63 or (len(live) and int(touches.max()) >= touch):
        raise reader.bad(f"{where} counts its changes wrongly")
    return stripe


def _free_list(reader: Reader, where: str, slots: Array, head: int) -> Array:
    free = np.asarray(slots["object"] == 0)
    after = slots["row_start"].tolist() if free.any() else []
    out: list[int] = []
    n_free = int(free.sum())
    while head != FREE_END and len(out) < n_free:
        if not 0 <= head < len(slots) or not free[head]:
            raise reader.bad_section(f"{where}/slots", 0, 1, "the free slots are not one list")
        out.append(head)
        head = after[head]
    if head != FREE_END or len(set(out)) != n_free:
        raise reader.bad_section(f"{where}/slots", 0, 1, "the free slots are not one list")
    return np.array(out, np.uint32)


def _check_items(c: Contents, traj_row_bytes: Array) -> None:
    wanted = {}
    for number, text in c.schemas.items():
        try:
            columns = item_schema.decode(text.encode()).columns
        except (ReverbError, RecursionError) as error:
            raise c.reader.bad(f"item structure {number} is damaged ({error})") from error
        if not all(type(n) is int and 0 <= n < 2**47 for column in columns for n in column.shape):
            raise c.reader.bad(f"item structure {number} has an impossible shape")
        sizes = [column.dtype.itemsize * math.prod(column.shape) for column in columns]
        if max(sizes) >= 2**47:
            raise c.reader.bad(f"item structure {number} has an impossible shape")
        wanted[number] = (sizes, [column.squeezed for column in columns])
    first_of_traj = np.concatenate(([0], np.cumsum(c.trajectories["columns"], dtype=np.int64)))
    length = _lengths(c)
    first_of_block = np.concatenate(([0], np.cumsum(c.blocks["columns"], dtype=np.int64)))
    for number, table in enumerate(c.tables):
        for k, stripe in enumerate(table.stripes):
            name = f"tables/{number}/stripes/{k}/slots"
            _check_objects(c, name, stripe)
            s = stripe.slots
            of_block = (s["object"] & 1) == 0
            live = stripe.live
            for schema in np.unique(s["schema"][live]).tolist():
                mine = live & (s["schema"] == schema)
                if schema not in wanted:
                    bad = int(np.flatnonzero(mine)[0])
                    raise c.reader.bad_section(name, bad, SLOT.itemsize, "no such structure")
                sizes, squeezed = wanted[schema]
                fits = np.ones(len(s), bool)
                in_block, in_traj = mine & of_block, mine & ~of_block
                numbers = ((s["object"] - 1) >> 1).astype(np.int64)
                fits[in_block] = _same(
                    numbers[in_block], c.blocks["columns"], first_of_block, c.row_bytes, sizes
                ) & _squeezed_alike(s["row_count"][in_block], squeezed)
                fits[in_traj] = _same(
                    numbers[in_traj], c.trajectories["columns"], first_of_traj, traj_row_bytes,
                    sizes,
                ) & _same(
                    numbers[in_traj], c.trajectories["columns"], first_of_traj, length,
                    [int(each) for each in squeezed],
                )  # fmt: skip
                _require(c.reader, name, SLOT.itemsize, fits, "an item is not of its structure")


def _lengths(c: Contents) -> Array:
    """1 for each column of the trajectories that has no time axis, 0 for one that has."""
    t, cols = c.trajectories, c.trajectory_columns
    keep = np.ones(len(cols), bool)
    keep[np.cumsum(t["columns"].astype(np.int64) + 1) - 1] = False
    return np.asarray((cols["length"][keep] & SQUEEZED) != 0).astype(np.uint64)


def _squeezed_alike(row_count: Array, squeezed: Sequence[bool]) -> Array:
    have = np.asarray((row_count & SQUEEZED) != 0)
    if all(squeezed):
        return have
    return ~have if not any(squeezed) else np.zeros(len(row_count), bool)


def _same(
    numbers: Array, columns: Array, first: Array, values: Array, wanted: Sequence[int]
) -> Array:
    """Whether the columns of these objects have these values."""
    ok = np.asarray(columns[numbers] == len(wanted))
    for c, value in enumerate(wanted):
        at = np.minimum(first[numbers] + c, max(len(values) - 1, 0))
        ok &= values[at] == value
    return ok


def _check_objects(c: Contents, name: str, stripe: SavedStripe) -> None:
    s, live = stripe.slots, stripe.live
    number = (s["object"] - 1) >> 1
    of_block = (s["object"] & 1) == 0
    there = np.where(of_block, len(c.blocks), len(c.trajectories)).astype(np.uint64)
    _require(c.reader, name, SLOT.itemsize, ~live | (number < there), "an item refers to nothing")
    mine = np.flatnonzero(live & of_block)
    count = (s["row_count"][mine] & ~SQUEEZED).astype(np.int64)
    start = s["row_start"][mine].astype(np.int64)
    rows = c.blocks["rows"][number[mine].astype(np.int64)].astype(np.int64)
    squeezed = (s["row_count"][mine] & SQUEEZED) != 0
    ok = np.ones(len(s), bool)
    ok[mine] = (count >= 1) & (start + count <= rows) & (~squeezed | (count == 1))
    _require(c.reader, name, SLOT.itemsize, ok, "an item has rows that are not in its block")
