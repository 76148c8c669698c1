"""The other side: a plain numpy ring as a user would write it, a numpy sum tree, and bare C."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.payloads import FIELDS, Fields

SOURCE = Path(__file__).parent / "c" / "baseline.c"
CACHE_LINE = 64


class TransitionRing:
    """The replay buffer that everybody writes: one array a field and a position.

    The fields are attributes and not a dict to loop over: it is the faster way to write it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.size = 0
        self.obs = np.zeros((capacity, *FIELDS["obs"][0]), np.float32)
        self.next_obs = np.zeros((capacity, *FIELDS["next_obs"][0]), np.float32)
        self.action = np.zeros(capacity, np.int32)
        self.reward = np.zeros(capacity, np.float32)
        self.done = np.zeros(capacity, np.bool_)

    def add(
        self,
        obs: NDArray[np.float32],
        next_obs: NDArray[np.float32],
        action: np.int32,
        reward: np.float32,
        done: bool,
    ) -> None:
        """Writes one transition over the oldest."""
        position = self.position
        self.obs[position] = obs
        self.next_obs[position] = next_obs
        self.action[position] = action
        self.reward[position] = reward
        self.done[position] = done
        self.position = (position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def add_batch(self, batch: Mapping[str, NDArray[Any]]) -> None:
        """Writes transitions with a leading axis (at most `capacity`) over the oldest."""
        rows = len(batch["action"])
        start, room = self.position, self.capacity - self.position
        for name, column in self.columns().items():
            values = batch[name]
            column[start : start + rows] = values[:room]
            if rows > room:
                column[: rows - room] = values[room:]
        self.position = (start + rows) % self.capacity
        self.size = min(self.size + rows, self.capacity)

    def columns(self) -> Fields:
        """Returns the arrays of all fields by name."""
        return {
            "obs": self.obs,
            "next_obs": self.next_obs,
            "action": self.action,
            "reward": self.reward,
            "done": self.done,
        }

    def sample_fancy(self, index: NDArray[np.int64]) -> Fields:
        """Gathers rows by fancy indexing, into new arrays."""
        return {
            "obs": self.obs[index],
            "next_obs": self.next_obs[index],
            "action": self.action[index],
            "reward": self.reward[index],
            "done": self.done[index],
        }

    def sample_take(self, index: NDArray[np.int64], out: Fields | None = None) -> Fields:
        """Gathers rows by np.take, into new arrays or into `out`.

        `mode="clip"` goes with `out`: under the default mode numpy would fill a copy first.
        """
        if out is None:
            return {
                "obs": self.obs.take(index, axis=0),
                "next_obs": self.next_obs.take(index, axis=0),
                "action": self.action.take(index),
                "reward": self.reward.take(index),
                "done": self.done.take(index),
            }
        self.obs.take(index, axis=0, out=out["obs"], mode="clip")
        self.next_obs.take(index, axis=0, out=out["next_obs"], mode="clip")
        self.action.take(index, out=out["action"], mode="clip")
        self.reward.take(index, out=out["reward"], mode="clip")
        self.done.take(index, out=out["done"], mode="clip")
        return out


class PayloadRing:
    """The same for a single field of bytes: uint8[capacity, size]."""

    def __init__(self, capacity: int, size: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.data = np.zeros((capacity, size), np.uint8)
        # Written once, so that no measurement pays for the first touch of a page.
        self.data.fill(1)

    def add(self, payload: NDArray[np.uint8]) -> None:
        """Writes one payload over the oldest."""
        position = self.position
        self.data[position] = payload
        self.position = (position + 1) % self.capacity


class NumpySumTree:
    """A binary sum tree in one float64 array; whole batches are drawn and updated by level."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self.count = len(weights)
        self.depth = max(1, (self.count - 1).bit_length())
        self.leaves = 1 << self.depth
        self.nodes = np.zeros(2 * self.leaves)
        self.nodes[self.leaves : self.leaves + self.count] = weights
        for level in range(self.depth - 1, -1, -1):
            start = 1 << level
            below = self.nodes[2 * start : 4 * start]
            self.nodes[start : 2 * start] = below[0::2] + below[1::2]

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.nodes[1])

    def sample(
        self, rng: np.random.Generator, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draws `count` leaves with replacement; returns their numbers and probabilities."""
        nodes = self.nodes
        target = rng.random(count) * nodes[1]
        node = np.ones(count, np.int64)
        for _ in range(self.depth):
            node *= 2
            left = nodes[node]
            right = target >= left
            target -= left * right
            node += right
        # Rounding may carry a target past the last leaf that has weight.
        index = np.minimum(node - self.leaves, self.count - 1)
        return index, nodes[index + self.leaves] / nodes[1]

    def update(self, index: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Sets the weights of leaves; of a leaf named twice the last one counts."""
        nodes = self.nodes
        node = index + self.leaves
        nodes[node] = weights
        for _ in range(self.depth):
            node = node >> 1
            below = 2 * node
            nodes[node] = nodes[below] + nodes[below + 1]


class CompilerError(RuntimeError):
    """The C baselines could not be compiled."""


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiles the C baselines once a process and loads them.

    Raises:
        CompilerError: There is no C compiler, or it refused the source.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise CompilerError("the C baselines need a C compiler: install cc or name one in CC")
    with tempfile.TemporaryDirectory(prefix="shmreplay-bench-") as directory:
        target = Path(directory) / "baseline.so"
        command = [compiler, "-std=c11", "-O3", "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompilerError(f"compiling {SOURCE.name} failed:\n{done.stderr}")
        library = ctypes.CDLL(str(target))
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.bench_memcpy_ring.restype = None
    library.bench_memcpy_ring.argtypes = [pointer, size, size, pointer, *[size] * 4, pointer]
    library.bench_gather.restype = size
    library.bench_gather.argtypes = [*[pointer] * 3, size, pointer, *[size] * 4, ctypes.c_int]
    return library


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Returns uint8[rows, row_bytes], written once, whose first byte starts a page.

    A copy between arrays that lie a few bytes apart modulo a page is many times slower on some
    machines; the floor must not be measured in that hole.
    """
    page = 4096
    raw = np.zeros(rows * row_bytes + page, np.uint8)
    raw.fill(1)
    offset = -raw.ctypes.data % page
    return raw[offset : offset + rows * row_bytes].reshape(rows, row_bytes)


class BareMemcpy:
    """Copies payloads into a ring, in C: what writing the bytes costs and nothing else."""

    def __init__(self, rows: int, size: int, sources: int) -> None:
        stride = -(-size // CACHE_LINE) * CACHE_LINE
        self._ring = aligned_zeros(rows, stride)
        self._pool = aligned_zeros(sources, stride)
        self._size = size
        self._position = (ctypes.c_size_t * 2)(0, 0)
        self._copy = _library().bench_memcpy_ring

    def set_source(self, source: int, payload: NDArray[Any]) -> None:
        """Sets one payload of the pool that the copies take in turn."""
        self._pool[source, : self._size] = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)

    def row(self, row: int) -> NDArray[np.uint8]:
        """Returns the payload in one row of the ring."""
        return self._ring[row, : self._size]

    def run(self, calls: int) -> None:
        """Copies this many payloads."""
        ring, pool = self._ring, self._pool
        self._copy(
            ring.ctypes.data,
            ring.shape[1],
            ring.shape[0],
            pool.ctypes.data,
            pool.shape[1],
            pool.shape[0],
            self._size,
            calls,
            self._position,
        )


class BareGather:
    """Gathers rows of field arrays into the caller's arrays, in C, by indices drawn beforehand.

    Attributes:
        out: The caller's arrays of the last batch, by field.
        index: int64[sets, batch], the rows of each batch in turn.
    """

    def __init__(
        self, columns: Fields, index: NDArray[np.int64], *, prefetch: bool = False
    ) -> None:
        self.index = np.ascontiguousarray(index, np.int64)
        batch = self.index.shape[1]
        self.out: Fields = {name: _aligned_like(column, batch) for name, column in columns.items()}
        self._columns = columns
        self._sources = _addresses(list(columns.values()))
        self._outs = _addresses(list(self.out.values()))
        row_bytes = [column.nbytes // len(column) for column in columns.values()]
        self._row_bytes = (ctypes.c_size_t * len(columns))(*row_bytes)
        self._prefetch = int(prefetch)
        self._set = 0
        self._gather = _library().bench_gather

    def run(self, batches: int) -> None:
        """Gathers this many batches."""
        sets, batch = self.index.shape
        self._set = self._gather(
            self._sources,
            self._outs,
            self._row_bytes,
            len(self._columns),
            self.index.ctypes.data,
            sets,
            batch,
            self._set,
            batches,
            self._prefetch,
        )


def _aligned_like(column: NDArray[Any], rows: int) -> NDArray[Any]:
    """Returns an array of `rows` rows like those of `column`, on a page boundary."""
    row_bytes = column.nbytes // len(column)
    return (
        aligned_zeros(rows, row_bytes)
        .reshape(-1)
        .view(column.dtype)
        .reshape(rows, *column.shape[1:])
    )


def _addresses(arrays: Sequence[NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the addresses of C-contiguous arrays.

    Raises:
        ValueError: An array is not C-contiguous.
    """
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"expected C-contiguous arrays, got strides {array.strides}")
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
