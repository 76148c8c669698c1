"""What does it cost to get a payload from an actor process to where a learner can sample it?

Shared memory (append, and next_step in place) against pickle over a pipe and a
multiprocessing.Queue, from one to four producer processes. In every row an "environment" writes
each payload once: into an array of its own, or with next_step straight into the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import library
from bench.baselines import BareMemcpy, PayloadRing
from bench.harness import Bench, Contender, Measure, Reading, TimedLoop
from bench.payloads import PAYLOADS, frames, rows_for
from bench.processes import Crew, Work, context, crew_measure

NAME = "copy_vs_zero_copy"
QUESTION = "From an actor to where a learner can sample it: shared memory, pipe or queue?"
PRODUCERS = (1, 2, 3, 4)
APPEND = "shmreplay append"
IN_PLACE = "shmreplay next_step, in place"
PIPE = "pickle over multiprocessing.Pipe"
QUEUE = "multiprocessing.Queue"
RING = "numpy ring in one process"
MEMCPY = "bare C memcpy"
KEEP_ALIVE = 4
QUEUE_MESSAGES = 64
"""An unbounded queue would grow without end, as its producer is the faster side."""

POOL = 4


def case_name(payload: str, producers: int) -> str:
    """Returns the label of a case."""
    return f"{payload}, {producers} producer{'s' if producers > 1 else ''}"


def _chunk(size: int) -> int:
    """Returns the items between two looks at the clock: some 40 kB, at most 16 items."""
    return max(1, min(16, 40_000 // size))


def append_work(stack: ExitStack, address: str, size: int, laps: int) -> Work:
    """Appends payloads from an array of the environment's own and makes each an item."""
    client = stack.enter_context(library.require().Client(address))
    writer = client.trajectory_writer(num_keep_alive_refs=KEEP_ALIVE)
    stack.callback(writer.close)
    pool = cycle(frames(size, POOL))
    observation = np.empty(size, np.uint8)

    def loop(calls: int) -> None:
        for frame in islice(pool, calls):
            observation[...] = frame
            writer.append({"x": observation})
            writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1:]})

    loop(laps)
    return Work(loop, _chunk(size))


def in_place_work(stack: ExitStack, address: str, size: int, laps: int) -> Work:
    """Lets the environment write each payload into the table and makes it an item."""
    client = stack.enter_context(library.require().Client(address))
    writer = client.trajectory_writer(num_keep_alive_refs=KEEP_ALIVE)
    stack.callback(writer.close)
    pool = cycle(frames(size, POOL))
    # The first step tells the writer which columns there are.
    writer.append({"x": next(pool)})

    def loop(calls: int) -> None:
        for frame in islice(pool, calls):
            with writer.next_step() as step:
                step["x"][...] = frame
            writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1:]})

    loop(laps)
    return Work(loop, _chunk(size))


def pipe_work(stack: ExitStack, connection: Connection, size: int) -> Work:
    """Sends payloads through a pipe; None ends a run."""
    stack.callback(connection.close)
    pool = cycle(frames(size, POOL))
    observation = np.empty(size, np.uint8)

    def loop(calls: int) -> None:
        for frame in islice(pool, calls):
            observation[...] = frame
            connection.send(observation)

    return Work(loop, _chunk(size), lambda: connection.send(None))


def queue_work(stack: ExitStack, queue: Queue[NDArray[np.uint8] | None], size: int) -> Work:
    """Puts payloads into a queue; None ends a run.

    Each payload is an array of its own: the queue pickles later, in a thread, and would send
    whatever a reused array held by then.
    """
    pool = cycle(frames(size, POOL))

    def loop(calls: int) -> None:
        for frame in islice(pool, calls):
            queue.put(frame.copy())

    return Work(loop, _chunk(size), lambda: queue.put(None))


def _shared(
    stack: ExitStack, size: int, producers: int, work: Callable[[ExitStack, str, int, int], Work]
) -> Measure:
    """Measures producers that write into one table: what they wrote can be sampled at once."""
    rows = rows_for(size)
    address, client = library.serve(stack, rows, size)
    # Together they go round the table once before anything is measured.
    laps = rows * 6 // 5 // producers
    measure = crew_measure(stack, work, [(address, size, laps)] * producers)
    library.check_size(client, rows)
    return measure


class _PipeConsumer:
    """Receives from one pipe a producer and stores in a numpy ring."""

    def __init__(self, stack: ExitStack, size: int, producers: int) -> None:
        pairs = [context().Pipe(duplex=False) for _ in range(producers)]
        self._readers = [reader for reader, _ in pairs]
        self._ring = PayloadRing(rows_for(size), size)
        for reader in self._readers:
            stack.callback(reader.close)
        self._crew = Crew(stack, pipe_work, [(writer, size) for _, writer in pairs])
        for _, writer in pairs:
            writer.close()

    def measure(self, seconds: float) -> Reading:
        """Counts the payloads that were stored in time."""
        deadline = self._crew.start(seconds) + seconds
        stored = self._drain(deadline)
        self._crew.results(seconds)
        return Reading(stored, seconds)

    def _drain(self, deadline: float) -> int:
        """Stores until every producer has ended its run; returns how many were stored in time."""
        ring, now = self._ring, time.monotonic
        running: list[Connection] = list(self._readers)
        stored = 0
        while running:
            # With a single pipe there is nothing to choose from, and waiting would only cost.
            ready: list[Any] = list(running) if len(running) == 1 else wait(running)
            for reader in ready:
                payload = reader.recv()
                if payload is None:
                    running.remove(reader)
                    continue
                ring.add(payload)
                stored += now() <= deadline
        return stored


class _QueueConsumer:
    """Takes from one queue and stores in a numpy ring."""

    def __init__(self, stack: ExitStack, size: int, producers: int) -> None:
        self._queue: Queue[NDArray[np.uint8] | None] = context().Queue(QUEUE_MESSAGES)
        stack.callback(self._queue.close)
        self._producers = producers
        self._ring = PayloadRing(rows_for(size), size)
        self._crew = Crew(stack, queue_work, [(self._queue, size)] * producers)

    def measure(self, seconds: float) -> Reading:
        """Counts the payloads that were stored in time."""
        deadline = self._crew.start(seconds) + seconds
        stored = self._drain(deadline)
        self._crew.results(seconds)
        return Reading(stored, seconds)

    def _drain(self, deadline: float) -> int:
        """Stores until every producer has ended its run; returns how many were stored in time."""
        ring, get, now = self._ring, self._queue.get, time.monotonic
        running, stored = self._producers, 0
        while running:
            payload = get()
            if payload is None:
                running -= 1
                continue
            ring.add(payload)
            stored += now() <= deadline
        return stored


def _pipe(stack: ExitStack, size: int, producers: int) -> Measure:
    return _PipeConsumer(stack, size, producers).measure


def _queue(stack: ExitStack, size: int, producers: int) -> Measure:
    return _QueueConsumer(stack, size, producers).measure


def _ring(stack: ExitStack, size: int) -> Measure:
    """Measures the same in one process with nothing in between: write, then store in the ring."""
    ring = PayloadRing(rows_for(size), size)
    pool = cycle(frames(size, POOL))
    observation = np.empty(size, np.uint8)

    def loop(calls: int) -> None:
        for frame in islice(pool, calls):
            observation[...] = frame
            ring.add(observation)

    return TimedLoop(loop)


def _memcpy(stack: ExitStack, size: int) -> Measure:
    """Measures writing each payload once, straight into a ring: less cannot be done."""
    copies = BareMemcpy(rows_for(size), size, POOL)
    for source, frame in enumerate(frames(size, POOL)):
        copies.set_source(source, frame)
    return TimedLoop(copies.run)


def run(bench: Bench) -> None:
    """Measures this question."""
    quick = bench.settings.quick
    for payload, size in PAYLOADS.items():
        if quick and payload not in ("400 B", "400 kB"):
            continue
        for producers in PRODUCERS[:2] if quick else PRODUCERS:
            shared = partial(_shared, size=size, producers=producers)
            bench.compare(
                NAME,
                case_name(payload, producers),
                [
                    Contender(APPEND, partial(shared, work=append_work), ours=True),
                    Contender(IN_PLACE, partial(shared, work=in_place_work), ours=True),
                    Contender(PIPE, partial(_pipe, size=size, producers=producers)),
                    Contender(QUEUE, partial(_queue, size=size, producers=producers)),
                    Contender(RING, partial(_ring, size=size)),
                    Contender(MEMCPY, partial(_memcpy, size=size)),
                ],
                bytes_per_item=size,
                box=0.3,
            )
