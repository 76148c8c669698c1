"""Rate limiters: how far inserting and sampling may run ahead of each other.

A limiter is pure arithmetic on three counters of its table: inserts I, samples S and deletes D.
With size = I - D, all bounds inclusive,

* ``n`` samples may be taken when size >= min_size_to_sample
  and I * samples_per_insert - S - n >= min_diff;
* ``n`` items may be inserted when size + n <= min_size_to_sample
  or (I + n) * samples_per_insert - S <= max_diff.

A limiter here is a plain value; the counters are the table's. So one limiter object may be used in
any number of tables.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from typing import Any

from shmreplay.errors import InvalidArgumentError
from shmreplay.limits import checked_int, checked_number

__all__ = ["MinSize", "Queue", "RateLimiter", "SampleToInsertRatio", "Stack"]

_logger = logging.getLogger(__name__)

_MAX_INT64 = 2**63 - 1


class RateLimiter:
    """A limiter of any four numbers; equal to another of the same numbers."""

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        min_diff: float,
        max_diff: float,
    ) -> None:
        """Makes a limiter.

        Args:
            samples_per_insert: How many samples one insert pays for on average; above 0.
            min_size_to_sample: Items the table must hold before anything is sampled; at least 1.
            min_diff: Lowest value of inserts * samples_per_insert - samples that sampling may
                lead to. An infinite one becomes the largest finite float, here and below.
            max_diff: Highest value that inserting may lead to.

        Raises:
            InvalidArgumentError: A value is out of its range.
            ArgumentTypeError: A value is not a number, or the size is not an int.
        """
        self._samples_per_insert = checked_number("samples_per_insert", samples_per_insert)
        self._min_size_to_sample = checked_int("min_size_to_sample", min_size_to_sample)
        self._min_diff = _bound("min_diff", min_diff)
        self._max_diff = _bound("max_diff", max_diff)
        if not 0 < self._samples_per_insert < math.inf:
            raise InvalidArgumentError(
                f"Got samples_per_insert {samples_per_insert!r}; expected a finite number above "
                "0. Use MinSize where the two are not bound to each other."
            )
        if not 1 <= self._min_size_to_sample <= _MAX_INT64:
            raise InvalidArgumentError(
                f"Got min_size_to_sample {min_size_to_sample!r}; expected a positive integer below"
                " 2**63. Give the items to hold before anything is sampled."
            )
        if self._min_diff > self._max_diff:
            _logger.warning(
                "%r: min_diff is above max_diff, so inserts and samples will block each other as"
                " soon as the table holds min_size_to_sample items.",
                self,
            )

    @property
    def samples_per_insert(self) -> float:
        """How many samples one insert pays for on average."""
        return self._samples_per_insert

    @property
    def min_size_to_sample(self) -> int:
        """Items the table must hold before anything is sampled."""
        return self._min_size_to_sample

    @property
    def min_diff(self) -> float:
        """Lowest value of inserts * samples_per_insert - samples that sampling may lead to."""
        return self._min_diff

    @property
    def max_diff(self) -> float:
        """Highest value of inserts * samples_per_insert - samples that inserting may lead to."""
        return self._max_diff

    def can_sample(
        self, num_samples: int, *, inserts: int = 0, samples: int = 0, deletes: int = 0
    ) -> bool:
        """Returns whether a table with these counters may give ``num_samples`` samples.

        Args:
            num_samples: How many.
            inserts: Items inserted so far.
            samples: Samples taken so far.
            deletes: Items deleted so far.

        Raises:
            InvalidArgumentError: ``num_samples`` is below 1.
            ArgumentTypeError: ``num_samples`` is not an int.
        """
        count = _positive("num_samples", num_samples)
        if inserts - deletes < self._min_size_to_sample:
            return False
        return inserts * self._samples_per_insert - samples - count >= self._min_diff

    def can_insert(
        self, num_inserts: int, *, inserts: int = 0, samples: int = 0, deletes: int = 0
    ) -> bool:
        """Returns whether a table with these counters may take ``num_inserts`` items.

        Args:
            num_inserts: How many.
            inserts: Items inserted so far.
            samples: Samples taken so far.
            deletes: Items deleted so far.

        Raises:
            InvalidArgumentError: ``num_inserts`` is below 1.
            ArgumentTypeError: ``num_inserts`` is not an int.
        """
        count = _positive("num_inserts", num_inserts)
        if inserts - deletes + count <= self._min_size_to_sample:
            return True
        return (inserts + count) * self._samples_per_insert - samples <= self._max_diff

    def _key(self) -> tuple[float, int, float, float]:
        return (
            self._samples_per_insert,
            self._min_size_to_sample,
            self._min_diff,
            self._max_diff,
        )

    def __eq__(self, other: object) -> bool:
        """Returns whether the four numbers are equal."""
        if not isinstance(other, RateLimiter):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        """Returns a hash of the four numbers."""
        return hash(self._key())

    def __repr__(self) -> str:
        """Returns the call that would make an equal limiter."""
        return (
            f"RateLimiter(samples_per_insert={self._samples_per_insert!r},"
            f" min_size_to_sample={self._min_size_to_sample!r},"
            f" min_diff={self._min_diff!r}, max_diff={self._max_diff!r})"
        )


class MinSize(RateLimiter):
    """Lets everything pass, except that sampling waits until the table holds enough items."""

    def __init__(self, min_size_to_sample: int) -> None:
        """Makes a limiter.

        Args:
            min_size_to_sample: Items the table must hold before anything is sampled; at least 1.

        Raises:
            InvalidArgumentError: It is below 1.
            ArgumentTypeError: It is not an int.
        """
        super().__init__(
            samples_per_insert=1.0,
            min_size_to_sample=min_size_to_sample,
            min_diff=-sys.float_info.max,
            max_diff=sys.float_info.max,
        )


class SampleToInsertRatio(RateLimiter):
    """Holds the number of samples taken of each inserted item near a target on average."""

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | Iterable[float],
    ) -> None:
        """Makes a limiter.

        Args:
            samples_per_insert: The target; above 0.
            min_size_to_sample: Items the table must hold before anything is sampled; at least 1.
            error_buffer: How far inserts * samples_per_insert - samples may be from
                min_size_to_sample * samples_per_insert, or the pair (min_diff, max_diff).

        Raises:
            InvalidArgumentError: A value is out of its range, or the buffer is so small or so high
                that inserts and samples would block each other.
            ArgumentTypeError: A value is not a number, or the buffer neither number nor pair.
        """
        ratio = checked_number("samples_per_insert", samples_per_insert)
        if not 0 < ratio < math.inf:
            raise InvalidArgumentError(
                f"Got samples_per_insert {samples_per_insert!r}; expected a finite number above "
                "0. Use MinSize where the two are not bound to each other."
            )
        offset = ratio * checked_int("min_size_to_sample", min_size_to_sample)
        min_diff, max_diff = _diffs(error_buffer, offset)
        super().__init__(ratio, min_size_to_sample, min_diff, max_diff)
        if self.max_diff - self.min_diff < 2 * max(1.0, ratio):
            raise InvalidArgumentError(
                f"Got the error_buffer {error_buffer!r}, whose range is"
                f" {self.max_diff - self.min_diff:g} wide; expected at least 2 * max(1.0,"
                f" samples_per_insert) = {2 * max(1.0, ratio):g}, as a smaller one could block"
                " samples and inserts for ever. Give a larger error_buffer."
            )
        if self.min_diff > offset:
            raise InvalidArgumentError(
                f"Got the error_buffer {error_buffer!r}, whose range begins at {self.min_diff:g};"
                f" expected at most samples_per_insert * min_size_to_sample = {offset:g}, as"
                " sampling could not begin. Give a lower range."
            )
        if self.max_diff < offset:
            _logger.warning(
                "%r: the range of error_buffer is below samples_per_insert * min_size_to_sample ="
                " %g. If nothing samples at the same time, inserts will block as soon as the table"
                " holds min_size_to_sample items.",
                self,
                offset,
            )


class Queue(RateLimiter):
    """Makes a table behave as a queue of bounded length: each item is sampled once."""

    def __init__(self, size: int) -> None:
        """Makes a limiter.

        Args:
            size: Items that may be inserted and not yet sampled.

        Raises:
            InvalidArgumentError: It is NaN, or below 0.
            ArgumentTypeError: It is not a number.
        """
        super().__init__(1.0, min_size_to_sample=1, min_diff=0.0, max_diff=_length("size", size))


class Stack(RateLimiter):
    """Makes a table behave as a stack of bounded height: each item is sampled once."""

    def __init__(self, size: int) -> None:
        """Makes a limiter.

        Args:
            size: Items that may be inserted and not yet sampled.

        Raises:
            InvalidArgumentError: It is NaN, or below 0.
            ArgumentTypeError: It is not a number.
        """
        super().__init__(1.0, min_size_to_sample=1, min_diff=0.0, max_diff=_length("size", size))


def _bound(name: str, value: Any) -> float:
    number = checked_number(name, value)
    if math.isnan(number):
        raise InvalidArgumentError(f"Got {name} nan; expected a number. Leave no NaN in limits.")
    # JSON has no infinity, and no sum of counters comes near the largest float.
    return min(max(number, -sys.float_info.max), sys.float_info.max)


def _length(name: str, value: Any) -> float:
    length = _bound(name, value)
    if length < 0:
        raise InvalidArgumentError(
            f"Got {name} {value!r}; expected the number of items that may wait, at least 1. Give "
            "the length of the queue."
        )
    return length


def _positive(name: str, value: Any) -> int:
    count = checked_int(name, value)
    if count < 1:
        raise InvalidArgumentError(
            f"Got {name} {value!r}; expected at least 1. Use MinSize(1) for no bound."
        )
    return count


def _diffs(error_buffer: Any, offset: float) -> tuple[float, float]:
    if isinstance(error_buffer, Iterable) and not isinstance(error_buffer, str):
        pair = list(error_buffer)
        if len(pair) == 2:
            return _bound("error_buffer[0]", pair[0]), _bound("error_buffer[1]", pair[1])
        raise InvalidArgumentError(
            f"Got an error_buffer of {len(pair)} numbers; expected one number, or the pair"
            " (min_diff, max_diff). Give one of the two."
        )
    buffer = checked_number("error_buffer", error_buffer)
    return offset - buffer, offset + buffer
