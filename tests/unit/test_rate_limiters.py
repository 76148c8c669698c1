"""Rate limiters: the four numbers of each kind, the arithmetic, and what is refused."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import numpy as np
import pytest

from shmreplay import rate_limiters
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.rate_limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack

MAX = sys.float_info.max
NUMPY: Any = (np.float64(0.5), np.int64(7), np.float32(-1))


def numbers(limiter: RateLimiter) -> tuple[float, int, float, float]:
    """Returns the four numbers of a limiter."""
    return (
        limiter.samples_per_insert,
        limiter.min_size_to_sample,
        limiter.min_diff,
        limiter.max_diff,
    )


@pytest.mark.parametrize(
    ("limiter", "expected"),
    [
        (RateLimiter(2, 3, 2, 10), (2.0, 3, 2.0, 10.0)),
        (RateLimiter(NUMPY[0], NUMPY[1], NUMPY[2], math.inf), (0.5, 7, -1.0, MAX)),
        (RateLimiter(1, 1, -math.inf, 10**400), (1.0, 1, -MAX, MAX)),
        (MinSize(5), (1.0, 5, -MAX, MAX)),
        (SampleToInsertRatio(4, 10, 8), (4.0, 10, 32.0, 48.0)),
        (SampleToInsertRatio(0.5, 10, 1.5), (0.5, 10, 3.5, 6.5)),
        (SampleToInsertRatio(4, 10, (0, 100)), (4.0, 10, 0.0, 100.0)),
        (SampleToInsertRatio(4, 10, [-math.inf, 100.0]), (4.0, 10, -MAX, 100.0)),
        (SampleToInsertRatio(1, 1, np.array([0.0, 5.0])), (1.0, 1, 0.0, 5.0)),
        (Queue(3), (1.0, 1, 0.0, 3.0)),
        (Queue(0), (1.0, 1, 0.0, 0.0)),
        (Stack(3), (1.0, 1, 0.0, 3.0)),
    ],
)
def test_numbers(limiter: RateLimiter, expected: tuple[float, int, float, float]) -> None:
    assert numbers(limiter) == expected
    assert [type(number) for number in numbers(limiter)] == [float, int, float, float]


def test_limiters_are_values() -> None:
    assert MinSize(3) == RateLimiter(1, 3, -MAX, MAX)
    assert Queue(3) == Stack(3)
    assert hash(Queue(3)) == hash(Stack(3))
    assert len({MinSize(1), MinSize(2), Queue(2), Queue(2)}) == 3
    assert Queue(3) != "queue"
    assert repr(Queue(3)) == (
        "RateLimiter(samples_per_insert=1.0, min_size_to_sample=1, min_diff=0.0, max_diff=3.0)"
    )
    namespace = {"RateLimiter": RateLimiter}
    for limiter in (MinSize(3), Stack(2), SampleToInsertRatio(0.3, 10, 2)):
        assert eval(repr(limiter), namespace) == limiter


# --- arithmetic ---------------------------------------------------------------------------------


def test_can_sample_near_min_diff() -> None:
    limiter = RateLimiter(1, 1, -1, 1)
    assert [limiter.can_sample(n, inserts=1) for n in (1, 2, 3)] == [True, True, False]


def test_can_insert_near_max_diff() -> None:
    limiter = RateLimiter(1.5, 2, -MAX, 5)
    assert [limiter.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not limiter.can_insert(1, inserts=3)
    assert limiter.can_insert(1, inserts=3, samples=1)


def test_five_inserts_pass_and_the_sixth_waits() -> None:
    limiter = RateLimiter(2, 3, 2, 10)
    inserts = 0
    while limiter.can_insert(1, inserts=inserts):
        inserts += 1
    assert inserts == 5
    samples = 0
    while limiter.can_sample(1, inserts=inserts, samples=samples):
        samples += 1
    assert samples == 8


def test_queue() -> None:
    queue = Queue(3)
    assert [queue.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not queue.can_sample(1)
    assert queue.can_sample(3, inserts=3)
    assert not queue.can_sample(4, inserts=3)
    # A deletion gives no room back, unless the table becomes empty.
    assert not queue.can_insert(1, inserts=3, deletes=1)
    assert queue.can_insert(1, inserts=3, deletes=3)


def test_deletes_below_min_size_free_inserts_and_stop_samples() -> None:
    limiter = RateLimiter(1, 2, 0, 2)
    assert not limiter.can_insert(1, inserts=2)
    assert limiter.can_sample(1, inserts=2)
    assert limiter.can_insert(1, inserts=2, deletes=1)
    assert not limiter.can_sample(1, inserts=2, deletes=1)


def test_min_size_never_holds_inserts() -> None:
    limiter = MinSize(3)
    assert limiter.can_insert(10**9, inserts=10**15)
    assert not limiter.can_sample(1, inserts=2)
    assert limiter.can_sample(10**9, inserts=3)


@pytest.mark.parametrize("ask", [MinSize(1).can_sample, MinSize(1).can_insert])
def test_counts_that_are_refused(ask: Any) -> None:
    for count in (0, -1):
        with pytest.raises(InvalidArgumentError, match=f"{count}; expected at least 1"):
            ask(count)
    for wrong in (1.0, "1", None, True):
        with pytest.raises(ArgumentTypeError, match="expected an int"):
            ask(wrong)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, -1, math.nan, math.inf])
def test_samples_per_insert_must_be_positive(ratio: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"samples_per_insert .* above 0"):
        RateLimiter(ratio, 1, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"samples_per_insert .* above 0"):
        SampleToInsertRatio(ratio, 1, 100)


@pytest.mark.parametrize("size", [0, -1, 2**63])
def test_min_size_must_be_positive(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="positive integer"):
        RateLimiter(1, size, 0, 1)
    with pytest.raises(InvalidArgumentError, match="positive integer"):
        MinSize(size)
    with pytest.raises(InvalidArgumentError, match="positive integer"):
        SampleToInsertRatio(1, size, 100)


@pytest.mark.parametrize("value", ["1", None, True, 1j, [1]])
def test_wrong_types(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="samples_per_insert"):
        RateLimiter(value, 1, 0, 1)
    with pytest.raises(ArgumentTypeError, match="min_size_to_sample"):
        MinSize(value)
    with pytest.raises(ArgumentTypeError, match="min_diff"):
        RateLimiter(1, 1, value, 1)
    with pytest.raises(ArgumentTypeError, match="size"):
        Queue(value)
    with pytest.raises((ArgumentTypeError, InvalidArgumentError), match="error_buffer"):
        SampleToInsertRatio(1, 1, value)


@pytest.mark.parametrize("make", [Queue, Stack])
@pytest.mark.parametrize("size", [-1, -math.inf, np.int64(-5)])
def test_a_length_below_zero(make: Any, size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="size"):
        make(size)


def test_a_float_is_no_size() -> None:
    with pytest.raises(ArgumentTypeError, match="expected an int"):
        MinSize(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda x: RateLimiter(1, 1, x, 1), Queue, Stack])
def test_nan_bounds(make: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="nan"):
        make(math.nan)


@pytest.mark.parametrize(
    ("ratio", "buffer"), [(1, 0.9), (4, 3.9), (0.1, 0.5), (1, (0, 1.9)), (1, (5, 0)), (1, -5)]
)
def test_buffers_that_are_too_small(ratio: float, buffer: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected at least 2 \* max"):
        SampleToInsertRatio(ratio, 10, buffer)


def test_buffer_that_is_just_large_enough() -> None:
    assert numbers(SampleToInsertRatio(4, 10, 4))[2:] == (36.0, 44.0)


def test_buffer_above_the_target() -> None:
    SampleToInsertRatio(2, 10, (20, 100))
    with pytest.raises(InvalidArgumentError, match="expected at most samples_per_insert"):
        SampleToInsertRatio(2, 10, (20.5, 100))


@pytest.mark.parametrize("buffer", [(1,), (1, 2, 3), []])
def test_buffer_that_is_no_pair(buffer: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the pair \(min_diff, max_diff\)"):
        SampleToInsertRatio(1, 1, buffer)


def test_buffer_below_the_target_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, rate_limiters.__name__):
        SampleToInsertRatio(2, 10, (0, 20))
        assert not caplog.records
        SampleToInsertRatio(2, 10, (0, 19))
    (record,) = caplog.records
    assert "below samples_per_insert * min_size_to_sample = 20" in record.getMessage()


def test_crossed_bounds_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, rate_limiters.__name__):
        RateLimiter(1, 1, 3, 3)
        assert not caplog.records
        RateLimiter(1, 1, 3, 2)
    assert "min_diff is above max_diff" in caplog.records[0].getMessage()
