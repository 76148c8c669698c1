"""The segment of a store: a file in /dev/shm, its name, its permissions and what is laid out in it.

The segment of store ``name`` is ``/shmreplay.<uid>.<name>``, or where its pointer says
(``store_file.py``). Beside it lies the store's lease, see
``lease.py``. Both are made by ``shm_open``, which follows no link at the end of a name and closes
on exec, with rights for this user alone; before anything in such a file is believed, its owner and
mode are looked at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import posix_ipc

from shmreplay import store_file
from shmreplay._native import Store as NativeStore
from shmreplay._native import store_bytes
from shmreplay.errors import (
    ArenaFullError,
    ArgumentTypeError,
    InvalidArgumentError,
    StorePermissionError,
    TableCorruptedError,
)
from shmreplay.limits import MAX_STORE_NAME_BYTES, checked_int
from shmreplay.store_file import POINTER_SUFFIX
from shmreplay.table import TableConfig

__all__ = [
    "BYTES_A_PARTICIPANT",
    "DIRECTORY",
    "LEASE_SUFFIX",
    "MAX_PARTICIPANTS",
    "MIN_PARTICIPANTS",
    "check_name",
    "check_owner",
    "checked_capacity",
    "file_of",
    "forget_file",
    "is_current",
    "lay_out",
    "map_segment",
    "name_at",
    "open_segment",
    "open_shared",
    "path_of",
    "remove",
    "segment_name",
    "store_names",
    "tables_of",
]

DIRECTORY: Final = "/dev/shm"
LEASE_SUFFIX: Final = ".lease"

BYTES_A_PARTICIPANT: Final = 256 << 10
MIN_PARTICIPANTS: Final = 32
MAX_PARTICIPANTS: Final = 1024
"""Participants have fixed entries, as many as the capacity has so many bytes, within bounds."""

_BYTES_A_SESSION: Final = 64 << 10
_MIN_SESSIONS: Final = 128
_MAX_SESSIONS: Final = 4096

# More arenas would divide small stores too finely, and writers rarely meet on eight locks.
_MAX_ARENAS: Final = 8
# Below this the fixed part of a store leaves no room for data.
_MIN_CAPACITY: Final = 1 << 20
# Each arena has addresses for the whole capacity, and a process has 2**47.
_MAX_CAPACITY: Final = 1 << 43
_MIN_DEFAULT_CAPACITY: Final = 8 << 20

_MODE: Final = 0o600
_ALLOWED: Final = re.compile(r"[A-Za-z0-9._-]+")


def check_name(name: Any) -> None:
    """Checks that ``name`` can name a store.

    Raises:
        ArgumentTypeError: It is not a str.
        InvalidArgumentError: It is empty, too long, or has characters that it must not have.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"Got the store name {name!r} of type {type(name).__name__}; expected a str. Give its"
            " name as text."
        )
    if (
        not _ALLOWED.fullmatch(name)
        or len(name) > MAX_STORE_NAME_BYTES
        or name.endswith((LEASE_SUFFIX, POINTER_SUFFIX))
    ):
        raise InvalidArgumentError(
            f"Got the store name {name!r}; expected 1 to {MAX_STORE_NAME_BYTES} of the characters"
            f" A-Z a-z 0-9 . _ - and neither {LEASE_SUFFIX!r} nor {POINTER_SUFFIX!r} at the end."
            " Choose another name."
        )


def segment_name(name: str) -> str:
    """Returns the name that store ``name`` of this user has for ``shm_open``."""
    return f"/shmreplay.{os.geteuid()}.{name}"


def path_of(shared_name: str) -> str:
    """Returns the path of what ``shm_open`` knows as ``shared_name``, or of a segment elsewhere.

    Raises:
        StorePermissionError: What says so is not a file that only this user can have written.
    """
    if shared_name.endswith(LEASE_SUFFIX):
        return DIRECTORY + shared_name
    return file_of(shared_name) or DIRECTORY + shared_name


def file_of(shared_name: str) -> str | None:
    """Returns the path of a segment that is not in /dev/shm, None for one that is.

    Raises:
        StorePermissionError: What says so is not a file that only this user can have written.
    """
    return store_file.read_pointer(DIRECTORY + shared_name + POINTER_SUFFIX)


def has_pointer(shared_name: str) -> bool:
    """Returns whether something says where a segment is, be it that it leads nowhere.

    Whoever is killed while it writes one leaves an empty one.
    """
    return os.path.lexists(DIRECTORY + shared_name + POINTER_SUFFIX)


def store_names() -> list[str]:
    """Returns the names of this user's stores, the dead included, sorted."""
    prefix = segment_name("")[1:]
    found = (entry for entry in os.listdir(DIRECTORY) if entry.startswith(prefix))
    names = {
        entry[len(prefix) :].removesuffix(POINTER_SUFFIX)
        for entry in found
        if not entry.endswith(LEASE_SUFFIX)
    }
    return sorted(names)


def name_at(path: str) -> str | None:
    """Returns the name of this user's store whose segment is at this path, if there is one."""
    found = (name for name in store_names() if file_of(segment_name(name)) == path)
    return next(found, None)


def open_shared(shared_name: str, flags: int = 0, size: int = 0) -> int:
    """Opens or creates a shared-memory file for reading and writing, without following links.

    Args:
        shared_name: As for ``shm_open``.
        flags: 0 to open what is there, ``posix_ipc.O_CREAT`` or ``posix_ipc.O_CREX``.
        size: Virtual size in bytes of what is created; commits no memory.

    Returns:
        A file descriptor, closed on exec, which the caller owns.

    Raises:
        FileNotFoundError: There is no such file.
        FileExistsError: It should be created and is there.
        StorePermissionError: It belongs to somebody else, or is no shared-memory file.
        InvalidArgumentError: The file cannot be as large as ``size``.
    """
    path = path_of(shared_name)
    if path != DIRECTORY + shared_name:
        if flags & posix_ipc.O_CREAT:
            return store_file.create(path, size)
        return store_file.open_existing(path)
    try:
        return int(posix_ipc.SharedMemory(shared_name, flags, _MODE, size).fd)
    except posix_ipc.ExistentialError as error:
        if flags & posix_ipc.O_EXCL:
            raise FileExistsError(errno.EEXIST, str(error), path_of(shared_name)) from error
        raise FileNotFoundError(errno.ENOENT, str(error), path_of(shared_name)) from error
    except posix_ipc.PermissionsError as error:
        raise _not_ours(shared_name, os.lstat(path_of(shared_name))) from error
    except (OSError, ValueError) as error:
        # A link gives ELOOP; for a directory, and for a size that is too large, there is only a
        # ValueError that does not say which.
        try:
            found = os.lstat(path_of(shared_name))
        except FileNotFoundError:
            found = None
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise _not_ours(shared_name, found) from error
        if isinstance(error, OSError):
            raise
        raise InvalidArgumentError(
            f"Got a store of {size} bytes of address space, which cannot be created as"
            f" {path_of(shared_name)} ({error}); expected less. Give a smaller capacity, or raise"
            " the limit on the size of files (ulimit -f)."
        ) from error


def check_owner(shared_name: str, status: os.stat_result) -> None:
    """Checks that a file is one that only this user can have written.

    Raises:
        StorePermissionError: It belongs to another user, others have rights to it, or it is not a
            regular file.
    """
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not ours or not stat.S_ISREG(status.st_mode):
        raise _not_ours(shared_name, status)


def _not_ours(shared_name: str, status: os.stat_result) -> StorePermissionError:
    return StorePermissionError(
        f"Got {path_of(shared_name)}, which belongs to user {status.st_uid} and has mode"
        f" {stat.filemode(status.st_mode)} ({stat.S_IMODE(status.st_mode):#o}); expected a regular"
        f" file of user {os.geteuid()} with mode {_MODE:#o}, as only then nobody else can have"
        " written it. Find out who made it, remove it, or use another store name."
    )


def is_current(fd: int, shared_name: str) -> bool:
    """Returns whether ``shared_name`` still names the open file ``fd``."""
    try:
        named = os.lstat(path_of(shared_name))
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def remove(shared_name: str) -> None:
    """Removes a name, and what leads to it; it is no error if somebody else did that already."""
    path = path_of(shared_name)
    if path != DIRECTORY + shared_name:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        forget_file(shared_name)
        return
    try:
        posix_ipc.unlink_shared_memory(shared_name)
    except posix_ipc.ExistentialError:
        return


def forget_file(shared_name: str) -> None:
    """Removes the pointer to a segment that is not in /dev/shm, if any; by the lease's holder."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(DIRECTORY + shared_name + POINTER_SUFFIX)


def checked_capacity(capacity: Any, path: str | None = None) -> int:
    """Returns the capacity of a new store in bytes; for None, half of what is free.

    Args:
        capacity: What was asked for.
        path: Of its file, if it is not to be in /dev/shm.

    Raises:
        InvalidArgumentError: It is too small or too large.
        ArgumentTypeError: It is not an int.
    """
    if capacity is None:
        return max(_MIN_DEFAULT_CAPACITY, min(_free_bytes(path) // 2, _MAX_CAPACITY))
    wanted = checked_int("capacity", capacity)
    if not _MIN_CAPACITY <= wanted <= _MAX_CAPACITY:
        raise InvalidArgumentError(
            f"Got a capacity of {wanted} bytes; expected {_MIN_CAPACITY} to {_MAX_CAPACITY}."
            f" Leave it out for half of what {_place(path)} has free, {_free_bytes(path)} bytes."
        )
    return wanted


def _place(path: str | None) -> str:
    return DIRECTORY if path is None else os.path.dirname(path)


def _free_bytes(path: str | None) -> int:
    status = os.statvfs(_place(path))
    return status.f_bavail * status.f_frsize


def _clamp(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


def lay_out(
    name: str,
    tables: Sequence[TableConfig],
    capacity: int,
    undo: ExitStack,
    keys: Sequence[tuple[int, int]] | None = None,
    path: str | None = None,
) -> tuple[int, NativeStore]:
    """Creates the segment of store ``name`` and lays the store out in it.

    Args:
        name: Of the store; the caller has locked its lease.
        tables: Its tables.
        capacity: Bytes of memory that it may use.
        undo: Gets what removes the segment again.
        keys: For keys of another store: bits of a slot's number in those of each table, and slots
            at least; 0 for any.
        path: Of its file, if it is not to be in /dev/shm.

    Returns:
        The segment's descriptor, and the store mapped.

    Raises:
        FileExistsError: There is something of that name.
        ArenaFullError: /dev/shm, or the capacity, has no room for an empty store.
        InvalidArgumentError: The core does not accept the tables, or the file would be too large.
    """
    segment = segment_name(name)
    config = json.dumps([table.to_json() for table in tables]).encode()
    n_arenas = _clamp(os.cpu_count() or 1, 1, _MAX_ARENAS)
    n_participants = _clamp(capacity // BYTES_A_PARTICIPANT, MIN_PARTICIPANTS, MAX_PARTICIPANTS)
    n_sessions = _clamp(capacity // _BYTES_A_SESSION, _MIN_SESSIONS, _MAX_SESSIONS)
    shape = (capacity, n_arenas, n_participants, n_sessions)
    nbytes = store_bytes(*shape, len(config), tables, keys)
    if path is not None:
        store_file.clear_the_way(path)
        while (stale := name_at(path)) is not None:  # of a dead store that was there
            forget_file(segment_name(stale))
        store_file.write_pointer(DIRECTORY + segment + POINTER_SUFFIX, path)
        undo.callback(forget_file, segment)
    fd = open_shared(segment, posix_ipc.O_CREX, nbytes)
    undo.callback(os.close, fd)
    undo.callback(remove, segment)
    native = NativeStore(fd, nbytes)
    generation = 1 + secrets.randbelow(2**64 - 1)
    seeds = [secrets.randbits(64) if table.seed is None else table.seed for table in tables]
    try:
        native.format(generation, *shape, config, tables, seeds, keys)
    except ArenaFullError as error:
        raise ArenaFullError(
            f"Got no room for an empty store {name!r} with a capacity of {capacity} bytes where"
            f" {_place(path)} has {_free_bytes(path)} bytes free: {error} Expected room for"
            " it: free some (`shmreplay clean`), or give another capacity="
        ) from error
    return fd, native


def map_segment(segment: str, fd: int) -> NativeStore | None:
    """Maps an open segment after a look at its owner and its header; None: not laid out yet.

    Raises:
        StorePermissionError: It is not a file that only this user can have written.
        VersionMismatchError: It was made by a build with another layout.
        TableCorruptedError: Its header is damaged.
    """
    status = os.fstat(fd)
    check_owner(segment, status)
    # The magic word is the first and is written last. It is read, and not looked at in the
    # mapping, as there the page of an unfinished segment might not have memory.
    if not any(os.pread(fd, 8, 0)):
        return None
    native = NativeStore(fd, status.st_size)
    if not native.attach():
        raise TableCorruptedError(
            f"Got {path_of(segment)}, which does not begin as a store does; expected the magic"
            " word of a store. Stop the processes that use it, and remove the file."
        )
    return native


def open_segment(name: str, undo: ExitStack) -> tuple[int, NativeStore] | None:
    """Opens and maps a store's segment; None if it is not laid out or has gone.

    Args:
        name: Of the store.
        undo: Gets what closes the descriptor again.

    Raises:
        StorePermissionError: It is not a file that only this user can have written.
        VersionMismatchError: It was made by a build with another layout.
        TableCorruptedError: Its header is damaged.
    """
    shared_name = segment_name(name)
    try:
        fd = open_shared(shared_name)
    except FileNotFoundError:  # being created or removed: the lease was there
        return None
    undo.callback(os.close, fd)
    native = map_segment(shared_name, fd)
    return None if native is None else (fd, native)


def tables_of(name: str, native: NativeStore) -> list[TableConfig]:
    """Returns the settings of a store's tables.

    Raises:
        TableCorruptedError: They are damaged.
    """
    try:
        texts = json.loads(native.config_json)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidArgumentError(
                "Got other JSON; expected a list of texts. Start the server anew."
            )
        return [TableConfig.from_json(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise TableCorruptedError(
            f"Got store {name!r} with damaged settings of its tables ({error}); expected them as"
            " they were written. Something wrote"
            " over its memory: stop the processes that use it, and start its server anew."
        ) from error
