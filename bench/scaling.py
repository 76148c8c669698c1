"""Do more writer processes write more?

One and two writers on a table of two stripes, then 64 writers on the cores there are. All start
from the same instant and write for a fixed time; the rate is what all of them wrote in that time.
Beside them the same without anything shared, by as many processes: each with a store and a table of
its own, and each with a numpy ring of its own, as large together as the one table or larger. What
these lose as well is not lost to sharing: it is what the machine gives to so many processes.
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
CHUNK = 16
PRIVATE_SPARE_BYTES = 16 << 20
PRIVATE_ITEMS = 20_000
"""At least, of a process that shares nothing: more than it writes while it has a core and than its
caches hold, as those who share a table never meet what they wrote a moment ago."""
WARM_UP_LAPS = 30_000


def ours(writers: int) -> str:
    """Returns the label of this many writers."""
    return f"shmreplay, {writers} writer{'s' if writers > 1 else ''}"


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def control(writers: int) -> str:
    """Returns the label of this many processes with a numpy ring each."""
    return f"numpy ring of its own, {_processes(writers)}"


def private(writers: int) -> str:
    """Returns the label of this many processes with a store each."""
    return f"shmreplay, a store of its own, {_processes(writers)}"


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


def ring_work(stack: ExitStack, rows: int, laps: int) -> Work:
    """Writes transitions into a ring of the process's own."""
    loop = ring_loop(TransitionRing(rows))
    loop(laps)
    return Work(loop, CHUNK)


def private_work(stack: ExitStack, work: Prepare, rows: int, laps: int) -> Work:
    """Does the work of a writer on a store of the process's own."""
    address, _ = library.serve(
        stack, rows, TRANSITION_BYTES, stripes=1, spare_bytes=PRIVATE_SPARE_BYTES
    )
    return work(stack, address, laps)


def _writers(stack: ExitStack, writers: int, work: Prepare) -> Measure:
    address, client = library.serve(stack, ITEMS, TRANSITION_BYTES, stripes=STRIPES)
    # Before anything is measured they go round the table together at least once, and each has met
    # most of its memory: a process's first touch of a page costs it a fault.
    measure = crew_measure(stack, work, [(address, _laps(writers))] * writers)
    library.check_size(client, ITEMS)
    return measure


def _laps(writers: int) -> int:
    return max(ITEMS * 6 // 5 // writers, WARM_UP_LAPS)


def _private_items(processes: int) -> int:
    return max(ITEMS // processes, PRIVATE_ITEMS)


def _private(stack: ExitStack, processes: int, work: Prepare) -> Measure:
    each = (work, _private_items(processes), _laps(processes))
    return crew_measure(stack, private_work, [each] * processes)


def _control(stack: ExitStack, processes: int) -> Measure:
    each = (_private_items(processes), _laps(processes))
    return crew_measure(stack, ring_work, [each] * processes)


def run(bench: Bench) -> None:
    """Measures this question."""
    counts = QUICK_WRITERS if bench.settings.quick else WRITERS
    cases: dict[str, Prepare] = {SINGLE_CASE: writer_work, BATCH_CASE: batch_work}
    for case, work in cases.items():
        rows = [
            Contender(ours(count), partial(_writers, writers=count, work=work), ours=True)
            for count in counts
        ]
        rows += [
            Contender(private(n), partial(_private, processes=n, work=work), ours=True)
            for n in counts
        ]
        if work is writer_work:
            rows += [Contender(control(n), partial(_control, processes=n)) for n in counts]
        bench.compare(NAME, case, rows, bytes_per_item=TRANSITION_BYTES, box=1.0)
