"""Putting a checkpoint into a store that is being made.

All of the index is read and checked before there is a store. Steps are checked as they are read;
until the last of them is in place nobody can attach, and if anything fails the store is removed:
so a checkpoint is there wholly or not at all.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from shmreplay import _native, checkpoint_files
from shmreplay.checkpoint_check import Contents, SavedStripe, SavedTable, load
from shmreplay.checkpoint_format import SLOT, Array, Reader
from shmreplay.checkpointers import CheckpointSettings
from shmreplay.errors import ArenaFullError, CheckpointError, InvalidArgumentError
from shmreplay.table import Table, TableConfig

__all__ = ["Plan", "choose", "fill", "plan"]

_BLOCK_KIND: Final = 1
_TRAJECTORY_KIND: Final = 2

_log = logging.getLogger(__name__)


class _Restored(NamedTuple):
    """How one saved table comes back."""

    number: int
    """Of the table in the new store."""
    saved: SavedTable
    config: TableConfig
    keeps_keys: bool


class Plan(NamedTuple):
    """What restoring a checkpoint comes to."""

    path: str
    contents: Contents
    configs: list[TableConfig]
    """Settings of the tables of the store to be made."""
    keys: list[tuple[int, int]]
    """Of each table: bits of a slot's number in its keys, and slots at least; 0 for any."""
    tables: list[_Restored]
    differences: list[str]
    """Between saved and declared settings, in words."""
    reset_limiters: bool


def choose(settings: CheckpointSettings) -> str | None:
    """Returns the path of the checkpoint that a server loads, None if there is none."""
    path = checkpoint_files.latest(settings.path) if settings.path else None
    if path is None and settings.fallback_checkpoint_path is not None:
        fallback = os.path.abspath(settings.fallback_checkpoint_path)
        if os.path.isdir(fallback):
            return fallback
        _log.warning("there is no checkpoint to fall back to at %s", fallback)
    return path


def plan(path: str, tables: Sequence[Table], settings: CheckpointSettings, capacity: int) -> Plan:
    """Reads a checkpoint's index, checks it, and compares it with the tables that are declared.

    Args:
        path: Of the checkpoint.
        tables: That are declared.
        settings: Whose settings win, and whether limiters start anew.
        capacity: Of the store to be made.

    Raises:
        CheckpointError: It is damaged; says where.
        InvalidArgumentError: It has a table that is not declared.
    """
    contents = load(Reader(path))
    declared = {table.name: (i, table) for i, table in enumerate(tables)}
    saved_names = [saved.config.name for saved in contents.tables]
    missing = [name for name in saved_names if name not in declared]
    if missing:
        raise InvalidArgumentError(
            f"Trying to load table {missing[0]!r} but table was not found in provided list of"
            f" tables. The checkpoint {path} has {', '.join(map(repr, saved_names))}; the server"
            f" was given {', '.join(map(repr, declared))}. Declare the tables that are missing, or"
            " give the server a checkpointer with another path."
        )
    configs = [table.config() for table in tables]
    keys = [(0, 0)] * len(configs)
    restored, differences = [], []
    for saved in contents.tables:
        number, table = declared[saved.config.name]
        config = _settled(saved.config, table, settings.settings)
        differences += _differences(saved.config, table.config(), settings.settings)
        bits = saved.counts["slot_bits"]
        keeps = config.stripes == saved.config.stripes and _native.slot_bits_fit(
            bits, config.max_size, capacity
        )
        if keeps:
            keys[number] = (bits, max((len(s.slots) for s in saved.stripes), default=0))
        elif saved.size:
            differences.append(
                f"table {config.name!r}: its items get new keys, as its stripes or its max_size"
                " are so different that the old ones do not fit"
            )
        _check_priorities(path, saved, config)
        configs[number] = config
        restored.append(_Restored(number, saved, config, keeps))
    differences += [
        f"table {name!r} is not in the checkpoint and starts empty"
        for name in declared
        if name not in saved_names
    ]
    return Plan(path, contents, configs, keys, restored, differences, settings.reset_limiters)


def _settled(saved: TableConfig, table: Table, whose: str) -> TableConfig:
    """The settings that the table gets."""
    declared = table.config()
    if whose == "saved":
        return dataclasses.replace(
            saved, events=declared.events, stripes=1 if declared.events else saved.stripes
        )
    if table.requested_stripes is not None or saved.stripes == declared.stripes:
        return declared
    try:  # the default depends on the machine; as many as there were keep the keys
        return dataclasses.replace(declared, stripes=saved.stripes)
    except InvalidArgumentError:
        return declared


def _differences(saved: TableConfig, declared: TableConfig, whose: str) -> list[str]:
    taken = "saved" if whose == "saved" else "declared"
    return [
        f"table {saved.name!r}: {field.name} was saved as {getattr(saved, field.name)!r} and is"
        f" declared as {getattr(declared, field.name)!r}; the {taken} one holds"
        for field in dataclasses.fields(saved)
        if field.name not in ("stripes", "events", "name")
        and getattr(saved, field.name) != getattr(declared, field.name)
    ]


def _check_priorities(path: str, saved: SavedTable, config: TableConfig) -> None:
    if "prioritized" not in (config.sampler_kind, config.remover_kind):
        return
    for stripe in saved.stripes:
        priorities = stripe.slots["priority"][stripe.live]
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise CheckpointError(
                f"{path}: table {config.name!r} has items with negative or infinite priorities;"
                " expected none, as it is declared with a prioritized selector. Declare it as it"
                " was saved."
            )


# --- filling ------------------------------------------------------------------------------------


def fill(native: _native.Store, what: Plan) -> None:
    """Puts the checkpoint into a store that was just made and that nobody can attach to.

    Raises:
        CheckpointError: It is damaged; says where. The store is then to be removed.
        ArenaFullError: The store has no room for it.
    """
    began = time.monotonic()
    contents = what.contents
    _native.restore_begin(native)
    try:
        offs = _restore_objects(native, contents)
        _restore_rows(native, contents, offs[0])
        schemas = {n: native.schema_intern(text.encode()) for n, text in contents.schemas.items()}
        lost = sum(_restore_table(native, each, offs, schemas) for each in what.tables)
        _native.restore_derive(native)
        for each in what.tables:
            _restore_orders(native, each)
        evicted = _native.restore_end(native, what.reset_limiters)
    except CheckpointError as error:
        raise CheckpointError(f"{what.path}: {error}") from error
    except ArenaFullError as error:
        raise ArenaFullError(
            f"Got the checkpoint {what.path} with {contents.data_bytes} bytes of steps, for which"
            f" the store has no room. Give the server a larger capacity. {error}"
        ) from error
    for difference in what.differences:
        _log.warning("restoring %s: %s", what.path, difference)
    _log.info(
        "restored %s from %s in %.2f s: %d items, %d trajectories, %d blocks, %d episodes, %d bytes"
        " of steps; %d items were sampled as often as is allowed now, %d were beyond max_size",
        *(", ".join(repr(each.config.name) for each in what.tables), what.path),
        *(time.monotonic() - began, sum(t.size for t in contents.tables)),
        *(len(contents.trajectories), len(contents.blocks), len(contents.episodes)),
        *(contents.data_bytes, lost, evicted),
    )


def _restore_objects(native: _native.Store, c: Contents) -> tuple[Array, Array]:
    """Makes blocks, without their rows, and trajectories; says where they are."""
    episodes = np.empty(len(c.episodes), np.uint64)
    _native.restore_episodes(native, c.episodes, episodes)
    blocks = np.empty(len(c.blocks), np.uint64)
    _native.restore_blocks(native, c.blocks, c.row_bytes, c.runs, episodes, blocks)
    trajectories = np.empty(len(c.trajectories), np.uint64)
    _native.restore_trajs(
        native,
        c.trajectories,
        c.trajectory_blocks,
        c.trajectory_columns,
        c.segments,
        blocks,
        trajectories,
    )
    return blocks, trajectories


def _restore_rows(native: _native.Store, c: Contents, blocks: Array) -> None:
    for number in range(len(c.reader.files)):
        mine = np.flatnonzero(c.places["file"] == number)
        mine = mine[np.argsort(c.places["offset"][mine], kind="stable")]
        offs, heads = blocks[mine], c.blocks[mine]
        where = np.ascontiguousarray(c.places["offset"][mine])
        path, done = os.path.join(c.reader.path, c.reader.files[number][0]), 0
        for at, data in c.reader.chunks_of(number):
            done = _native.restore_rows(native, path, offs, heads, where, done, data, at)


def _restore_table(
    native: _native.Store,
    each: _Restored,
    offs: tuple[Array, Array],
    schemas: dict[int, int],
) -> int:
    """Puts slots and counters in place; gives the number of items that were sampled too often."""
    saved, config = each.saved, each.config
    stripes = [s.slots.copy() for s in saved.stripes]
    lost = 0
    for slots in stripes:
        if config.max_times_sampled > 0:
            through = (slots["object"] != 0) & (slots["times_sampled"] >= config.max_times_sampled)
            slots["object"][through] = 0
            lost += int(through.sum())
        _refer(slots, offs, schemas)
    touches = [s.touch_next for s in saved.stripes]
    if not each.keeps_keys:
        stripes, touches = _dealt_out(stripes, touches, config.stripes)
    for k, (slots, touch_next) in enumerate(zip(stripes, touches, strict=True)):
        _native.restore_slots(native, each.number, k, slots, touch_next)
    counts = {**saved.counts, "deletes": saved.counts["deletes"] + lost}
    seeded = config.seed is not None and config.seed == saved.config.seed
    _native.restore_table(native, each.number, counts, seeded)
    return lost


def _refer(slots: Array, offs: tuple[Array, Array], schemas: dict[int, int]) -> None:
    """Puts references in the place of numbers."""
    names = slots["object"]
    refs = np.zeros(len(slots), np.uint64)
    numbers = ((names - np.uint64(1)) >> np.uint64(1)).astype(np.int64)
    live = names != 0
    of_block, of_trajectory = live & ((names & 1) == 0), live & ((names & 1) == 1)
    refs[of_block] = offs[0][numbers[of_block]] | _BLOCK_KIND
    refs[of_trajectory] = offs[1][numbers[of_trajectory]] | _TRAJECTORY_KIND
    there = slots["schema"].copy()
    for before, after in schemas.items():
        slots["schema"][live & (there == before)] = after
    slots["object"] = refs


def _dealt_out(
    stripes: Sequence[Array], touches: Sequence[int], n_stripes: int
) -> tuple[list[Array], list[int]]:
    """Items in the order of their insertion, by turns over the stripes, with new keys."""
    items = np.concatenate([slots[slots["object"] != 0] for slots in stripes])
    items = items[np.argsort(items["sequence"], kind="stable")]
    items["key"] = 0
    if len(stripes) > 1:  # changes of different stripes have no order
        items["touch"] = np.arange(len(items))
    after = len(items) if len(stripes) > 1 else touches[0]
    parts = [np.ascontiguousarray(items[k::n_stripes]) for k in range(n_stripes)]
    return [part.astype(SLOT, copy=False) for part in parts], [after] * n_stripes


def _restore_orders(native: _native.Store, each: _Restored) -> None:
    """The orders that do not follow from the items: so that later draws are the same, too."""
    saved, config = each.saved, each.config
    same = (config.sampler_kind, config.remover_kind) == (
        saved.config.sampler_kind,
        saved.config.remover_kind,
    )
    if not each.keeps_keys:
        return
    for k, stripe in enumerate(saved.stripes):
        if _went(stripe, config):
            continue
        _native.restore_free(native, each.number, k, stripe.free)
        for selector, (order, head) in enumerate(zip(stripe.orders, stripe.heads, strict=True)):
            if same and len(order):
                _native.restore_order(native, each.number, k, selector, order, head)


def _went(stripe: SavedStripe, config: TableConfig) -> bool:
    most = config.max_times_sampled
    times = stripe.slots["times_sampled"][stripe.live]
    return most > 0 and bool((times >= most).any())
