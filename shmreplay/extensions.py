"""Extensions: objects that are told of every change of a table, in the order of the changes.

The methods of a ``TableExtension`` run in a thread of the server's process, one after the other for
all tables of the server, and under no lock. A change and its entry in a ring in shared memory are
made together, by whatever process makes the change; the thread reads the ring.

- The ring is bounded. Who would change a table whose extensions are that far behind waits, and says
  so in the log after five seconds; nothing is lost, and nothing grows.
- A server that is killed loses what its thread had taken and not told, a few dozen changes at most.
  While no server runs, the ring keeps what happens for the next one; once it is full, changes are
  counted (``events_dropped`` in ``stats``) and not told.
- A server that is stopped tells what is left: it begins no method after five seconds, and waits as
  long again for the one that is running.
- A process that is killed in the middle of a change leaves the change and its entry, or neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shmreplay.errors import ExtensionError, InvalidArgumentError
from shmreplay.limits import checked_number

__all__ = ["ExtensionItem", "TableExtension", "insert_on_sample"]


class ItemSource(Protocol):
    """Where an item's steps are, as long as its extension's method runs."""

    def load(self, index: int) -> Any:
        """Returns copies of the item's data, in the structure that it was created with."""

    def insert(self, index: int, table: str, priority: float, timeout: float | None) -> int:
        """Inserts the item into a table; returns its key there."""


class ExtensionItem:
    """An item as it was when something happened to it. Its steps are there until the method ends.

    Attributes:
        table: Name of its table.
        key: Its key, as in ``info.key`` of a sample.
        priority: Its priority; of an update, the new one.
        times_sampled: How often it was sampled, this time included.
        inserted_ns: When it was inserted, to a few milliseconds: nanoseconds since the epoch.
    """

    __slots__ = (
        "_data",
        "_index",
        "_source",
        "inserted_ns",
        "key",
        "priority",
        "table",
        "times_sampled",
    )

    def __init__(
        self,
        table: str,
        key: int,
        priority: float,
        times_sampled: int,
        inserted_ns: int,
        source: ItemSource,
        index: int,
    ) -> None:
        """Takes what the ring says, and where the steps are; for the extensions' thread."""
        self.table = table
        self.key = key
        self.priority = priority
        self.times_sampled = times_sampled
        self.inserted_ns = inserted_ns
        self._source: ItemSource | None = source
        self._index = index
        self._data: Any = None

    @property
    def data(self) -> Any:
        """The item's data as a sample has it: arrays [T, ...] (or [...]) in its structure, copies.

        Copied when it is first asked for, and then kept.

        Raises:
            ExtensionError: The method that was given the item has returned.
        """
        if self._data is None:
            self._data = self._steps("its data").load(self._index)
        return self._data

    def insert_into(
        self, table: str, priority: float | None = None, timeout: float | None = None
    ) -> int:
        """Inserts the item into another table of the server. Its steps are shared, not copied.

        Args:
            table: Name of that table.
            priority: There; None: the one that it has here.
            timeout: Seconds to wait for that table's rate limiter; None: for ever.

        Returns:
            Its key in that table.

        Raises:
            TableNotFoundError, SignatureError, PriorityError: Nothing was inserted.
            DeadlineExceededError: The limiter did not let it in.
            ExtensionError: The method that was given the item has returned; or it would wait for
                itself, as that table's extensions are behind.
        """
        source = self._steps("insert_into")
        return source.insert(
            self._index, table, self.priority if priority is None else priority, timeout
        )

    def _steps(self, what: str) -> ItemSource:
        if self._source is None:
            raise ExtensionError(
                f"Got a request for {what} of item {self.key} of table {self.table!r} after the"
                " method that was given the item had returned; expected one before. Ask for"
                " item.data there, and keep that."
            )
        return self._source

    def _expire(self) -> None:
        self._source = None

    def __repr__(self) -> str:
        """Names table and key."""
        return f"ExtensionItem(table={self.table!r}, key={self.key}, priority={self.priority})"


class TableExtension:
    """Derive from this, and give an instance to a ``Table``. Each method here does nothing.

    A method that raises is logged with its traceback and counted (``extension_errors`` in
    ``Server.stats``); the next one is called all the same. A method may use the server through a
    ``Client`` of its own. What would wait for the thread that it runs in is refused with
    ``ExtensionError``; what waits for others, such as a rate limiter, wants a timeout, since
    everybody who changes a table waits for its extensions in the end.
    """

    def prepare(self, table: str, tables: Sequence[str]) -> None:
        """Called when a server is made, before it has a store; raises to refuse.

        Args:
            table: Name of the table that has the extension.
            tables: Names of all tables of the server.
        """

    def on_insert(self, item: ExtensionItem) -> None:
        """The item was inserted.

        Args:
            item: Valid until the call returns, as in all of these.
        """

    def on_delete(self, item: ExtensionItem) -> None:
        """The item left: deleted, evicted, or sampled as often as it may be. Not by a reset.

        Args:
            item: Its data are still there.
        """

    def on_update(self, item: ExtensionItem) -> None:
        """The item has a new priority.

        Args:
            item: With the new priority.
        """

    def on_sample(self, item: ExtensionItem) -> None:
        """The item was sampled.

        Args:
            item: With the samples counted so far.
        """

    def on_reset(self) -> None:
        """The table was emptied; its counters are zero."""


class _InsertOnSample(TableExtension):
    def __init__(self, table: str, priority: float | None, every_time: bool) -> None:
        self._table = table
        self._priority = priority
        self._every_time = every_time

    def prepare(self, table: str, tables: Sequence[str]) -> None:
        if self._table not in tables or self._table == table:
            raise InvalidArgumentError(
                f"Got insert_on_sample({self._table!r}) for table {table!r}; expected the name of"
                f" another table of the server: {sorted(set(tables) - {table})}. Use one of them."
            )

    def on_sample(self, item: ExtensionItem) -> None:
        if self._every_time or item.times_sampled == 1:
            item.insert_into(self._table, self._priority)

    def __repr__(self) -> str:
        return f"insert_on_sample({self._table!r})"


def insert_on_sample(
    table: str, *, priority: float | None = None, every_time: bool = False
) -> TableExtension:
    """Returns an extension that inserts each item that is sampled into another table.

    The steps are shared by both tables and not copied.

    Args:
        table: Name of the other table, of the same server. Where its rate limiter lets nothing in,
            the table that has the extension waits, too.
        priority: In the other table; None: the one that the item has when it is sampled.
        every_time: Insert it again each time that it is sampled, and not only the first time.

    Raises:
        ArgumentTypeError: The priority is not a number.
    """
    if priority is not None:
        priority = checked_number("priority", priority)
    return _InsertOnSample(table, priority, every_time)
