"""The lease of a store: the kernel's proof of which of its participants live.

The lease of store ``name`` is ``/shmreplay.<uid>.<name>.lease``, a file without data. A participant
holds a POSIX record lock on its byte of it. The kernel frees that lock however the process dies; it
is not inherited over fork, and neither a reused process id nor a zombie can be mistaken for its
holder.

Such a lock has one trap: it is gone as soon as its process closes *any* descriptor of the file.
So a process opens a lease once, never maps or duplicates it, and never opens one that it holds.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import posix_ipc

from shmreplay import segment
from shmreplay._native import Store as NativeStore
from shmreplay.errors import ArenaFullError, ReverbError, StoreExistsError, StoreNotFoundError

__all__ = [
    "Lease",
    "Participant",
    "close_inherited",
    "describe",
    "exists",
    "identity",
    "join",
    "lock_new",
    "lock_server",
    "open_living",
    "take_entry_of_server",
]

_log = logging.getLogger(__name__)

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("@hhqqi0q")
# No participant has this byte: it is locked only as part of a lock on the whole file.
_BEYOND_ALL: Final = 1 << 40
_DYING_WAIT_S: Final = 5.0
_DYING_PAUSE_S: Final = 0.01

# The leases that this process has open, in order never to open one twice: (device, inode) to
# descriptor.
_held: dict[tuple[int, int], int] = {}


class Participant(NamedTuple):
    """A process that is attached to a store, or died while it was."""

    number: int
    """Its byte of the lease; 0 is the server's."""
    pid: int
    start_ticks: int
    """Its start in clock ticks since boot, which tells it from others that had the same id."""
    pid_namespace: int
    """Inode of the pid namespace in which ``pid`` means something."""
    attached_ns: int
    """When it attached: nanoseconds since the epoch."""
    role: str
    alive: bool
    """Whether it holds its byte of the lease."""


def describe(participants: Sequence[Participant]) -> str:
    """Says for a message who of the participants lives, and whether the server is among them."""
    own = identity()[2]
    alive = [each for each in participants if each.alive]
    who = ", ".join(
        f"{each.pid} ({each.role}"
        + (")" if each.pid_namespace in (own, 0) else ", in another pid namespace)")
        for each in alive
    )
    served = any(each.number == 0 for each in alive)
    return f"living processes: {who or 'none'}" + ("" if served else "; the server is dead")


def identity() -> tuple[int, int, int]:
    """Returns this process's id, start time in clock ticks since boot, and pid namespace.

    They are for people to read: who lives is decided by the lease. So where /proc is not mounted
    the last two are 0.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            after_command = file.read().rpartition(")")[2].split()
        return os.getpid(), int(after_command[19]), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.getpid(), 0, 0


class Lease:
    """The open lease of one store. Not thread-safe; the callers hold a lock of their own."""

    def __init__(self, name: str, fd: int) -> None:
        """Takes over ``fd``; use ``open``."""
        status = os.fstat(fd)
        self._name = name
        self._fd = fd
        self._inode = (status.st_dev, status.st_ino)
        _held[self._inode] = fd

    @classmethod
    def open(cls, store_name: str, *, create: bool = False) -> Lease:
        """Opens the lease of a store, or creates it.

        Raises:
            FileNotFoundError: There is none, and it should not be created.
            StoreExistsError: This process has it open already.
            StorePermissionError: It is not a file that only this user can have written.
        """
        name = segment.segment_name(store_name) + segment.LEASE_SUFFIX
        try:
            found = os.lstat(segment.path_of(name))
            if (found.st_dev, found.st_ino) in _held:
                raise StoreExistsError(
                    f"Got the store name {store_name!r}, to which this process (pid"
                    f" {os.getpid()}) is still attached although its segment was removed; expected"
                    " one that it has left. Close"
                    " that store's server and clients first, or use another name."
                )
        except FileNotFoundError:
            if not create:
                raise
        fd = segment.open_shared(name, posix_ipc.O_CREAT if create else 0)
        try:
            segment.check_owner(name, os.fstat(fd))
            return cls(name, fd)
        except BaseException:
            os.close(fd)
            raise

    def is_current(self) -> bool:
        """Returns whether the lease's name still names this file."""
        return segment.is_current(self._fd, self._name)

    def try_lock(self, number: int) -> bool:
        """Locks a participant's byte; False if another process has it."""
        return self._try_lock(number, 1)

    def try_lock_all(self) -> bool:
        """Locks every byte: afterwards nobody is attached and nobody can join."""
        return self._try_lock(0, 0)

    def _try_lock(self, start: int, length: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: both mean "taken"
            return False
        return True

    def unlock(self, number: int) -> None:
        """Gives a participant's byte back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    def unlock_all_but_first(self) -> None:
        """Lets others join: keeps only byte 0 of what ``try_lock_all`` took."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 0, 1)

    def holder(self, number: int) -> int | None:
        """Returns the process id of the *other* process that holds a byte, None if none does.

        The id is 0 where the process lives in a pid namespace that cannot be seen from here.
        """
        return self._holder(number, 1)

    def is_anybody_there(self) -> bool:
        """Returns whether any other process holds any byte."""
        return self._holder(0, 0) is not None

    def is_locked_whole(self) -> bool:
        """Returns whether another process is creating the store just now."""
        return self._holder(_BEYOND_ALL, 1) is not None

    def holders(self) -> list[str]:
        """Returns role and process id of each other process that holds a byte, for messages."""
        pids = [self.holder(number) for number in range(segment.MAX_PARTICIPANTS)]
        # A process that is creating the store holds all bytes.
        clients = {pid for pid in pids[1:] if pid is not None and pid != pids[0]}
        server = [] if pids[0] is None else [("server", pids[0])]
        return [
            f"{role} {pid}" if pid else f"{role} in another pid namespace"
            for role, pid in [*server, *(("client", pid) for pid in sorted(clients))]
        ]

    def only_dying(self) -> bool:
        """Returns whether all who hold a byte were killed and are not gone yet.

        The last thread of a process gives its locks up; until then /proc calls it a zombie.
        """
        pids = {self.holder(number) for number in range(segment.MAX_PARTICIPANTS)} - {None}
        return bool(pids) and all(pid is not None and _is_dying(pid) for pid in pids)

    def _holder(self, start: int, length: int) -> int | None:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, request))
        return None if kind == fcntl.F_UNLCK else max(int(pid), 0)

    def remove(self) -> None:
        """Removes the lease's name if it still names this file."""
        if self.is_current():
            segment.remove(self._name)

    def close(self) -> None:
        """Closes the file, which gives up every byte that this process holds."""
        del _held[self._inode]
        os.close(self._fd)


# --- creating and joining -----------------------------------------------------------------------


def lock_server(store_name: str, undo: ExitStack) -> Lease | None:
    """Opens a lease and locks the server's byte; None if there is no lease, or it was exchanged.

    Args:
        store_name: Of the store.
        undo: Gets what closes the lease again.

    Raises:
        StoreExistsError: Another process holds that byte.
        StorePermissionError: It is not a file that only this user can have written.
    """
    try:
        held = Lease.open(store_name)
    except FileNotFoundError:
        return None
    with ExitStack() as failing:
        failing.callback(held.close)
        locked = held.try_lock(0)
        if locked and held.is_current():
            undo.callback(failing.pop_all().close)
            return held
        gone = locked or not held.is_current()
        holders = held.holders()
    if gone:
        return None
    raise exists(store_name, holders, served=True)


def take_entry_of_server(native: NativeStore, role: str) -> None:
    """Takes entry 0, which its last owner left when it died; the caller has locked byte 0.

    Raises:
        TableCorruptedError: What the dead server held is damaged.
    """
    who = identity()
    if not native.participant_set(0, *who, role):
        native.participant_reclaim(0)
        native.participant_set(0, *who, role)


def _is_dying(pid: int) -> bool:
    """Whether a process is a zombie, or on the way to be one; False where that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


def lock_new(store_name: str, undo: ExitStack) -> Lease:
    """Opens or creates a lease and locks all of it, so that nobody lives and nobody can join.

    Waits a moment for those that were killed and are not gone yet.

    Args:
        store_name: Of the store.
        undo: Gets what removes the lease again.

    Raises:
        StoreExistsError: Some participant lives.
        StorePermissionError: The lease's name is taken by a file that is not ours.
    """
    deadline = time.monotonic() + _DYING_WAIT_S
    while True:
        held = Lease.open(store_name, create=True)
        with ExitStack() as failing:
            failing.callback(held.close)
            locked = held.try_lock_all()
            # Its owner may have removed the file between our opening and locking it.
            if locked and held.is_current():
                undo.callback(failing.pop_all().close)
                undo.callback(held.remove)
                return held
            taken = held.is_current()
            dying = held.only_dying()
            holders = held.holders()
        if taken and dying and time.monotonic() < deadline:
            time.sleep(_DYING_PAUSE_S)
        elif taken:
            served = not holders or holders[0].startswith("server")
            raise exists(store_name, holders, served=served)


def exists(store_name: str, holders: Sequence[str], *, served: bool) -> StoreExistsError:
    """The error for the name of a store that living processes use.

    Args:
        store_name: The name.
        holders: Who they are, as ``Lease.holders`` says it.
        served: Whether its server is one of them.
    """
    who = ", ".join(holders) or "one that has just ended"
    remedy = (
        ""
        if served
        else " Its server is dead: to go on with all that is in it, take it over with"
        f" Server(tables, name={store_name!r}, recover=True). To be rid of it, end those processes"
        " and run `shmreplay clean`, or make the server again."
    )
    return StoreExistsError(
        f"Got the store name {store_name!r}, which is in use by living processes ({who}); expected"
        " one that nobody is attached to. Stop those processes, use another name, or make a"
        f" Client('shm://{store_name}') to use that store.{remedy}"
    )


def open_living(store_name: str, undo: ExitStack) -> Lease:
    """Opens the lease of a store that a living process is attached to.

    Args:
        store_name: Of the store.
        undo: Gets what closes the lease again.

    Raises:
        StoreNotFoundError: There is no lease, or no other process has a byte of it.
        StoreExistsError: This process has it open already.
        StorePermissionError: It is not a file that only this user can have written.
    """
    try:
        held = Lease.open(store_name)
    except FileNotFoundError as error:
        raise _not_found(store_name, "there is none") from error
    undo.callback(held.close)
    if not held.is_anybody_there():
        raise _not_found(
            store_name,
            "all processes that used it have died (a server takes over what is in it with"
            " recover=True, `shmreplay dump` reads it out)",
        )
    return held


def _not_found(store_name: str, why: str) -> StoreNotFoundError:
    names = segment.store_names()
    listed = ", ".join(repr(other) for other in names) if names else "none"
    return StoreNotFoundError(
        f"Got the store name {store_name!r}, but {why}; expected a store of user {os.geteuid()}"
        f" that a living process is attached to. {segment.DIRECTORY} has: {listed}. Start its"
        " server, or use the name of another."
    )


def join(store_name: str, native: NativeStore, held: Lease, role: str) -> int | None:
    """Locks the first free byte and takes the participant entry that belongs to it.

    Args:
        store_name: Of the store, for the message.
        native: The store.
        held: Its lease.
        role: What this process is, for people.

    Returns:
        The number; None if the store is just being replaced, so that the caller should look anew.

    Raises:
        ArenaFullError: All entries are in use.
    """
    who = identity()
    for number in range(1, native.n_participants):
        if not held.try_lock(number):
            continue
        if native.participant_set(number, *who, role):
            return number
        # An entry in use under a free byte is one whose owner died.
        try:
            native.participant_reclaim(number)
        except ReverbError as error:  # what it held is damaged: another entry will do
            _log.warning("entry %d of store %r stays out of use: %s", number, store_name, error)
            held.unlock(number)
            continue
        if native.participant_set(number, *who, role):
            return number
        held.unlock(number)
    if held.is_locked_whole():
        return None
    raise ArenaFullError(
        f"Got store {store_name!r} with all of its {native.n_participants - 1} places for processes"
        " taken; expected a free one. Stop a process that uses it, or give the server more"
        f" capacity: there is a place for each {segment.BYTES_A_PARTICIPANT} bytes, but at least"
        f" {segment.MIN_PARTICIPANTS} and at most {segment.MAX_PARTICIPANTS}."
    )


def close_inherited() -> None:
    """Closes, in a forked child, the leases that its parent had open; the parent keeps its locks.

    The child owns no lock yet, so there is none that it could lose by this.
    """
    for fd in _held.values():
        os.close(fd)
    _held.clear()
