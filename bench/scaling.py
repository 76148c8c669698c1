"""Do more writer processes write more?

One and two writers on a table of two stripes, then 64 writers on the cores there are. All start
from the same instant and write for a fixed time; the rate is what all of them wrote in that time.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice

from bench import library
from bench.baselines import TransitionRing
from bench.harness import Bench, Contender, Measure
from bench.payloads import TRANSITION_BYTES, transition_batch
from bench.processes import Prepare, Work, crew_measure
from bench.single_insert import KEEP_ALIVE, append_loop, ring_loop, writer_loop

NAME = "scaling"
QUESTION = "Do more writer processes write more?"
ITEMS = 200_000
STRIPES = 2
BATCH = 256
SINGLE_CASE = "append + 5 slices + create_item"
BATCH_CASE = "insert_batch of 256"
WRITERS = (1, 2, 64)
QUICK_WRITERS = (1, 2, 16)
RING_ITEMS = 50_000
CHUNK = 16
WARM_UP_LAPS = 30_000


def ours(writers: int) -> str:
    """Returns the label of this many writers."""
    return f"shmreplay, {writers} writer{'s' if writers > 1 else ''}"


def control(writers: int) -> str:
    """Returns the label of this many processes that share nothing."""
    return f"numpy ring of its own, {writers} process{'es' if writers > 1 else ''}"


def writer_work(stack: ExitStack, address: str, laps: int) -> Work:
    """Writes transitions one by one."""
    client = stack.enter_context(library.require().Client(address))
    writer = client.trajectory_writer(num_keep_alive_refs=KEEP_ALIVE)
    stack.callback(writer.close)
    append_loop(writer)(1)
    loop = writer_loop(writer)
    loop(laps)
    return Work(loop, CHUNK)


def batch_work(stack: ExitStack, address: str, laps: int) -> Work:
    """Writes transitions in batches; an item of the count is a transition."""
    client = stack.enter_context(library.require().Client(address))
    batches = cycle([transition_batch(BATCH, seed=seed) for seed in range(4)])

    def loop(calls: int) -> None:
        for batch in islice(batches, calls // BATCH):
            client.insert_batch(library.TABLE, batch, priorities=1.0)

    loop(laps + BATCH - 1)
    return Work(loop, BATCH)


def ring_work(stack: ExitStack) -> Work:
    """Writes transitions into a ring of the process's own."""
    loop = ring_loop(TransitionRing(RING_ITEMS))
    loop(RING_ITEMS)
    return Work(loop, CHUNK)


def _writers(stack: ExitStack, writers: int, work: Prepare) -> Measure:
    address, client = library.serve(stack, ITEMS, TRANSITION_BYTES, stripes=STRIPES)
    # Before anything is measured they go round the table together at least once, and each has met
    # most of its memory: a process's first touch of a page costs it a fault.
    laps = max(ITEMS * 6 // 5 // writers, WARM_UP_LAPS)
    measure = crew_measure(stack, work, [(address, laps)] * writers)
    library.check_size(client, ITEMS)
    return measure


def _control(stack: ExitStack, processes: int) -> Measure:
    return crew_measure(stack, ring_work, [()] * processes)


def run(bench: Bench) -> None:
    """Measures this question."""
    counts = QUICK_WRITERS if bench.settings.quick else WRITERS
    cases: dict[str, Prepare] = {SINGLE_CASE: writer_work, BATCH_CASE: batch_work}
    for case, work in cases.items():
        rows = [
            Contender(ours(count), partial(_writers, writers=count, work=work), ours=True)
            for count in counts
        ]
        if work is writer_work:
            # What this machine gives two processes that have nothing to do with each other.
            rows += [Contender(control(n), partial(_control, processes=n)) for n in (1, 2)]
        bench.compare(NAME, case, rows, bytes_per_item=TRANSITION_BYTES, box=1.0)
