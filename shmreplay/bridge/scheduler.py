"""Requests that wait: each is a generator that tries, and says what it waits for if it must.

None has a thread. What waits for the same thing waits in line, and tries again in that order when
messages came, and by a short timer for what local processes change.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Any

__all__ = ["Scheduler", "Task", "Work"]

Work = Generator[Hashable, None, Any]
"""Yields what it waits for; returns its result."""


class Task:
    """One piece of work and what becomes of it."""

    __slots__ = (
        "_expired",
        "_timed",
        "cancelled",
        "deadline",
        "done",
        "finish",
        "sequence",
        "waits_for",
        "work",
    )

    def __init__(
        self, finish: Callable[[Task, Any, Exception | None], None], sequence: int = 0
    ) -> None:
        """Takes what to do with the result or the error, and the number of the request."""
        self.work: Work | None = None
        self.finish = finish
        self.sequence = sequence
        self.waits_for: Hashable | None = None
        self.deadline = math.inf
        """Reading of the monotonic clock at which it tries once more at the latest."""
        self.done = False
        self.cancelled = False
        self._timed = math.inf
        self._expired = math.inf


class Scheduler:
    """Runs tasks. Used by one thread."""

    def __init__(self, may_help: Callable[[Hashable], bool]) -> None:
        """Nothing runs yet.

        Args:
            may_help: Says quickly whether those who wait for this may get it now.
        """
        self._may_help = may_help
        self._waiting: dict[Hashable, deque[Task]] = {}
        self._deadlines: list[tuple[float, int, Task]] = []
        self._serial = itertools.count()
        self._new: deque[Task] = deque()
        self._starting = False

    @property
    def idle(self) -> bool:
        """Whether no task waits."""
        return not self._waiting

    def start(self, task: Task, work: Work) -> None:
        """Lets a task try for the first time; after whatever is at work now."""
        task.work = work
        self._new.append(task)
        if self._starting:
            return
        self._starting = True
        try:
            while self._new:
                self._step(self._new.popleft())
        finally:
            self._starting = False

    def _step(self, task: Task) -> None:
        """One try. The task is then done, or in line for what it waits for."""
        if task.done or task.work is None:
            return
        try:
            waits_for = next(task.work)
        except StopIteration as stop:
            self._end(task, stop.value, None)
        except Exception as error:  # told to whoever asked
            self._end(task, None, error)
        else:
            if waits_for != task.waits_for:
                self._leave(task)
                task.waits_for = waits_for
                self._waiting.setdefault(waits_for, deque()).append(task)
            if task.deadline < task._timed and task.deadline != task._expired:
                task._timed = task.deadline
                heapq.heappush(self._deadlines, (task.deadline, next(self._serial), task))

    def _end(self, task: Task, result: Any, error: Exception | None) -> None:
        self._leave(task)
        task.done = True
        task.finish(task, result, error)

    def _leave(self, task: Task) -> None:
        if task.waits_for is None:
            return
        line = self._waiting[task.waits_for]
        line.remove(task)
        if not line:
            del self._waiting[task.waits_for]
        task.waits_for = None

    def retry(self) -> None:
        """Lets each that waits try, the oldest first, as long as trying may help."""
        for waits_for in list(self._waiting):
            for task in list(self._waiting.get(waits_for, ())):
                if not self._may_help(waits_for):
                    break
                if task.waits_for == waits_for:
                    self._step(task)

    def expire(self) -> None:
        """Lets those try whose time is over."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            task = heapq.heappop(self._deadlines)[2]
            task._timed, task._expired = math.inf, task._timed
            self._step(task)

    def next_deadline(self) -> float | None:
        """When the next task's time is over."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def cancel(self, task: Task) -> None:
        """Tells a task to wait no longer."""
        task.cancelled = True
        if task.waits_for is not None:
            self._step(task)

    def drop(self, task: Task) -> None:
        """Ends a task that nobody asks for any more."""
        if not task.done:
            task.done = True
            self._leave(task)
            if task.work is not None:
                task.work.close()
