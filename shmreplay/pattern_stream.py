"""Trajectories that patterns make of a stream of steps, in memory: no table, no server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors, tree
from shmreplay.binding_support import as_array
from shmreplay.pattern_plan import PatternEvaluator, compile_config
from shmreplay.patterns import Config, check_configs, reach_of
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.spec import conversion_hint, dtype_name, shape_text
from shmreplay.structured_writer import infer_signature

__all__ = ["NumpyPatternDataset", "apply_patterns", "with_info"]


class NumpyPatternDataset:
    """Iterable of the trajectories that a `StructuredWriter` would make of steps.

    Each iteration begins anew with an iteration over the steps. The end of the steps is no end of
    an episode.
    """

    def __init__(
        self,
        input_dataset: Iterable[Any],
        configs: Sequence[Config],
        respect_episode_boundaries: bool,
        is_end_of_episode: Callable[[Any], Any],
    ) -> None:
        """Makes a dataset.

        Args:
            input_dataset: Steps: structures of arrays and scalars.
            configs: Patterns, of one table and one structure; see `structured_writer`.
            respect_episode_boundaries: Make no trajectories with steps of two episodes.
            is_end_of_episode: Says of a step whether it is the last of its episode.

        Raises:
            InvalidArgumentError: A config cannot be applied, or they do not go together.
        """
        check_configs(configs)
        self._input_dataset = input_dataset
        self._configs = list(configs)
        self._respect_episode_boundaries = respect_episode_boundaries
        self._is_end_of_episode = is_end_of_episode

    def __iter__(self) -> Iterator[Any]:
        """Yields trajectories: the pattern's structure of arrays.

        Raises:
            SignatureError: Steps differ in the number of leaves, or in a leaf's dtype or shape.
        """
        steps = ((step, bool(self._is_end_of_episode(step))) for step in self._input_dataset)
        return apply_patterns(steps, self._configs, self._respect_episode_boundaries)


def apply_patterns(
    steps: Iterable[tuple[Any, bool]], configs: Sequence[Config], clear_after_episode: bool
) -> Iterator[Any]:
    """Yields the trajectories that patterns make of steps.

    Args:
        steps: Each with whether it is the last of its episode.
        configs: Checked patterns.
        clear_after_episode: Whether patterns stop at the beginning of an episode.

    Raises:
        InvalidArgumentError: The configs do not go together.
        SignatureError: Steps differ in the number of leaves, or in a leaf's dtype or shape.
    """
    writer: _Memory | None = None
    for step, is_last in steps:
        if writer is None:
            infer_signature(configs, tree.map_structure(np.asarray, step))
            writer = _Memory(reach_of(configs))
            plans = [compile_config(config) for config in configs]
            evaluator = PatternEvaluator(writer, plans, reach_of(configs))
        evaluator.append(step, False)
        if is_last:
            evaluator.apply_at_end()
            evaluator.ended(clear_after_episode)
            writer.end_episode(clear_after_episode)
        yield from writer.take()


def with_info(trajectories: Iterable[Any]) -> Iterator[ReplaySample]:
    """Yields trajectories as samples with an info of zeros."""
    return (ReplaySample(SampleInfo.zeros(), trajectory) for trajectory in trajectories)


class _Memory:
    """A writer that keeps the last steps and the items made of them, for `PatternEvaluator`."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._items: list[Any] = []
        self._n_steps = 0
        self.history: dict[int, _Column] = {}

    def append(self, data: dict[int, Any], *, partial_step: bool = False) -> None:
        arrays = {index: as_array(leaf, (index,)) for index, leaf in data.items()}
        for index, array in arrays.items():
            if index in self.history:
                self.history[index].check(index, array)
            else:
                self.history[index] = _Column(array, self._n_steps)
        for index, column in self.history.items():
            # A copy: the caller may reuse its arrays.
            column.values.append(None if index not in arrays else arrays[index].copy())
            del column.values[: -self._reach]
        self._n_steps = min(self._n_steps + 1, self._reach)

    def create_item(
        self, table: str, priority: float, trajectory: Any, timeout: float | None = None
    ) -> None:
        self._items.append(trajectory)

    def take(self) -> list[Any]:
        """The items that were made since the last call."""
        items, self._items = self._items, []
        return items

    def flush(self, block_until_num_items: int = 0, timeout_ms: float | None = None) -> None:
        """Nothing is held back."""

    def end_episode(self, clear_buffers: bool = True, timeout_ms: float | None = None) -> None:
        if clear_buffers:
            for column in self.history.values():
                column.values.clear()
            self._n_steps = 0

    def close(self) -> None:
        """Nothing is held."""


class _Column:
    """Values of one leaf, the newest last; None where a step has none."""

    def __init__(self, first: npt.NDArray[Any], n_before: int) -> None:
        self.values: list[npt.NDArray[Any] | None] = [None] * n_before
        self._dtype, self._shape = first.dtype, first.shape

    def check(self, index: int, array: npt.NDArray[Any]) -> None:
        if array.dtype != self._dtype:
            raise errors.SignatureError(
                f"Tensor of wrong dtype provided for column ({index},). Got "
                f"{dtype_name(array.dtype)} but expected {dtype_name(self._dtype)}. "
                f"{conversion_hint(array.dtype, self._dtype)}"
            )
        if array.shape != self._shape:
            raise errors.SignatureError(
                f"Tensor of incompatible shape provided for column ({index},). Got "
                f"{shape_text(array.shape)} which is incompatible with {shape_text(self._shape)}. "
                "Expected is the shape of the first value: reshape it."
            )

    def __getitem__(self, index: int | slice) -> npt.NDArray[Any]:
        if isinstance(index, slice):
            return np.stack([np.asarray(value) for value in self.values[index]])
        return np.asarray(self.values[index])
