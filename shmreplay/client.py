"""The client: everything that a process does with a store, by table name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, limits
from shmreplay.batches import SampleOutput, item_arrays
from shmreplay.client_tables import ClientTables
from shmreplay.compat import ignored_argument
from shmreplay.drawing import Borrowed
from shmreplay.inserting import batch_columns, priorities_of_batch
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.sampler import Sampler
from shmreplay.spec import dtype_code
from shmreplay.structured_writer import Config, StructuredWriter
from shmreplay.trajectory_writer import TrajectoryWriter, checked_keep_alive
from shmreplay.writer import Writer

__all__ = ["Client", "checked_batch_size", "checked_num_samples"]


class Client(ClientTables):
    """A process's way to the tables of a server, on this machine or another.

    Here are inserting and sampling; `ClientTables` has what is done to tables beside that, and
    `ClientLink` how the server is reached.

    Cheap to make, safe to share between threads, picklable by address. After a fork it attaches
    anew by itself in the child.
    """

    # ------------------------------------------------------------------ inserting

    def insert(
        self, data: Any, priorities: Mapping[str, float | None], timeout: float | None = None
    ) -> None:
        """Inserts one step as an item into each of some tables. The step is stored once.

        Args:
            data: Nested structure of arrays and scalars. The item's columns get a leading time
                dimension of 1.
            priorities: Table name -> priority; None: the largest that the table has seen.
            timeout: Seconds to wait for the rate limiters; None: for ever.

        Raises:
            InvalidArgumentError: priorities or data are empty.
            TableNotFoundError, PriorityError, SignatureError: Nothing was inserted.
            DeadlineExceededError: A limiter did not let the item in; names the tables that have it.
            ArenaFullError: No memory.
        """
        connection, seconds = self._reach(timeout)
        inserter = self._inserter
        if inserter is None or inserter.connection is not connection:
            inserter = self._new_inserter(connection)
        inserter.insert(data, priorities, seconds)

    def insert_batch(
        self,
        table: str,
        data: Any,
        priorities: float | npt.ArrayLike | None = 1.0,
        timeout: float | None = None,
    ) -> npt.NDArray[np.uint64]:
        """Inserts N items at once: row i of every array is item i, without a time dimension.

        The same as N single inserts in order, and many times faster. The whole batch counts as
        one episode.

        Args:
            table: Name of the table.
            data: Nested structure of arrays [N, ...].
            priorities: One for all, or [N]; None: the largest that the table has seen.
            timeout: Seconds to wait for the rate limiter; None: for ever.

        Returns:
            Keys, uint64[N]. All items are in the table. Over a bridge whose server died meanwhile
            and was recovered, those that the dead one had inserted, but for the last of them, have
            the key 0, which is no item's: calls that take keys pass over it.

        Raises:
            SignatureError: Leading axes differ, or data does not fit the table's signature.
            PriorityError, TableNotFoundError: Nothing was inserted.
            DeadlineExceededError: Says how many of the first items are in.
            ArenaFullError: No memory; says how many of the first items are in.

        The arrays are the caller's again when the call is over, however it ended. Over a bridge,
        items of a call that was interrupted may still come into the table after it, with the data
        as they were when it was called; where the server takes nothing, such a call takes some
        seconds to end (a second Ctrl-C ends it at once: the arrays must then not be changed).
        """
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        columns, n = batch_columns(data)
        prio = priorities_of_batch(connection, table, number, priorities, n)
        columns = connection.fit_texts(number, columns)
        leaves = [(dtype_code(c.dtype), c.shape[1:], True) for c in columns]
        connection.check_signature(number, leaves)
        schema = connection.intern(data, leaves)
        keys = np.zeros(n, np.uint64)
        if n == 0:
            return keys
        session = connection.take_session()
        try:
            session.insert_batch(
                number,
                columns,
                n,
                prio,
                schema,
                seconds,
                connection.describe_wait(number, "insert_batch"),
                connection.next_episode(),
                keys,
                compress=connection.configs[number].compress == "lz4",
            )
        finally:
            connection.give_session(session)
        return keys

    def trajectory_writer(
        self,
        num_keep_alive_refs: int,
        *,
        validate_items: bool = True,
        get_signature_timeout_ms: int | None = None,
        confirm: bool = True,
        compress: str | None = None,
    ) -> TrajectoryWriter:
        """A writer of steps, and of items that refer to them.

        Args:
            num_keep_alive_refs: Steps that stay within reach of `history`.
            validate_items: Check items against the table's signature in `create_item`.
            get_signature_timeout_ms: Has no effect: signatures lie in shared memory and are not
                waited for. Earlier releases of Reverb had it.
            confirm: Over a bridge, wait in `create_item` until the server has the item. False:
                items go out together, many times faster; `create_item` returns None, and `flush`
                and `end_episode` wait for them and raise what went wrong. Of no meaning on the
                server's machine.
            compress: `'lz4'`: the writer's blocks are compressed when they are full or it is
                closed; `'none'`: they are not. Default: if one of the server's tables wants it.
                Nobody who reads notices, but that it takes longer.

        Raises:
            InvalidArgumentError: num_keep_alive_refs < 1, or compress is something else.
        """
        if get_signature_timeout_ms is not None:
            ignored_argument("Client.trajectory_writer", "get_signature_timeout_ms")
        keep = checked_keep_alive(num_keep_alive_refs)
        return self._open_writer(self._connected(), keep, validate_items, confirm, compress)

    def structured_writer(
        self, configs: Sequence[Config], *, compress: str | None = None
    ) -> StructuredWriter:
        """A writer that makes an item wherever a pattern applies; see `structured_writer`.

        Args:
            configs: From `structured_writer.create_config`.
            compress: As for `trajectory_writer`.

        Raises:
            InvalidArgumentError: There are no configs, or one cannot be applied.
            TableNotFoundError, PriorityError: A config's table is not there, or does not take its
                priority.
        """
        make_writer = functools.partial(self.trajectory_writer, compress=compress)
        return StructuredWriter(make_writer, configs)

    def writer(
        self,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
        *,
        compress: str | None = None,
    ) -> Writer:
        """A writer whose items are the newest n steps, in all their fields.

        Args:
            max_sequence_length: Steps of an item at most.
            delta_encoded: Accepted for Reverb's sake, as is chunk_length: steps lie in memory as
                they are.
            chunk_length: In [1, max_sequence_length].
            max_in_flight_items: Items that may wait for the rate limiter; None: a million.
            compress: As for `trajectory_writer`.

        Raises:
            InvalidArgumentError: A number is out of range.
        """
        return Writer(
            functools.partial(self.trajectory_writer, validate_items=False, compress=compress),
            self.server_info,
            max_sequence_length,
            delta_encoded,
            chunk_length,
            max_in_flight_items,
        )

    # ------------------------------------------------------------------ sampling

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        unpack_as_table_signature: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """Samples items one by one. Nothing is drawn before the consumer asks for it.

        Args:
            table: Name of the table.
            num_samples: How many; -1 yields nothing.
            emit_timesteps: Yield each item as a list of one `ReplaySample` a step, else as one
                `ReplaySample` with whole columns.
            unpack_as_table_signature: Give data in the structure of the table's signature, else as
                a flat list.
            timeout: Seconds to wait for each item; None: for ever.

        Yields:
            Lists of ReplaySample, or ReplaySample. Arrays are copies, the caller's own.

        Raises:
            TableNotFoundError: At the call.
            InvalidArgumentError: num_samples is 0 or below -1; the columns of an item differ in
                length and emit_timesteps is on.
            DeadlineExceededError: No item within the timeout.
        """
        n = checked_num_samples(num_samples)
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        output = SampleOutput(
            connection.configs[number].signature() if unpack_as_table_signature else None,
            emit_timesteps,
        )
        return self._samples(table, n, output, seconds)

    def _samples(
        self, table: str, n: int, output: SampleOutput, timeout: float | None
    ) -> Iterator[Any]:
        for _ in range(n):
            connection = self._connected()
            number = connection.number(table)
            drawing = self._drawing_over(connection)
            batch = drawing.draw(number, 1, timeout)
            try:
                info = SampleInfo(*batch.info_of(0))
                result = output.make(info, item_arrays(connection, batch, 0))
            except BaseException:
                drawing.keep(number, batch)
                raise
            drawing.finish(batch)
            yield result

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: Any = None,
    ) -> ReplaySample:
        """Samples a batch as stacked arrays.

        Args:
            table: Name of the table.
            batch_size: Items, B.
            timeout: Seconds to wait; None: for ever; 0: do not wait. If some items but not all
                were drawn when the time is over, the batch is short.
            out: Structure of arrays [B, ...] to fill instead of new ones.

        Returns:
            ReplaySample of `info` with arrays (key uint64[B], probability float64[B], table_size
            int64[B], priority float64[B], times_sampled int32[B]) and `data` with arrays [B, ...]
            (squeezed columns) or [B, T, ...] in the structure that the items were created with.

        Raises:
            InvalidArgumentError: batch_size is out of range; items differ in structure or length
                (sample those with `sample` or `borrow`); out does not fit.
            TableNotFoundError: There is no such table.
            DeadlineExceededError: Nothing was drawn within the timeout.
        """
        n = checked_batch_size(batch_size)
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        drawing = self._drawing_over(connection)
        return drawing.delivered(number, drawing.draw(number, n, seconds), out)

    def borrow(self, table: str, n: int = 1, timeout: float | None = None) -> Borrowed:
        """Samples n items without copying: a context manager that gives read-only views.

        The items stay pinned until the block ends and the last view of them is gone, so a view
        that outlives the block stays valid, and delays the reuse of its memory.

        Args:
            table: Name of the table.
            n: Items.
            timeout: Seconds to wait; None: for ever.

        Returns:
            Context manager whose value is a list of n `ReplaySample`, info of scalars, data in the
            structure that the item was created with. A column whose steps do not lie together
            (strided, or over several blocks) is a read-only copy.

        Raises:
            InvalidArgumentError: n is out of range.
            TableNotFoundError: There is no such table.
        """
        count = checked_batch_size(n)
        connection, seconds = self._reach(timeout)
        number = connection.number(table)

        def draw() -> _native.Batch:
            return self._drawing_over(connection).draw(number, count, seconds)

        return Borrowed(connection, draw)

    def sampler(
        self, table: str, batch_size: int, prefetch: int = 2, timeout: float | None = None
    ) -> Sampler:
        """An iterator of batches, gathered ahead by a thread.

        Args:
            table: Name of the table.
            batch_size: Items in a batch.
            prefetch: Batches gathered ahead, exactly; 0: none, each is drawn when asked for.
            timeout: Seconds to wait for a batch; on expiry the iterator raises.

        Raises:
            InvalidArgumentError: A number is out of range.
            TableNotFoundError: There is no such table.
        """
        n = checked_batch_size(batch_size)
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        if connection.make_sampler is not None:
            sampler: Sampler = connection.make_sampler(self, table, n, prefetch, seconds)
            return sampler
        drawing = self._drawing_over(connection)
        return Sampler(lambda ended: drawing.draw_ahead(number, n, seconds, ended), prefetch)


def checked_batch_size(value: Any) -> int:
    """A number of items to sample.

    Raises:
        InvalidArgumentError: It is out of range.
        ArgumentTypeError: It is not an integer.
    """
    n = limits.checked_int("batch_size", value)
    if not 1 <= n <= limits.MAX_BATCH:
        raise errors.InvalidArgumentError(
            f"batch_size must be in [1, {limits.MAX_BATCH}], got {n}. Take more in several batches."
        )
    return n


def checked_num_samples(value: Any) -> int:
    """A number of items to draw one by one; -1, which yields nothing, becomes 0.

    Raises:
        InvalidArgumentError: It is out of range.
        ArgumentTypeError: It is not an integer.
    """
    n = limits.checked_int("num_samples", value)
    if n == 0 or n < -1:
        raise errors.InvalidArgumentError(
            f"num_samples must be at least 1 (or -1, which yields nothing), got {n}. Give the "
            "number of items to draw."
        )
    return max(n, 0)
