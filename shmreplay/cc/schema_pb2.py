"""Messages of tables, under Reverb's names."""

from __future__ import annotations

from typing import Any, ClassVar

from shmreplay.patterns import Message
from shmreplay.reverb_types import RateLimiterCallStats, RateLimiterInfo, TableWorkerTime

__all__ = [
    "KeyDistributionOptions",
    "RateLimiterCallStats",
    "RateLimiterInfo",
    "TableWorkerTime",
]


class _Prioritized(Message):
    """The settings of a prioritized selector."""

    priority_exponent: float
    _FIELDS: ClassVar[dict[str, Any]] = {"priority_exponent": float}


class _Heap(Message):
    """The settings of a heap selector."""

    min_heap: bool
    _FIELDS: ClassVar[dict[str, Any]] = {"min_heap": bool}


class KeyDistributionOptions(Message):
    """A selector, to be written into a configuration."""

    Prioritized: ClassVar = _Prioritized
    Heap: ClassVar = _Heap

    fifo: bool
    uniform: bool
    prioritized: _Prioritized
    heap: _Heap
    lifo: bool
    is_deterministic: bool
    _FIELDS: ClassVar[dict[str, Any]] = {
        "fifo": bool,
        "uniform": bool,
        "prioritized": _Prioritized,
        "heap": _Heap,
        "lifo": bool,
        "is_deterministic": bool,
    }
    _ONE_OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "distribution": ("fifo", "uniform", "prioritized", "heap", "lifo")
    }
