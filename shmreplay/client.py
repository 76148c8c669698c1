"""The client: everything that a process does with a store, by table name."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, address, errors, limits, live_table
from shmreplay.batches import SampleOutput, item_arrays
from shmreplay.compat import ignored_argument
from shmreplay.connection import Connection, stopped
from shmreplay.drawing import Borrowed, Drawing
from shmreplay.inserting import Inserter, batch_columns, check_priorities, checked_priorities
from shmreplay.rate_limiters import RateLimiter
from shmreplay.replay_sample import ItemInfo, ReplaySample, SampleInfo
from shmreplay.reverb_types import TableInfo
from shmreplay.sampler import Sampler
from shmreplay.spec import DTYPE_CODES
from shmreplay.store import Store
from shmreplay.structured_writer import Config, StructuredWriter
from shmreplay.trajectory_writer import TrajectoryWriter, checked_keep_alive
from shmreplay.writer import Writer

__all__ = ["Client"]

# Seconds that attaching to a store takes at most where its server is up.
_ATTACH_S = 0.05


class Client:
    """A process's way to the tables of a server, on this machine or another.

    Cheap to make, safe to share between threads, picklable by address. After a fork it attaches
    anew by itself in the child.
    """

    def __init__(self, server_address: str, remote: address.RemoteOptions | None = None) -> None:
        """Does not connect: the first call does, and waits for a server that is not up yet.

        Args:
            server_address: `'HOST:PORT'` as from `Server.port`: the server's store itself where it
                is on this machine, else its bridge. `'tcp://HOST:PORT'`: the bridge in any case.
                `'shm://NAME'`: the store, which is not waited for.
            remote: How to use a bridge.

        Raises:
            ArgumentTypeError: The address is not a string.
            InvalidArgumentError: It is not such an address.
        """
        address.parse(server_address)
        self._server_address = server_address
        self._remote = address.RemoteOptions() if remote is None else remote
        self._connection: Connection | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._drawing: Drawing | None = None
        self._inserter: Inserter | None = None

    @property
    def server_address(self) -> str:
        """The address that the client was made with."""
        return self._server_address

    def __reduce__(self) -> tuple[type[Client], tuple[str, address.RemoteOptions]]:
        """Pickles by address."""
        return type(self), (self._server_address, self._remote)

    def __repr__(self) -> str:
        """Names the address."""
        return f"Client, server_address={self._server_address}"

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or connection.unusable:
            return self._connect()
        return connection

    def _reach(self, timeout: float | None) -> tuple[Connection, float | None]:
        """The connection, and the seconds of the timeout that waiting for it has left."""
        seconds = limits.checked_timeout(timeout)
        connection = self._connection
        if connection is not None and not connection.unusable:
            return connection, seconds
        began = time.monotonic()
        connection = self._connect(seconds)
        waited = time.monotonic() - began
        # Just to attach takes no time worth counting, and messages then name what was given.
        if seconds is None or waited < _ATTACH_S:
            return connection, seconds
        return connection, max(seconds - waited, 0.0)

    def _connect(self, timeout: float | None = None) -> Connection:
        if self._connection is not None and self._connection.store.forked:
            # In a forked child: what was inherited belongs to the parent, the lock included.
            self._lock = threading.RLock()
            self._connection = None
            self._drawing = None
            self._inserter = None
        made: Connection | None = None
        while True:
            with self._lock:
                if not self._closed and self._connection is None and made is not None:
                    self._connection, made = made, None
                elif self._connection is not None and self._connection.unusable:
                    self._connect_again(self._connection)
                connection, closed = self._connection, self._closed
            if made is not None and (closed or connection is not None):
                made.close()  # another call was faster
            if closed:
                raise errors.ServerClosedError(
                    f"Got a call on a client of {self._server_address!r} that is closed; expected "
                    "an open one; make a new Client."
                )
            if connection is not None:
                return connection
            # Without the lock: other calls may have shorter timeouts, or close the client.
            made = self._attach(timeout)

    def _attach(self, timeout: float | None) -> Connection:
        """Attaches to the store, or connects to the bridge: the one place that decides."""
        target = address.resolve(self._server_address, timeout)
        if target.name is not None:
            return Connection(Store.open(target.name))
        from shmreplay.bridge.client import RemoteConnection

        remote, compress = self._remote, self._remote.compress
        if compress is None:
            compress = not address.is_local(target.host)
        return RemoteConnection(target.endpoint, remote.timeout, remote.keys, compress, timeout)

    def _connect_again(self, old: Connection) -> None:
        """Attaches to the store of a server that was started after the old one had been stopped."""
        try:
            connection = self._attach(0.0)
        except (errors.StoreNotFoundError, errors.DeadlineExceededError) as error:
            raise stopped(self._server_address) from error
        if connection.native.closed:  # its server is about to remove it
            connection.close()
            raise stopped(self._server_address)
        self._connection = connection
        self._drawing = None
        inserter, self._inserter = self._inserter, None
        if inserter is not None:
            inserter.close()
        old.close()

    def _open_writer(
        self,
        connection: Connection,
        num_keep_alive_refs: int,
        validate_items: bool = True,
        confirm: bool = True,
        compress: str | None = None,
    ) -> TrajectoryWriter:
        make: Any = connection.make_writer or TrajectoryWriter
        writer: TrajectoryWriter = make(
            connection,
            num_keep_alive_refs,
            validate_items=validate_items,
            confirm=confirm,
            compress=compress,
        )
        return writer

    def close(self) -> None:
        """Leaves the store. Idempotent. Borrowed views stay valid until they are dropped."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            inserter, self._inserter = self._inserter, None
            drawing, self._drawing = self._drawing, None
        if connection is not None and not connection.store.forked:
            if inserter is not None:
                inserter.close()
            if drawing is not None:
                drawing.drop()
            connection.close()

    def __enter__(self) -> Client:
        """Returns the client."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the client."""
        self.close()

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

    def _new_inserter(self, connection: Connection) -> Inserter:
        with self._lock:
            inserter = self._inserter
            if inserter is None or inserter.connection is not connection:
                # Once closed, the client keeps none: this one closes its writers after the call.
                inserter = Inserter(connection, self._open_writer, self._closed)
                if not self._closed:
                    self._inserter = inserter
            return inserter

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
        """
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        columns, n = batch_columns(data)
        if priorities is None:
            prio = np.full(n, math.nan)  # which the core takes for the largest seen
        else:
            prio = checked_priorities(priorities, n)
            check_priorities(connection, table, number, prio)
        leaves = [(DTYPE_CODES[c.dtype], c.shape[1:], True) for c in columns]
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

    def _drawing_over(self, connection: Connection) -> Drawing:
        """What draws over the connection: one for all calls of the client."""
        drawing = self._drawing
        if drawing is not None and drawing.connection is connection:
            return drawing
        with self._lock:
            drawing = self._drawing
            if drawing is None or drawing.connection is not connection:
                drawing = Drawing(connection)
                if connection is self._connection:
                    self._drawing = drawing
            return drawing

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
        n = limits.checked_int("num_samples", num_samples)
        if n == 0 or n < -1:
            raise errors.InvalidArgumentError(
                f"num_samples must be at least 1 (or -1, which yields nothing), got {n}. Give the "
                "number of items to draw."
            )
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        output = SampleOutput(
            connection.configs[number].signature() if unpack_as_table_signature else None,
            emit_timesteps,
        )
        return self._samples(table, max(n, 0), output, seconds)

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

    # ------------------------------------------------------------------ changing by key

    def update_priorities(
        self,
        table: str,
        keys: npt.ArrayLike,
        priorities: npt.ArrayLike,
        timeout: float | None = None,
    ) -> int:
        """Sets new priorities. Keys that are not there any more are skipped.

        Args:
            table: Name of the table.
            keys: uint64[N], as in `info.key`.
            priorities: float[N], or one for all.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Returns:
            Number of keys that were found.

        Raises:
            ArgumentTypeError: Keys are not integers.
            PriorityError: A priority is bad. Nothing was changed.
            DeadlineExceededError: Says how many of the first keys are done.
        """
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        key_array = checked_keys(keys)
        values = checked_priorities(priorities, len(key_array))
        check_priorities(connection, table, number, values)
        session = connection.take_session()
        try:
            return session.update(number, key_array, values, seconds)
        finally:
            connection.give_session(session)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Deletes items, then updates priorities (Reverb's order). Unknown keys are skipped.

        Args:
            table: Name of the table.
            updates: Key -> new priority.
            deletes: Keys.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Raises:
            ArgumentTypeError: A key is not a non-negative integer, or deletes is a set.
            PriorityError: A priority is bad. Nothing was changed.
            DeadlineExceededError: Says how much was done.
        """
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        if isinstance(deletes, set | frozenset):
            raise errors.ArgumentTypeError(
                f"deletes must be a list of keys, got {deletes!r}. Use [key] for a single one."
            )
        gone = checked_keys([] if deletes is None else deletes)
        if updates is not None and not isinstance(updates, Mapping):
            raise errors.ArgumentTypeError(
                f"updates must be a dict, got {updates!r}. Give {{key: priority}}."
            )
        items = {} if updates is None else updates
        keys = checked_keys(list(items.keys()))
        values = checked_priorities(list(items.values()), len(keys))
        check_priorities(connection, table, number, values)
        began = time.monotonic()
        session = connection.take_session()
        try:
            if len(gone) > 0:
                session.delete(number, gone, seconds)
                if seconds is not None:
                    seconds = max(seconds - (time.monotonic() - began), 0.0)
            if len(keys) > 0:
                session.update(number, keys, values, seconds)
        except errors.DeadlineExceededError as e:
            raise errors.DeadlineExceededError(
                f"{e}. Deletes ({len(gone)} keys) come before updates ({len(keys)} keys)."
            ) from None
        finally:
            connection.give_session(session)

    def configure_table(
        self,
        table: str,
        *,
        max_size: int | None = None,
        max_times_sampled: int | None = None,
        rate_limiter: RateLimiter | None = None,
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Gives a table in use other settings, at once and for everybody.

        Nobody works on the table meanwhile, so shrinking a large one holds up the others for
        about a second a million items that leave. Whoever waits for the limiter looks again.

        Args:
            table: Name of the table.
            max_size: Where it is smaller than what is there, the remover evicts down to it. At
                most eight times what the table was declared with. None keeps the setting, here
                and below.
            max_times_sampled: Items that were sampled as often already leave; below 1: no bound.
            rate_limiter: Its counters go on from where they are.
            max_bytes: As for `Table`; the remover evicts down to it. 0 takes the bound away.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Raises:
            TableNotFoundError: There is no such table.
            DeadlineExceededError: They are behind still. Nothing was changed.
            InvalidArgumentError, ArgumentTypeError: A setting is out of its range or of the wrong
                type. Nothing was changed.
        """
        connection, seconds = self._reach(timeout)
        change = (max_size, max_times_sampled, rate_limiter, max_bytes)
        live_table.configure(connection, table, *change, timeout=seconds)

    def reset(self, table: str, timeout: float | None = None) -> None:
        """Empties the table and zeroes its counters; inserts that wait go on.

        Args:
            table: Name of the table.
            timeout: Seconds to wait where the table's extensions are behind; None: for ever.

        Raises:
            TableNotFoundError: There is no such table.
            DeadlineExceededError: They are behind still. Nothing was changed.
        """
        connection, seconds = self._reach(timeout)
        number = connection.number(table)
        session = connection.take_session()
        try:
            session.reset(number, seconds)
        finally:
            connection.give_session(session)
        self._drawing_over(connection).forget(number)

    # ------------------------------------------------------------------ looking

    def keys(self, table: str) -> npt.NDArray[np.uint64]:
        """The keys of all items, in the order of their insertion; see `items`.

        Returns:
            uint64[N].

        Raises:
            TableNotFoundError: There is no such table.
        """
        keys: npt.NDArray[np.uint64] = self.items(table).key
        return keys

    def items(self, table: str) -> ItemInfo:
        """What the table knows of all its items, in the order of their insertion.

        Others go on working meanwhile: an item that is there from the beginning of the call to its
        end is in the list once, one that comes or goes meanwhile may be.

        Returns:
            key uint64[N], priority float64[N], times_sampled int32[N], inserted float64[N]
            (seconds since the epoch).

        Raises:
            TableNotFoundError: There is no such table.
        """
        return live_table.list_items(self._connected(), table)

    def fetch(self, table: str, keys: npt.ArrayLike) -> list[ReplaySample]:
        """Reads items by key. That does not count as sampling them.

        Args:
            table: Name of the table.
            keys: uint64[N].

        Returns:
            Those that are still there, in the order of their keys in the argument; `info.key` tells
            which. `info.probability` is 0.0, as nothing was drawn. Data are copies, in the
            structure that the item was created with.

        Raises:
            TableNotFoundError: There is no such table.
            ArgumentTypeError: Keys are not integers.
        """
        return live_table.fetch(self._connected(), table, checked_keys(keys))

    def max_priority(self, table: str) -> float:
        """The largest priority of any insert or update since the table was made or reset.

        The item that had it may be gone. 1.0 where there was none yet. New items get it with
        `priority=None`, so that they are sampled soon.

        Raises:
            TableNotFoundError: There is no such table.
        """
        connection = self._connected()
        return connection.max_priority(connection.number(table))

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Settings and counters of every table.

        Args:
            timeout: Seconds to wait for a server that is not up yet; None, or 0 as in Reverb: until
                it is taken to be missing.

        Raises:
            DeadlineExceededError: No server was up within the timeout.
            StoreNotFoundError: There is no server.
            ServerClosedError: It was stopped.
        """
        seconds = limits.checked_timeout(timeout) or None
        try:
            connection, _ = self._reach(seconds)
        except errors.DeadlineExceededError as e:
            raise errors.DeadlineExceededError(
                f"ServerInfo call did not complete within provided timeout of {timeout}s: {e}"
            ) from None
        connection.check_open()
        return {name: connection.info(number) for name, number in connection.tables.items()}

    def checkpoint(self) -> str:
        """Writes a checkpoint of all tables where the server keeps them, and returns its path.

        Others go on meanwhile: calls are held up for milliseconds, while the index is copied.

        Raises:
            InvalidArgumentError: The server's checkpointer names a group to own it.
            CheckpointError: It could not be written; the last one stays as it was.
        """
        return self._connected().checkpoint()

    def stats(self) -> dict[str, float]:
        """Counters of the store and of each table: a flat dict of numbers, units in the names.

        As `Server.stats`, from any process and host; `counters` says what each key means.
        """
        return self._connected().stats()

    def overview(self) -> dict[str, Any]:
        """What is going on in the store, for people: more than `stats`, and not only numbers.

        Returns:
            Plain values, as JSON has them: tables with settings and counters, memory by use, and
            the processes that use the store with what each has done and holds. See
            `overview.overview`; `shmreplay top` shows it.
        """
        return self._connected().overview()

    def check(self, table: str | None = None) -> None:
        """Walks all invariants of one table, or of the whole store.

        Raises:
            TableCorruptedError: One does not hold; says which.
            ServerClosedError: The server was stopped.
        """
        connection = self._connected()
        connection.check(None if table is None else connection.number(table))


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


def checked_keys(keys: Any) -> npt.NDArray[np.uint64]:
    """Keys as uint64[N], C-contiguous.

    Raises:
        ArgumentTypeError: They are not non-negative integers.
        InvalidArgumentError: They are not one-dimensional.
    """
    if isinstance(keys, list | tuple):
        # Not through numpy's own rules: large and small integers together would become floats.
        return np.array([limits.checked_key(key) for key in keys], np.uint64)
    array = np.asarray(keys)
    if array.dtype.kind not in "ui":
        raise errors.ArgumentTypeError(
            f"keys must be integers (info.key, uint64), got dtype {array.dtype}: {keys!r:.80}. "
            "Take them from info.key of what was sampled."
        )
    if array.ndim != 1:
        raise errors.InvalidArgumentError(
            f"keys must have shape [N], got {list(array.shape)}. Use keys.ravel()."
        )
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise errors.ArgumentTypeError(
            f"keys must not be negative, got {int(array.min())}; take them from info.key"
        )
    return np.ascontiguousarray(array, np.uint64)
