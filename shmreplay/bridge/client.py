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
from shmreplay.bridge import auth, protocol
from shmreplay.bridge.batch import RemoteBatch, read_samples
from shmreplay.bridge.link import Link
from shmreplay.bridge.pending import Pending
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.sampler import RemoteSampler
from shmreplay.bridge.scratch import ScratchStore
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.bridge.writer import RemoteTrajectoryWriter
from shmreplay.connection import LISTED, Connection, Limiter
from shmreplay.item_schema import ItemSchema
from shmreplay.store import registered
from shmreplay.table import Changeable, TableConfig

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
        auth.check_type(keys, auth.ClientKeys)
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
        self.link.look = self._check_own_thread
        self._remote_schemas: dict[int, ItemSchema] = {}
        self._next_writer = 0
        self._checker = _native.Session(self.native, _native.SESSION_CLIENT)

    @property
    def unusable(self) -> bool:
        """Closed, inherited through a fork, or the server is gone for good."""
        return super().unusable or self.link.lost is not None

    @property
    def reachable(self) -> bool:
        """Whether the connection stands at this moment."""
        return self.link.connected and not self.unusable

    def check_open(self) -> None:
        """Raises where this connection cannot be used."""
        super().check_open()
        if self.link.lost is not None:
            raise self.link.lost

    def _check_own_thread(self) -> None:
        """Refuses to wait for extensions in the thread of this process that calls them.

        Raises:
            ExtensionError: This is that thread, and a table has no room to tell them of more.
        """
        store = registered(self.store_name)
        if store is not None:
            for number in self.tables.values():
                store.native.check_extension_thread(number)

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
        counts, settings, _ = self._info(number)
        return self.configs[number].info(reverb_types.TableCounts(*counts), Changeable(*settings))

    def _info(self, number: int) -> tuple[Sequence[Any], Sequence[Any], float]:
        """Counters, mass and bytes, settings as they are now, and the largest priority."""
        self.check_open()
        body = Writer()
        body.u16(number)
        reader = self.link.call(Kind.INFO, body)
        fields = reader.unpack(protocol.INFO)
        reader.finish()
        return (*fields[:6], *fields[-2:]), fields[6:-3], float(fields[-3])

    def max_priority(self, number: int) -> float:
        """The largest priority that a table has seen since it was made or reset."""
        return self._info(number)[2]

    def consumes(self, number: int, batch: Any) -> bool:
        """Whether the items of a batch are not drawn again: the server said so with them."""
        pinned: bool = batch.pinned
        return pinned

    def list_some(self, number: int, cursor: int) -> tuple[int | None, npt.NDArray[Any]]:
        """Some of a table's items, and from where to go on (None: the end)."""
        self.check_open()
        body = self.body()
        body.u16(number)
        body.u64(cursor)
        reader = self.link.call(Kind.LIST, body)
        more, after = reader.u8(), reader.u64()
        arrays = [reader.array() for _ in protocol.LISTED_FIELDS]
        reader.finish()
        part = np.zeros(arrays[0].size, LISTED)
        for name, array in zip(protocol.LISTED_FIELDS, arrays, strict=True):
            if array.shape != part.shape or array.dtype != LISTED[name]:
                raise errors.ProtocolError("an answer lists items in arrays that do not match")
            part[name] = array
        return after if more else None, part

    def configure(
        self,
        number: int,
        max_size: int | None,
        max_times_sampled: int | None,
        limiter: Limiter | None,
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Gives a table those settings that are not None; the server waits as it has to."""
        self.check_open()
        what = protocol.SET_MAX_SIZE if max_size is not None else 0
        what |= protocol.SET_MAX_TIMES_SAMPLED if max_times_sampled is not None else 0
        what |= protocol.SET_LIMITER if limiter is not None else 0
        what |= protocol.SET_MAX_BYTES if max_bytes is not None else 0
        body = Writer()
        body.meta += protocol.CHANGE.pack(
            number, what, max_size or 0, max_times_sampled or 0, *(limiter or (0.0, 0, 0.0, 0.0))
        )
        if max_bytes is not None:
            body.u64(max_bytes)
        self.link.call(Kind.CONFIGURE, body, timeout, cancel=True)

    def stats(self) -> dict[str, float]:
        """Counters of the store and of each table: a flat dict of numbers, units in the names."""
        reader = self.link.call(Kind.STATS, Writer())
        stats: dict[str, float] = json.loads(reader.text())
        return stats

    def overview(self) -> dict[str, Any]:
        """What is going on in the store: see `overview.overview`."""
        body = Writer()
        body.u8(protocol.WITH_PROCESSES)
        text = self.link.call(Kind.STATS, body).array()
        about: dict[str, Any] = json.loads(text.tobytes())
        return about | {"address": self.link.address}

    def check(self, number: int | None) -> None:
        """Walks all invariants of a table, or of the store."""
        body = Writer()
        body.u16(0xFFFF if number is None else number)
        self.link.call(Kind.CHECK, body)

    def checkpoint(self) -> str:
        """Has the server write a checkpoint; gives its path there."""
        return str(self.link.call(Kind.CHECKPOINT, Writer()).text())

    def describe_wait(self, number: int, what: str) -> Callable[[], str]:
        """A function that says what a call waits for."""
        return lambda: (
            f"{what} on table {self.configs[number].name!r} at {self.link.address}; see what holds"
            f" it back with `shmreplay info {self.link.address}`"
        )

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

    def _change(self, kind: Kind, body: Writer, timeout: float | None) -> Reader:
        """What waits where the table's extensions are behind."""
        self.connection.check_open()
        return self.connection.link.call(kind, body, timeout, cancel=True)

    def update(
        self,
        table: int,
        keys: npt.NDArray[np.uint64],
        priorities: npt.NDArray[np.float64],
        timeout: float | None = None,
    ) -> int:
        """Sets priorities by key; the number of keys found."""
        body = self.connection.body()
        body.u16(table)
        body.array(keys)
        body.array(priorities)
        return self._change(Kind.UPDATE, body, timeout).u32()

    def delete(self, table: int, keys: npt.NDArray[np.uint64], timeout: float | None = None) -> int:
        """Deletes by key; the number of items deleted."""
        body = self.connection.body()
        body.u16(table)
        body.array(keys)
        return self._change(Kind.DELETE, body, timeout).u32()

    def reset(self, table: int, timeout: float | None = None) -> None:
        """Empties the table and zeroes its counters."""
        body = Writer()
        body.u16(table)
        body.u64(self.connection.link.token())
        self._change(Kind.RESET, body, timeout)

    def pin(self, table: int, keys: npt.NDArray[np.uint64]) -> RemoteBatch:
        """Those of the items of these keys that are there; the server keeps no pins on them."""
        batch = RemoteBatch(self, table, [])
        while len(keys):
            self.connection.check_open()
            link, body = self.connection.link, self.connection.body()
            body.u16(table)
            body.array(keys)
            pending = link.post(Kind.FETCH, body)
            reader = link.answer(pending)
            done = reader.u32()
            if not 1 <= done <= len(keys):
                raise errors.ProtocolError(f"an answer about {done} keys; asked for {len(keys)}")
            batch.absorb(read_samples(self, table, pending.sequence, reader))
            keys = keys[done:]
        return batch

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
        compress: bool = False,
    ) -> None:
        """One item a row; fills keys. The server compresses, as its table says."""
        body = self.connection.body()
        body.u16(table)
        body.u64(self.connection.link.token())
        body.timeout(timeout)
        body.u64(n)
        body.text(self.connection.native.schema_text(schema))
        body.array(priorities)
        for column in columns:
            body.array(column)
        self.connection.check_open()
        link = self.connection.link
        pending = link.post(Kind.INSERT_BATCH, body)
        keys[:] = link.answer(pending, timeout).array()

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
