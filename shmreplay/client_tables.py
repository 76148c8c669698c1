"""What a client does with tables beside inserting and sampling: changing, listing, looking."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmreplay import errors, limits, live_table
from shmreplay.binding_support import as_contiguous, as_plain
from shmreplay.client_link import ClientLink
from shmreplay.inserting import check_priorities, checked_priorities
from shmreplay.rate_limiters import RateLimiter
from shmreplay.replay_sample import ItemInfo, ReplaySample
from shmreplay.reverb_types import TableInfo

__all__ = ["ClientTables", "checked_keys"]


class ClientTables(ClientLink):
    """The part of `Client` that changes tables and items, and looks at them."""

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

        Args:
            table: Its name.

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

        Args:
            table: Its name.

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

        Args:
            table: Its name.

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

        Args:
            table: Its name; None: all that is in the store.

        Raises:
            TableCorruptedError: One does not hold; says which.
            ServerClosedError: The server was stopped.
        """
        connection = self._connected()
        connection.check(None if table is None else connection.number(table))


def checked_keys(keys: Any) -> npt.NDArray[np.uint64]:
    """Keys as uint64[N], C-contiguous.

    Raises:
        ArgumentTypeError: They are not non-negative integers, or have a mask.
        InvalidArgumentError: They are not one-dimensional.
        OutOfMemoryError: They must be copied, and are too many for that.
    """
    if isinstance(keys, list | tuple):
        # Not through numpy's own rules: large and small integers together would become floats.
        return np.array([limits.checked_key(key) for key in keys], np.uint64)
    array = as_plain(keys, "keys")
    if array.dtype.kind not in "ui":
        raise errors.ArgumentTypeError(
            f"keys must be integers (info.key, uint64), got dtype {array.dtype}: {keys!r:.80}. "
            "Take them from info.key of what was sampled."
        )
    if array.ndim != 1:
        raise errors.InvalidArgumentError(
            f"keys must have shape [N], got {list(array.shape)}: {keys!r:.80}. "
            + ("Put the key into a list: [key]." if array.ndim == 0 else "Use keys.ravel().")
        )
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise errors.ArgumentTypeError(
            f"keys must not be negative, got {int(array.min())}; take them from info.key"
        )
    return as_contiguous(array, np.uint64, "keys")
