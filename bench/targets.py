"""What the figures are held to; met or not is computed from what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import (
    batch_insert,
    borrow,
    crash_safety,
    import_time,
    prioritized,
    scaling,
    single_insert,
    uniform_sample,
)
from bench.harness import Figure, Spread

Row = tuple[str, str, str]
"""Question, case, contender."""


@dataclass(frozen=True)
class Target:
    """A figure, or the ratio of two, and its limit.

    Attributes:
        text: What is held to what.
        row: The figure.
        limit: The limit, in `unit`.
        at_least: Whether the limit is a lower one.
        unit: "us" (of a call), "M items/s", or "x" for the row's `of` relative to `to`.
        of: For a ratio: "us" or "items/s".
        to: For a ratio: the figure that it is relative to.
        reason: Why it may be missed, where that is known.
    """

    text: str
    row: Row
    limit: float
    at_least: bool
    unit: str
    of: str = ""
    to: Row | None = None
    reason: str = ""

    @property
    def requirement(self) -> str:
        """The limit in words."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured: None where a figure is missing.

    A ratio is taken within each repetition, where both contenders ran one shortly after the other;
    the spread is that of the ratios.
    """

    target: Target
    measured: Spread | None

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the limit; None if it was not measured."""
        if self.measured is None:
            return None
        compare: Callable[[float, float], bool] = (
            operator.ge if self.target.at_least else operator.le
        )
        return compare(self.measured.median, self.target.limit)

    @property
    def word(self) -> str:
        """Met, not met or not measured."""
        return {True: "met", False: "NOT MET", None: "not measured"}[self.met]


def _uniform_targets() -> list[Target]:
    """Returns the targets of uniform sampling, for each table size."""
    name = uniform_sample.NAME
    found: list[Target] = []
    for case in uniform_sample.CASES:
        found.append(
            Target(
                f"sample_batch(256), {case}: speed against numpy fancy indexing (both new arrays)",
                (name, case, uniform_sample.OURS),
                2.0,
                True,
                "x",
                "items/s",
                (name, case, uniform_sample.FANCY),
            )
        )
        for label, floor in (
            ("a bare C gather", uniform_sample.GATHER),
            ("a bare C gather with prefetch", uniform_sample.GATHER_AHEAD),
        ):
            found.append(
                Target(
                    f"sample_batch(256, out=), {case}: time against {label} (arrays given)",
                    (name, case, uniform_sample.OURS_OUT),
                    1.7,
                    False,
                    "x",
                    "us",
                    (name, case, floor),
                )
            )
    return found


def _scaling_targets() -> list[Target]:
    """Returns the targets of several writers."""
    name, case = scaling.NAME, scaling.SINGLE_CASE
    one, two, many = (scaling.ours(count) for count in scaling.WRITERS)
    return [
        Target(
            "two writers on two stripes: rate against one writer",
            (name, case, two),
            1.7,
            True,
            "x",
            "items/s",
            (name, case, one),
        ),
        Target(
            "64 writers: total rate against two writers",
            (name, case, many),
            0.95,
            True,
            "x",
            "items/s",
            (name, case, two),
        ),
        Target(
            "64 writers: total rate against one writer",
            (name, case, many),
            0.95,
            True,
            "x",
            "items/s",
            (name, case, one),
        ),
    ]


def all_targets() -> list[Target]:
    """Returns every target."""
    single = (single_insert.NAME, single_insert.CASE, single_insert.OURS)
    ring = (single_insert.NAME, single_insert.CASE, single_insert.RING)
    batch = (batch_insert.NAME, batch_insert.CASE, batch_insert.OURS)
    priority_case = next(iter(prioritized.CASES))
    return [
        Target("append + five slices + create_item", single, 3.0, False, "us"),
        Target(
            "append + five slices + create_item: time against the numpy ring",
            single,
            1.0,
            False,
            "x",
            "us",
            ring,
        ),
        Target("insert_batch of 256", batch, 5.0, True, "M items/s"),
        *_uniform_targets(),
        Target(
            f"prioritized sample + update of 256, {priority_case}",
            (prioritized.NAME, priority_case, prioritized.OURS),
            1.2,
            True,
            "M items/s",
        ),
        Target(
            "borrow of one 400 kB item",
            (borrow.NAME, "400 kB", borrow.OURS),
            10.0,
            False,
            "us",
        ),
        Target(
            "importing the package",
            (import_time.NAME, import_time.CASE, import_time.OURS),
            250_000.0,
            False,
            "us",
        ),
        *_scaling_targets(),
        *(
            Target(
                f"{case}: time against the same without crash safety",
                (crash_safety.NAME, case, crash_safety.OURS),
                1.1,
                False,
                "x",
                "us",
                (crash_safety.NAME, case, crash_safety.FRAGILE),
            )
            for case in crash_safety.ALL_CASES
        ),
    ]


def judge(targets: Sequence[Target], figures: Sequence[Figure]) -> list[Verdict]:
    """Holds figures to targets.

    Args:
        targets: What to judge.
        figures: Everything that was measured; a target whose figures are missing is not measured.
    """
    rows = {(figure.question, figure.case, figure.contender): figure for figure in figures}
    return [Verdict(target, _measured(target, rows)) for target in targets]


def _measured(target: Target, rows: dict[Row, Figure]) -> Spread | None:
    """Returns a target's figure in its unit, or None."""
    figure = rows.get(target.row)
    if figure is None:
        return None
    if target.to is None:
        if target.unit == "us":
            return figure.microseconds
        return Spread.of([1e-6 * rate for rate in figure.rates])
    other = rows.get(target.to)
    if other is None:
        return None
    pairs = zip(figure.seconds_per_call, other.seconds_per_call, strict=True)
    if target.of == "us":
        return Spread.of([mine / theirs for mine, theirs in pairs])
    return Spread.of([theirs / mine for mine, theirs in pairs])
