"""What sampling returns."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

__all__ = ["INFO_DTYPES", "ItemInfo", "ReplaySample", "SampleInfo"]


class _Fields(NamedTuple):
    """The fields of a `SampleInfo`: just those of Reverb, as programs unpack them."""

    key: Any
    probability: Any
    table_size: Any
    priority: Any
    times_sampled: Any


class SampleInfo(_Fields):
    """What a table knows of a sampled item, or of each item of a batch.

    Of one sample the fields are Python numbers; of a batch of B, arrays of shape [B] with the
    dtypes of ``INFO_DTYPES``:

    * ``key``: Key of the item, uint64; for ``update_priorities``.
    * ``probability``: Probability of selecting this item when it was sampled, float64.
    * ``table_size``: Items in the table when it was sampled, before any removal by this sample,
      int64.
    * ``priority``: Priority of the item when it was sampled, float64.
    * ``times_sampled``: How often the item has been sampled, this time included, int32.
    """

    inserted_ns: Any = None
    """When the item was inserted, to a few milliseconds: nanoseconds as of ``time.time_ns()``, an
    int or uint64[B]. None where it is not known. No field of the tuple: Reverb's has five."""

    def __new__(
        cls,
        key: Any,
        probability: Any,
        table_size: Any,
        priority: Any,
        times_sampled: Any,
        inserted_ns: Any = None,
    ) -> SampleInfo:
        """Makes an info of its fields and, beside them, the time of insertion."""
        # What the base does, without the call: each sampled item has one.
        self = tuple.__new__(cls, (key, probability, table_size, priority, times_sampled))
        if inserted_ns is not None:
            self.inserted_ns = inserted_ns
        return self

    def age(self) -> Any:
        """Seconds since the item was inserted: a float, or float64[B]; None where not known.

        By the clock of day, so it may be slightly off, and below 0, where that was set meanwhile.
        """
        if self.inserted_ns is None:
            return None
        inserted = np.asarray(self.inserted_ns).astype(np.int64)
        seconds = (np.int64(time.time_ns()) - inserted) * 1e-9
        return seconds if inserted.ndim else float(seconds)

    @classmethod
    def zeros(cls, batch_size: int | None = None) -> SampleInfo:
        """Returns an info of zeros: Python numbers, or arrays of shape [batch_size].

        Args:
            batch_size: Rows of the arrays; None: one sample.
        """
        if batch_size is None:
            return cls(key=0, probability=0.0, table_size=0, priority=0.0, times_sampled=0)
        return cls(*(np.zeros(batch_size, dtype) for dtype in INFO_DTYPES))

    @classmethod
    def tf_dtypes(cls) -> SampleInfo:
        """Returns the TensorFlow dtype of each field.

        Raises:
            ImportError: TensorFlow is not installed.
        """
        import tensorflow as tf

        return cls(*(tf.as_dtype(dtype) for dtype in INFO_DTYPES))

    @classmethod
    def tf_shapes(cls) -> SampleInfo:
        """Returns the TensorFlow shape of each field of one sample: that of scalars.

        Raises:
            ImportError: TensorFlow is not installed.
        """
        import tensorflow as tf

        return cls(*(tf.TensorShape([]) for _ in INFO_DTYPES))


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


class ItemInfo(NamedTuple):
    """What a table knows of its items: of N of them, arrays of shape [N]."""

    key: Any
    """Keys, uint64."""

    priority: Any
    """Priorities, float64."""

    times_sampled: Any
    """How often each has been sampled, int32."""

    inserted: Any
    """When each was inserted: seconds since the epoch, float64, to some milliseconds."""
