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

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

from shmreplay import lease, ports, segment, store_file
from shmreplay._native import Store as NativeStore
from shmreplay._native import hold_ask_back, note_fork, sessions
from shmreplay.errors import (
    DeadlineExceededError,
    ForkedHandleError,
    InvalidArgumentError,
    ReverbError,
    ServerClosedError,
    StoreExistsError,
)
from shmreplay.lease import Lease, Participant
from shmreplay.limits import CHECKPOINT_YIELD_S, checked_int
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


class Store:
    """This process's attachment to one store. Made by ``create`` and ``open``; thread-safe.

    Whoever gets a store from ``create`` or ``open``, or calls ``retain``, calls ``release`` once,
    after the sessions that it opened are closed and its threads no longer use ``native``.
    """

    def __init__(
        self,
        name: str,
        number: int,
        tables: Sequence[TableConfig],
        held_lease: Lease,
        fd: int,
        native: NativeStore,
    ) -> None:
        """Takes over an attachment that is complete; for ``create``, ``open``, ``take_over``."""
        self._name = name
        self._number = number
        # A process that was attached when it took the store over has two entries.
        self._serves = number == 0
        self._tables = list(tables)
        self._lease = held_lease
        self._fd = fd
        store_file.hold(fd)
        self._native = native
        self._pid = os.getpid()
        self._references = 1
        self._forked = False
        # Threads of one process do not exclude each other by record locks.
        self._reclaiming = threading.Lock()
        native.on_full = self._make_room
        native.server_lives = self._server_lives

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
        with _lock:
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
                store = cls(name, 0, tables, held, fd, native)
                _attached.append(store)
                _by_name[name] = store
                undo.pop_all()
            held.unlock_all_but_first()
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
            with _lock:
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
                with _lock:
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
            _attached.append(store)
            _by_name[name] = store
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

    def resign(self) -> None:
        """Undoes ``take_over``: the store stays as it is, again without a server.

        The caller still releases the store.
        """
        with _lock:
            self._serves = False
            if self._number != 0:  # else its place goes with the last reference
                self._native.participant_clear(0)
                self._lease.unlock(0)

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
            _attached.append(store)
            _by_name[name] = store
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
            raise InvalidArgumentError("Got port 0; expected the port of a server, 1 to 65535.")
        with _lock:
            found = ports.stores_on(port, _port_if_ours)
        return min((not served, name) for name, served in found)[1] if found else None

    @property
    def native(self) -> NativeStore:
        """The store in shared memory.

        Raises:
            ForkedHandleError: This process got it from its parent.
            ServerClosedError: It was released.
        """
        self.check_fork()
        if self._references == 0:
            raise self._released()
        return self._native

    @property
    def name(self) -> str:
        """The store's name."""
        return self._name

    @property
    def address(self) -> str:
        """The address by which other processes of this machine open it."""
        return f"shm://{self._name}"

    @property
    def tables(self) -> list[TableConfig]:
        """The settings of its tables, in their order in the store."""
        return list(self._tables)

    @property
    def participant(self) -> int:
        """The number of this process's participant entry, as sessions need it."""
        return self._number

    @property
    def is_creator(self) -> bool:
        """Whether this process is the server: it created the store, or took it over."""
        return self._serves and not self.forked

    @property
    def forked(self) -> bool:
        """Whether this process got the store from its parent, and so must not use it."""
        return self._forked

    def check_fork(self) -> None:
        """Refuses work in a process that got the store from its parent.

        Raises:
            ForkedHandleError: It did.
        """
        if self._forked:
            raise ForkedHandleError(
                f"Got a handle to store {self._name!r} that process {self._pid} opened before it"
                f" forked process {os.getpid()}; expected one that was opened in this process."
                f" Make a new Client({self.address!r}) here."
            )

    def retain(self) -> Store:
        """Counts one more reference, to be given back by ``release``; returns the store itself.

        Raises:
            ForkedHandleError: This process got it from its parent.
            ServerClosedError: The last reference was released already.
        """
        with _lock:
            self.check_fork()
            if self._references == 0:
                raise self._released()
            self._references += 1
            return self

    def release(self) -> None:
        """Gives a reference back; the last one detaches, and unlinks if this is the server.

        Does nothing in a process that got the store from its parent.

        Raises:
            ServerClosedError: The last reference was released already.
        """
        with _lock:
            if self._is_foreign():
                return
            if self._references == 0:
                raise self._released()
            self._references -= 1
            if self._references == 0:
                self._detach()

    def _detach(self) -> None:
        _attached.remove(self)
        if _by_name.get(self._name) is self:
            del _by_name[self._name]
        with ExitStack() as stack:  # in reverse order, each whatever became of the others
            stack.callback(os.close, self._fd)
            stack.callback(self._lease.close)
            stack.callback(self._native.participant_clear, self._number)
            if self._serves:
                stack.callback(self._native.participant_clear, 0)
                stack.callback(self._close_and_unlink)
        self._native.on_full = None
        self._native.server_lives = None

    def unlink(self) -> None:
        """Closes the store for everybody and removes its name; only its server may.

        Whoever is attached keeps the memory until it detaches; the name is free at once. Does
        nothing the second time, or in a process that got the store from its parent.

        Raises:
            InvalidArgumentError: This process is not the store's server.
        """
        with _lock:
            if self._is_foreign():
                return
            if not self._serves:
                raise InvalidArgumentError(
                    f"Got a request to remove store {self._name!r} from process {self._pid}, which"
                    " did not create it; expected one from its server. Stop that instead."
                )
            if self._references > 0:
                self._close_and_unlink()
            if _by_name.get(self._name) is self:
                del _by_name[self._name]

    def _close_and_unlink(self) -> None:
        self._native.close_server()
        # Somebody may have removed the files by hand, and others made new ones.
        if self._is_current():
            segment.remove(segment.segment_name(self._name))
        if self._lease.is_current():
            segment.forget_file(segment.segment_name(self._name))
        self._lease.remove()

    def participants(self) -> list[Participant]:
        """Returns who is attached, and who died while it was and has not been cleared away.

        Raises:
            ForkedHandleError: This process got the store from its parent.
            ServerClosedError: It was released.
        """
        with _lock:
            return [
                Participant._make((*entry, self._lives(entry[0])))
                for entry in self.native.participants()
            ]

    def _is_ours(self, number: int) -> bool:
        return number == self._number or (number == 0 and self._serves)

    def _lives(self, number: int) -> bool:
        return self._is_ours(number) or self._lease.holder(number) is not None

    def _make_room(self) -> bool:
        """Gives back what the dead, or a checkpoint, held, for an allocation without room."""
        try:
            return self.reclaim_dead() > 0 or self._end_checkpoint()
        except (ReverbError, OSError) as error:
            _log.warning("a dead process held what cannot be given back: %s", error)
            return False

    def _end_checkpoint(self) -> bool:
        """Makes a checkpoint that is being written give up; False if there is none."""
        if not hold_ask_back(self._native):
            return False
        end = time.monotonic() + CHECKPOINT_YIELD_S
        while hold_ask_back(self._native) and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE_S)
        return True

    def _server_lives(self) -> bool:
        with _lock:
            return self._references == 0 or self._lives(0)

    def reclaim_dead(self) -> int:
        """Frees the sessions of participants that died.

        A server does so each second, and every participant whose allocation found no room.

        Returns:
            How many sessions were freed.

        Raises:
            ForkedHandleError: This process got the store from its parent.
            ServerClosedError: It was released.
            TableCorruptedError: A dead participant's references are damaged.
        """
        self.retain()  # the lease stays open meanwhile
        try:
            with self._reclaiming:
                return sum(
                    self._reclaim(entry[0])
                    for entry in self._native.participants()
                    if not self._is_ours(entry[0])
                )
        finally:
            self.release()

    def _reclaim(self, number: int) -> int:
        if not self._lease.try_lock(number):
            return 0
        try:
            return self._native.participant_reclaim(number)
        finally:
            self._lease.unlock(number)

    def _exists(self) -> StoreExistsError:
        holders = [*self._lease.holders(), f"this one, {os.getpid()}"]
        return lease.exists(self._name, holders, served=self._lives(0))

    def _is_foreign(self) -> bool:
        # The process id also tells a child that was forked behind Python's back.
        return self._forked or self._pid != os.getpid()

    def _is_current(self) -> bool:
        return segment.is_current(self._fd, segment.segment_name(self._name))

    def _released(self) -> ServerClosedError:
        return ServerClosedError(
            f"Got a handle to store {self._name!r} that was closed; expected one in use. Make a"
            " new Client or Server."
        )

    def __repr__(self) -> str:
        """Returns name and participant number."""
        return f"Store({self._name!r}, participant={self._number})"


# What this process is attached to; under `_lock`, as are all leases. By name only those that still
# have their name.
_lock = threading.RLock()  # reentrant, as finalisers release stores whenever they run
_attached: list[Store] = []
_by_name: dict[str, Store] = {}


def guard() -> AbstractContextManager[Any]:
    """Keeps other threads of this process from opening and leaving stores, and so from leases."""
    return _lock


def registered(name: str) -> Store | None:
    """Returns this process's store of that name, unless its files were removed meanwhile."""
    store = _by_name.get(name)
    if store is not None and not store._is_current():
        del _by_name[name]
        return None
    return store


# --- creating -----------------------------------------------------------------------------------


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


# --- forking and exiting ------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    """Cuts the child off from its parent's stores; their mappings stay, for views of them."""
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    for store in _attached:
        store._forked = True
    _attached.clear()
    _by_name.clear()
    lease.close_inherited()
    note_fork()


def _at_exit() -> None:
    """Removes the stores that this process serves and did not stop, and leaves all others.

    Of one in which it has open sessions, such as those of a writer, it stays a participant in the
    books: threads may still work in them, and whoever sees that it has died frees both.
    """
    with _lock:
        for store in _attached.copy():
            if store._is_foreign():
                continue
            if store._serves:
                store._close_and_unlink()
            elif all(entry[0] != store._number for entry in sessions(store._native)):
                store._references = 0
                store._detach()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
