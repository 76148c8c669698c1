"""Stores: creating one, attaching to one, and leaving it without a trace.

A process has one ``Store`` for each store that it is attached to, however many servers and clients
it has: they share it and count their references. What the files in /dev/shm are, and how a
participant proves that it lives, is said in ``lease.py``.

Creating holds the whole lease locked from before the segment exists until it is laid out, so that
nobody can attach to half a store or to one that is about to be replaced. Where that lock is
granted nobody is attached, and what a dead server left behind is replaced. Leaving removes the
segment first and the lease second: as long as a segment has its name, so has its lease.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from shmreplay import lease, ports, segment, store_file
from shmreplay._native import Store as NativeStore
from shmreplay.attachment import Attachment, attached, guard, record
from shmreplay.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ServerClosedError,
    StoreExistsError,
)
from shmreplay.lease import Participant
from shmreplay.limits import checked_int
from shmreplay.table import TableConfig

__all__ = [
    "OPEN_TIMEOUT_S",
    "Participant",
    "Store",
    "guard",
    "registered",
]

OPEN_TIMEOUT_S: Final = 10.0
"""Seconds that attaching waits for a store that is being laid out: that takes milliseconds."""

_MAX_PORT: Final = 65535
# Seconds in which a byte of the lease may be taken by somebody who cleans up after the dead.
_TAKE_OVER_WAIT_S: Final = 0.5
# Pauses between looks at a store that is being laid out.
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05

_log = logging.getLogger(__name__)


class Store(Attachment):
    """This process's attachment to one store. Made by ``create`` and ``open``; thread-safe.

    Whoever gets a store from ``create`` or ``open``, or calls ``retain``, calls ``release`` once,
    after the sessions that it opened are closed and its threads no longer use ``native``.
    """

    @classmethod
    def create(
        cls,
        name: str,
        tables: Sequence[TableConfig],
        *,
        capacity: int | None = None,
        port: int = 0,
        role: str = "server",
        keys: Sequence[tuple[int, int]] | None = None,
        fill: Callable[[NativeStore], None] | None = None,
        path: str | None = None,
    ) -> Store:
        """Creates a store and attaches to it as its participant 0.

        A store of this name that no living process is attached to is replaced.

        Args:
            name: 1 to 100 of the characters A-Z a-z 0-9 . _ -, not ending in ``.lease``.
            tables: The tables it has.
            capacity: Bytes of memory that it may use, at least 1 MiB. None takes half of what
                /dev/shm has free. Memory is committed as it is needed.
            port: By which clients on this machine may find it; 0 for none.
            role: What this process is, for people who list the participants.
            keys: See ``segment.lay_out``.
            fill: Called with the store before anybody can attach to it; if it raises, there is
                none.
            path: Of the file that it is in; None: /dev/shm.

        Raises:
            StoreExistsError: A living process is attached to a store of this name, or another
                living server has the port; or the path is taken.
            ArenaFullError: /dev/shm, or the capacity, has no room for an empty store.
            StorePermissionError: The name is taken by a file that is not ours.
            InvalidArgumentError: An argument is out of its range.
            ArgumentTypeError: An argument has the wrong type.
        """
        segment.check_name(name)
        port = _checked_port(port)
        path = None if path is None else store_file.checked_path(path)
        capacity = segment.checked_capacity(capacity, path)
        with guard():
            ours = registered(name)
            if ours is not None:
                raise ours._exists()
            _check_port_is_free(name, port)
            with ExitStack() as undo:
                held = lease.lock_new(name, undo)
                _remove_stale_segment(name)
                fd, native = segment.lay_out(name, tables, capacity, undo, keys, path)
                native.participant_set(0, *lease.identity(), role)
                native.creator_pid = os.getpid()
                native.port = port
                if fill is not None:
                    fill(native)
                # Again, as another process may have chosen the same port meanwhile. Each sees the
                # other now: both may fail, but not both succeed.
                _check_port_is_free(name, port)
                held.unlock_all_but_first()
                store = cls(name, 0, tables, held, fd, native)
                record(store)
                undo.pop_all()
            return store

    @classmethod
    def open(
        cls, name: str, *, role: str = "client", timeout: float | None = OPEN_TIMEOUT_S
    ) -> Store:
        """Attaches to a store, or returns what this process has of it already.

        Args:
            name: Of the store.
            role: What this process is, for people who list the participants.
            timeout: Seconds to wait for a store that is being laid out; None waits for ever, 0
                looks once.

        Raises:
            StoreNotFoundError: There is no such store, or no living process is attached to it.
            DeadlineExceededError: It was not laid out in time.
            ServerClosedError: Its server was stopped.
            StorePermissionError: Its files are not ours, or others have rights to them.
            VersionMismatchError: It was made by a build with another layout.
            TableCorruptedError: Its header is damaged.
            ArenaFullError: It has as many participants as it can have.
            InvalidArgumentError: The name cannot be the name of a store.
        """
        segment.check_name(name)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE_S
        while True:
            with guard():
                store = registered(name)
                if store is not None:
                    return store.retain()
                store = cls._attach(name, role)
                if store is not None:
                    return store
            left = pause if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"Got store {name!r}, which was not laid out within {timeout} s; expected its"
                    " server to finish creating or removing it. Look whether that process hangs,"
                    " or wait longer."
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @classmethod
    def take_over(
        cls,
        name: str,
        check: Callable[[list[TableConfig]], None],
        *,
        port: int = 0,
        role: str = "server",
    ) -> Store | None:
        """Becomes the server of a store whose server died, with all that is in it.

        Processes that are attached go on working and do not notice.

        Args:
            name: Of the store.
            check: Given the settings of its tables before anything is changed; what it raises
                ends the attempt.
            port: By which clients on this machine may find it from now on; 0 for none.
            role: What this process is, for people who list the participants.

        Returns:
            The store; None if there is none, or nothing in it: its server was stopped, or died
            before it was laid out.

        Raises:
            StoreExistsError: Its server lives, or another living server has the port.
            StorePermissionError: Its files are not ours, or others have rights to them.
            VersionMismatchError: It was made by a build with another layout.
            TableCorruptedError: Its header, or what the dead server held, is damaged.
            InvalidArgumentError: The name or the port is out of range.
        """
        segment.check_name(name)
        port = _checked_port(port)
        deadline = time.monotonic() + _TAKE_OVER_WAIT_S
        while True:
            try:
                with guard():
                    _check_port_is_free(name, port)
                    store = cls._take_over(name, check, role)
                    if store is not None:
                        store._native.creator_pid = os.getpid()
                        store._native.port = port
                    return store
            except StoreExistsError:
                # Somebody may just be giving back what the dead server held.
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_FIRST_PAUSE_S)

    @classmethod
    def _take_over(
        cls, name: str, check: Callable[[list[TableConfig]], None], role: str
    ) -> Store | None:
        store = registered(name)
        if store is not None:
            return store._promote(check, role)
        with ExitStack() as undo:
            held = lease.lock_server(name, undo)
            opened = None if held is None else segment.open_segment(name, undo)
            if held is None or opened is None or opened[1].closed:
                return None
            # Nobody replaces or removes either file while byte 0 is held.
            fd, native = opened
            tables = segment.tables_of(name, native)
            check(tables)
            lease.take_entry_of_server(native, role)
            store = cls(name, 0, tables, held, fd, native)
            record(store)
            undo.pop_all()
            return store

    def _promote(self, check: Callable[[list[TableConfig]], None], role: str) -> Store:
        """Lets a process that is attached become the server."""
        check(self._tables)
        if self._serves or not self._lease.try_lock(0):
            raise self._exists()
        try:
            lease.take_entry_of_server(self._native, role)
        except BaseException:
            self._lease.unlock(0)
            raise
        self._serves = True
        return self.retain()

    @classmethod
    def _attach(cls, name: str, role: str) -> Store | None:
        """One attempt to attach, which leaves nothing behind if it fails; None to try again."""
        with ExitStack() as undo:
            held = lease.open_living(name, undo)
            opened = None if held.is_locked_whole() else segment.open_segment(name, undo)
            if opened is None:
                return None
            fd, native = opened
            if native.closed:
                raise ServerClosedError(
                    f"Got store {name!r}, whose server was stopped; expected a running one. Start"
                    " it again, once the processes that still use the store have ended."
                )
            tables = segment.tables_of(name, native)
            number = lease.join(name, native, held, role)
            if number is None:
                return None
            undo.callback(native.participant_clear, number)
            # The server may have removed, or another replaced, either file since it was opened. A
            # segment that has its name now had it when the lease was looked at, and the two belong
            # together while both have theirs; so the order of these two looks matters.
            if not held.is_current() or not segment.is_current(fd, segment.segment_name(name)):
                return None
            store = cls(name, number, tables, held, fd, native)
            record(store)
            undo.pop_all()
            return store

    @staticmethod
    def find_by_port(port: int) -> str | None:
        """Returns the name of this user's store that has this port, None if there is none.

        Does not attach. A store whose server lives goes before one that only clients still use;
        one that nobody uses does not count.

        Raises:
            InvalidArgumentError: The port is not 1 to 65535.
            ArgumentTypeError: The port is not an int.
        """
        port = _checked_port(port)
        if port == 0:
            raise InvalidArgumentError(
                "Got port 0; expected the port of a server, 1 to 65535. Use server.port."
            )
        with guard():
            found = ports.stores_on(port, _port_if_ours)
        return min((not served, name) for name, served in found)[1] if found else None


def registered(name: str) -> Store | None:
    """Returns this process's store of that name, unless its files were removed meanwhile."""
    found = attached(name)
    return found if isinstance(found, Store) else None


def _checked_port(port: Any) -> int:
    number = checked_int("port", port)
    if not 0 <= number <= _MAX_PORT:
        raise InvalidArgumentError(
            f"Got port {number}; expected 0 to {_MAX_PORT}. Give 0 for none."
        )
    return number


def _port_if_ours(name: str) -> tuple[int, bool] | None:
    """The port of a store that this process is attached to, and whether its server lives."""
    store = registered(name)
    return None if store is None else (store._native.port, store._lives(0))


def _check_port_is_free(name: str, port: int) -> None:
    others = ports.stores_on(port, _port_if_ours) if port else []
    taken = [other for other, served in others if served and other != name]
    if taken:
        raise StoreExistsError(
            f"Got port {port} for store {name!r}, which the living server of store {taken[0]!r}"
            " has; expected a port of its own. Stop that server, or use another port or none."
        )


def _remove_stale_segment(name: str) -> None:
    """Removes what a dead process left; the caller holds the whole lease."""
    shared_name = segment.segment_name(name)
    try:
        status = os.lstat(segment.path_of(shared_name))
    except FileNotFoundError:
        segment.forget_file(shared_name)
        return
    segment.check_owner(shared_name, status)
    _log.warning("replacing store %r, which was left behind by a process that died", name)
    segment.remove(shared_name)
    segment.forget_file(shared_name)
