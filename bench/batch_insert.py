"""What does it cost to write 256 transitions at once?"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle, islice

from bench import library
from bench.baselines import BareMemcpy, TransitionRing
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES, transition_batch

NAME = "batch_insert"
QUESTION = "What does it cost to write 256 transitions at once?"
ITEMS = 200_000
BATCH = 256
CASE = "256 transitions of 681 B, table of 200k"
OURS = "shmreplay insert_batch"
RING = "numpy ring, slice assignment"
MEMCPY = "bare C memcpy"
POOL = 8


def _ours(stack: ExitStack) -> Measure:
    _, client = library.serve(stack, ITEMS, TRANSITION_BYTES)
    batches = cycle([transition_batch(BATCH, seed=seed) for seed in range(POOL)])

    def loop(calls: int) -> None:
        for batch in islice(batches, calls):
            client.insert_batch(library.TABLE, batch, priorities=1.0)

    loop(ITEMS // BATCH * 6 // 5)
    library.check_size(client, ITEMS)
    return TimedLoop(loop)


def _ring(stack: ExitStack) -> Measure:
    ring = TransitionRing(ITEMS)
    batches = cycle([transition_batch(BATCH, seed=seed) for seed in range(POOL)])

    def loop(calls: int) -> None:
        for batch in islice(batches, calls):
            ring.add_batch(batch)

    loop(ITEMS // BATCH + 1)
    return TimedLoop(loop)


def _memcpy(stack: ExitStack) -> Measure:
    copies = BareMemcpy(ITEMS // BATCH, BATCH * TRANSITION_BYTES, POOL)
    copies.run(ITEMS // BATCH)
    return TimedLoop(copies.run)


def run(bench: Bench) -> None:
    """Measures this question."""
    bench.compare(
        NAME,
        CASE,
        [
            Contender(OURS, _ours, ours=True),
            Contender(RING, _ring),
            Contender(MEMCPY, _memcpy),
        ],
        bytes_per_item=TRANSITION_BYTES,
        items_per_call=BATCH,
    )
