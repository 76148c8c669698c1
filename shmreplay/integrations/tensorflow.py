"""Reverb's datasets as `tf.data.Dataset`s.

They run Python code of this process: they can be mapped, batched, interleaved and prefetched, but
not serialised or sent to other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shmreplay import errors, tree
from shmreplay.dataset import (
    ElementSpec,
    FromTableSignature,
    NumpyTimestepDataset,
    NumpyTrajectoryDataset,
)
from shmreplay.pattern_stream import apply_patterns
from shmreplay.patterns import Config, check_configs
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo
from shmreplay.structured_writer import infer_signature
from shmreplay.tf_client import as_text

__all__ = ["PatternDataset", "TimestepDataset", "TrajectoryDataset", "with_info"]

# Seconds between two chances for TensorFlow to stop an iteration.
_POLL_S = 0.1

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_it_is(function: _Function) -> _Function:
    """Keeps AutoGraph, which rewrites what `interleave` and `map` call, from rewriting this."""
    unchanged: _Function = tf.autograph.experimental.do_not_convert(function)
    return unchanged


class TrajectoryDataset(FromTableSignature, tf.data.Dataset):  # type: ignore[misc]
    """`tf.data.Dataset` of sampled items, each a `ReplaySample` with whole columns."""

    _numpy_dataset: ClassVar[type[NumpyTrajectoryDataset]] = NumpyTrajectoryDataset

    @_as_it_is
    def __init__(
        self,
        server_address: Any,
        table: Any,
        dtypes: Any,
        shapes: Any,
        max_in_flight_samples_per_worker: int,
        num_workers_per_iterator: int = -1,
        max_samples_per_stream: int = -1,
        rate_limiter_timeout_ms: int = -1,
        max_samples: int = -1,
        flexible_batch_size: int | None = None,
    ) -> None:
        """Makes a dataset; see `dataset.NumpyTrajectoryDataset`.

        Args:
            server_address: str or string tensor.
            table: str or string tensor.
            dtypes: See there, as for the other arguments.
            shapes: See there.
            max_in_flight_samples_per_worker: See there.
            num_workers_per_iterator: See there.
            max_samples_per_stream: See there.
            rate_limiter_timeout_ms: See there.
            max_samples: See there.
            flexible_batch_size: See there.

        Raises:
            InvalidArgumentError: A number is out of its range, or the structures differ.
        """

        def make(address: str, table_name: str) -> NumpyTrajectoryDataset:
            return self._numpy_dataset(
                address,
                table_name,
                dtypes,
                shapes,
                max_in_flight_samples_per_worker,
                num_workers_per_iterator,
                max_samples_per_stream,
                rate_limiter_timeout_ms,
                max_samples,
                flexible_batch_size,
            )

        def elements(address: Any, table_name: Any) -> Iterator[ReplaySample]:
            for element in make(as_text(address), as_text(table_name)).polled(_POLL_S):
                yield nothing if element is None else element

        # Names may be tensors, which have no value yet: the other arguments are checked now.
        checked = make("localhost:1", "")
        # TensorFlow stops an iteration between two elements and not within one: where it waits for
        # items, it is given empty elements from time to time, which the filter takes away.
        nothing = ReplaySample(
            SampleInfo(*(dtype.type(0) for dtype in INFO_DTYPES)),
            tree.map_structure(_empty, checked.element_specs),
        )
        self._dataset = tf.data.Dataset.from_generator(
            elements,
            args=(server_address, table),
            output_signature=ReplaySample(
                SampleInfo(*(tf.TensorSpec((), dtype) for dtype in INFO_DTYPES)),
                tree.map_structure(_tensor_spec, checked.element_specs),
            ),
        ).filter(_is_sample)
        super().__init__(self._dataset._variant_tensor)

    @classmethod
    @_as_it_is
    def from_table_signature(cls, *args: Any, **options: Any) -> Any:
        """See `dataset.FromTableSignature`."""
        return super().from_table_signature(*args, **options)

    def _inputs(self) -> list[Any]:
        """TensorFlow asks for the datasets that this one is made of."""
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """`ReplaySample` of `tf.TensorSpec`."""
        return self._dataset.element_spec


class TimestepDataset(TrajectoryDataset):
    """`tf.data.Dataset` of the steps of sampled items, in order, each a `ReplaySample`."""

    _numpy_dataset: ClassVar[type[NumpyTrajectoryDataset]] = NumpyTimestepDataset


class PatternDataset(tf.data.Dataset):  # type: ignore[misc]
    """`tf.data.Dataset` of the trajectories that patterns make of a `tf.data.Dataset` of steps."""

    def __init__(
        self,
        input_dataset: Any,
        configs: Sequence[Config],
        respect_episode_boundaries: bool,
        is_end_of_episode: Callable[..., Any],
    ) -> None:
        """Makes a dataset; in eager mode only, as in Reverb.

        Args:
            input_dataset: `tf.data.Dataset` of steps.
            configs: Patterns, of one table and one structure; see `structured_writer`.
            respect_episode_boundaries: Make no trajectories with steps of two episodes.
            is_end_of_episode: Says of a step, whose leaves are tensors, whether it is the last of
                its episode: a bool tensor.

        Raises:
            InvalidArgumentError: A config cannot be applied, they do not go together, or
                is_end_of_episode gives no bool.
        """
        configs = list(configs)
        check_configs(configs)
        signature = infer_signature(configs, input_dataset.element_spec)

        def with_end(*parts: Any) -> Any:
            step = parts[0] if len(parts) == 1 else parts
            return step, is_end_of_episode(*parts)

        steps = input_dataset.map(with_end)
        flag = steps.element_spec[1]
        if flag != tf.TensorSpec((), tf.bool):
            raise errors.InvalidArgumentError(
                f"is_end_of_episode must return one bool for a step, it returns {flag}. Make it a"
                " function of one step, not of a batch."
            )

        def trajectories() -> Iterator[Any]:
            return apply_patterns(steps.as_numpy_iterator(), configs, respect_episode_boundaries)

        self._dataset = tf.data.Dataset.from_generator(
            trajectories,
            output_signature=tree.map_structure(
                lambda spec: tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)), signature
            ),
        )
        super().__init__(self._dataset._variant_tensor)

    def _inputs(self) -> list[Any]:
        """TensorFlow asks for the datasets that this one is made of."""
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """The pattern's structure of `tf.TensorSpec`."""
        return self._dataset.element_spec


def with_info(trajectories: Any) -> Any:
    """Returns the dataset with each element as a `ReplaySample` with an info of zeros."""

    @_as_it_is
    def sample(*parts: Any) -> ReplaySample:
        zeros = SampleInfo(*(tf.zeros((), dtype) for dtype in INFO_DTYPES))
        return ReplaySample(zeros, parts[0] if len(parts) == 1 else parts)

    return trajectories.map(sample)


@_as_it_is
def _is_sample(element: ReplaySample) -> Any:
    """No sample is of a table of size 0."""
    return element.info.table_size > 0


def _empty(spec: ElementSpec) -> npt.NDArray[Any]:
    return np.zeros([size or 0 for size in spec.shape or ()], spec.dtype)


def _tensor_spec(spec: ElementSpec) -> Any:
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype))
