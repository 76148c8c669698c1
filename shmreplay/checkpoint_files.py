"""Directories of checkpoints: their names, which is the newest, and clearing old ones away.

Under the directory that a checkpointer names, each checkpoint is a directory of its own, named by
the time of its writing. While it is written it has another name, so what has such a name is whole.
A data file that two checkpoints have in common is one file with two names (a hard link): it goes
with the last of them. Nothing else in the directory is ever touched.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from shmreplay.checkpoint_format import INDEX, MANIFEST
from shmreplay.errors import CheckpointError

__all__ = [
    "clear_away",
    "data_name",
    "discard",
    "latest",
    "locked",
    "new_directory",
    "publish",
    "saved",
    "temporary_root",
]

_NAME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}\+00:00")
_UNFINISHED: Final = re.compile(r"\.shmreplay-[0-9a-f]{16}")
_FILE: Final = re.compile(r"blocks-[0-9a-f]{16}\.bin")
_LOCK_PAUSE_S: Final = 0.02

_log = logging.getLogger(__name__)


def data_name() -> str:
    """Returns the name of a new data file."""
    return f"blocks-{secrets.token_hex(8)}.bin"


def _name_at(ns: int) -> str:
    seconds = datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{ns % 10**9:09d}+00:00"


def saved(root: str) -> list[str]:
    """Returns the names of the checkpoints in a directory, the oldest first.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"Got {root!r} for checkpoints, which cannot be read ({error.strerror}); expected a"
            " directory. Give another path, or look at its rights."
        ) from error
    return sorted(
        name
        for name in names
        if _NAME.fullmatch(name) and os.path.isfile(os.path.join(root, name, MANIFEST))
    )


def latest(root: str) -> str | None:
    """Returns the path of the newest checkpoint, None if there is none."""
    names = saved(root)
    return os.path.join(root, names[-1]) if names else None


@contextmanager
def locked(root: str, look: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Makes the directory if it is not there, and keeps others from writing checkpoints to it.

    Args:
        root: The directory.
        look: Called now and then while others write there; raises where waiting is to end.

    Yields:
        A descriptor of it.

    Raises:
        CheckpointError: It cannot be made or opened.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"Got {root!r} for checkpoints, which cannot be used ({error.strerror}); expected a"
            " directory, or a place where one can be made. Give another path."
        ) from error
    try:
        while not _try_lock(fd):
            look()
            time.sleep(_LOCK_PAUSE_S)
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_directory(root: str) -> str:
    """Makes a directory for a checkpoint that is being written, and removes those of dead writers.

    The caller has locked the root.
    """
    for name in os.listdir(root):
        if _UNFINISHED.fullmatch(name):
            _remove(os.path.join(root, name))
    path = os.path.join(root, f".shmreplay-{secrets.token_hex(8)}")
    os.mkdir(path, 0o700)
    return path


def discard(path: str) -> None:
    """Removes what was written of a checkpoint that comes to nothing, if it is still there."""
    if os.path.isdir(path):
        _remove(path)


def publish(root: str, root_fd: int, path: str) -> str:
    """Makes a written checkpoint the newest one, and returns its path.

    Everything in it is on disk; from the renaming on it is there.
    """
    _sync_directory(path)
    names = saved(root)
    ns = time.time_ns()
    name = _name_at(ns)
    while names and name <= names[-1]:  # the clock was set back
        ns = max(ns, _ns_of(names[-1])) + 1
        name = _name_at(ns)
    final = os.path.join(root, name)
    os.rename(path, final)
    os.fsync(root_fd)
    return final


def _ns_of(name: str) -> int:
    moment = datetime.strptime(name[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * 10**9 + int(name[20:29])


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clear_away(root: str, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints. The caller has locked the root."""
    for name in saved(root)[:-keep]:
        path = os.path.join(root, name)
        if _is_ours(path):
            # Half of it is no checkpoint, and is removed by the next writer if this one dies.
            unfinished = os.path.join(root, f".shmreplay-{secrets.token_hex(8)}")
            os.rename(path, unfinished)
            _remove(unfinished)


def _is_ours(path: str) -> bool:
    others = [n for n in os.listdir(path) if n not in (MANIFEST, INDEX) and not _FILE.fullmatch(n)]
    if others:
        _log.warning("%s stays: it holds %r, which is not of a checkpoint", path, others[0])
    return not others


def _remove(path: str) -> None:
    """Removes a directory of ours, but none in which there is anything else."""
    if _is_ours(path):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def temporary_root(generation: int) -> str:
    """Returns where checkpoints of a store go that was not told where; made when it is used."""
    return os.path.join(tempfile.gettempdir(), f"shmreplay-{os.geteuid()}-{generation:016x}")
