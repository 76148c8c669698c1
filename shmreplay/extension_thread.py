"""The thread that tells tables' extensions what has happened."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from shmreplay import _native, errors, limits
from shmreplay.batches import item_arrays
from shmreplay.binding_support import bad_priority
from shmreplay.connection import Connection
from shmreplay.extensions import ExtensionItem, TableExtension
from shmreplay.spec import dtype_code
from shmreplay.table import Table

__all__ = ["ExtensionThread"]

_log = logging.getLogger(__name__)

# Kinds of events, as the core numbers them (enum sr_event_kind).
_METHODS: Final = {1: "on_insert", 2: "on_delete", 3: "on_update", 4: "on_sample", 5: "on_reset"}


class _Listeners:
    """The extensions of one table."""

    def __init__(self, number: int, name: str, extensions: Sequence[TableExtension]) -> None:
        self.number = number
        self.name = name
        # Methods that are not overridden do nothing: nobody calls them.
        self.methods: dict[int, list[Callable[..., None]]] = {
            kind: [
                getattr(extension, method)
                for extension in extensions
                if getattr(type(extension), method) is not getattr(TableExtension, method)
            ]
            for kind, method in _METHODS.items()
        }
        self.is_empty = not extensions
        self.errors = 0
        self.log_at = 0.0
        self.shut = False


class _Source:
    """The steps of the items that the thread has taken."""

    def __init__(self, connection: Connection, session: _native.Session) -> None:
        self._connection = connection
        self._session = session
        self.batch: _native.Batch | None = None

    def _pinned(self) -> _native.Batch:
        if self.batch is None:
            raise errors.ExtensionError(
                "Got an item of an extension after the call that it was given to; expected use "
                "within it. Copy what is needed later."
            )
        return self.batch

    def load(self, index: int) -> Any:
        schema, arrays = item_arrays(self._connection, self._pinned(), index)
        return schema.unflatten(arrays)

    def insert(self, index: int, table: str, priority: float, timeout: float | None) -> int:
        seconds = limits.checked_timeout(timeout)
        number = self._connection.number(table)
        batch = self._pinned()
        columns = self._connection.schema(batch.schema_of(index)).columns
        self._connection.check_signature(
            number,
            [
                (dtype_code(c.dtype), c.shape if squeezed else (length, *c.shape), squeezed)
                for c, (length, squeezed, _) in zip(columns, batch.columns(index), strict=True)
            ],
        )
        value = limits.checked_number("priority", priority)
        if self._session.first_bad_priority(number, np.array([value], np.float64)) >= 0:
            raise bad_priority(table, value)
        describe = self._connection.describe_wait(number, "an extension's insert")
        return self._session.insert_again(batch, index, number, value, seconds, describe)


class ExtensionThread:
    """Calls the extensions of all tables of a server. There is one for a server, if at all.

    One thread for all: what an extension of one table does to another table that has extensions is
    told after it, and two tables cannot wait for each other.
    """

    def __init__(self, connection: Connection, tables: Sequence[Table]) -> None:
        """Takes the tables as the server declared them, with their extensions.

        Raises:
            StoreLimitError: The store has no free place for a session.
        """
        self._connection = connection
        self._native = connection.native
        declared = {table.name: table.extensions for table in tables}
        self._tables = [
            # Some may have none now: a store that was taken over keeps its rings.
            _Listeners(number, config.name, declared.get(config.name, ()))
            for number, config in enumerate(connection.configs)
            if config.events > 0
        ]
        self._session = connection.new_session(_native.SESSION_CLIENT)
        self._source = _Source(connection, self._session)
        self._stop_at: float | None = None
        self._left = 0

    @classmethod
    def make(cls, connection: Connection, tables: Sequence[Table]) -> ExtensionThread | None:
        """Returns one if a table of the store has extensions, or had some before."""
        needed = any(config.events > 0 for config in connection.configs)
        return cls(connection, tables) if needed else None

    def start(self, stopped: threading.Event) -> threading.Thread:
        """Starts the thread; it ends some seconds after `stopped` is set."""
        thread = threading.Thread(
            target=self.run, args=(stopped,), name="shmreplay-extensions", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            self._session.close()  # else it keeps the store
            raise
        return thread

    def stats(self) -> dict[str, float]:
        """For each table: how often its extensions raised."""
        return {f"{table.name}/extension_errors": table.errors for table in self._tables}

    def run(self, stopped: threading.Event) -> None:
        """Tells what happens, until `stopped` is set; then what is left, for some seconds."""
        self._native.extension_thread = threading.get_ident()
        try:
            for table in self._tables:
                self._say_what_was_dropped(table)
            while not stopped.is_set():
                seq = self._native.events_seq()
                if not self._round():
                    self._native.wait_events(seq, limits.WAIT_SLICE_MS)
            self._stop_at = time.monotonic() + limits.EXTENSION_STOP_S
            while self._left == 0 and self._round():
                pass
            if self._left > 0:
                _log.warning(
                    "the server stops; its extensions are slow and were not told of at least %d "
                    "changes",
                    self._left,
                )
        finally:
            self._native.extension_thread = 0
            self._session.close()

    def _say_what_was_dropped(self, table: _Listeners) -> None:
        if table.is_empty:
            _log.warning(
                "table %r was made with extensions and is served without: nobody is told of its "
                "changes",
                table.name,
            )
        dropped = self._native.table_info(table.number)["events_dropped"]
        if dropped > 0:
            _log.warning(
                "while no server ran, table %r changed %d times; its extensions are not told of it",
                table.name,
                dropped,
            )

    def _round(self) -> bool:
        """Tells some of what waits, table after table. Was there anything?"""
        told = [self._tell_some(table) for table in self._tables if not table.shut]
        return any(told)

    def _tell_some(self, table: _Listeners) -> bool:
        try:
            batch, happened = self._session.take_events(table.number, limits.EXTENSION_BATCH)
        except (errors.ReverbError, OSError, MemoryError) as e:
            # Without this thread, whoever changes the table would wait for ever: tried again.
            table.shut = isinstance(e, errors.TableCorruptedError)
            if table.shut:
                self._connection.native.leave_events(table.number)
            self._log_error(table, f"taking what happened to table {table.name!r}")
            return False
        self._source.batch = batch
        try:
            for event in happened:
                self._tell(table, event)
        finally:
            self._source.batch = None
            batch.release()
        return bool(happened)

    def _tell(self, table: _Listeners, event: tuple[int, int, int, float, int, int]) -> None:
        kind, index, key, priority, times_sampled, inserted_ns = event
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._left += 1
            return
        methods = table.methods[kind]
        if not methods:
            return
        item = ExtensionItem(
            table.name, key, priority, times_sampled, inserted_ns, self._source, index
        )
        arguments = (item,) if index >= 0 else ()
        for method in methods:
            try:
                method(*arguments)
            except BaseException as e:  # whatever it is, it ends that call and not the thread
                table.errors += 1
                if not isinstance(e, errors.ServerClosedError) or not self._native.closed:
                    self._log_error(
                        table, f"{_METHODS[kind]} of an extension of table {table.name!r}"
                    )
        item._expire()

    def _log_error(self, table: _Listeners, what: str) -> None:
        now = time.monotonic()
        if now >= table.log_at:
            table.log_at = now + limits.EXTENSION_LOG_EVERY_S
            _log.exception("%s failed; %d errors of this table so far", what, table.errors)
