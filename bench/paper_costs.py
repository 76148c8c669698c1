"""The other half of bench/paper.py: latency by the number of actors, cost by the table's size."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from bench import library
from bench.harness import Bench, Contender, Measure, Quantity
from bench.payloads import TRANSITION_BYTES
from bench.peers_cases import FIELD_NAMES, in_chunks, repeated
from bench.processes import Crew, Work
from bench.single_insert import append_loop

BATCH = 256
ACTORS = (0, 1, 4, 16, 64)
QUICK_ACTORS = (0, 4)
ACTOR_RATE = 100.0
"""Steps a second of an actor, whose environment takes its time."""
LATENCY_CASE = "latency of sample_batch(256) beside actors of 100 steps/s"
LATENCY_ROWS = 100_000
LATENCY_BOX = 2.0
SIZES = {"10^3": 10**3, "10^4": 10**4, "10^5": 10**5, "10^6": 10**6, "10^7": 10**7}
QUICK_SIZES = ("10^3", "10^5")
ITEM_BYTES = 8
BYTES_OF_AN_ITEM = 512
"""What the store needs for an item of 8 bytes at most."""
SHARE_OF_FREE = 0.6
"""Of the free shared memory: a table that needs more is not measured."""
COST_CASES = {
    "insert_batch of 256, by items in the table": (None, "insert"),
    "sample_batch(256), by items in the table": (None, "sample"),
    "sample_batch(256) by priority + update, by items in the table": (0.6, "update"),
}


def acting(stack: ExitStack, address: str) -> Work:
    """An actor process at its own pace."""
    client = stack.enter_context(library.require().Client(address))
    loop = append_loop(library.structured_writer(stack, client, FIELD_NAMES))

    def step(calls: int) -> None:
        loop(calls)
        time.sleep(calls / ACTOR_RATE)

    loop(1)
    return Work(step, 1)


def latencies(bench: Bench, question: str) -> None:
    """Notes p50 and p99 of a learner's sample_batch, for each number of actors in turn."""
    if bench.has(question, LATENCY_CASE):
        return
    counts = QUICK_ACTORS if bench.settings.quick else ACTORS
    seconds = LATENCY_BOX * bench.settings.box_scale
    bench.report(f"{question}: {LATENCY_CASE}")
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        address, client = library.serve(stack, LATENCY_ROWS, TRANSITION_BYTES)
        writer = library.structured_writer(stack, client, FIELD_NAMES)
        append_loop(writer)(LATENCY_ROWS)
        crews = {count: Crew(stack, acting, [(address,)] * count) for count in counts}
        for _ in range(bench.settings.repeat):
            for count in counts:
                start = crews[count].start(seconds)
                found[count].append(_percentiles(client, start, seconds))
                crews[count].results(seconds)
    for count in counts:
        for place, name in enumerate(("p50", "p99")):
            values = tuple(pair[place] for pair in found[count])
            name = f"{count} actors, {name}"
            bench.quantities.append(Quantity(question, LATENCY_CASE, name, "us", values))
    bench.finish(question, LATENCY_CASE)


def _percentiles(client: Any, start: float, seconds: float) -> tuple[float, float]:
    """Returns the median and the 99th percentile of the calls from `start` on, in us."""
    time.sleep(max(0.0, start - time.monotonic()))
    taken, now = [], time.monotonic()
    while now < start + seconds:
        client.sample_batch(library.TABLE, BATCH)
        before, now = now, time.monotonic()
        taken.append(now - before)
    p50, p99 = np.percentile(taken, (50, 99))
    return 1e6 * float(p50), 1e6 * float(p99)


def _cost(stack: ExitStack, rows: int, exponent: float | None, what: str) -> Measure:
    reverb = library.require()
    uniform = exponent is None
    table = reverb.Table(
        library.TABLE,
        reverb.selectors.Uniform() if uniform else reverb.selectors.Prioritized(exponent),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
        stripes=1,
    )
    server = stack.enter_context(reverb.Server([table], capacity=_capacity(rows)))
    client = stack.enter_context(reverb.Client(server.address))
    insert = partial(client.insert_batch, library.TABLE)
    rng = np.random.default_rng(4)
    in_chunks(insert, {"x": rng.random((1000, 1))}, rows)
    library.check_size(client, rows)
    if what == "insert":
        batch = {"x": rng.random((BATCH, 1))}
        return repeated(lambda: insert(batch))
    if what == "sample":
        return repeated(lambda: client.sample_batch(library.TABLE, BATCH))
    priorities = rng.random(BATCH) + 0.1

    def call() -> None:
        keys = client.sample_batch(library.TABLE, BATCH).info.key
        client.update_priorities(library.TABLE, keys, priorities)

    return repeated(call)


def _capacity(rows: int) -> int:
    return rows * BYTES_OF_AN_ITEM + library.SPARE_BYTES


def costs(bench: Bench, question: str) -> None:
    """Compares table sizes, smallest to largest that the free memory holds."""
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    chosen = QUICK_SIZES if bench.settings.quick else tuple(SIZES)
    # All tables of a case stand beside each other.
    fitting, total = [], 0
    for name in chosen:
        total += _capacity(SIZES[name])
        if total <= SHARE_OF_FREE * free:
            fitting.append(name)
        else:
            bench.skip(
                question,
                "cost by items in the table",
                f"{name} items",
                f"/dev/shm has {free / 2**30:.1f} GiB free, and it takes {total / 2**30:.1f}",
            )
    for case, (exponent, what) in COST_CASES.items():
        contenders = [
            Contender(
                f"{name} items",
                partial(_cost, rows=SIZES[name], exponent=exponent, what=what),
                ours=True,
            )
            for name in fitting
        ]
        bench.compare(
            question, case, contenders, bytes_per_item=ITEM_BYTES, items_per_call=BATCH, box=0.5
        )
