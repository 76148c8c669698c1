"""`TimestepDataset`: of TensorFlow where that is installed, else of numpy."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from shmreplay.dataset import NumpyTimestepDataset
from shmreplay.tf_client import tensorflow_is_installed

__all__ = ["TimestepDataset"]


class TimestepDataset(NumpyTimestepDataset):
    """Dataset of the steps of sampled items, in order.

    Where TensorFlow is installed, making one gives the `tf.data.Dataset` of
    `integrations.tensorflow`, with the same arguments; `dataset.NumpyTimestepDataset` never does.
    """

    __signature__: ClassVar = inspect.signature(NumpyTimestepDataset)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Makes the dataset of TensorFlow where that is installed."""
        if cls is TimestepDataset and tensorflow_is_installed():
            from shmreplay.integrations import tensorflow

            return tensorflow.TimestepDataset(*args, **options)
        return super().__new__(cls)

    @classmethod
    def from_table_signature(cls, *args: Any, **options: Any) -> Any:
        """Makes the dataset with dtypes and shapes of the table's signature.

        See `dataset.NumpyTrajectoryDataset.from_table_signature`.

        Args:
            *args: Those of that method.
            **options: Those of that method.
        """
        if cls is TimestepDataset and tensorflow_is_installed():
            from shmreplay.integrations import tensorflow

            return tensorflow.TimestepDataset.from_table_signature(*args, **options)
        return super().from_table_signature(*args, **options)
