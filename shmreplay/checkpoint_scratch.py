"""Arrays that take no memory of their own: they lie in a file without a name.

The index of a large store has 100 bytes an item and more. While a checkpoint is written it is in
such a file, in the directory of the checkpoint: its pages are the system's to keep or to write to
the disk, and it is gone with the process, however that ends.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from shmreplay import checkpoint_files
from shmreplay.checkpoint_format import Array

__all__ = ["PIECE", "Scratch", "pieces", "unique"]

PIECE: Final = 1 << 17
"""Elements that are worked on at once: what that takes besides is some MiB."""

_MADV_POPULATE_WRITE: Final = 23

_log = logging.getLogger(__name__)


class Scratch:
    """A file without a name, and the arrays in it. It is gone with the last of them."""

    def __init__(self, directory: str) -> None:
        """Makes the file.

        Args:
            directory: Of the checkpoint that is being written.

        Raises:
            OSError: It cannot be made there.
        """
        path = os.path.join(directory, checkpoint_files.data_name())
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        self._end = 0

    def close(self) -> None:
        """Lets go of the file; its arrays stay valid."""
        os.close(self._fd)

    def array(self, count: int, dtype: npt.DTypeLike, populate: bool = False) -> Array:
        """Returns a new array of zeros.

        Args:
            count: Its elements.
            dtype: Of these.
            populate: Whether it is to have all of its pages now, rather than when they are used.

        Raises:
            OSError: The disk has no room for it, or failed.
        """
        kind = np.dtype(dtype)
        size = -(-count * kind.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if size == 0:
            return np.zeros(0, kind)
        # The room is taken here: a disk that is full is an error now, and no bus error later.
        os.posix_fallocate(self._fd, self._end, size)
        try:
            memory = mmap.mmap(self._fd, size, offset=self._end)
        except OSError as error:  # some network file systems share no mappings
            _log.info("the index is copied to memory of its own (%s)", error)
            array = np.zeros(count, kind)
            if populate:
                array.fill(0)
            return array
        self._end += size
        if populate:
            _populate(memory)
        return np.frombuffer(memory, kind, count)


def _populate(memory: mmap.mmap) -> None:
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        np.frombuffer(memory, np.uint8).fill(0)  # a system before Linux 5.14


def pieces(count: int) -> list[slice]:
    """Returns the parts, of at most ``PIECE`` elements, of so many."""
    return [slice(first, min(first + PIECE, count)) for first in range(0, count, PIECE)]


def unique(array: Array) -> Array:
    """Sorts an array in place, and returns the part of it that now has each of its values once."""
    array.sort()
    n = 0
    for part in pieces(len(array)):
        values = array[part]
        new = np.ones(len(values), bool)
        new[1:] = values[1:] != values[:-1]
        new[0] = n == 0 or values[0] != array[n - 1]
        found = values[new]
        array[n : n + len(found)] = found
        n += len(found)
    return array[:n]
