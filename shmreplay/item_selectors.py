"""The selectors under the module name that Reverb gives them; see ``selectors``."""

from __future__ import annotations

from shmreplay.selectors import (
    Epoch,
    Fifo,
    Heap,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    Selector,
    Uniform,
)

__all__ = [
    "Epoch",
    "Fifo",
    "Heap",
    "Lifo",
    "MaxHeap",
    "MinHeap",
    "Prioritized",
    "Selector",
    "Uniform",
]
