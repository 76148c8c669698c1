"""One contender of bench/crash_safety.py in a process of its own: whichever shmreplay is found.

    python -m bench.crash_safety_worker CASE ROWS

Reads a number of seconds a line, measures for as long, and answers with `calls seconds`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from bench import library, single_insert
from bench.harness import Measure, TimedLoop
from bench.payloads import TRANSITION_BYTES

BATCH = 256


def _insert(stack: ExitStack, rows: int) -> Measure:
    _, client = library.serve(stack, rows, TRANSITION_BYTES)
    writer = client.trajectory_writer(num_keep_alive_refs=single_insert.KEEP_ALIVE)
    stack.callback(writer.close)
    single_insert.append_loop(writer)(1)
    loop = single_insert.writer_loop(writer)
    loop(2 * rows)
    return TimedLoop(loop)


def _structured(stack: ExitStack, rows: int) -> Measure:
    _, client = library.serve(stack, rows, TRANSITION_BYTES)
    writer = library.structured_writer(stack, client, single_insert.FIELDS)
    loop = single_insert.append_loop(writer)
    loop(2 * rows)
    return TimedLoop(loop)


def _sample(stack: ExitStack, rows: int) -> Measure:
    _, client = library.serve(stack, rows, TRANSITION_BYTES)
    library.fill(client, rows)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, BATCH)

    return TimedLoop(loop)


def _update(stack: ExitStack, rows: int) -> Measure:
    _, client = library.serve(stack, rows, TRANSITION_BYTES)
    library.fill(client, rows)
    keys = client.sample_batch(library.TABLE, BATCH).info.key
    priorities = np.linspace(1.0, 2.0, BATCH)

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.update_priorities(library.TABLE, keys, priorities)

    return TimedLoop(loop)


CASES: dict[str, tuple[Callable[[ExitStack, int], Measure], int]] = {
    "append + 5 slices + create_item": (_insert, 1),
    "structured append": (_structured, 1),
    "sample_batch(256)": (_sample, BATCH),
    "update_priorities of 256": (_update, BATCH),
}
"""What is measured, and how many items a call handles."""


def main(case: str, rows: int) -> None:
    """Serves requests for measurements until the input ends."""
    with ExitStack() as stack:
        prepare, _ = CASES[case]
        measure = prepare(stack, rows)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            reading = measure(float(line))
            sys.stdout.write(f"{reading.calls} {reading.seconds!r}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
