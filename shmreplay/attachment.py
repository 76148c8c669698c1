"""What a process has of a store that it is attached to, from the first reference to the last.

A process has one attachment for each store, however many servers and clients it has: they share it
and count their references. What is attached at all is under one lock, as are all leases. How a
store is made, found, opened or taken over is in ``store.py``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Self

from shmreplay import lease, segment, store_file
from shmreplay._native import Store as NativeStore
from shmreplay._native import hold_ask_back, note_fork, sessions
from shmreplay.errors import (
    ForkedHandleError,
    InvalidArgumentError,
    ReverbError,
    ServerClosedError,
    StoreExistsError,
)
from shmreplay.lease import Lease, Participant
from shmreplay.limits import CHECKPOINT_YIELD_S
from shmreplay.table import TableConfig

__all__ = ["Attachment", "attached", "guard", "record"]

# Between looks whether a checkpoint gave up.
_PAUSE_S: Final = 0.001

_log = logging.getLogger(__name__)


class Attachment:
    """This process's references to one store, and what it may do with them. Thread-safe."""

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

    def resign(self) -> None:
        """Undoes ``take_over``: the store stays as it is, again without a server.

        The caller still releases the store.
        """
        with _lock:
            self._serves = False
            if self._number != 0:  # else its place goes with the last reference
                self._native.participant_clear(0)
                self._lease.unlock(0)

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

    def retain(self) -> Self:
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
            time.sleep(_PAUSE_S)
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
_attached: list[Attachment] = []
_by_name: dict[str, Attachment] = {}


def guard() -> AbstractContextManager[Any]:
    """Keeps other threads of this process from opening and leaving stores, and so from leases."""
    return _lock


def record(attachment: Attachment) -> None:
    """Makes an attachment known to this process; the caller has `guard`."""
    _attached.append(attachment)
    _by_name[attachment._name] = attachment


def attached(name: str) -> Attachment | None:
    """Returns what this process has of that store, unless its files were removed meanwhile."""
    store = _by_name.get(name)
    if store is not None and not store._is_current():
        del _by_name[name]
        return None
    return store


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
