"""What is written and read: the same bytes for every contender, from a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = dict[str, NDArray[Any]]
Transition = tuple[NDArray[np.float32], NDArray[np.float32], np.int32, np.float32, bool]

OBS_SIZE = 84
FIELDS: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
    "obs": ((OBS_SIZE,), np.dtype(np.float32)),
    "next_obs": ((OBS_SIZE,), np.dtype(np.float32)),
    "action": ((), np.dtype(np.int32)),
    "reward": ((), np.dtype(np.float32)),
    "done": ((), np.dtype(np.bool_)),
}
"""The transition: shape and dtype of each field."""

TRANSITION_BYTES = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in FIELDS.values())
"""681 bytes."""

PAYLOADS: dict[str, int] = {"400 B": 400, "4 kB": 4_000, "40 kB": 40_000, "400 kB": 400_000}
"""Sizes of the one-field payloads in bytes."""


def transition_batch(rows: int, *, seed: int = 1, first: int = 0) -> Fields:
    """Returns `rows` transitions as arrays with a leading axis.

    Args:
        rows: How many.
        seed: Of the observations.
        first: `action` counts up from here, so that a row tells which one it is.
    """
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.random((rows, OBS_SIZE), dtype=np.float32),
        "next_obs": rng.random((rows, OBS_SIZE), dtype=np.float32),
        "action": np.arange(first, first + rows, dtype=np.int32),
        "reward": rng.random(rows, dtype=np.float32),
        "done": rng.random(rows) < 0.01,
    }


def transitions(count: int = 64) -> Iterator[Transition]:
    """Returns single transitions for ever: a small pool, so that reading them costs little.

    The scalars are numpy scalars of the field's own dtype, but `done` is a bool, as it mostly is.
    """
    batch = transition_batch(count)
    return cycle(
        [
            (
                batch["obs"][i].copy(),
                batch["next_obs"][i].copy(),
                batch["action"][i],
                batch["reward"][i],
                bool(batch["done"][i]),
            )
            for i in range(count)
        ]
    )


def batch_chunks(total: int, rows: int) -> Iterator[Fields]:
    """Yields `total` transitions in batches of up to `rows`, with `action` counting up through all.

    Only `action` differs from batch to batch: drawing a million observations would take longer than
    measuring.
    """
    base = transition_batch(min(rows, total))
    for first in range(0, total, rows):
        size = min(rows, total - first)
        chunk = {name: column[:size] for name, column in base.items()}
        chunk["action"] = np.arange(first, first + size, dtype=np.int32)
        yield chunk


def frames(size: int, count: int = 4) -> list[NDArray[np.uint8]]:
    """Returns `count` arrays of `size` random bytes, which nothing on the way can shrink."""
    rng = np.random.default_rng(size)
    return [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


def rows_for(size: int, *, total: int = 200_000_000, least: int = 500, most: int = 100_000) -> int:
    """Returns how many items of `size` bytes a buffer holds: more than caches do, within reason."""
    return max(least, min(most, total // size))
