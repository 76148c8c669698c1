"""Datasets of numpy arrays: iterables of sampled items, with the constructors of Reverb's datasets.

`trajectory_dataset` and `timestep_dataset` have the classes under Reverb's names, which are
`tf.data.Dataset`s where TensorFlow is installed. Those here never need it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np

from shmreplay import errors, limits, tree
from shmreplay.client import Client, checked_batch_size
from shmreplay.compat import ignored_argument
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo
from shmreplay.reverb_types import TableInfo
from shmreplay.spec import TensorSpec, dtype_name, shape_matches, shape_text

__all__ = [
    "Batches",
    "ElementSpec",
    "NumpyTimestepDataset",
    "NumpyTrajectoryDataset",
    "element_specs",
]

# Seconds of the longest slice of the wait for a server.
_LONGEST_CONNECT_S = 2.0

# Items of so many different lengths are not looked at anew.
_ACCEPTED_KINDS = 256

_Self = TypeVar("_Self", bound="FromTableSignature")


@dataclasses.dataclass(frozen=True)
class ElementSpec:
    """What one leaf of a dataset's elements looks like."""

    dtype: np.dtype[Any]
    """Of its arrays; object stands for text of any width."""

    shape: tuple[int | None, ...] | None
    """Of its arrays, None for a size that is not known; None alone: not even the rank is."""

    def accepts(self, dtype: np.dtype[Any], shape: Sequence[int | None]) -> bool:
        """Returns whether arrays of this dtype and shape may be such a leaf.

        Args:
            dtype: Of the arrays.
            shape: Of the arrays; None is any size.
        """
        same = dtype == self.dtype or (self.dtype == object and dtype.kind in "SU")
        return same and (self.shape is None or shape_matches(self.shape, shape))

    def __str__(self) -> str:
        """Returns the text that messages have."""
        shape = "<unknown>" if self.shape is None else shape_text(self.shape)
        return f"({dtype_name(self.dtype)}, {shape})"


class FromTableSignature:
    """Makes datasets of what a table's signature says; for those of numpy and of TensorFlow."""

    @classmethod
    def from_table_signature(
        cls: type[_Self],
        server_address: str,
        table: str,
        max_in_flight_samples_per_worker: int,
        num_workers_per_iterator: int = -1,
        max_samples_per_stream: int = -1,
        rate_limiter_timeout_ms: int = -1,
        get_signature_timeout_secs: float | None = None,
        max_samples: int = -1,
        flexible_batch_size: int | None = None,
    ) -> _Self:
        """Makes a dataset with dtypes and shapes of the table's signature.

        Args:
            server_address: See the constructor, as for the other arguments.
            table: Name of the table.
            max_in_flight_samples_per_worker: Items that may be drawn ahead; none are.
            num_workers_per_iterator: Accepted for Reverb's sake.
            max_samples_per_stream: Accepted for Reverb's sake.
            rate_limiter_timeout_ms: Milliseconds to wait for an item; then the iteration ends.
            get_signature_timeout_secs: Seconds to wait for a server that is not up yet.
            max_samples: Items after which the iteration ends.
            flexible_batch_size: Has no effect.

        Raises:
            InvalidArgumentError: There is no such table, or it has no signature.
            DeadlineExceededError: There was no server within the timeout.
        """
        signature = table_signature(server_address, table, get_signature_timeout_secs)
        make: Any = cls
        dataset: _Self = make(
            server_address=server_address,
            table=table,
            dtypes=tree.map_structure(lambda spec: spec.dtype, signature),
            shapes=tree.map_structure(lambda spec: spec.shape, signature),
            max_in_flight_samples_per_worker=max_in_flight_samples_per_worker,
            num_workers_per_iterator=num_workers_per_iterator,
            max_samples_per_stream=max_samples_per_stream,
            rate_limiter_timeout_ms=rate_limiter_timeout_ms,
            max_samples=max_samples,
            flexible_batch_size=flexible_batch_size,
        )
        return dataset


class Batches:
    """Iterable of a dataset's elements, many at a time. What `NumpyTrajectoryDataset.batch` gives.

    Each iteration begins anew, as one of the dataset does.
    """

    def __init__(
        self, dataset: NumpyTrajectoryDataset, batch_size: int, drop_remainder: bool
    ) -> None:
        """Of this dataset; the numbers are checked."""
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[ReplaySample]:
        """Yields batches: see `NumpyTrajectoryDataset.batch`."""
        size, least = self._batch_size, self._batch_size if self._drop_remainder else 1
        for batch in self._dataset._batches(size):
            if len(batch.info.key) >= least:
                yield batch


class NumpyTrajectoryDataset(FromTableSignature):
    """Iterable of sampled items, each a `ReplaySample` with whole columns as numpy arrays.

    Each iteration has a client of its own and draws an item when it is asked for one: nothing is
    drawn ahead, so where sampling consumes, nothing is lost when an iteration is given up.
    `info` holds numpy scalars. Lists in the structure become tuples, as in TensorFlow's datasets.
    """

    _emit_timesteps: ClassVar[bool] = False

    def __init__(
        self,
        server_address: str,
        table: str,
        dtypes: Any,
        shapes: Any,
        max_in_flight_samples_per_worker: int,
        num_workers_per_iterator: int = -1,
        max_samples_per_stream: int = -1,
        rate_limiter_timeout_ms: int = -1,
        max_samples: int = -1,
        flexible_batch_size: int | None = None,
    ) -> None:
        """Makes a dataset; an iteration connects.

        Args:
            server_address: As for `Client`.
            table: Name of the table.
            dtypes: Structure of the dtypes of an element's `data`.
            shapes: The same structure of shapes: sequences of sizes, None where one is not known;
                a None in place of a shape takes any.
            max_in_flight_samples_per_worker: Items that may be drawn ahead; none are.
            num_workers_per_iterator: Accepted for Reverb's sake, as the next one: items come
                straight from shared memory.
            max_samples_per_stream: See there.
            rate_limiter_timeout_ms: Milliseconds to wait for an item; then the iteration ends,
                without an error. -1: for ever.
            max_samples: Items after which the iteration ends. -1: none.
            flexible_batch_size: Has no effect; earlier releases of Reverb had it.

        Raises:
            InvalidArgumentError: A number is out of its range, or the structures differ.
            SignatureError: A dtype or a shape cannot be one.
        """
        counts = {
            "max_in_flight_samples_per_worker": max_in_flight_samples_per_worker,
            "num_workers_per_iterator": num_workers_per_iterator,
            "max_samples_per_stream": max_samples_per_stream,
            "max_samples": max_samples,
        }
        for name, value in counts.items():
            _check_count(name, value, or_unlimited=name != "max_in_flight_samples_per_worker")
        if limits.checked_int("rate_limiter_timeout_ms", rate_limiter_timeout_ms) < -1:
            raise errors.InvalidArgumentError(
                f"rate_limiter_timeout_ms ({rate_limiter_timeout_ms}) must be an integer >= -1. "
                "Use -1 to wait for ever."
            )
        if flexible_batch_size is not None:
            ignored_argument(type(self).__name__, "flexible_batch_size")
        self._server_address = server_address
        self._table = table
        self._specs = element_specs(dtypes, shapes)
        self._flat_specs: list[ElementSpec] = tree.flatten(self._specs)
        self._keys = tree.keys_of_flat_dict(self._specs)
        self._accepted: set[tuple[Any, ...]] = set()  # dtypes and shapes that were looked at
        self._timeout = None if rate_limiter_timeout_ms < 0 else rate_limiter_timeout_ms / 1000
        self._max_samples = sys.maxsize if max_samples == -1 else max_samples

    @property
    def element_specs(self) -> Any:
        """The structure of an element's `data`, of `ElementSpec`."""
        return self._specs

    def __iter__(self) -> Iterator[ReplaySample]:
        """Yields elements.

        Raises:
            TableNotFoundError: There is no such table.
            InvalidArgumentError: The table's signature, or an item, is not as the dataset says.
        """
        return (element for element in self.polled(None) if element is not None)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Batches:
        """Returns the same elements, `batch_size` at a time, stacked.

        Items are drawn and stacked by `Client.sample_batch`, which takes a small part of the time
        that drawing them one by one and stacking them does. They must be alike in their lengths.

        Args:
            batch_size: Elements in a batch, B.
            drop_remainder: Leave out a last batch that is shorter.

        Returns:
            An iterable of ReplaySample, whose `info` has arrays [B] and whose `data` has arrays
            [B, ...]. rate_limiter_timeout_ms is for a whole batch: one that is not full by then is
            short, and the last.

        Raises:
            InvalidArgumentError: batch_size is out of range.
        """
        return Batches(self, checked_batch_size(batch_size), bool(drop_remainder))

    def polled(self, every: float | None) -> Iterator[ReplaySample | None]:
        """Yields elements as an iteration does, and None whenever none has come for a while.

        So who iterates gets to look around, and can stop, while the table has nothing to give.

        Args:
            every: Seconds of such a while; None: never yields None.

        Raises:
            TableNotFoundError, InvalidArgumentError: As an iteration does.
        """
        with Client(self._server_address) as client:
            for _ in self._connecting(client, every):
                yield None
            left, end = self._max_samples, self._deadline()
            while left > 0:
                remaining = None if end is None else max(end - time.monotonic(), 0.0)
                waits = [seconds for seconds in (remaining, every) if seconds is not None]
                samples = client.sample(
                    self._table,
                    left,
                    emit_timesteps=self._emit_timesteps,
                    timeout=min(waits, default=None),
                )
                try:
                    for item in samples:
                        left -= 1
                        yield from self._elements(item)
                        end = self._deadline()  # the timeout is for each wait
                except errors.DeadlineExceededError:
                    if end is not None and time.monotonic() >= end:
                        return
                    yield None

    def _connecting(self, client: Client, every: float | None) -> Iterator[None]:
        """Connects and compares signatures; yields between the slices of the wait for a server."""
        end = time.monotonic() + limits.SERVER_WAIT_S
        while every is not None:
            try:
                self._check_signature(client.server_info(every))
                return
            except errors.DeadlineExceededError as error:
                if time.monotonic() >= end:
                    raise errors.StoreNotFoundError(str(error)) from None
            yield
            every = min(2 * every, _LONGEST_CONNECT_S)  # a far server may take a while to answer
        self._check_signature(client.server_info())

    def _batches(self, batch_size: int) -> Iterator[ReplaySample]:
        with Client(self._server_address) as client:
            for _ in self._connecting(client, None):
                continue
            left = self._max_samples
            while left > 0:
                wanted = min(batch_size, left)
                try:
                    batch = client.sample_batch(self._table, wanted, self._timeout)
                except errors.DeadlineExceededError:
                    return
                leaves = tree.flatten(batch.data)
                self._check_kinds([(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
                yield ReplaySample(batch.info, self._pack(leaves))
                size = len(batch.info.key)
                if size < wanted:
                    return  # the time was over
                left -= size

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _elements(self, item: Any) -> Iterator[ReplaySample]:
        yield self._element(item)

    def _element(self, item: ReplaySample) -> ReplaySample:
        self._check_kinds([(leaf.dtype, leaf.shape) for leaf in item.data])
        values: list[Any] = [
            dt.type(value) for dt, value in zip(INFO_DTYPES, item.info, strict=True)
        ]
        values.append(item.info.inserted_ns)
        return ReplaySample(SampleInfo(*values), self._pack(item.data))

    def _pack(self, leaves: list[Any]) -> Any:
        if self._keys is not None:
            return dict(zip(self._keys, leaves, strict=True))
        return tree.unflatten_as(self._specs, leaves)

    def _check_kinds(self, kinds: list[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
        """Is an item with columns of these dtypes and shapes as the dataset says?"""
        kind = tuple(kinds)
        if kind in self._accepted:
            return
        if len(kinds) != len(self._flat_specs):
            raise errors.InvalidArgumentError(
                f"Got an item of {len(kinds)} columns from table {self._table!r}; the dataset "
                f"expects {len(self._flat_specs)}. Give dtypes and shapes for each column."
            )
        for i, ((dtype, shape), spec) in enumerate(zip(kinds, self._flat_specs, strict=True)):
            if not spec.accepts(dtype, shape):
                raise errors.InvalidArgumentError(
                    f"Received incompatible tensor at flattened index {i} from table "
                    f"'{self._table}'. The dataset expects {spec}, the item has "
                    f"{ElementSpec(dtype, shape)}. Make the dataset with that, or insert others."
                )
        if len(self._accepted) < _ACCEPTED_KINDS:
            self._accepted.add(kind)

    def _check_signature(self, infos: dict[str, TableInfo]) -> None:
        """Compares with the table's signature, so that an iteration fails at once if it must."""
        info = infos.get(self._table)
        if info is None or info.signature is None:
            return  # a table that is not there is named by the first draw
        wanted: list[TensorSpec] = tree.flatten(info.signature)
        if len(wanted) != len(self._flat_specs):
            raise errors.InvalidArgumentError(
                f"Requested {len(self._flat_specs)} columns of table '{self._table}', whose "
                f"signature has {len(wanted)}: {info.signature}. Expected one for each: make the "
                "dataset by from_table_signature."
            )
        for i, (spec, column) in enumerate(zip(self._flat_specs, wanted, strict=True)):
            if not any(spec.accepts(column.dtype, shape) for shape in self._shapes_of(column)):
                raise errors.InvalidArgumentError(
                    f"Requested incompatible tensor at flattened index {i} from table "
                    f"'{self._table}'. The dataset expects {spec}, the table's signature has "
                    f"{ElementSpec(column.dtype, column.shape)}. Make the dataset with that."
                )

    def _shapes_of(self, column: TensorSpec) -> list[tuple[int | None, ...]]:
        """Shapes that an element may have where the signature has this column."""
        return [column.shape]


class NumpyTimestepDataset(NumpyTrajectoryDataset):
    """Iterable of the steps of sampled items, in order, each a `ReplaySample` of numpy arrays.

    All steps of an item have the same `info`. The columns of an item must be equally long. A
    table's signature may describe one step or whole items; `shapes` describe one step.
    """

    _emit_timesteps: ClassVar[bool] = True

    def _elements(self, item: Any) -> Iterator[ReplaySample]:
        for step in item:
            yield self._element(step)

    def _batches(self, batch_size: int) -> Iterator[ReplaySample]:
        elements = iter(self)
        while found := list(islice(elements, batch_size)):
            yield ReplaySample(_stacked_info(found), self._pack(_stacked_leaves(found)))

    def _shapes_of(self, column: TensorSpec) -> list[tuple[int | None, ...]]:
        return [column.shape, column.shape[1:]]


def _stacked_info(found: Sequence[ReplaySample]) -> SampleInfo:
    columns = zip(*[(*element.info, element.info.inserted_ns) for element in found], strict=True)
    return SampleInfo(*map(np.array, columns))


def _stacked_leaves(found: Sequence[ReplaySample]) -> list[Any]:
    columns: Iterable[tuple[Any, ...]] = zip(
        *[tree.flatten(element.data) for element in found], strict=True
    )
    return [np.stack(column) for column in columns]


def table_signature(server_address: str, table: str, timeout: float | None) -> Any:
    """The signature of a table.

    Raises:
        InvalidArgumentError: There is no such table, or it has no signature.
        DeadlineExceededError: There was no server within the timeout.
    """
    with Client(server_address) as client:
        infos = client.server_info(timeout)
    if table not in infos:
        raise errors.InvalidArgumentError(
            f"Server at {server_address} does not contain any table named {table}. Expected one "
            f"that it has: {', '.join(sorted(infos))}. Use one of them."
        )
    signature = infos[table].signature
    if signature is None:
        raise errors.InvalidArgumentError(
            f"Table {table} at {server_address} does not have a signature, and needs one. Give "
            "it, or make the dataset with dtypes and shapes."
        )
    return signature


def element_specs(dtypes: Any, shapes: Any) -> Any:
    """Joins dtypes and shapes into one structure of `ElementSpec`, in which lists are tuples.

    Args:
        dtypes: Structure of dtypes.
        shapes: The same structure of shapes.

    Raises:
        InvalidArgumentError: The structures differ.
        SignatureError: A dtype or a shape cannot be one.
    """
    return _join(dtypes, shapes, ())


def _join(dtypes: Any, shapes: Any, path: tree.Path) -> Any:
    if not tree.is_nested(dtypes):
        unknown = shapes is None or getattr(shapes, "rank", 0) is None  # a tf.TensorShape(None)
        any_text = _is_any_text(dtypes)
        spec = TensorSpec(() if unknown else shapes, "S1" if any_text else dtypes)
        dtype = np.dtype(object) if any_text else spec.dtype
        return ElementSpec(dtype, None if unknown else spec.shape)
    if isinstance(dtypes, Mapping):
        if not isinstance(shapes, Mapping) or dtypes.keys() != shapes.keys():
            raise _differ(dtypes, shapes, path)
        return {key: _join(dtypes[key], shapes[key], (*path, key)) for key in dtypes}
    if not isinstance(shapes, list | tuple) or len(dtypes) != len(shapes):
        raise _differ(dtypes, shapes, path)
    parts = [_join(*both, (*path, i)) for i, both in enumerate(zip(dtypes, shapes, strict=True))]
    return type(dtypes)._make(parts) if hasattr(dtypes, "_fields") else tuple(parts)


def _is_any_text(dtype: Any) -> bool:
    """Is it tf.string, or what numpy has for text without a width?"""
    if getattr(dtype, "as_numpy_dtype", dtype) is object:
        return True
    return dtype in (str, bytes, "S", "U") or dtype == np.dtype(object)


def _differ(dtypes: Any, shapes: Any, path: tree.Path) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"Expected dtypes and shapes alike; they don't have the same nested structure, as dtypes "
        f"{dtypes!r:.80} and shapes {shapes!r:.80}; expected one. Give a shape for each dtype."
    )


def _check_count(name: str, value: Any, *, or_unlimited: bool) -> None:
    count = limits.checked_int(name, value)
    if count < 1 and not (or_unlimited and count == -1):
        raise errors.InvalidArgumentError(
            f"{name} ({value}) must be a positive integer{' or -1' if or_unlimited else ''}. "
            "Leave it out for the default."
        )
