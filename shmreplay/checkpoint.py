"""Writing checkpoints of a store: all tables as of one instant, while everybody goes on.

The index (which items there are) is copied under all locks of the store, which takes milliseconds.
From then on what these items refer to is held, and read and written without a lock. Blocks that
the last checkpoint has are not written again: the files are shared. See FORMAT.md, and
``_core/checkpoint.h`` for what is held how.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np

from shmreplay import _native, checkpoint_files
from shmreplay.checkpoint_format import (
    BLOCK,
    COLUMN,
    DATA_CHUNK,
    EPISODES,
    INDEX,
    MANIFEST,
    PLACE,
    RUN,
    SEGMENT,
    SLOT,
    TRAJECTORY,
    Array,
    IndexWriter,
    Reader,
    sum_of_chunks,
    write_all,
    write_manifest,
)
from shmreplay.checkpointers import CheckpointSettings
from shmreplay.errors import CheckpointError, InvalidArgumentError
from shmreplay.limits import CHECKPOINT_WAIT_S, WAIT_SLICE_MS
from shmreplay.table import TableConfig

__all__ = ["Saved", "save"]

_BUFFER_BYTES: Final = 4 * DATA_CHUNK
_FILE_BYTES: Final = 256 << 20
_ROOM_SLOTS: Final = 4096
"""Slots that a stripe may take into use between two looks at it."""
_LIVELY: Final = 0.5
"""Share of a data file that must still be in use for it to be kept; else what is in use of it is
written anew, so that what is not does not stay on disk for ever."""
_NICE: Final = 19

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """What a checkpoint took."""

    path: str
    items: int
    data_bytes: int
    """Bytes of steps that its items need, as they are stored."""
    new_bytes: int
    """Of these, those that were written now."""
    held_s: float
    """Seconds for which all calls on the store were held up."""
    seconds: float


class _Stripe(NamedTuple):
    slots: Array
    orders: list[Array]
    heads: list[int]
    free_head: int
    touch_next: int


class _Image:
    """A copy of the store's index; what it refers to is held until ``release``."""

    def __init__(self, native: _native.Store, configs: Sequence[TableConfig]) -> None:
        self.native = native
        self.n_stripes = sum(config.stripes for config in configs)
        while True:
            used = _native.slots_used(native, self.n_stripes)
            room = [n + n // 8 + _ROOM_SLOTS for n in used]
            slots = [np.zeros(n, SLOT) for n in room]
            orders = [[np.zeros(n, np.uint32) for _ in range(2)] for n in room]
            for array in (*slots, *(each for pair in orders for each in pair)):
                array.fill(0)  # now: under the locks there is no time to make pages
            taken = _native.snapshot(native, len(configs), slots, orders)
            if taken is not None:
                break
        held_ns, stripes, self.counts = taken
        self.held_s = held_ns / 1e9
        self.stripes = [
            _Stripe(s[:n], [o[0][:n0], o[1][:n1]], [h0, h1], free, touch)
            for s, o, (n, n0, n1, h0, h1, free, touch) in zip(slots, orders, stripes, strict=True)
        ]

    def refs(self) -> Array:
        """Returns the references of all items."""
        parts = [s.slots["object"] for s in self.stripes]
        refs = np.concatenate(parts)
        return np.asarray(refs[refs != 0])


_KIND_MASK: Final = np.uint64(7)
_BLOCK_KIND: Final = 1


class _Objects:
    """What the items refer to, copied while it is held; and blocks put in order of their making."""

    def __init__(self, image: _Image, session: _native.Session) -> None:
        native, refs = image.native, image.refs()
        kinds, offs = refs & _KIND_MASK, refs & ~_KIND_MASK
        self.traj_offs = np.unique(offs[kinds != _BLOCK_KIND])
        self.trajs = np.empty(len(self.traj_offs), TRAJECTORY)
        _native.image_traj_heads(native, self.traj_offs, self.trajs)
        total = {
            name: int(self.trajs[name].sum(dtype=np.uint64)) for name in TRAJECTORY.fields or ()
        }
        of_trajs = np.empty(total["blocks"], np.uint64)
        self.cols = np.empty(total["columns"] + len(self.trajs), COLUMN)
        self.segs = np.empty(total["segments"], SEGMENT)
        _native.image_trajs(native, self.traj_offs, self.trajs, of_trajs, self.cols, self.segs)

        offs = np.unique(np.concatenate((offs[kinds == _BLOCK_KIND], of_trajs)))
        blocks, rows = np.empty(len(offs), BLOCK), np.empty(len(offs), np.uint64)
        _native.image_block_heads(session, offs, blocks, rows)
        self._rank = np.empty(len(offs), np.uint32)
        order = np.argsort(blocks["uid"], kind="stable")
        self._rank[order] = np.arange(len(offs), dtype=np.uint32)
        self._sorted_offs = offs
        self.block_offs, self.block_rows, self.blocks = offs[order], rows[order], blocks[order]
        self.traj_blocks = self.block_numbers(of_trajs)
        self.row_bytes = np.empty(int(self.blocks["columns"].sum(dtype=np.uint64)), np.uint64)
        self.runs = np.empty(int(self.blocks["runs"].sum(dtype=np.uint64)), RUN)
        _native.image_blocks(native, self.block_offs, self.blocks, self.row_bytes, self.runs)
        at, numbers = np.unique(self.runs["episode"], return_inverse=True)
        self.runs["episode"] = numbers
        self.episodes = np.empty(len(at), EPISODES)
        _native.image_episodes(native, at, self.episodes)

    def block_numbers(self, offs: Array) -> Array:
        """Returns the numbers of blocks at these offsets."""
        return self._rank[np.searchsorted(self._sorted_offs, offs)]

    def name_objects(self, image: _Image) -> None:
        """Puts numbers in the place of references: 1 + 2 * number, and 1 more for a block."""
        for stripe in image.stripes:
            refs = stripe.slots["object"].copy()
            offs, of_block = refs & ~_KIND_MASK, (refs & _KIND_MASK) == _BLOCK_KIND
            named = np.zeros(len(refs), np.uint64)
            of_traj = (refs != 0) & ~of_block
            named[of_block] = 2 * self.block_numbers(offs[of_block]).astype(np.uint64) + 2
            numbers = np.searchsorted(self.traj_offs, offs[of_traj])
            named[of_traj] = 2 * numbers.astype(np.uint64) + 1
            stripe.slots["object"] = named


class _Last(NamedTuple):
    """Of the last checkpoint, what the next one may share."""

    path: str
    blocks: Array
    places: Array
    files: list[tuple[str, int]]
    sums: list[Array]


def _last(root: str) -> _Last | None:
    path = checkpoint_files.latest(root)
    if path is None:
        return None
    try:
        reader = Reader(path)
        blocks, places = reader.section("blocks", BLOCK), reader.section("block_places", PLACE)
        sums = [reader.section(f"data/{i}/crc32", "<u4") for i in range(len(reader.files))]
        if len(places) != len(blocks) or (places["file"] >= len(reader.files)).any():
            raise reader.bad("the places of blocks are damaged")
    except CheckpointError as error:
        _log.warning("nothing is shared with the last checkpoint: %s", error)
        return None
    return _Last(path, blocks, places, reader.files, sums)


class _Data:
    """The data files of a checkpoint: those shared with the last one, and new ones."""

    def __init__(self, directory: str, objects: _Objects, bandwidth: float | None) -> None:
        self._directory = directory
        self._bandwidth = bandwidth
        self._next = 0.0
        self._objects = objects
        self.places = np.zeros(len(objects.blocks), PLACE)
        self.files: list[tuple[str, int]] = []
        self.sums: list[Array] = []
        self.new_bytes = 0
        self._new = np.ones(len(objects.blocks), bool)

    def share(self, last: _Last) -> None:
        """Takes over what the last checkpoint has: blocks of the same number and rows."""
        blocks = self._objects.blocks
        if len(last.blocks) == 0 or len(blocks) == 0:
            return
        order = np.argsort(last.blocks["uid"], kind="stable")
        at = order[np.searchsorted(last.blocks["uid"], blocks["uid"], sorter=order) % len(order)]
        same = np.asarray(last.blocks[at] == blocks)
        for number, (name, size) in enumerate(last.files):
            mine = same & (last.places["file"][at] == number)
            if blocks["bytes"][mine].sum() < _LIVELY * size or not mine.any():
                continue
            try:
                os.link(os.path.join(last.path, name), os.path.join(self._directory, name))
            except OSError as error:  # a file system without links: all is written
                _log.info("%s cannot be shared (%s)", name, error)
                return
            self.places["file"][mine] = len(self.files)
            self.places["offset"][mine] = last.places["offset"][at[mine]]
            self.files.append((name, size))
            self.sums.append(last.sums[number])
            self._new &= ~mine

    def write(self, native: _native.Store) -> None:
        """Writes the blocks that are not shared."""
        numbers = np.flatnonzero(self._new)
        sizes = self._objects.blocks["bytes"][numbers].astype(np.int64)
        begins = np.cumsum(sizes) - sizes
        first = 0
        while first < len(numbers):
            # As many as make up a file, and one at least.
            end = int(np.searchsorted(begins, begins[first] + _FILE_BYTES))
            end = max(end, first + 1)
            part = numbers[first:end]
            self.places["file"][part] = len(self.files)
            self.places["offset"][part] = begins[first:end] - begins[first]
            self._write_file(native, part)
            first = end

    def _rest(self, native: _native.Store, nbytes: int) -> None:
        """Waits until so many bytes more may be written, unless it is to give up."""
        if self._bandwidth is None:
            return
        self._next = max(self._next, time.monotonic()) + nbytes / self._bandwidth
        while (left := self._next - time.monotonic()) > 0:
            _check_wanted(native)
            time.sleep(min(left, WAIT_SLICE_MS / 1000))

    def _write_file(self, native: _native.Store, numbers: Array) -> None:
        objects = self._objects
        offs, heads = objects.block_offs[numbers], objects.blocks[numbers]
        rows = objects.block_rows[numbers]
        at = np.zeros(2, np.uint64)
        buffer = np.empty(_BUFFER_BYTES if self._bandwidth is None else DATA_CHUNK, np.uint8)
        name, size, sums = checkpoint_files.data_name(), 0, []
        fd = _create(os.path.join(self._directory, name))
        try:
            while int(at[0]) < len(numbers):
                _check_wanted(native)
                got = _native.image_rows(native, offs, rows, heads, at, buffer)
                data = buffer.data[:got]
                sums += sum_of_chunks(data)
                write_all(fd, data)
                size += got
                self._rest(native, got)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.files.append((name, size))
        self.sums.append(np.array(sums, np.uint32))
        self.new_bytes += size


def _check_wanted(native: _native.Store) -> None:
    if _native.hold_unwanted(native):
        raise CheckpointError(
            "The checkpoint was given up, as somebody needed memory that it held in a store that is"
            " full. The last checkpoint stays. Give the server a larger capacity, or a smaller"
            " max_size, so that what is replaced while a checkpoint is written has room beside what"
            " replaces it."
        )


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _claim(native: _native.Store, reclaim: Callable[[], int]) -> None:
    end = time.monotonic() + CHECKPOINT_WAIT_S
    while not _native.hold_claim(native):
        reclaim()  # whoever has it may have died
        if _native.hold_claim(native):
            return
        if time.monotonic() >= end:
            raise CheckpointError(
                f"Got no turn within {CHECKPOINT_WAIT_S} s: another process writes a checkpoint of"
                " this store. Try again later, or see `shmreplay info` for who that may be."
            )
        time.sleep(0.05)


class _Copier(threading.Thread):
    """Reads and writes what is held, with less claim to the processors than the rest of us."""

    def __init__(
        self,
        image: _Image,
        session: _native.Session,
        directory: str,
        last: _Last | None,
        bandwidth: float | None,
    ) -> None:
        super().__init__(name="shmreplay-checkpoint", daemon=True)
        self._image = image
        self._session = session
        self._directory = directory
        self._last = last
        self._bandwidth = bandwidth
        self.failure: BaseException | None = None
        self.objects: _Objects
        self.data: _Data

    def run(self) -> None:
        try:
            # It holds no lock of the store from here on, so nobody waits for it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self.objects = _Objects(self._image, self._session)
            self.data = _Data(self._directory, self.objects, self._bandwidth)
            if self._last is not None:
                self.data.share(self._last)
            self.data.write(self._image.native)
        except BaseException as error:
            self.failure = error


def save(
    native: _native.Store,
    configs: Sequence[TableConfig],
    settings: CheckpointSettings,
    reclaim: Callable[[], int],
) -> Saved:
    """Writes a checkpoint of all tables, as of one instant.

    Args:
        native: The store.
        configs: Its tables, as they were declared.
        settings: Where to, and how many to keep.
        reclaim: Gives back what dead processes held.

    Raises:
        CheckpointError: It could not be written; the last one stays as it was.
        InvalidArgumentError: A group is to own it.
    """
    if settings.group:
        raise InvalidArgumentError(
            f"Got the group {settings.group!r} for checkpoints; expected none: they belong to the"
            " user who runs the server. Give the directory to the group (chgrp, chmod g+s)."
        )
    began = time.monotonic()
    root = os.path.abspath(settings.path or checkpoint_files.temporary_root(native.generation))
    try:
        with checkpoint_files.locked(root) as root_fd:
            directory = checkpoint_files.new_directory(root)
            try:
                saved = _save(native, configs, directory, _last(root), reclaim, settings.bandwidth)
                path = checkpoint_files.publish(root, root_fd, directory)
            except BaseException:  # what was written of it would fill the disk until the next one
                checkpoint_files.discard(directory)
                raise
            checkpoint_files.clear_away(root, settings.keep)
    except OSError as error:
        raise CheckpointError(
            f"Got an error while a checkpoint was written to {root!r}: {error}. The last one stays"
            " as it was. Look at the space and the rights there."
        ) from error
    saved = saved._replace(path=path, seconds=time.monotonic() - began)
    _log.info(
        "saved %d items, %d bytes of steps of which %d are new, to %s in %.2f s; calls were held"
        " up for %.1f ms",
        *(saved.items, saved.data_bytes, saved.new_bytes, path, saved.seconds, 1e3 * saved.held_s),
    )
    return saved


def _save(
    native: _native.Store,
    configs: Sequence[TableConfig],
    directory: str,
    last: _Last | None,
    reclaim: Callable[[], int],
    bandwidth: float | None,
) -> Saved:
    settings = [_settings_now(native, i, config) for i, config in enumerate(configs)]
    _claim(native, reclaim)
    try:
        with closing(_native.Session(native, _native.SESSION_CLIENT)) as session:
            image = _Image(native, configs)
            copier = _Copier(image, session, directory, last, bandwidth)
            copier.start()
            try:
                copier.join()
            except BaseException:  # Ctrl-C: what it reads is let go of only once it has ended
                _native.hold_ask_back(native)
                copier.join()
                raise
    finally:
        _native.hold_release(native)
    if copier.failure is not None:
        raise copier.failure
    objects, data = copier.objects, copier.data
    objects.name_objects(image)
    items = sum(int((s.slots["object"] != 0).sum()) for s in image.stripes)
    _write_index(native, settings, image, objects, data, directory)
    total = int(objects.blocks["bytes"].sum(dtype=np.uint64))
    return Saved("", items, total, data.new_bytes, image.held_s, 0.0)


def _settings_now(native: _native.Store, number: int, config: TableConfig) -> TableConfig:
    info = native.table_info(number)
    changed = {name: info[name] for name in config.changeable()._fields}
    return dataclasses.replace(config, **changed)


def _write_index(
    native: _native.Store,
    settings: Sequence[TableConfig],
    image: _Image,
    objects: _Objects,
    data: _Data,
    directory: str,
) -> None:
    fd = _create(os.path.join(directory, INDEX))
    try:
        index = IndexWriter(fd)
        index.add("episodes", objects.episodes)
        index.add("blocks", objects.blocks)
        index.add("block_places", data.places)
        index.add("block_columns", objects.row_bytes)
        index.add("block_runs", objects.runs)
        index.add("trajectories", objects.trajs)
        index.add("trajectory_blocks", objects.traj_blocks)
        index.add("trajectory_columns", objects.cols)
        index.add("trajectory_segments", objects.segs)
        for i, sums in enumerate(data.sums):
            index.add(f"data/{i}/crc32", sums)
        tables = _write_tables(index, settings, image)
        os.fsync(fd)
    finally:
        os.close(fd)
    numbers = {
        int(n) for s in image.stripes for n in np.unique(s.slots["schema"][s.slots["object"] != 0])
    }
    content = {
        "created_ns": time.time_ns(),
        "layout_version": _native.LAYOUT_VERSION,
        "tables": tables,
        "schemas": [{"number": n, "text": native.schema_text(n).decode()} for n in sorted(numbers)],
        "data": [{"file": name, "bytes": size} for name, size in data.files],
        "index": index.describe(),
    }
    fd = _create(os.path.join(directory, MANIFEST))
    try:
        write_manifest(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_tables(
    index: IndexWriter, settings: Sequence[TableConfig], image: _Image
) -> list[dict[str, Any]]:
    tables, first = [], 0
    for i, config in enumerate(settings):
        stripes: list[dict[str, Any]] = []
        for k, stripe in enumerate(image.stripes[first : first + config.stripes]):
            where = f"tables/{i}/stripes/{k}"
            index.add(f"{where}/slots", stripe.slots)
            for each, order in enumerate(stripe.orders):
                index.add(f"{where}/order_{each}", order)
            stripes.append(
                {
                    "items": int((stripe.slots["object"] != 0).sum()),
                    "touch_next": stripe.touch_next,
                    "free_head": stripe.free_head,
                    "heads": stripe.heads,
                }
            )
        first += config.stripes
        tables.append(
            {
                "name": config.name,
                "settings": json.loads(config.to_json()),
                "counts": image.counts[i],
                "stripes": stripes,
            }
        )
    return tables
