"""What does prioritized replay cost: draw 256 by priority, then set 256 new priorities?"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from bench import library
from bench.baselines import NumpySumTree, TransitionRing
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES, batch_chunks
from bench.uniform_sample import check_rows, out_arrays

NAME = "prioritized"
QUESTION = "What does it cost to draw 256 by priority and set 256 new priorities?"
BATCH = 256
EXPONENT = 0.6
CASES: dict[str, int] = {"1M items": 1_000_000}
QUICK_CASES: dict[str, int] = {"200k items": 200_000}
OURS = "shmreplay sample_batch + update_priorities"
OURS_OUT = "shmreplay sample_batch(out=) + update_priorities"
TREE = "numpy ring + vectorised numpy sum tree"


def _priorities() -> list[NDArray[np.float64]]:
    """Returns a pool of new priorities: absolute TD errors, as a learner would set them."""
    rng = np.random.default_rng(11)
    return [np.abs(rng.standard_normal(BATCH)) + 1e-3 for _ in range(64)]


def _ours(stack: ExitStack, table: library.FilledTable, *, reuse: bool) -> Measure:
    client = table.client(stack)
    out = out_arrays() if reuse else None
    pool = cycle(_priorities())
    first = client.sample_batch(library.TABLE, BATCH, out=out)
    check_rows(first.data, next(batch_chunks(table.rows, library.FILL_ROWS)))
    found = client.update_priorities(library.TABLE, first.info.key, next(pool))
    if found != BATCH:
        raise RuntimeError(f"expected {BATCH} priorities to be set, {found} were")

    def loop(calls: int) -> None:
        for priorities in islice(pool, calls):
            sample = client.sample_batch(library.TABLE, BATCH, out=out)
            client.update_priorities(library.TABLE, sample.info.key, priorities)

    return TimedLoop(loop)


def _tree(stack: ExitStack, items: int) -> Measure:
    ring = TransitionRing(items)
    for chunk in batch_chunks(items, library.FILL_ROWS):
        ring.add_batch(chunk)
    tree = NumpySumTree(np.ones(items))
    rng = np.random.default_rng(7)
    pool = cycle(_priorities())

    def loop(calls: int) -> None:
        for priorities in islice(pool, calls):
            index, _ = tree.sample(rng, BATCH)
            ring.sample_take(index)
            tree.update(index, priorities**EXPONENT)

    return TimedLoop(loop)


def run(bench: Bench) -> None:
    """Measures this question."""
    cases = QUICK_CASES if bench.settings.quick else CASES
    for case, items in cases.items():
        table = library.FilledTable(items, EXPONENT)
        bench.compare(
            NAME,
            case,
            [
                Contender(OURS, partial(_ours, table=table, reuse=False), ours=True),
                Contender(OURS_OUT, partial(_ours, table=table, reuse=True), ours=True),
                Contender(TREE, partial(_tree, items=items)),
            ],
            bytes_per_item=TRANSITION_BYTES,
            items_per_call=BATCH,
        )
