"""Selectors: which item a table samples next, and which it removes when it is full.

A selector here is a plain value that says what is wanted; the table does the selecting. So one
selector object may be used for sampler and remover, and in any number of tables.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np

from shmreplay.errors import InvalidArgumentError

__all__ = [
    "KINDS",
    "Epoch",
    "Fifo",
    "Heap",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "Prioritized",
    "Selector",
    "Uniform",
    "from_kind",
]

KINDS = ("fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap", "epoch")
"""Every value of ``Selector.kind``."""


class Selector:
    """What all selectors have in common; use one of its subclasses."""

    is_deterministic: ClassVar[bool] = True
    """Whether the same operations always select the same items."""

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return type(self).__name__.lower()

    @property
    def priority_exponent(self) -> float:
        """The exponent that makes weights of priorities; 0.0 where priorities are not weights."""
        return 0.0

    def __eq__(self, other: object) -> bool:
        """Returns whether both select in the same way."""
        if not isinstance(other, Selector):
            return NotImplemented
        return (self.kind, self.priority_exponent) == (other.kind, other.priority_exponent)

    def __hash__(self) -> int:
        """Returns a hash of kind and exponent."""
        return hash((self.kind, self.priority_exponent))

    def __repr__(self) -> str:
        """Returns the name under which Reverb prints this selector."""
        return f"{type(self).__name__}Selector"


class Fifo(Selector):
    """Selects the item that was inserted first; probability 1. Updates do not move an item."""


class Lifo(Selector):
    """Selects the item that was inserted last; probability 1. Updates do not move an item."""


class Uniform(Selector):
    """Selects any item with probability 1 / size."""

    is_deterministic: ClassVar[bool] = False


class Epoch(Selector):
    """Selects every item once, in random order, before it selects any again: without replacement.

    For samplers only. An item that comes in joins the pass that is under way; a pass ends when the
    next draw finds nothing left of it. The probability is 1 / items left in the pass. A draw counts
    for the table, not for each client: several clients share a pass. What a client drew and could
    not deliver, it delivers first next time. Where a process dies inside the table, a new pass
    begins.
    """

    is_deterministic: ClassVar[bool] = False


class Prioritized(Selector):
    """Selects items with probabilities proportional to ``priority ** priority_exponent``.

    An item of priority 0 has weight 0, whatever the exponent; where all weights are 0, every item
    is equally likely. Priorities must be finite and not negative.
    """

    is_deterministic: ClassVar[bool] = False

    def __init__(self, priority_exponent: float) -> None:
        """Makes the selector.

        Args:
            priority_exponent: Any finite number: 0 makes all weights alike, 1 takes priorities as
                they are, and a negative one prefers low priorities.

        Raises:
            InvalidArgumentError: It is not a finite number.
        """
        self._priority_exponent = _finite(priority_exponent)

    @property
    def priority_exponent(self) -> float:
        """The exponent that makes weights of priorities."""
        return self._priority_exponent

    def __repr__(self) -> str:
        """Returns the text under which Reverb prints this selector."""
        exponent = repr(self._priority_exponent).removesuffix(".0")
        return f"PrioritizedSelector(priority_exponent={exponent})"


class Heap(Selector):
    """Selects the item of lowest or highest priority; probability 1.

    Among equal priorities, the item goes first whose insertion or last update is longest ago.
    """

    def __init__(self, min_heap: bool) -> None:
        """Makes the selector.

        Args:
            min_heap: True for the lowest priority first, False for the highest.
        """
        self._min_heap = bool(min_heap)

    @property
    def kind(self) -> str:
        """``'min_heap'`` or ``'max_heap'``."""
        return "min_heap" if self._min_heap else "max_heap"

    @property
    def min_heap(self) -> bool:
        """True for the lowest priority first, False for the highest."""
        return self._min_heap

    def __repr__(self) -> str:
        """Returns the text under which Reverb prints this selector."""
        return f"HeapSelector(sign={1 if self._min_heap else -1})"


MinHeap = functools.partial(Heap, True)
"""Makes a selector of the lowest priority first."""

MaxHeap = functools.partial(Heap, False)
"""Makes a selector of the highest priority first."""


def from_kind(kind: str, priority_exponent: float = 0.0) -> Selector:
    """Makes a selector of its ``kind`` and ``priority_exponent``.

    Args:
        kind: One of ``KINDS``.
        priority_exponent: Of a prioritized one.

    Raises:
        InvalidArgumentError: The kind is not one of ``KINDS``, or the exponent is not finite.
    """
    match kind:
        case "fifo":
            return Fifo()
        case "lifo":
            return Lifo()
        case "uniform":
            return Uniform()
        case "prioritized":
            return Prioritized(priority_exponent)
        case "min_heap":
            return MinHeap()
        case "max_heap":
            return MaxHeap()
        case "epoch":
            return Epoch()
    raise InvalidArgumentError(
        f"Got the selector kind {kind!r}; expected one of {', '.join(KINDS)}. Use the classes of "
        "shmreplay.selectors."
    )


def _finite(exponent: Any) -> float:
    if isinstance(exponent, (int, float, np.integer, np.floating)):
        try:
            value = float(exponent)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
    raise InvalidArgumentError(
        f"Got the priority_exponent {exponent!r}; expected a finite number, for instance 0.6."
    )
