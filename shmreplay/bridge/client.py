"""A client's connection to a bridge, in the shape of a connection to a store.

`RemoteConnection`, `RemoteSession` and `RemoteBatch` answer what `Connection` and the native
`Session` and `Batch` answer, so that the client's code is one for both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, item_schema, reverb_types
from shmreplay.bridge import auth
from shmreplay.bridge.batch import RemoteBatch, read_samples
from shmreplay.bridge.link import Link, Pending
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.sampler import RemoteSampler
from shmreplay.bridge.scratch import ScratchStore
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.bridge.writer import RemoteTrajectoryWriter
from shmreplay.connection import Connection
from shmreplay.item_schema import ItemSchema
from shmreplay.table import TableConfig

__all__ = ["RemoteConnection", "RemoteSession"]

# Seconds that an interrupted call waits for what it has drawn nevertheless.
_CANCEL_S = 1.0


class RemoteConnection(Connection):
    """A hold on a bridge and what is known about it."""

    make_writer = RemoteTrajectoryWriter
    make_sampler = RemoteSampler

    def __init__(
        self,
        address: str,
        timeout: float,
        keys: auth.ClientKeys | None = None,
        compress: bool = False,
        within: float | None = None,
    ) -> None:
        """Connects.

        Args:
            address: `'tcp://host:port'`.
            timeout: Seconds that the server may be out of reach.
            keys: Of this client and of the server; None without encryption.
            compress: Compress what is sent in both directions where that makes it smaller.
            within: Seconds for connecting, where they are fewer than `timeout`.

        Raises:
            DeadlineExceededError: The server was not reached in time, but `timeout` is not over.
            ServerClosedError: The server was not reached within the timeout.
            AuthenticationError, VersionMismatchError, ProtocolError: It refused.
        """
        self.link = Link(address, timeout, keys, compress)
        try:
            welcome = self.link.connect(within)
            self.store_name = welcome.text()
            self.compress = compress
            tables = [TableConfig.from_json(welcome.text()) for _ in range(welcome.u16())]
            super().__init__(ScratchStore(address, tables))
        except BaseException:
            self.link.close()
            raise
        self._remote_schemas: dict[int, ItemSchema] = {}
        self._next_writer = 0
        self._checker = _native.Session(self.native, _native.SESSION_CLIENT)

    @property
    def unusable(self) -> bool:
        """Closed, inherited through a fork, or the server is gone for good."""
        return super().unusable or self.link.lost is not None

    def check_open(self) -> None:
        """Raises where this connection cannot be used."""
        super().check_open()
        if self.link.lost is not None:
            raise self.link.lost

    def close(self) -> None:
        """Takes leave. Idempotent."""
        super().close()
        self.link.close()

    def new_session(self, kind: int) -> Any:
        """A session of its own: for writers one of the private store."""
        if kind == _native.SESSION_WRITER:
            return super().new_session(kind)
        self.check_open()
        return RemoteSession(self)

    def writer_number(self) -> int:
        """Number of a new writer."""
        with self._lock:
            self._next_writer += 1
            return self._next_writer

    def first_bad_priority(self, table: int, priorities: npt.NDArray[np.float64]) -> int:
        """Index of the first priority that the table does not take, or -1."""
        self.check_open()
        return self._checker.first_bad_priority(table, priorities)

    def body(self) -> Writer:
        """A new message."""
        return Writer(self.compress)

    def info(self, number: int) -> reverb_types.TableInfo:
        """Settings and counters of a table at this moment."""
        body = Writer()
        body.u16(number)
        reader = self.link.call(Kind.INFO, body)
        counts = reverb_types.TableCounts(*(reader.i64() for _ in range(6)))
        return self.configs[number].info(counts)

    def stats(self) -> dict[str, float]:
        """Counters of the store and of each table: a flat dict of numbers, units in the names."""
        reader = self.link.call(Kind.STATS, Writer())
        stats: dict[str, float] = json.loads(reader.text())
        return stats

    def check(self, number: int | None) -> None:
        """Walks all invariants of a table, or of the store."""
        body = Writer()
        body.u16(0xFFFF if number is None else number)
        self.link.call(Kind.CHECK, body)

    def describe_wait(self, number: int, what: str) -> Callable[[], str]:
        """A function that says what a call waits for."""
        return lambda: f"{what} on table {self.configs[number].name!r} at {self.link.address}"

    # ------------------------------------------------------------------ schemas

    def schema(self, number: int) -> ItemSchema:
        """The item structure that the server gave this number."""
        return self._remote_schemas[number]

    def learn_schema(self, number: int, text: bytes) -> None:
        """Takes a structure that came with an answer."""
        if number not in self._remote_schemas:
            self._remote_schemas[number] = item_schema.decode(text)


class RemoteSession:
    """What a native `Session` does, at the server."""

    def __init__(self, connection: RemoteConnection) -> None:
        """See `RemoteConnection.new_session`."""
        self.connection = connection
        self.interrupted: RemoteBatch | None = None

    def close(self) -> None:
        """Nothing is held."""

    def first_bad_priority(self, table: int, priorities: npt.NDArray[np.float64]) -> int:
        """Index of the first priority that the table does not take, or -1."""
        return self.connection.first_bad_priority(table, priorities)

    def _call(self, kind: Kind, body: Writer, timeout: float | None = None) -> Reader:
        self.connection.check_open()
        return self.connection.link.call(kind, body, timeout)

    def update(
        self, table: int, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]
    ) -> int:
        """Sets priorities by key; the number of keys found."""
        body = self.connection.body()
        body.u16(table)
        body.array(keys)
        body.array(priorities)
        return self._call(Kind.UPDATE, body).u32()

    def delete(self, table: int, keys: npt.NDArray[np.uint64]) -> int:
        """Deletes by key; the number of items deleted."""
        body = self.connection.body()
        body.u16(table)
        body.array(keys)
        return self._call(Kind.DELETE, body).u32()

    def reset(self, table: int) -> None:
        """Empties the table and zeroes its counters."""
        body = Writer()
        body.u16(table)
        self._call(Kind.RESET, body)

    def insert_batch(
        self,
        table: int,
        columns: Sequence[npt.NDArray[Any]],
        n: int,
        priorities: npt.NDArray[np.float64],
        schema: int,
        timeout: float | None,
        describe: Callable[[], str],
        episode_id: int,
        keys: npt.NDArray[np.uint64],
    ) -> None:
        """One item a row; fills keys."""
        body = self.connection.body()
        body.u16(table)
        body.timeout(timeout)
        body.u64(n)
        body.text(self.connection.native.schema_text(schema))
        body.array(priorities)
        for column in columns:
            body.array(column)
        reader = self._call(Kind.INSERT_BATCH, body, timeout)
        keys[:] = reader.array()

    # ------------------------------------------------------------------ sampling

    def ask(self, table: int, n: int, timeout: float | None) -> Pending:
        """Asks for items; see `take`."""
        self.connection.check_open()
        body = Writer()
        body.u16(table)
        body.u32(n)
        body.timeout(timeout)
        return self.connection.link.post(Kind.SAMPLE, body)

    def take(self, table: int, pending: Pending, timeout: float | None) -> RemoteBatch:
        """Waits for the items that were asked for. An interrupted call asks for them no more."""
        link = self.connection.link
        try:
            reader = link.answer(pending, timeout)
        except errors.ReverbError:
            raise
        except BaseException:
            self.interrupted = self.drawn_nevertheless(table, pending)
            raise
        return read_samples(self, table, pending.sequence, reader)

    def drawn_nevertheless(self, table: int, pending: Pending) -> RemoteBatch | None:
        """What a request that was cancelled had drawn before."""
        if not pending.wait(_CANCEL_S) or pending.error is not None:
            return None
        return read_samples(self, table, pending.sequence, pending.result())

    def sample(
        self,
        table: int,
        n: int,
        timeout: float | None,
        describe: Callable[[], str],
        partial: RemoteBatch | None = None,
    ) -> RemoteBatch:
        """Draws n items, of which `partial` has the first; fewer if the time is over."""
        have = 0 if partial is None else len(partial)
        if have >= n and partial is not None:
            return partial
        try:
            batch = self.take(table, self.ask(table, n - have, timeout), timeout)
        except errors.DeadlineExceededError:
            if partial is not None and have:
                return partial
            raise
        except BaseException:
            if partial is not None:
                if self.interrupted is not None:
                    partial.absorb(self.interrupted)
                self.interrupted = partial
            raise
        if partial is None:
            return batch
        partial.absorb(batch)
        return partial
