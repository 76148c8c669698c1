"""Stores in a file of the user's choice: where it is, and that only its owner replaces it.

The segment of such a store is not in /dev/shm but at ``path``. In /dev/shm lies a pointer instead,
``shmreplay.<uid>.<name>.path``, mode 0600, with that path as its text: so the store is found by its
name as any other, and its lease is where all leases are. The pointer is written before the segment
and removed after it, both by whoever holds the lease.

Whoever is attached holds a shared ``flock`` on the segment. Who finds a store at the path that the
pointer of its own name does not lead to, as after a reboot, replaces it only where nobody does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Any, Final

from shmreplay.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    StoreExistsError,
    StorePermissionError,
)

__all__ = [
    "POINTER_SUFFIX",
    "checked_path",
    "clear_the_way",
    "create",
    "hold",
    "is_held",
    "open_existing",
    "read_pointer",
    "write_pointer",
]

POINTER_SUFFIX: Final = ".path"

_MAGIC: Final = b"SREPLAY1"
_MODE: Final = 0o600
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST: Final = 4096


def checked_path(path: Any) -> str:
    """Returns the absolute path of a store's file, links in its directory resolved.

    Raises:
        ArgumentTypeError: It is no path.
        InvalidArgumentError: Its directory is not there, or it names none of a file.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(
            f"Got the path {path!r} of type {type(path).__name__}; expected a str or a Path. Give "
            "it as text."
        )
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text or "\n" in text:
        raise InvalidArgumentError(
            f"Got the path {path!r}; expected text of one line. Choose another."
        )
    directory, name = os.path.split(os.path.abspath(text))
    if (
        not text
        or not name
        or not os.path.isdir(directory)
        or len(text) > _LONGEST
        or text.endswith("/")
    ):
        raise InvalidArgumentError(
            f"Got the path {text!r} for a store; expected that of a file in a directory that is"
            " there. Make the directory first."
        )
    return os.path.join(os.path.realpath(directory), name)


def _not_ours(path: str, status: os.stat_result) -> StorePermissionError:
    return StorePermissionError(
        f"Got {path}, which belongs to user {status.st_uid} and has mode"
        f" {stat.filemode(status.st_mode)}; expected a regular file of user {os.geteuid()} with"
        f" mode {_MODE:#o}. Use another path, or remove what is there if nobody needs it."
    )


def _check_ours(path: str, status: os.stat_result) -> None:
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not ours or not stat.S_ISREG(status.st_mode):
        raise _not_ours(path, status)


def open_existing(path: str) -> int:
    """Opens a store's file; the caller owns the descriptor and looks at its owner.

    Raises:
        FileNotFoundError: There is none.
        StorePermissionError: It is a link, no file, or may not be opened.
    """
    try:
        return os.open(path, _FLAGS | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _not_ours(path, os.lstat(path)) from error


def create(path: str, size: int) -> int:
    """Creates a store's file of this length, with no memory yet; the caller owns the descriptor.

    Raises:
        FileExistsError: There is something at the path.
        InvalidArgumentError: The file system does not have files as long, or none at all.
    """
    try:
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    except FileNotFoundError as error:
        raise InvalidArgumentError(
            f"Got the path {path} for a store, where no file can be made ({error.strerror});"
            " expected one in a directory of a file system that has files."
        ) from error
    try:
        os.fchmod(fd, _MODE)
        # Its last byte makes it as long; the core allocates what it uses before it does.
        os.pwrite(fd, b"\0", size - 1)
    except OSError as error:
        os.close(fd)
        os.unlink(path)
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EOVERFLOW):
            raise
        raise InvalidArgumentError(
            f"Got a store of {size} bytes of address space, which cannot be created as {path}"
            f" ({error}). Give a smaller capacity, or a path on another file system."
        ) from error
    return fd


def hold(fd: int) -> None:
    """Says that this process is attached, until the descriptor is closed."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def is_held(path: str) -> bool:
    """Returns whether a process is attached to the store at this path, whatever its name.

    Raises:
        FileNotFoundError: There is none.
        StorePermissionError: It is a link, no file, or may not be opened.
    """
    fd = open_existing(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def clear_the_way(path: str) -> None:
    """Removes a store at this path that nobody is attached to, and nothing else.

    Raises:
        StoreExistsError: Somebody is, or it is not a store.
        StorePermissionError: It is not a file that only this user can have written.
    """
    try:
        fd = open_existing(path)
    except FileNotFoundError:
        return
    try:
        _check_ours(path, os.fstat(fd))
        if os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise StoreExistsError(
                f"Got the path {path}, where there is a file that is not a store; expected one"
                " where there is none. Remove it yourself, or use another path."
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreExistsError(
                f"Got the path {path}, where there is a store that living processes use; expected"
                " one that nobody uses. See `shmreplay ls`, or use another path."
            ) from error
        os.unlink(path)
    finally:
        os.close(fd)


def write_pointer(pointer: str, path: str) -> None:
    """Writes a pointer to a path, in place of what there was; by the holder of the lease."""
    fd = os.open(pointer, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        os.fchmod(fd, _MODE)
        os.write(fd, os.fsencode(path))
    except BaseException:
        os.unlink(pointer)
        raise
    finally:
        os.close(fd)


def read_pointer(pointer: str) -> str | None:
    """Returns where a pointer leads to; None: there is none, or it is just being written.

    Raises:
        StorePermissionError: It is not a file that only this user can have written.
    """
    try:
        fd = open_existing(pointer)
    except FileNotFoundError:
        return None
    try:
        _check_ours(pointer, os.fstat(fd))
        path = os.fsdecode(os.pread(fd, _LONGEST + 1, 0))
    finally:
        os.close(fd)
    return path if os.path.isabs(path) and "\0" not in path else None
