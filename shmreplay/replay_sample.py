"""What sampling returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["INFO_DTYPES", "ReplaySample", "SampleInfo"]


class SampleInfo(NamedTuple):
    """What a table knows of a sampled item, or of each item of a batch.

    Of one sample the fields are Python numbers; of a batch of B, arrays of shape [B] with the
    dtypes of ``INFO_DTYPES``.
    """

    key: Any
    """Key of the item, uint64; for ``update_priorities``."""

    probability: Any
    """Probability of selecting this item when it was sampled, float64."""

    table_size: Any
    """Items in the table when it was sampled, before any removal by this sample, int64."""

    priority: Any
    """Priority of the item when it was sampled, float64."""

    times_sampled: Any
    """How often the item has been sampled, this time included, int32."""

    @classmethod
    def zeros(cls, batch_size: int | None = None) -> SampleInfo:
        """Returns an info of zeros: Python numbers, or arrays of shape [batch_size]."""
        if batch_size is None:
            return cls(key=0, probability=0.0, table_size=0, priority=0.0, times_sampled=0)
        return cls(*(np.zeros(batch_size, dtype) for dtype in INFO_DTYPES))


INFO_DTYPES = SampleInfo(
    key=np.dtype(np.uint64),
    probability=np.dtype(np.float64),
    table_size=np.dtype(np.int64),
    priority=np.dtype(np.float64),
    times_sampled=np.dtype(np.int32),
)
"""The dtype of each field of the info of a batch."""


class ReplaySample(NamedTuple):
    """A sampled item, or a batch of them."""

    info: SampleInfo
    """What the table knows of it."""

    data: Any
    """The data, in the structure that the reading call documents."""
