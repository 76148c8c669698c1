"""What does it cost to look at one item without copying it, whatever its size?"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bench import library
from bench.baselines import BareMemcpy, PayloadRing
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import PAYLOADS, frames, rows_for

if TYPE_CHECKING:
    import shmreplay

NAME = "borrow"
QUESTION = "What does it cost to look at one random item without copying it?"
OURS = "shmreplay borrow"
OURS_COPY = "shmreplay sample_batch(1)"
RING = "numpy ring, copy of a row"
MEMCPY = "bare C memcpy"


def _filled(stack: ExitStack, size: int) -> shmreplay.Client:
    """Serves a full table of payloads."""
    rows = rows_for(size)
    _, client = library.serve(stack, rows, size)
    pool = np.stack(frames(size, 8))
    whole, rest = divmod(rows, len(pool))
    for _ in range(whole):
        client.insert_batch(library.TABLE, {"x": pool}, priorities=1.0)
    if rest:
        client.insert_batch(library.TABLE, {"x": pool[:rest]}, priorities=1.0)
    library.check_size(client, rows)
    return client


def _borrow(stack: ExitStack, size: int) -> Measure:
    client = _filled(stack, size)
    with client.borrow(library.TABLE, 1) as samples:
        view = samples[0].data["x"]
        known = any(np.array_equal(view, frame) for frame in frames(size, 8))
        if not known or view.flags.writeable or view.flags.owndata:
            raise RuntimeError("a borrowed item is not a read-only view of what was written")

    def loop(calls: int) -> None:
        for _ in range(calls):
            with client.borrow(library.TABLE, 1) as samples:
                samples[0].data["x"]

    return TimedLoop(loop)


def _copy(stack: ExitStack, size: int) -> Measure:
    client = _filled(stack, size)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, 1)

    return TimedLoop(loop)


def _ring(stack: ExitStack, size: int) -> Measure:
    rows = rows_for(size)
    ring = PayloadRing(rows, size)
    rng = np.random.default_rng(7)
    index = rng.integers(0, rows, 4096).tolist()

    def loop(calls: int) -> None:
        for call in range(calls):
            ring.data[index[call & 4095]].copy()

    return TimedLoop(loop)


def _memcpy(stack: ExitStack, size: int) -> Measure:
    copies = BareMemcpy(2, size, rows_for(size))
    copies.run(2)
    return TimedLoop(copies.run)


def run(bench: Bench) -> None:
    """Measures this question."""
    for case, size in PAYLOADS.items():
        if bench.settings.quick and case not in ("400 B", "400 kB"):
            continue
        bench.compare(
            NAME,
            case,
            [
                Contender(OURS, partial(_borrow, size=size), ours=True),
                Contender(OURS_COPY, partial(_copy, size=size), ours=True),
                Contender(RING, partial(_ring, size=size)),
                Contender(MEMCPY, partial(_memcpy, size=size)),
            ],
            bytes_per_item=size,
            box=0.3,
        )
