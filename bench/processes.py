"""Processes that start together and work for a fixed time, on command."""

from __future__ import annotations

import functools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from bench.harness import Loop, Measure, Reading

START_DELAY = 0.05
"""Seconds between the command and the common start: by then every process sleeps."""

ANSWER_SECONDS = 120.0
"""A process that says nothing for this long is given up."""


@dataclass(frozen=True)
class Work:
    """What a process does.

    Attributes:
        loop: Handles this many items.
        chunk: Items between two looks at the clock. A chunk that ends too late is not counted.
        finish: Called after each run, outside the measured time.
        several: In place of the loop, for a process that plays several clients: called with the
            deadline on the monotonic clock, returns what each of them handled by then.
    """

    loop: Loop
    chunk: int
    finish: Callable[[], None] | None = None
    several: Callable[[float], list[int]] | None = None


Prepare = Callable[..., Work]
"""Called in the process with an exit stack and the crew's arguments. A module-level function."""


class WorkerError(RuntimeError):
    """A process of a crew failed; the message holds its traceback."""


@functools.cache
def context() -> ForkServerContext:
    """Returns the start method of all processes: forked from a clean server with the imports done.

    Not plain fork: the parent serves a store, and its handles are of no use to a child.
    """
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload(["numpy", "bench.processes", "shmreplay"])
    return result


class Crew:
    """Processes that run the same job from the same instant for the same time.

    They are started once, prepare themselves, and then sleep until told to run.
    """

    def __init__(self, stack: ExitStack, prepare: Prepare, arguments: Sequence[tuple[Any, ...]]):
        """Starts one process for each tuple of arguments and waits until all are ready.

        Args:
            stack: Ends the processes.
            prepare: See `Prepare`.
            arguments: One tuple a process.

        Raises:
            WorkerError: A process failed to get ready.
        """
        self._members: list[tuple[ForkServerProcess, Connection]] = []
        stack.callback(self.close)
        for each in arguments:
            ours, theirs = context().Pipe()
            process = context().Process(target=_work, args=(theirs, prepare, each), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for process, connection in self._members:
            _receive(process, connection, ANSWER_SECONDS)

    def start(self, seconds: float) -> float:
        """Tells all to run for `seconds`; returns the common start on the monotonic clock."""
        # Many processes need longer until they all sleep.
        start = time.monotonic() + START_DELAY + 0.002 * len(self._members)
        for _, connection in self._members:
            connection.send((start, seconds))
        return start

    def results(self, seconds: float) -> int:
        """Waits for all to finish; returns how many items they handled in time, together.

        Raises:
            WorkerError: A process failed.
        """
        return sum(self.counts(seconds))

    def counts(self, seconds: float) -> list[int]:
        """Waits for all to finish; returns how many items each of them handled in time.

        Raises:
            WorkerError: A process failed.
        """
        return [
            int(count)
            for process, connection in self._members
            for count in _receive(process, connection, seconds + ANSWER_SECONDS)
        ]

    def measure(self, seconds: float) -> Reading:
        """Runs all for `seconds`; a call of the reading is an item of any of them."""
        self.start(seconds)
        return Reading(self.results(seconds), seconds)

    def close(self) -> None:
        """Ends the processes; kills one that does not end."""
        for process, connection in self._members:
            if process.is_alive():
                # It may end by itself between the question and the word.
                with suppress(BrokenPipeError):
                    connection.send(None)
        for process, connection in self._members:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
            process.close()
        self._members.clear()


def crew_measure(
    stack: ExitStack, prepare: Prepare, arguments: Sequence[tuple[Any, ...]]
) -> Measure:
    """Starts a crew; returns what measures it."""
    return Crew(stack, prepare, arguments).measure


def _receive(process: ForkServerProcess, connection: Connection, seconds: float) -> Any:
    """Returns the next answer of a process.

    Raises:
        WorkerError: It failed, died or said nothing for `seconds`.
    """
    if connection not in wait([connection, process.sentinel], seconds):
        state = "died" if process.exitcode is not None else f"said nothing for {seconds:g} s"
        raise WorkerError(f"process {process.name} {state} (exit code {process.exitcode})")
    try:
        answer = connection.recv()
    except EOFError as error:
        process.join(10)
        raise WorkerError(f"process {process.name} died (exit code {process.exitcode})") from error
    if isinstance(answer, str):
        raise WorkerError(f"process {process.name} failed:\n{answer}")
    return answer


def _work(connection: Connection, prepare: Prepare, arguments: tuple[Any, ...]) -> None:
    """The life of a process: get ready, run on command, end on None."""
    try:
        with ExitStack() as stack:
            work = prepare(stack, *arguments)
            connection.send(True)
            while (command := connection.recv()) is not None:
                connection.send(_run(work, *command))
    except Exception:
        # Not swallowed: the parent raises it, with this traceback as its message.
        connection.send(traceback.format_exc())


def _run(work: Work, start: float, seconds: float) -> list[int]:
    """Works from `start` on; returns the items that were done by `start + seconds`, by client."""
    loop, chunk, now = work.loop, work.chunk, time.monotonic
    time.sleep(max(0.0, start - now()))
    deadline = start + seconds
    done = 0
    try:
        if work.several is not None:
            return work.several(deadline)
        while True:
            loop(chunk)
            if now() > deadline:
                return [done]
            done += chunk
    finally:
        # Also after an error: somebody may be waiting for the end of this run.
        if work.finish is not None:
            work.finish()
