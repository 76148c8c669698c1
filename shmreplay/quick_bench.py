"""What ``shmreplay bench`` measures: a few operations on this machine, in a store of its own.

One process, everything warm, medians of five. The full benchmark, with several processes, is in
``bench/`` of the source tree.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from shmreplay import rate_limiters, selectors
from shmreplay.client import Client
from shmreplay.server import Server
from shmreplay.table import Table

__all__ = ["Result", "measure_all"]

BATCH: Final = 256
_ITEMS: Final = 50_000
_LARGE: Final = 100_000  # float32: 400 kB
_REPETITIONS: Final = 5
_CAPACITY: Final = 128 << 20


class Result(NamedTuple):
    """One operation, and what it is to be seen beside."""

    what: str
    items_per_s: float
    bytes_per_s: float
    beside: str
    beside_items_per_s: float


def measure_all(seconds: float) -> Iterator[Result]:
    """Measures one operation after the other.

    Args:
        seconds: For each of the five repetitions of each operation.

    Raises:
        ArenaFullError: /dev/shm has no room for a store of 128 MiB.
    """
    minimum = rate_limiters.MinSize(1)
    tables = [
        Table("small", selectors.Uniform(), selectors.Fifo(), _ITEMS, minimum, seed=1),
        Table("large", selectors.Uniform(), selectors.Fifo(), 64, minimum, seed=1),
    ]
    with Server(tables, name=f"bench-{os.getpid()}", capacity=_CAPACITY) as server:
        with Client(server.address) as client:
            ring = _rows(_ITEMS)
            yield _single(client, ring, seconds)
            yield _batches(client, ring, seconds)
            yield _samples(client, ring, seconds)
            yield _borrows(client, seconds)


def _rows(n: int) -> dict[str, np.ndarray[Any, Any]]:
    """A transition of 680 bytes, n times."""
    rng = np.random.default_rng(1)
    return {
        "obs": rng.random((n, 84), np.float32),
        "next_obs": rng.random((n, 84), np.float32),
        "action": rng.integers(0, 9, n, np.int32),
        "reward": rng.random(n, np.float32),
    }


def _rate(operation: Callable[[], object], items: int, seconds: float) -> float:
    """Items a second: the median of some repetitions, after one to warm up."""
    rates = []
    for number in range(_REPETITIONS + 1):
        calls, began = 0, time.perf_counter()
        while (now := time.perf_counter()) - began < seconds or calls == 0:
            operation()
            calls += 1
        if number > 0:
            rates.append(calls * items / (now - began))
    return statistics.median(rates)


def _single(client: Client, ring: dict[str, Any], seconds: float) -> Result:
    step = {name: column[0] for name, column in _rows(1).items()}
    at = 0

    def into_ring() -> None:
        nonlocal at
        for name, column in ring.items():
            column[at] = step[name]
        at = (at + 1) % _ITEMS

    with client.trajectory_writer(num_keep_alive_refs=1) as writer:

        def insert() -> None:
            writer.append(step)
            history = writer.history
            writer.create_item("small", 1.0, {name: history[name][-1:] for name in step})

        ours = _rate(insert, 1, seconds)
    nbytes = sum(column[0].nbytes for column in ring.values())
    return Result(
        "append a step of 680 B and create an item",
        ours,
        ours * nbytes,
        "numpy ring of this process",
        _rate(into_ring, 1, seconds),
    )


def _batches(client: Client, ring: dict[str, Any], seconds: float) -> Result:
    rows = _rows(BATCH)
    at = 0

    def into_ring() -> None:
        nonlocal at
        for name, column in ring.items():
            column[at : at + BATCH] = rows[name]
        at = (at + BATCH) % (_ITEMS - BATCH)

    ours = _rate(lambda: client.insert_batch("small", rows), BATCH, seconds)
    nbytes = sum(column.nbytes for column in rows.values()) // BATCH
    return Result(
        f"insert_batch of {BATCH}",
        ours,
        ours * nbytes,
        "numpy ring, slices",
        _rate(into_ring, BATCH, seconds),
    )


def _samples(client: Client, ring: dict[str, Any], seconds: float) -> Result:
    client.reset("small")  # its first items have a time axis, and would not stack with these
    client.insert_batch("small", ring)
    rng = np.random.default_rng(2)

    def from_ring() -> dict[str, Any]:
        index = rng.integers(0, _ITEMS, BATCH)
        return {name: column[index] for name, column in ring.items()}

    ours = _rate(lambda: client.sample_batch("small", BATCH), BATCH, seconds)
    nbytes = sum(column[0].nbytes for column in ring.values())
    return Result(
        f"sample_batch of {BATCH}, uniform, {_ITEMS:,} items",
        ours,
        ours * nbytes,
        "numpy fancy indexing",
        _rate(from_ring, BATCH, seconds),
    )


def _borrows(client: Client, seconds: float) -> Result:
    large = np.zeros((16, _LARGE), np.float32)
    client.insert_batch("large", {"x": large})
    target = np.empty(_LARGE, np.float32)

    def borrow() -> None:
        with client.borrow("large", 1):
            pass

    ours = _rate(borrow, 1, seconds)
    return Result(
        "borrow an item of 400 kB",
        ours,
        ours * target.nbytes,
        "memcpy of 400 kB",
        _rate(lambda: np.copyto(target, large[7]), 1, seconds),
    )
