"""What does it cost to draw 256 transitions, stacked?

Random rows of a large table are bound by memory latency, so the floor is a C loop that gathers the
same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from bench import library
from bench.baselines import BareGather, TransitionRing
from bench.harness import Bench, Contender, Measure, TimedLoop
from bench.payloads import FIELDS, TRANSITION_BYTES, Fields, batch_chunks, transition_batch
from bench.single_insert import KEEP_ALIVE, POOL, append_loop, writer_loop

NAME = "uniform_sample"
QUESTION = "What does it cost to draw 256 transitions uniformly, stacked?"
BATCH = 256
SETS = 4096
CASES: dict[str, int] = {"200k items": 200_000, "1M items": 1_000_000}
OURS = "shmreplay sample_batch"
OURS_OUT = "shmreplay sample_batch(out=)"
OURS_STEPWISE = "shmreplay sample_batch, written step by step"
FANCY = "numpy fancy indexing"
TAKE = "np.take"
TAKE_OUT = "np.take(out=)"
GATHER = "bare C gather"
GATHER_AHEAD = "bare C gather with prefetch"


def out_arrays() -> Fields:
    """Returns arrays for one batch."""
    return {name: np.zeros((BATCH, *shape), dtype) for name, (shape, dtype) in FIELDS.items()}


def check_rows(data: Fields, chunk: Fields) -> None:
    """Checks that sampled rows are rows that were written: `action` tells which.

    Raises:
        RuntimeError: They are not.
    """
    row = data["action"].reshape(-1) % len(chunk["action"])
    for name in ("obs", "next_obs", "reward", "done"):
        if not np.array_equal(data[name].reshape(chunk[name][row].shape), chunk[name][row]):
            raise RuntimeError(f"sampled {name} is not what was written")


def _ours(stack: ExitStack, table: library.FilledTable, *, reuse: bool) -> Measure:
    client = table.client(stack)
    out = out_arrays() if reuse else None
    sample = client.sample_batch(library.TABLE, BATCH, out=out)
    check_rows(sample.data, next(batch_chunks(table.rows, library.FILL_ROWS)))

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, BATCH, out=out)

    return TimedLoop(loop)


def _ours_stepwise(stack: ExitStack, items: int) -> Measure:
    """Measures a table that an actor filled: small blocks, and items with a time dimension."""
    _, client = library.serve(stack, items, TRANSITION_BYTES)
    writer = client.trajectory_writer(num_keep_alive_refs=KEEP_ALIVE)
    stack.callback(writer.close)
    append_loop(writer)(1)
    writer_loop(writer)(items)
    library.check_size(client, items)
    sample = client.sample_batch(library.TABLE, BATCH)
    check_rows(sample.data, transition_batch(POOL))

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, BATCH)

    return TimedLoop(loop)


def _indexed(
    ring: TransitionRing, gather: Callable[[np.ndarray[tuple[int], np.dtype[np.int64]]], Fields]
) -> Measure:
    """Measures drawing row numbers and gathering by them: sampling is both."""
    rng = np.random.default_rng(7)

    def loop(calls: int) -> None:
        for _ in range(calls):
            gather(rng.integers(0, ring.size, BATCH))

    return TimedLoop(loop)


def _fancy(ring: TransitionRing, stack: ExitStack) -> Measure:
    return _indexed(ring, ring.sample_fancy)


def _take(ring: TransitionRing, stack: ExitStack) -> Measure:
    return _indexed(ring, ring.sample_take)


def _take_out(ring: TransitionRing, stack: ExitStack) -> Measure:
    return _indexed(ring, partial(ring.sample_take, out=out_arrays()))


def _gather(ring: TransitionRing, prefetch: bool, stack: ExitStack) -> Measure:
    index = np.random.default_rng(7).integers(0, ring.size, (SETS, BATCH))
    return TimedLoop(BareGather(ring.columns(), index, prefetch=prefetch).run)


def run(bench: Bench) -> None:
    """Measures this question."""
    cases = {"200k items": CASES["200k items"]} if bench.settings.quick else CASES
    for case, items in cases.items():
        ring = TransitionRing(items)
        for chunk in batch_chunks(items, library.FILL_ROWS):
            ring.add_batch(chunk)
        table = library.FilledTable(items)
        bench.compare(
            NAME,
            case,
            [
                Contender(OURS, partial(_ours, table=table, reuse=False), ours=True),
                Contender(OURS_OUT, partial(_ours, table=table, reuse=True), ours=True),
                Contender(OURS_STEPWISE, partial(_ours_stepwise, items=items), ours=True),
                Contender(FANCY, partial(_fancy, ring)),
                Contender(TAKE, partial(_take, ring)),
                Contender(TAKE_OUT, partial(_take_out, ring)),
                Contender(GATHER, partial(_gather, ring, False)),
                Contender(GATHER_AHEAD, partial(_gather, ring, True)),
            ],
            bytes_per_item=TRANSITION_BYTES,
            items_per_call=BATCH,
        )
