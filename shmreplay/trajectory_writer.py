"""Writing steps and making items of references to them.

The hot path (append, history, create_item) is in the native `WriterCore`. Here is what waits: the
window of items that the rate limiter holds back, flush and end_episode.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from shmreplay import _native, errors, item_schema, limits, tree
from shmreplay._native import TrajectoryColumn, WriterCore
from shmreplay.binding_support import check_new_structure
from shmreplay.connection import Connection, WaitLog, stopped
from shmreplay.history_structure import merged, paths_of
from shmreplay.item_schema import Leaf
from shmreplay.spec import as_spec, dtype_code
from shmreplay.step_in_place import StepInPlace, StepLayout, check_declared

__all__ = ["StepInPlace", "TrajectoryColumn", "TrajectoryWriter"]


class TrajectoryWriter(WriterCore):
    """Appends steps and creates items that refer to them.

    Each step is written once into shared memory, however many items of however many tables refer
    to it. Make one with `Client.trajectory_writer`. Thread-safe; not usable after a fork.
    """

    def __init__(
        self,
        connection: Connection,
        num_keep_alive_refs: int,
        *,
        validate_items: bool = True,
        confirm: bool = True,
        compress: str | None = None,
    ) -> None:
        """See `Client.trajectory_writer`."""
        compresses = connection.compresses(compress)
        session = connection.new_session(_native.SESSION_WRITER)
        super().__init__(
            session,
            connection.tables,
            num_keep_alive_refs,
            connection.next_episode(),
            compresses,
        )
        self._connection = connection
        self._validate = validate_items
        self._structure: Any = None
        self._layout: StepLayout | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __new__(
        cls,
        connection: Connection,
        num_keep_alive_refs: int,
        *,
        validate_items: bool = True,
        confirm: bool = True,
        compress: str | None = None,
    ) -> TrajectoryWriter:
        """Opens the writer's place in the store."""
        connection.check_open()
        return super().__new__(cls)

    # ------------------------------------------------------------------ what the native part asks

    def schema_for(self, trajectory: Any, leaves: Sequence[Leaf]) -> int:
        """Number of an item structure in the store.

        Args:
            trajectory: Structure of the item.
            leaves: Its columns.
        """
        return self._connection.intern(trajectory, leaves)

    def find_schema(self, trajectory: Any, leaves: Sequence[Leaf]) -> int | None:
        """Number of an item structure in the store, None where no item has had it.

        Args:
            trajectory: Structure of the item.
            leaves: Its columns.
        """
        return self._connection.native.schema_find(item_schema.encode(trajectory, leaves))

    def check_signature(
        self, table_number: int, table: str, trajectory: Any, leaves: Sequence[Leaf]
    ) -> list[int | None] | None:
        """Checks an item's columns against the table's signature.

        Args:
            table_number: Of the table.
            table: Its name.
            trajectory: Structure of the item.
            leaves: Its columns.
        """
        if not self._validate:
            return None
        return self._connection.check_signature(table_number, leaves)

    def check_structure(self, data: Any) -> None:
        """Refuses data whose structure does not go together with that of the history.

        Args:
            data: Of a step.
        """
        check_new_structure(data, self.columns)
        merged(self._structure, paths_of(data), ())

    def structure_grew(self, data: Any) -> None:
        """Takes new columns into the structure of the history.

        Args:
            data: Of a step.
        """
        self._structure = merged(self._structure, paths_of(data), ())
        self.history_cache = None
        self._layout = None

    def text_dtype(self, path: tree.Path, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of a new column of text: see `Connection.text_dtype`.

        Args:
            path: Of the column.
            dtype: Of its first step.
        """
        return self._connection.text_dtype(path, dtype)

    # ------------------------------------------------------------------ history

    def make_history(self) -> Any:
        """The structure of column histories; `history` keeps it until new columns are seen.

        Raises:
            WriterStateError: Nothing was appended yet.
        """
        if self._structure is None:
            raise errors.WriterStateError(
                "history cannot be accessed before `append` is called at least once: got 0 steps. "
                "Call append first."
            )
        numbers = {column.path: column.number for column in self.columns}
        return tree.map_structure(
            lambda leaf: self.column_history(numbers[leaf.path]) if leaf.path in numbers else None,
            self._structure,
        )

    # ------------------------------------------------------------------ items that are held back

    def window_grew(self) -> None:
        """Starts the thread that inserts held-back items, unless it runs."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_insert_held_back,
                    args=(weakref.ref(self),),
                    name="shmreplay-writer",
                    daemon=True,
                )
                self._thread.start()

    def make_room(self, what: str, timeout: float | None) -> None:
        """Waits while the window of held-back items is full.

        Args:
            what: What waits, for the error.
            timeout: Seconds to wait at most; None: for ever.
        """
        if len(self.pending) >= limits.WRITER_WINDOW_ITEMS:
            self._wait_for(limits.WRITER_WINDOW_ITEMS - 1, timeout, what)
        elif self._error is not None:
            self._raise_error()

    def _insert_some(self) -> tuple[int, int] | None:
        """One round of the thread. None when it has nothing more to do."""
        while True:
            try:
                wait = self.insert_pending()
            except BaseException as e:  # handed to the next call of the writer
                with self._changed:
                    self._error = e
                    self._thread = None
                    self._changed.notify_all()
                return None
            with self._changed:
                self._changed.notify_all()
                if wait is not None:
                    return wait
                if not self.pending:
                    self._thread = None
                    return None

    def _raise_error(self) -> None:
        """Raises, once, what ended the thread. The items stay in line: who waits tries again."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_for(self, n: int, timeout_s: float | None, what: str) -> None:
        """Waits until at most n items are held back."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        log = WaitLog(lambda: f"{what}: {self._describe_wait()}")
        if self.pending and self._error is None:
            self.window_grew()
        while True:
            with self._changed:
                self._raise_error()
                if len(self.pending) <= n:
                    return
                if self._thread is None:  # it told another of those who wait what ended it
                    self.window_grew()
                now = time.monotonic()
                if end is not None and now >= end:
                    raise errors.DeadlineExceededError(
                        f"{what} did not complete within the provided timeout of {timeout_s} s: "
                        f"{self._describe_wait()}. The items stay in line. Give a longer timeout, "
                        "or sample to make room."
                    )
                table = self.pending_table()
                if table is not None:
                    self._connection.native.check_extension_thread(table)
                # Python checks for signals between the slices.
                left = limits.WAIT_SLICE_MS / 1000
                self._changed.wait(left if end is None else min(left, end - now))
            log.tick()

    def _describe_wait(self) -> str:
        table = self.pending_table()
        if table is None:
            return "0 items held back"
        describe = self._connection.describe_wait(table, "an insert")
        return f"{len(self.pending)} items held back; {describe()}"

    # ------------------------------------------------------------------ other data for an item

    def replace_item(
        self, table: str, key: int, trajectory: Any, timeout: float | None = None
    ) -> bool:
        """Gives an item that is in its table other data, at once: no sample sees a part of each.

        The item keeps key, priority, times sampled and its place in every order. What was sampled
        before stays as it was.

        Args:
            table: Name of the table.
            key: Of the item, as `create_item` returned it or as in `info.key`.
            trajectory: As for `create_item`: of the structure, dtypes and shapes that the item was
                created with. Lengths may differ, where the table's signature lets them.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Returns:
            False where the item is not there any more.

        Raises:
            SignatureError: The item was created with another structure, dtype or shape.
            TableNotFoundError, InvalidArgumentError, ArgumentTypeError: As `create_item`.
            ArenaFullError: No memory.
            DeadlineExceededError: The extensions are behind still. Nothing is changed, whatever is
                raised.
        """
        seconds = limits.checked_timeout(timeout)
        number = self._connection.number(table)
        checked = limits.checked_key(key)
        done = self.replace_data(number, table, checked, trajectory, seconds)
        if isinstance(done, bool):
            return done
        have = self._connection.native.schema_text(done).decode()
        raise errors.SignatureError(
            f"Unable to replace the data of item {key} of table {table!r}: it was created with "
            "another structure, dtype or shape, or with a time dimension where the new data have "
            "none or the other way round. Its structure, with [code, shape, squeezed] for each "
            f"column: {have:.500}. An int index into the history gives a squeezed column, a slice "
            "one with a time dimension."
        )

    # ------------------------------------------------------------------ public calls that wait

    def flush(self, block_until_num_items: int = 0, timeout_ms: float | None = None) -> None:
        """Waits until at most so many created items are not in their table yet.

        Args:
            block_until_num_items: How many may remain.
            timeout_ms: Milliseconds to wait at most; None, 0 or negative: for ever.

        Raises:
            DeadlineExceededError: The time is over; the items stay in line.
            InvalidArgumentError: block_until_num_items is negative.
            ServerClosedError: The server was stopped.
        """
        n = limits.checked_int("block_until_num_items", block_until_num_items)
        if n < 0:
            raise errors.InvalidArgumentError(
                f"block_until_num_items must be >= 0, got {block_until_num_items}. Use 0 to wait "
                "for all items."
            )
        seconds = limits.checked_timeout_ms(timeout_ms)
        self._check_usable()
        forever = seconds is None or seconds <= 0
        self._wait_for(n, None if forever else seconds, "flush")

    def end_episode(self, clear_buffers: bool = True, timeout_ms: int | None = None) -> None:
        """Waits for all created items, then starts a new episode at step 0.

        Args:
            clear_buffers: Let all references into the history expire. With False, items may
                reach back over the end of the episode.
            timeout_ms: Milliseconds to wait at most; None: for ever; 0: do not wait.

        Raises:
            DeadlineExceededError: The time is over; nothing was changed.
            ServerClosedError: The server was stopped.
        """
        seconds = limits.checked_timeout_ms(timeout_ms)
        self._check_usable()
        self._wait_for(0, None if seconds is None else max(seconds, 0.0), "end_episode")
        self.finish_episode(clear_buffers)

    def configure(
        self,
        path: Sequence[Any],
        *,
        num_keep_alive_refs: int,
        max_chunk_length: int | None,
    ) -> None:
        """Sets one column's window and the longest run of its steps in one block.

        Args:
            path: Where the column stands in the data, for example `('obs', 'camera')`.
            num_keep_alive_refs: Values of the column that stay reachable.
            max_chunk_length: Steps in a block at most; None: chosen by size.

        Raises:
            InvalidArgumentError: A number is out of range.
            WriterStateError: The column's step is open.
        """
        if isinstance(path, str) or not isinstance(path, Sequence):
            raise errors.ArgumentTypeError(
                f"path must be a tuple like ('obs', 'camera'), got {path!r}. Use (name,) for a "
                "column of a flat dict."
            )
        keep = checked_keep_alive(num_keep_alive_refs)
        if max_chunk_length is not None:
            rows = limits.checked_int("max_chunk_length", max_chunk_length)
            if not 1 <= rows <= keep:
                raise errors.InvalidArgumentError(
                    f"max_chunk_length must be in [1, num_keep_alive_refs={keep}], got {rows}. "
                    "Give a smaller one, or keep more steps within reach."
                )
        self.configure_column(tuple(path), keep, max_chunk_length)

    def next_step(self, spec: Any = None) -> StepInPlace:
        """A step to write in place: no copy is made.

        Use it as `with writer.next_step() as step: step['obs'][...] = ...`. Inside, `step` is the
        data's structure of writable arrays (zeros to begin with) that lie in shared memory; at
        the end of the block the step is appended, or dropped if the block raised. Keep neither the
        arrays nor views of them for later: the memory then belongs to the step, and in the end to
        others.

        Args:
            spec: Structure of specs (anything with shape and dtype). Default: the columns of the
                history.

        Raises:
            WriterStateError: Nothing is known of the columns yet: pass spec.
        """
        return StepInPlace(self, spec)

    def layout_of_history(self) -> StepLayout:
        """The columns of the history, for a step in place.

        Raises:
            WriterStateError: Nothing was appended yet, or a column had no value yet.
        """
        if self._layout is None:
            if self._structure is None:
                raise errors.WriterStateError(
                    "next_step() does not know the columns after 0 appends; expected dtypes and "
                    "shapes: pass spec="
                )
            by_path = {c.path: c.number for c in self.columns}
            leaves = tree.flatten(self._structure)
            unknown = [leaf.path for leaf in leaves if leaf.path not in by_path]
            if unknown:
                raise errors.WriterStateError(
                    f"next_step() must know dtype and shape of {unknown}, which had no value "
                    "yet; pass spec="
                )
            self._layout = StepLayout([by_path[leaf.path] for leaf in leaves], self._structure)
        return self._layout

    def layout_of_spec(self, spec: Any) -> StepLayout:
        """The columns of a structure of specs, made known if they are new.

        Args:
            spec: Structure of `TensorSpec`.
        """
        self._check_usable()
        specs = tree.map_structure_with_path(lambda path, leaf: as_spec(leaf, path), spec)
        flat = tree.flatten_with_path(specs)
        self.check_structure(specs)
        for path, leaf in flat:
            check_declared(path, leaf)
        numbers = [self.declare_column(p, dtype_code(s.dtype, p), tuple(s.shape)) for p, s in flat]
        self.structure_grew(specs)
        return StepLayout(numbers, spec)

    def close(self) -> None:
        """Closes the writer. Items that are still held back are dropped. Idempotent."""
        lost = self.shut()
        if lost:
            _native.logger.warning(
                "a writer was closed with %d items that the rate limiter held back: they are "
                "dropped. Call flush() first to keep them.",
                lost,
            )

    def _check_usable(self) -> None:
        if self.closed:
            raise errors.WriterClosedError(
                "Got a call on a closed writer: Close has been called on this writer; expected an "
                "open one; make a new one to go on writing"
            )
        self._connection.store.check_fork()
        # The writer may outlive its client, but not its server.
        if self._connection.native.closed:
            raise stopped(self._connection.store.address)

    def __enter__(self) -> TrajectoryWriter:
        """Returns the writer."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flushes, unless an error of this package is on its way. The writer stays usable."""
        if exc_type is None or not issubclass(exc_type, errors.ReverbError):
            self.flush()


def checked_keep_alive(value: Any) -> int:
    """A number of steps to keep within reach.

    Raises:
        InvalidArgumentError: It is out of range.
        ArgumentTypeError: It is not an integer.
    """
    keep = limits.checked_int("num_keep_alive_refs", value)
    if not 1 <= keep <= limits.MAX_KEEP_ALIVE_REFS:
        raise errors.InvalidArgumentError(
            f"num_keep_alive_refs must be in [1, {limits.MAX_KEEP_ALIVE_REFS}], got {keep}. Give "
            "the number of steps that items reach back."
        )
    return keep


def _insert_held_back(ref: weakref.ref[TrajectoryWriter]) -> None:
    """Body of the thread that exists while a writer has items that the limiter holds back."""
    while True:
        writer = ref()
        if writer is None or writer.closed:
            return
        wait = writer._insert_some()
        if wait is None:
            return
        native = writer._connection.native
        del writer  # a writer that nobody else refers to may go
        native.wait_insert(*wait, limits.WAIT_SLICE_MS)
