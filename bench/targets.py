"""What the figures are held to; met or not is computed from what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import (
    batch_insert,
    block_append,
    borrow,
    crash_safety,
    import_time,
    prioritized,
    scaling,
    single_insert,
    uniform_sample,
)
from bench.harness import Figure, Quantity, Spread

Row = tuple[str, str, str]
"""Question, case, contender."""

WITHOUT_SHARING = 0.95
"""Of what more processes gain where they share nothing, those that share must gain so much."""


@dataclass(frozen=True)
class Target:
    """A figure, or the ratio of two, and its limit.

    Attributes:
        text: What is held to what.
        row: The figure.
        limit: The limit, in `unit`.
        at_least: Whether the limit is a lower one.
        unit: "us" (of a call), "M items/s", or "x" for the row's `of` relative to `to`.
        of: For a ratio: "us" or "items/s"; "quantity" where the rows name quantities, no figures.
        to: For a ratio: the figure that it is relative to.
        control: For a ratio: two figures of work without what is judged. The ratio is divided by
            theirs, which says what the machine takes by itself.
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
    control: tuple[Row, Row] | None = None

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


_GATHER = (
    "beside the gather, 256 items are drawn and pinned (a line of their slots and of their blocks "
    "each, which a plain array has not), and arrays, keys and probabilities made for Python"
)
_SHARING = (
    "an item is written under the locks of the limiter and of a stripe, and the oldest is evicted, "
    "whichever stripe it is in; a writer that is preempted there lets the others fall asleep, and "
    "each of them meets cold caches when it wakes. The rows over those of processes that share "
    "nothing tell how much of the loss is the machine's"
)


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
                _GATHER,
            )
        )
        for label, floor, limit in (
            ("a bare C gather", uniform_sample.GATHER, 1.3),
            ("a bare C gather with prefetch", uniform_sample.GATHER_AHEAD, 1.3),
        ):
            found.append(
                Target(
                    f"sample_batch(256, out=), {case}: time against {label} (arrays given)",
                    (name, case, uniform_sample.OURS_OUT),
                    limit,
                    False,
                    "x",
                    "us",
                    (name, case, floor),
                    _GATHER,
                )
            )
    return found


def _scaling_targets() -> list[Target]:
    """Returns the targets of several writers: alone, and beside processes that share nothing."""
    name, case = scaling.NAME, scaling.SINGLE_CASE
    one, two, many = scaling.WRITERS
    found: list[Target] = []
    for text, count, base, limit in (
        ("two writers on two stripes: rate against one writer", two, one, 1.7),
        ("64 writers: total rate against two writers", many, two, 0.95),
        ("64 writers: total rate against one writer", many, one, 0.95),
    ):
        rows = [(name, case, scaling.ours(each)) for each in (count, base)]
        found.append(Target(text, rows[0], limit, True, "x", "items/s", rows[1], _SHARING))
        for whose, label in (("a store each", scaling.private), ("a ring each", scaling.control)):
            alone = ((name, case, label(count)), (name, case, label(base)))
            found.append(
                Target(
                    f"{text}, over that of processes with {whose}",
                    rows[0],
                    WITHOUT_SHARING,
                    True,
                    "x",
                    "items/s",
                    rows[1],
                    _SHARING,
                    alone,
                )
            )
    return found


def _block_targets() -> list[Target]:
    """Returns the targets of blocks of payloads, for each size and place of the caller's array."""
    name = block_append.NAME
    return [
        Target(
            f"insert_batch of payloads of {case}, {offset} B past a page: rate against memcpy",
            (name, case, block_append.ours(offset)),
            0.9,
            True,
            "x",
            "items/s",
            (name, case, block_append.MEMCPY),
            "what is not copying (a key, a slot, an eviction) counts where payloads are small",
        )
        for case in block_append.SIZES
        for offset in block_append.OFFSETS
    ]


def _crash_safety_targets() -> list[Target]:
    """Returns the targets of each call with and without what makes crashes safe."""
    name = crash_safety.NAME
    return [
        Target(
            f"{case}: time against the same without crash safety",
            (name, case, crash_safety.OURS),
            1.1,
            False,
            "x",
            "us",
            (name, case, crash_safety.FRAGILE),
            "an undo record, a busy word and a robust mutex are a fixed number of stores, which "
            "count most in the shortest calls and in the core alone",
        )
        for case in crash_safety.ALL_CASES
    ]


def all_targets() -> list[Target]:
    """Returns every target."""
    single = (single_insert.NAME, single_insert.CASE, single_insert.OURS)
    ring = (single_insert.NAME, single_insert.CASE, single_insert.RING)
    structured = (single_insert.NAME, single_insert.CASE, single_insert.OURS_STRUCTURED)
    batch = (batch_insert.NAME, batch_insert.CASE, batch_insert.OURS)
    priority_case = next(iter(prioritized.CASES))
    return [
        Target("append + five slices + create_item", single, 2.0, False, "us"),
        Target("structured append, which makes the item", structured, 1.0, False, "us"),
        Target(
            "append + five slices + create_item: time against the numpy ring",
            single,
            1.0,
            False,
            "x",
            "us",
            ring,
            "the ring stores and forgets; here each step also gets a key, a place in the sampler, "
            "references that keep its block, an undo record, and evicts another",
        ),
        Target("insert_batch of 256", batch, 5.0, True, "M items/s"),
        *_block_targets(),
        *_uniform_targets(),
        Target(
            f"prioritized sample + update of 256, {priority_case}",
            (prioritized.NAME, priority_case, prioritized.OURS),
            1.8,
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
        *_crash_safety_targets(),
    ]


def judge(
    targets: Sequence[Target], figures: Sequence[Figure], quantities: Sequence[Quantity] = ()
) -> list[Verdict]:
    """Holds figures to targets.

    Args:
        targets: What to judge.
        figures: Everything that was measured; a target whose figures are missing is not measured.
        quantities: What was measured besides rates.
    """
    rows = {(figure.question, figure.case, figure.contender): figure for figure in figures}
    values = {(each.question, each.case, each.name): each.values for each in quantities}
    return [
        Verdict(target, _quantity(target, values))
        if target.of == "quantity"
        else Verdict(target, _measured(target, rows))
        for target in targets
    ]


def _quantity(target: Target, values: dict[Row, tuple[float, ...]]) -> Spread | None:
    """Returns a target's quantity, or its ratio to another in the same repetition, or None."""
    mine = values.get(target.row)
    if target.to is None or mine is None:
        return None if mine is None else Spread.of(mine)
    theirs = values.get(target.to)
    if theirs is None:
        return None
    return Spread.of([a / b for a, b in zip(mine, theirs, strict=True)])


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
    ratios = _ratios(figure, other, target.of)
    if target.control is not None:
        alone = [rows.get(row) for row in target.control]
        if alone[0] is None or alone[1] is None:
            return None
        bare = _ratios(alone[0], alone[1], target.of)
        ratios = [ratio / each for ratio, each in zip(ratios, bare, strict=True)]
    return Spread.of(ratios)


def _ratios(figure: Figure, other: Figure, of: str) -> list[float]:
    """Returns the ratio of two figures in each repetition."""
    pairs = zip(figure.seconds_per_call, other.seconds_per_call, strict=True)
    return [mine / theirs if of == "us" else theirs / mine for mine, theirs in pairs]
