"""The writer of earlier Reverb releases: items are the newest n steps, in all their fields."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from shmreplay import errors, limits, tree
from shmreplay._native import WriterCore, logger
from shmreplay.binding_support import as_array, table_not_found
from shmreplay.pattern_plan import StepWriter, check_places, relabelled
from shmreplay.reverb_types import TableInfo
from shmreplay.spec import TensorSpec, dtype_name, shape_matches, shape_text

__all__ = ["Writer"]

_FLUSH_BEFORE_GONE_MS = 5000
_UNBOUNDED = 1_000_000  # what Reverb makes of max_in_flight_items=None


class Writer:
    """Appends steps and creates items of the newest ones. Make one with `Client.writer`.

    An item is in its table as soon as the rate limiter lets it in, and not only once a chunk is
    full: `chunk_length` and `delta_encoded` are accepted and change nothing.
    """

    def __init__(
        self,
        make_writer: Callable[[int], StepWriter],
        server_info: Callable[[], Mapping[str, TableInfo]],
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ) -> None:
        """See `Client.writer`.

        Args:
            make_writer: Gives a new writer of trajectories that does not look at signatures, from
                how many steps to keep.
            server_info: Says what the server's tables look like.
            max_sequence_length: See `Client.writer`, as the rest.
            delta_encoded: Accepted.
            chunk_length: Accepted.
            max_in_flight_items: Items that may wait for the rate limiter.
        """
        length = limits.checked_int("max_sequence_length", max_sequence_length)
        if length < 1:
            raise errors.InvalidArgumentError(
                f"max_sequence_length ({length}) must be a positive integer. Give the steps that "
                "the longest item has."
            )
        if chunk_length is None:
            chunk_length = min(10, length)
        chunk = limits.checked_int("chunk_length", chunk_length)
        if not 1 <= chunk <= length:
            raise errors.InvalidArgumentError(
                f"chunk_length ({chunk}) must be a positive integer le to max_sequence_length "
                f"({length}). Leave it out for a good one."
            )
        if max_in_flight_items is None:
            max_in_flight_items = _UNBOUNDED
        in_flight = limits.checked_int("max_in_flight_items", max_in_flight_items)
        if in_flight < 1:
            raise errors.InvalidArgumentError(
                f"max_in_flight_items ({in_flight}) must be a positive integer. Use None for no "
                "bound."
            )
        self._settings = {
            "chunk_length": chunk,
            "max_timesteps": length,
            "delta_encoded": bool(delta_encoded),
            "max_in_flight_items": in_flight,
        }
        self._max_length = length
        self._max_in_flight = in_flight
        # At once: the writer may outlive its client.
        self._signatures = {name: info.signature for name, info in server_info().items()}
        self._structure: Any = None  # of the newest step
        self._specs: list[TensorSpec] = []
        self._paths: list[tree.Path] = []
        self._steps = 0  # within reach
        self._closed = False
        self._writer = make_writer(length)

    # ------------------------------------------------------------ steps

    def append(self, data: Any) -> None:
        """Appends one step.

        Args:
            data: Nested structure of arrays and scalars, of the same number of leaves in each step.

        Raises:
            SignatureError: The number of leaves, or a leaf's dtype or shape, is not that of the
                steps before. Nothing is changed.
            ArgumentTypeError: A leaf is None, or of a type that cannot be stored.
            WriterClosedError: The writer is closed.
        """
        self._check_open("Append")
        flat = self._checked_step(data)
        if not self._specs:
            flat = [(path, self._wide_enough(path, leaf)) for path, leaf in flat]
        try:
            self._writer.append({i: leaf for i, (_, leaf) in enumerate(flat)})
        except errors.ReverbError as error:
            raise relabelled(error, flat) from None
        self._structure = tree.map_structure(lambda _: None, data)
        if not self._specs:
            self._paths = [path for path, _ in flat]
            arrays = [as_array(leaf, path) for path, leaf in flat]
            self._specs = [TensorSpec(a.shape, a.dtype) for a in arrays]
        self._steps = min(self._steps + 1, self._max_length)

    def _checked_step(self, data: Any) -> list[tuple[tree.Path, Any]]:
        flat = tree.flatten_with_path(data)
        for path, leaf in flat:
            if leaf is None:
                raise errors.ArgumentTypeError(
                    f"data at {path!r} is None; expected an array. Use a TrajectoryWriter for "
                    "steps that lack columns."
                )
        if not flat:
            raise errors.SignatureError(
                f"data has no leaves: {data!r}; expected at least one array. Give a column."
            )
        if self._specs and len(flat) != len(self._specs):
            raise errors.SignatureError(
                "Number of tensors per timestep was inconsistent. Previously it was "
                f"{len(self._specs)}, but is now {len(flat)}."
            )
        if self._specs:
            check_places([path for path, _ in flat], self._paths)
        return flat

    def _wide_enough(self, path: tree.Path, leaf: Any) -> Any:
        """A leaf of the first step; text as wide as the tables' signatures say."""
        array = as_array(leaf, path)
        if array.dtype.kind not in "SU" or not isinstance(self._writer, WriterCore):
            return leaf
        return array.astype(self._writer.text_dtype(path, array.dtype))

    def append_sequence(self, sequence: Any) -> None:
        """Appends as many steps as the leading axis of every leaf has rows.

        Args:
            sequence: Nested structure of arrays [T, ...]. With T = 0 nothing happens.

        Raises:
            InvalidArgumentError: There are no leaves, a leaf is a scalar, or leading axes differ.
            SignatureError, ArgumentTypeError, WriterClosedError: As `append`.
        """
        self._check_open("Append")
        flat = tree.flatten_with_path(sequence)
        if not flat:
            raise errors.InvalidArgumentError(
                f"AppendSequence called with empty data. Got {sequence!r}; expected at least one "
                "array. Give a column."
            )
        arrays = [as_array(leaf, path, limits.MAX_DIMS + 1) for path, leaf in flat]
        for i, array in enumerate(arrays):
            if array.ndim == 0:
                raise errors.InvalidArgumentError(
                    f"AppendSequence called with scalar tensor at index {i}. Got a scalar; "
                    "expected a leading axis of steps. Use append for one step."
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise errors.InvalidArgumentError(
                f"AppendSequence called with tensors of non equal batch dimension: {lengths}. "
                "Expected one length. Give each column a row for every step; all must be equally "
                "many."
            )
        for row in range(lengths[0]):
            try:
                self.append(tree.unflatten_as(sequence, [array[row] for array in arrays]))
            except errors.ReverbError as error:
                error.add_note(f"{row} of {lengths[0]} steps were appended")
                raise

    # ------------------------------------------------------------ items

    def create_item(
        self, table: str, num_timesteps: int, priority: float, timeout: float | None = None
    ) -> None:
        """Creates an item of the newest steps.

        Waits where `max_in_flight_items` items wait for the rate limiter already.

        Args:
            table: Name of the table.
            num_timesteps: How many steps.
            priority: Its priority.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            DeadlineExceededError: The time is over; nothing was changed.
            InvalidArgumentError: num_timesteps is not positive, or more than there are.
            TableNotFoundError, SignatureError, PriorityError, ArgumentTypeError: Nothing was
                changed.
            WriterClosedError: The writer is closed.
        """
        self._check_open("CreateItem")
        count = limits.checked_int("num_timesteps", num_timesteps)
        if count < 1:
            raise errors.InvalidArgumentError(
                f"num_timesteps ({count}) must be a positive integer. Give the steps of the item."
            )
        if count > self._steps:
            raise errors.InvalidArgumentError(
                "Argument `num_timesteps` is larger than number of buffered timesteps: got "
                f"{count}, there are {self._steps} (max_sequence_length is {self._max_length}). "
                "Give fewer, or make the writer with a longer max_sequence_length."
            )
        self._check_signature(table, count)
        history = self._writer.history
        columns = [history[i][-count:] for i in range(len(self._specs))]
        seconds = limits.checked_timeout(timeout)
        began = time.monotonic()
        if self._max_in_flight < _UNBOUNDED:
            self._flush(self._max_in_flight - 1, seconds)
        left = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        trajectory = tree.unflatten_as(self._structure, columns)
        self._writer.create_item(table, priority, trajectory, left)

    def _check_signature(self, table: str, count: int) -> None:
        """A table's signature may be that of one step, or of the whole item."""
        if not isinstance(table, str) or table not in self._signatures:
            raise table_not_found(table, self._signatures, for_item=True)
        signature = self._signatures[table]
        if signature is None:
            return
        wanted = tree.flatten(signature)
        whole = [TensorSpec((count, *s.shape), s.dtype) for s in self._specs]
        if _fits(wanted, self._specs) or _fits(wanted, whole):
            return
        raise errors.SignatureError(
            f"Unable to CreateItem in table {table!r} because Append was called with a tensor "
            "signature inconsistent with the table signature. (Flattened) table signature: "
            f"{_described(wanted)}, data signature: {_described(self._specs)}. The table may have "
            "the signature of a step, or that of an item with its time dimension."
        )

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all items are in their tables.

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            DeadlineExceededError: The time is over; the items stay in line.
            WriterClosedError: The writer is closed.
        """
        self._check_open("Flush")
        self._flush(0, timeout)

    def _flush(self, n: int, timeout: float | None) -> None:
        seconds = limits.checked_timeout(timeout)
        # To the writer below, 0 means for ever.
        self._writer.flush(n, None if seconds is None else max(seconds * 1000, 1e-3))

    # ------------------------------------------------------------ end

    def close(self, retry_on_unavailable: bool = True, timeout: float | None = None) -> None:
        """Waits until all items are in their tables, and closes the writer.

        Args:
            retry_on_unavailable: With False, items that cannot be inserted since the server is gone
                are dropped, with a line in the log.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            InvalidArgumentError: It is closed already.
            DeadlineExceededError: The time is over. The items stay in line, and the writer open.
            ServerClosedError: The server is gone, and so are items. The writer is closed.
        """
        if self._closed:
            raise errors.InvalidArgumentError("close() has already been called on Writer.")
        seconds = limits.checked_timeout(timeout)
        self._closed = True
        try:
            self._flush(0, seconds)
        except errors.DeadlineExceededError:
            self._closed = False
            raise
        except errors.ServerClosedError as error:
            if retry_on_unavailable:
                raise
            logger.warning("a writer is closed before all its items got in: %s", error)
        finally:
            if self._closed:
                self._writer.close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise errors.WriterClosedError(
                f"Calling method {method} after Close has been called; expected an open writer; "
                "make a new writer"
            )

    def __enter__(self) -> Writer:
        """Returns the writer.

        Raises:
            InvalidArgumentError: It is closed.
        """
        if self._closed:
            raise errors.InvalidArgumentError("Cannot reuse already closed Writer")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flushes and closes, also where an exception is on its way."""
        if not self._closed:
            self.close()

    def __del__(self) -> None:
        """Says that it was not closed, and gives items that wait some seconds to get in."""
        if getattr(self, "_closed", True) or sys.is_finalizing() or not hasattr(self, "_writer"):
            return
        logger.warning("Writer-object deleted without calling .close explicitly.")
        self._closed = True
        try:
            self._writer.flush(0, _FLUSH_BEFORE_GONE_MS)
        except errors.ReverbError as error:
            logger.warning("a writer is gone before all its items got in: %s", error)

    def __repr__(self) -> str:
        """Names the settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self._settings.items())
        return f"Writer({settings}), closed: {self._closed}"


def _fits(wanted: list[Any], given: list[TensorSpec]) -> bool:
    return len(wanted) == len(given) and all(
        w.dtype == g.dtype and shape_matches(w.shape, g.shape)
        for w, g in zip(wanted, given, strict=True)
    )


def _described(specs: list[Any]) -> str:
    return ", ".join(
        f"{i}: Tensor<dtype: {dtype_name(np.dtype(s.dtype))}, shape: {shape_text(s.shape)}>"
        for i, s in enumerate(specs)
    )
