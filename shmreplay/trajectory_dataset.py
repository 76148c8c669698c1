"""`TrajectoryDataset`: of TensorFlow where that is installed, else of numpy."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from shmreplay.dataset import NumpyTrajectoryDataset
from shmreplay.tf_client import tensorflow_is_installed

__all__ = ["TrajectoryDataset"]


class TrajectoryDataset(NumpyTrajectoryDataset):
    """Dataset of sampled items with whole columns.

    Where TensorFlow is installed, making one gives the `tf.data.Dataset` of
    `integrations.tensorflow`, with the same arguments; `dataset.NumpyTrajectoryDataset` never does.
    """

    __signature__: ClassVar = inspect.signature(NumpyTrajectoryDataset)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Makes the dataset of TensorFlow where that is installed."""
        if cls is TrajectoryDataset and tensorflow_is_installed():
            from shmreplay.integrations import tensorflow

            return tensorflow.TrajectoryDataset(*args, **options)
        return super().__new__(cls)

    @classmethod
    def from_table_signature(cls, *args: Any, **options: Any) -> Any:
        """Makes the dataset with dtypes and shapes of the table's signature.

        See `dataset.NumpyTrajectoryDataset.from_table_signature`.

        Args:
            *args: Those of that method.
            **options: Those of that method.
        """
        if cls is TrajectoryDataset and tensorflow_is_installed():
            from shmreplay.integrations import tensorflow

            return tensorflow.TrajectoryDataset.from_table_signature(*args, **options)
        return super().from_table_signature(*args, **options)
