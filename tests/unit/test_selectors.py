"""Selectors: kinds, values, reprs and what a prioritized one refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shmreplay import item_selectors, selectors
from shmreplay.errors import InvalidArgumentError, ReverbError

CASES: list[tuple[selectors.Selector, str, float, bool, str]] = [
    (selectors.Fifo(), "fifo", 0.0, True, "FifoSelector"),
    (selectors.Lifo(), "lifo", 0.0, True, "LifoSelector"),
    (selectors.Uniform(), "uniform", 0.0, False, "UniformSelector"),
    (
        selectors.Prioritized(0.6),
        "prioritized",
        0.6,
        False,
        "PrioritizedSelector(priority_exponent=0.6)",
    ),
    (selectors.MinHeap(), "min_heap", 0.0, True, "HeapSelector(sign=1)"),
    (selectors.MaxHeap(), "max_heap", 0.0, True, "HeapSelector(sign=-1)"),
    (selectors.Epoch(), "epoch", 0.0, False, "EpochSelector"),
]


@pytest.mark.parametrize(("selector", "kind", "exponent", "deterministic", "text"), CASES)
def test_selector(
    selector: selectors.Selector, kind: str, exponent: float, deterministic: bool, text: str
) -> None:
    assert selector.kind == kind
    assert selector.priority_exponent == exponent
    assert selector.is_deterministic is deterministic
    assert repr(selector) == text
    again = selectors.from_kind(kind, exponent)
    assert type(again) is type(selector)
    assert again == selector
    assert hash(again) == hash(selector)


def test_kinds_are_all_different() -> None:
    assert tuple(case[1] for case in CASES) == selectors.KINDS
    assert len({case[0] for case in CASES}) == len(CASES)
    assert selectors.Prioritized(0.5) != selectors.Prioritized(0.6)
    assert selectors.Fifo() != "fifo"


def test_classes_and_partials_as_in_reverb() -> None:
    assert isinstance(selectors.Uniform(), selectors.Uniform)
    assert isinstance(selectors.MinHeap(), selectors.Heap)
    assert selectors.MinHeap.func is selectors.MaxHeap.func is selectors.Heap
    minimum, maximum = selectors.MinHeap(), selectors.MaxHeap()
    assert minimum.min_heap
    assert not maximum.min_heap


def test_item_selectors_has_the_same_names() -> None:
    for name in item_selectors.__all__:
        assert getattr(item_selectors, name) is getattr(selectors, name)
    assert {"Fifo", "Lifo", "Uniform", "Prioritized", "MinHeap", "MaxHeap"} <= set(
        item_selectors.__all__
    )


@pytest.mark.parametrize(
    ("exponent", "text"),
    [(0, "0"), (1.0, "1"), (-0.5, "-0.5"), (np.float32(0.5), "0.5"), (np.int64(2), "2")],
)
def test_exponents(exponent: Any, text: str) -> None:
    selector = selectors.Prioritized(exponent)
    assert selector.priority_exponent == float(exponent)
    assert type(selector.priority_exponent) is float
    assert repr(selector) == f"PrioritizedSelector(priority_exponent={text})"


@pytest.mark.parametrize("exponent", [math.nan, math.inf, -math.inf, 10**400, "1", None, [1.0]])
def test_bad_exponents(exponent: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a finite number") as raised:
        selectors.Prioritized(exponent)
    assert isinstance(raised.value, (ValueError, ReverbError))


def test_unknown_kind() -> None:
    with pytest.raises(InvalidArgumentError, match="'heap'; expected one of fifo, lifo"):
        selectors.from_kind("heap")
