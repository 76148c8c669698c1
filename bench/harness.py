"""How a figure is taken: contenders in turn, warmed up, repeated, with a time box for each."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

Loop = Callable[[int], None]
"""Makes this many calls, one after the other."""

CHUNK_SECONDS = 0.01
"""A loop reads the clock about this often: too rarely to cost, often enough to stop in time."""


@dataclass(frozen=True)
class Reading:
    """What one repetition of one contender gave: so many calls in so many seconds."""

    calls: int
    seconds: float


PATIENCE = 10.0
"""So many times as long is given to who completed no call in its box: the machine was busy."""

Measure = Callable[[float], Reading]
"""Runs a contender for about this many seconds."""


@dataclass(frozen=True)
class Contender:
    """One row of a comparison.

    Attributes:
        name: The row's label.
        prepare: Builds the contender, filled and pre-faulted, and returns what measures it. What
            must be closed afterwards goes on the stack.
        ours: Whether shmreplay does the work (and the plots set it off).
        box: Seconds for one repetition of it; None: as for the others of the comparison.
    """

    name: str
    prepare: Callable[[ExitStack], Measure]
    ours: bool = False
    box: float | None = None


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several repetitions."""

    median: float
    minimum: float
    maximum: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Returns the spread of at least one value.

        Raises:
            ValueError: There are no values.
        """
        if not values:
            raise ValueError("a spread needs at least one value, got none")
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Figure:
    """All repetitions of one contender in one case of one question.

    Attributes:
        question: The question's name, as `--only` takes it.
        case: What was varied within the question ("400 kB", "1M items").
        contender: The row's label.
        ours: Whether shmreplay did the work.
        items_per_call: Items that one call handles.
        bytes_per_item: Payload of an item in bytes.
        seconds_per_call: One value a repetition, in seconds.
    """

    question: str
    case: str
    contender: str
    ours: bool
    items_per_call: int
    bytes_per_item: int
    seconds_per_call: tuple[float, ...]

    @property
    def microseconds(self) -> Spread:
        """Microseconds a call."""
        return Spread.of([1e6 * value for value in self.seconds_per_call])

    @property
    def rates(self) -> tuple[float, ...]:
        """Items a second, one value a repetition."""
        return tuple(self.items_per_call / value for value in self.seconds_per_call)

    @property
    def items_per_second(self) -> Spread:
        """Items a second."""
        return Spread.of(self.rates)

    @property
    def gigabytes_per_second(self) -> Spread:
        """Payload in GB (1e9 bytes) a second."""
        return Spread.of([1e-9 * self.bytes_per_item * rate for rate in self.rates])


@dataclass(frozen=True)
class Quantity:
    """Something that is no rate: a percentile, a ratio between clients.

    Attributes:
        question: The question's name.
        case: What was varied within the question.
        name: What was measured.
        unit: Of the values.
        values: One a repetition.
    """

    question: str
    case: str
    name: str
    unit: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Failure:
    """A contender that could not be built or measured."""

    question: str
    case: str
    contender: str
    error: str
    trace: str

    @staticmethod
    def of(error: Exception, question: str, case: str = "", contender: str = "") -> Failure:
        """Returns the record of an error that was just caught."""
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Failure(question, case, contender, text, trace)


@dataclass(frozen=True)
class Skipped:
    """A contender that this machine has no means to measure, and why: no failure."""

    question: str
    case: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Settings:
    """What the command line chose.

    Attributes:
        repeat: Repetitions of every figure.
        box_scale: Factor on every time box.
        quick: Fewer and smaller cases.
    """

    repeat: int = 5
    box_scale: float = 1.0
    quick: bool = False


class TimedLoop:
    """Measures a loop of calls in chunks, so that the clock is read rarely.

    The chunk is sized once, by doubling, in the first measurement (the warm-up) and kept.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._chunk = 0

    def __call__(self, seconds: float) -> Reading:
        """Calls the loop for about this many seconds."""
        if self._chunk == 0:
            self._chunk = self._calibrate(min(CHUNK_SECONDS, seconds / 4))
        loop, chunk = self._loop, self._chunk
        calls = 0
        start = time.perf_counter()
        deadline = start + seconds
        while True:
            loop(chunk)
            calls += chunk
            now = time.perf_counter()
            if now >= deadline:
                return Reading(calls, now - start)

    def _calibrate(self, target: float) -> int:
        """Returns how many calls take at least `target` seconds, give or take a factor of two."""
        chunk = 1
        while True:
            start = time.perf_counter()
            self._loop(chunk)
            if time.perf_counter() - start >= target:
                return chunk
            chunk *= 2


@dataclass
class Bench:
    """Collects the figures and the failures of a whole run.

    Attributes:
        settings: What the command line chose.
        report: Called with a line of progress.
        peers: The folder of the peers' virtual environments; None if there are none.
        figures: What was measured.
        failures: What went wrong.
        skipped: What could not be measured here.
        quantities: What was measured besides rates.
        finished: The cases that are done, as (question, case): a run that is resumed leaves them
            out.
        note: Called whenever a case is finished.
    """

    settings: Settings
    report: Callable[[str], None]
    peers: Path | None = None
    figures: list[Figure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    quantities: list[Quantity] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)
    note: Callable[[], None] = lambda: None

    def has(self, question: str, case: str) -> bool:
        """Whether this case was finished, by the run that this one resumes."""
        return (question, case) in self.finished

    def finish(self, question: str, case: str) -> None:
        """Notes that a case is finished: whatever interrupts the run, it need not be done again."""
        self.finished.append((question, case))
        self.note()

    def compare(
        self,
        question: str,
        case: str,
        contenders: Sequence[Contender],
        *,
        bytes_per_item: int,
        items_per_call: int = 1,
        box: float = 0.5,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Measures contenders beside each other, unless that was done by the run before.

        Each repetition runs every contender once; the next repetition starts with the next
        contender, so that none is always the first. A contender that fails is recorded and left out
        from there on; the others go on.

        Args:
            question: The question's name.
            case: What is varied within the question.
            contenders: The rows.
            bytes_per_item: Payload of an item in bytes.
            items_per_call: Items that one call handles.
            box: Seconds for one repetition of one contender, before `settings.box_scale`.
            after: Called when all is measured: what else belongs to the case.
        """
        if self.has(question, case):
            return
        self.report(f"{question}: {case}")
        with ExitStack() as stack:
            live = self._prepare(stack, question, case, contenders, box)
            values: dict[str, list[float]] = {contender.name: [] for contender, _ in live}
            for repetition in range(self.settings.repeat):
                turn = repetition % len(live) if live else 0
                for contender, measure in live[turn:] + live[:turn]:
                    try:
                        reading = _settled(measure, self._seconds(contender, box))
                        values[contender.name].append(reading.seconds / reading.calls)
                    except Exception as error:
                        self._fail(error, question, case, contender.name)
                        live = [pair for pair in live if pair[0] is not contender]
        for contender, _ in live:
            taken = tuple(values[contender.name])
            self.figures.append(
                Figure(
                    question,
                    case,
                    contender.name,
                    contender.ours,
                    items_per_call,
                    bytes_per_item,
                    taken,
                )
            )
        after()
        self.finish(question, case)

    def _seconds(self, contender: Contender, box: float) -> float:
        return (box if contender.box is None else contender.box) * self.settings.box_scale

    def _prepare(
        self,
        stack: ExitStack,
        question: str,
        case: str,
        contenders: Sequence[Contender],
        box: float,
    ) -> list[tuple[Contender, Measure]]:
        """Builds and warms up every contender; returns those that can be measured."""
        live: list[tuple[Contender, Measure]] = []
        for contender in contenders:
            try:
                measure = contender.prepare(stack)
                measure(self._seconds(contender, box) / 2)
            except Exception as error:
                self._fail(error, question, case, contender.name)
            else:
                live.append((contender, measure))
        return live

    def skip(self, question: str, case: str, contender: str, reason: str) -> None:
        """Notes a contender that cannot be measured here; the report lists it."""
        skipped = Skipped(question, case, contender, reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def _fail(self, error: Exception, question: str, case: str, contender: str) -> None:
        failure = Failure.of(error, question, case, contender)
        self.failures.append(failure)
        self.report(f"  failed: {contender}: {failure.error}")


def _settled(measure: Measure, seconds: float) -> Reading:
    """Measures once, with the garbage of the previous contender out of the way.

    Raises:
        RuntimeError: Not a single call was completed in the time box.
    """
    gc.collect()
    for box in (seconds, PATIENCE * seconds):
        reading = measure(box)
        if reading.calls >= 1:
            return reading
    raise RuntimeError(
        f"no call was completed in {seconds:g} s, nor in {PATIENCE:g} times as long; give it a "
        "longer time box"
    )
