"""The data files of a checkpoint that is being written: those of the last one, and new ones.

A file of the last checkpoint that is to be shared is read and compared with its checksums first.
What the disk has damaged is not taken over: the store still has these rows, and they are written
anew.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from shmreplay import _native, checkpoint_files
from shmreplay.checkpoint_format import (
    BLOCK,
    DATA_CHUNK,
    PLACE,
    Array,
    Reader,
    read_chunks,
    sum_of_chunks,
    write_all,
)
from shmreplay.checkpoint_image import Objects
from shmreplay.checkpoint_scratch import Scratch, pieces
from shmreplay.errors import CheckpointError
from shmreplay.limits import WAIT_SLICE_MS

__all__ = ["DataFiles", "Last", "Pace", "create", "read_last", "verify"]

_BUFFER_BYTES: Final = 4 * DATA_CHUNK
_FILE_BYTES: Final = 256 << 20
_LIVELY: Final = 0.5
"""Share of a data file that must still be in use for it to be kept; else what is in use of it is
written anew, so that what is not does not stay on disk for ever."""

_log = logging.getLogger(__name__)


class Pace:
    """Keeps to a number of bytes a second, and looks now and then whether to go on at all."""

    def __init__(self, bandwidth: float | None, look: Callable[[], None]) -> None:
        """Takes bytes a second, None for any, and what raises where it is to be given up."""
        self.bandwidth = bandwidth
        self.look = look
        self._next = 0.0

    def spend(self, nbytes: int) -> None:
        """Waits until so many bytes more may be read or written."""
        self.look()
        if self.bandwidth is None:
            return
        self._next = max(self._next, time.monotonic()) + nbytes / self.bandwidth
        while (left := self._next - time.monotonic()) > 0:
            self.look()
            time.sleep(min(left, WAIT_SLICE_MS / 1000))


class Last(NamedTuple):
    """Of the last checkpoint, what the next one may share."""

    path: str
    blocks: Array
    places: Array
    files: list[tuple[str, int]]
    sums: list[Array]
    damaged: set[int]
    """Numbers of the files that may not be shared."""


def read_last(root: str, scratch: Scratch) -> Last | None:
    """Returns what the newest checkpoint has; None if there is none, or its index is damaged."""
    path = checkpoint_files.latest(root)
    if path is None:
        return None
    try:
        reader = Reader(path)
        blocks = reader.section("blocks", BLOCK, scratch.array)
        places = reader.section("block_places", PLACE, scratch.array)
        sums = [reader.section(f"data/{i}/crc32", "<u4") for i in range(len(reader.files))]
        if len(places) != len(blocks) or (places["file"] >= len(reader.files)).any():
            raise reader.bad("the places of blocks are damaged")
    except CheckpointError as error:
        _log.warning("nothing is shared with the last checkpoint: %s", error)
        return None
    return Last(path, blocks, places, reader.files, sums, set())


def verify(last: Last, pace: Pace) -> None:
    """Reads the data files of the last checkpoint, and notes which are damaged."""
    for number, (name, size) in enumerate(last.files):
        path = os.path.join(last.path, name)
        try:
            _forget_pages(path)
            for _, data in read_chunks(path, size, last.sums[number]):
                pace.spend(len(data))
        except CheckpointError as error:
            last.damaged.add(number)
            _log.warning("%s What the store still has of this file is written anew.", error)


def _forget_pages(path: str) -> None:
    """Makes the system read it from the disk, not from what it remembers of it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def create(path: str) -> int:
    """Makes a file of a checkpoint, and returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class DataFiles:
    """The data files of a checkpoint, and where in them each block is."""

    def __init__(self, directory: str, objects: Objects, scratch: Scratch, pace: Pace) -> None:
        """Has none so far."""
        self._directory = directory
        self._pace = pace
        self._objects = objects
        self._scratch = scratch
        self.places = scratch.array(len(objects.blocks), PLACE)
        self.files: list[tuple[str, int]] = []
        self.sums: list[Array] = []
        self.new_bytes = 0
        self._new = np.ones(len(objects.blocks), bool)

    def share(self, last: Last) -> None:
        """Takes over what the last checkpoint has: blocks of the same number and rows."""
        blocks = self._objects.blocks
        if len(last.blocks) == 0 or len(blocks) == 0:
            return
        order = np.argsort(last.blocks["uid"], kind="stable")
        at = self._scratch.array(len(blocks), np.uint32)
        file = self._scratch.array(len(blocks), np.int32)  # -1: the last one has it not
        used = np.zeros(len(last.files), np.float64)
        for part in pieces(len(blocks)):
            mine = blocks[part]
            found = np.searchsorted(last.blocks["uid"], mine["uid"], sorter=order) % len(order)
            at[part] = order[found]
            same = np.asarray(last.blocks[at[part]] == mine)
            file[part] = np.where(same, last.places["file"][at[part]], -1)
            used += np.bincount(file[part][same], mine["bytes"][same], len(used))
        taken = self._link(last, used)
        for part in pieces(len(blocks)):
            numbers = np.where(file[part] < 0, -1, taken[file[part]])
            kept = numbers >= 0
            self.places["file"][part][kept] = numbers[kept]
            self.places["offset"][part][kept] = last.places["offset"][at[part][kept]]
            self._new[part] = ~kept

    def _link(self, last: Last, used: Array) -> Array:
        """Shares those files of which enough is in use; gives their numbers here, -1 for none."""
        taken = np.full(len(last.files), -1, np.int64)
        for number, (name, size) in enumerate(last.files):
            if used[number] == 0 or used[number] < _LIVELY * size or number in last.damaged:
                continue
            try:
                os.link(os.path.join(last.path, name), os.path.join(self._directory, name))
            except OSError as error:  # a file system without links: all is written
                _log.info("%s cannot be shared (%s)", name, error)
                break
            taken[number] = len(self.files)
            self.files.append((name, size))
            self.sums.append(last.sums[number])
        return taken

    def write(self, native: _native.Store) -> None:
        """Writes the blocks that are not shared."""
        for part in pieces(len(self._new)):
            numbers = part.start + np.flatnonzero(self._new[part])
            sizes = self._objects.blocks["bytes"][numbers].astype(np.int64)
            begins = np.cumsum(sizes) - sizes
            first = 0
            while first < len(numbers):
                # As many as make up a file, and one at least.
                end = int(np.searchsorted(begins, begins[first] + _FILE_BYTES))
                end = max(end, first + 1)
                some = numbers[first:end]
                self.places["file"][some] = len(self.files)
                self.places["offset"][some] = begins[first:end] - begins[first]
                self._write_file(native, some)
                first = end

    def _write_file(self, native: _native.Store, numbers: Array) -> None:
        objects = self._objects
        offs, heads = objects.block_offs[numbers], objects.blocks[numbers]
        rows = objects.block_rows[numbers]
        at = np.zeros(2, np.uint64)
        buffer = np.empty(_BUFFER_BYTES if self._pace.bandwidth is None else DATA_CHUNK, np.uint8)
        name, size, sums = checkpoint_files.data_name(), 0, []
        fd = create(os.path.join(self._directory, name))
        try:
            while int(at[0]) < len(numbers):
                self._pace.look()
                got = _native.image_rows(native, offs, rows, heads, at, buffer)
                data = buffer.data[:got]
                sums += sum_of_chunks(data)
                write_all(fd, data)
                size += got
                self._pace.spend(got)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.files.append((name, size))
        self.sums.append(np.array(sums, np.uint32))
        self.new_bytes += size
