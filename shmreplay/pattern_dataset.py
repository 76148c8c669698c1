"""`PatternDataset`: trajectories that patterns make of a dataset of steps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from shmreplay.pattern_stream import NumpyPatternDataset, with_info
from shmreplay.patterns import Config

__all__ = ["PatternDataset", "pattern_dataset_with_info"]


class PatternDataset(NumpyPatternDataset):
    """Dataset of the trajectories that a `StructuredWriter` would make of steps.

    Of a `tf.data.Dataset` of steps it is a `tf.data.Dataset`, of any other iterable an iterable.
    """

    __signature__: ClassVar = inspect.signature(NumpyPatternDataset)

    def __new__(cls, input_dataset: Any, *args: Any, **options: Any) -> Any:
        """Makes the dataset that goes with the input."""
        if cls is PatternDataset and _is_of_tensorflow(input_dataset):
            from shmreplay.integrations import tensorflow

            return tensorflow.PatternDataset(input_dataset, *args, **options)
        return super().__new__(cls)


def pattern_dataset_with_info(
    input_dataset: Any,
    configs: Sequence[Config],
    respect_episode_boundaries: bool,
    is_end_of_episode: Callable[[Any], Any],
) -> Iterable[Any]:
    """Makes a `PatternDataset` whose elements are `ReplaySample`s with an info of zeros.

    Args:
        input_dataset: See `PatternDataset`, as for the other arguments.
        configs: Patterns.
        respect_episode_boundaries: Make no trajectories with steps of two episodes.
        is_end_of_episode: Says of a step whether it is the last of its episode.
    """
    made: Any = PatternDataset(
        input_dataset, configs, respect_episode_boundaries, is_end_of_episode
    )
    if _is_of_tensorflow(made):
        from shmreplay.integrations import tensorflow

        return tensorflow.with_info(made)  # type: ignore[no-any-return]
    return _WithInfo(made)


class _WithInfo:
    """Iterable of samples, as often as its trajectories can be iterated."""

    def __init__(self, trajectories: Iterable[Any]) -> None:
        self._trajectories = trajectories

    def __iter__(self) -> Any:
        return with_info(self._trajectories)


def _is_of_tensorflow(dataset: Any) -> bool:
    tf: Any = sys.modules.get("tensorflow")
    return tf is not None and isinstance(dataset, tf.data.Dataset)
