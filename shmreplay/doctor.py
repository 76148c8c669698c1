"""What ``shmreplay doctor`` looks at: whether this machine has what stores stand on, and how well.

Looks and changes nothing, but for a file of one page that it makes in /dev/shm and removes.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from shmreplay import _native, recovery, segment
from shmreplay.wording import size

__all__ = ["HINT", "OK", "PROBLEM", "Finding", "examine"]

OK: Final = "ok"
HINT: Final = "hint"
"""It works, and could be better."""
PROBLEM: Final = "problem"
"""Something will not work."""

_PYTHON: Final = (3, 11)
_POPULATE_KERNEL: Final = (5, 14)
_SMALL_SHM_BYTES: Final = 64 << 20
_SCARCE_SHM_BYTES: Final = 256 << 20
_FEW_FILES: Final = 256
_PACKAGES: Final = ("numpy", "posix_ipc", "lz4", "pyzmq")
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MOUNTS: Final = Path("/proc/self/mounts")
_COLLAPSE_KERNEL: Final = (6, 1)
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

# Tries to take a lock that this process holds: 0 if it is refused, as it must be.
_TRY_LOCK: Final = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        sys.exit(0)
sys.exit(1)
"""


class Finding(NamedTuple):
    """One thing that was looked at."""

    topic: str
    found: str
    level: str = OK
    """``OK``, ``HINT`` or ``PROBLEM``."""
    remedy: str = ""
    """What to do about it."""


def examine() -> Iterator[Finding]:
    """Looks at one thing after the other."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _software,
        _packages,
        _shared_memory,
        _huge_pages,
        _limits,
        _leases,
        _stores,
    )
    for check in checks:
        yield from check()


def _software() -> Iterator[Finding]:
    python = platform.python_version()
    if sys.version_info < _PYTHON:
        yield Finding("Python", python, PROBLEM, "Install Python 3.11 or newer.")
    else:
        yield Finding("Python", f"{python}, {platform.python_implementation()}")
    name, version = platform.libc_ver()
    if name:
        yield Finding("C library", f"{name} {version}")
    else:
        yield Finding(
            "C library",
            "not glibc",
            HINT,
            "Only glibc is tested. Locks must be robust and shared between processes; run"
            " scripts/test of a checkout to see.",
        )
    release = platform.release()
    if platform.system() != "Linux":
        yield Finding("kernel", platform.system(), PROBLEM, "Use Linux: futexes are needed.")
    elif _version(release) < _POPULATE_KERNEL:
        yield Finding(
            "kernel",
            release,
            HINT,
            "From 5.14 on memory is made ready ahead of its use in one call"
            " (MADV_POPULATE_WRITE); before, page by page. Update the kernel if you can.",
        )
    else:
        yield Finding("kernel", release)
    yield Finding("layout", f"signature {_native.layout_signature():016x}")


def _version(release: str) -> tuple[int, ...]:
    numbers = release.split("-")[0].split(".")[:2]
    return tuple(int(part) for part in numbers if part.isdecimal())


def _packages() -> Iterator[Finding]:
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "is not there", PROBLEM, f"pip install {package}")
            continue
        if package == "pyzmq":
            import zmq  # no other command needs it

            version += f", libzmq {zmq.zmq_version()}"
            if not zmq.has("curve"):
                yield Finding(
                    package,
                    f"{version}, without CURVE",
                    HINT,
                    "Bridges cannot encrypt: install pyzmq from a wheel (pip install pyzmq).",
                )
                continue
        yield Finding(package, version)


def _shared_memory() -> Iterator[Finding]:
    try:
        status = os.statvfs(segment.DIRECTORY)
    except OSError as error:
        yield Finding(
            segment.DIRECTORY,
            error.strerror or "cannot be looked at",
            PROBLEM,
            f"Mount it: mount -t tmpfs -o size=50% tmpfs {segment.DIRECTORY}",
        )
        return
    whole, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{size(whole)}, {size(free)} free"
    larger = (
        "Make it larger: `docker run --shm-size=8g`, or `mount -o remount,size=8g"
        f" {segment.DIRECTORY}`; in Kubernetes an emptyDir with medium: Memory, mounted there."
    )
    if whole <= _SMALL_SHM_BYTES:
        yield Finding(segment.DIRECTORY, found, PROBLEM, larger)
    elif free < _SCARCE_SHM_BYTES:
        remedy = f"See what takes it with `shmreplay ls` and `ls -l {segment.DIRECTORY}`. {larger}"
        yield Finding(segment.DIRECTORY, found, HINT, remedy)
    else:
        yield Finding(segment.DIRECTORY, found)
    for path in _CGROUP_LIMITS:
        if not path.exists():
            continue
        text = path.read_text().strip()
        limit = int(text) if text.isdecimal() else None
        if limit is not None and limit < whole:
            yield Finding(
                "memory limit",
                f"{size(limit)}, less than {segment.DIRECTORY}",
                HINT,
                "What is in a store counts as memory of this control group, and beyond the limit"
                " processes are killed: keep capacity= well below it.",
            )
        return


def _huge_pages() -> Iterator[Finding]:
    """Whether what is in a store can lie in huge pages, which makes reading a large one faster.

    A mount of tmpfs has them as its option `huge=` says. Where that is `never`, as it mostly is,
    a process can still have small pages put together (MADV_COLLAPSE). What shmem_enabled says
    is of other shared memory, but that `deny` and `force` overrule both.
    """
    topic = "huge pages"
    if not _SHMEM_ENABLED.exists():
        yield Finding(topic, "not in this kernel")
        return
    chosen = _SHMEM_ENABLED.read_text().split("[")[-1].split("]")[0]
    mounted = _mount_option("huge") or "never"
    remount = f"mount -o remount,huge=within_size {segment.DIRECTORY} (as root)"
    if chosen == "deny":
        yield Finding(
            topic,
            "shmem_enabled is deny",
            HINT,
            "None can be had, and large stores are read more slowly: echo never >"
            f" {_SHMEM_ENABLED} (as root) leaves it to mounts and processes.",
        )
    elif chosen == "force":
        yield Finding(topic, "shmem_enabled is force: everywhere")
    elif mounted in ("always", "within_size"):
        yield Finding(topic, f"{segment.DIRECTORY} is mounted with huge={mounted}")
    elif _version(platform.release()) >= _COLLAPSE_KERNEL:
        yield Finding(topic, "on request: this kernel has MADV_COLLAPSE")
    else:
        yield Finding(
            topic,
            f"none: {segment.DIRECTORY} is mounted with huge={mounted}, and the kernel is older"
            " than 6.1, which puts small ones together (MADV_COLLAPSE)",
            HINT,
            f"For large stores it may be faster with: {remount}; or update the kernel.",
        )


def _mount_option(name: str) -> str | None:
    """What an option of the mount of the stores' directory says; None: it is not there."""
    found = None
    for line in _MOUNTS.read_text().splitlines():
        _, where, _, options, *_ = line.split()
        if where == segment.DIRECTORY:  # the last one hides those before
            given = dict(each.partition("=")[::2] for each in options.split(","))
            found = given.get(name)
    return found


def _limits() -> Iterator[Finding]:
    def text(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    yield Finding(
        "open files",
        text(files),
        HINT if few else OK,
        "A bridge needs a descriptor a client: ulimit -n 4096" if few else "",
    )
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    bounded = address_space != resource.RLIM_INFINITY
    yield Finding(
        "address space",
        text(address_space),
        HINT if bounded else OK,
        "A store takes addresses for several times its capacity: ulimit -v unlimited"
        if bounded
        else "",
    )
    file_size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    bounded = file_size != resource.RLIM_INFINITY
    yield Finding(
        "file size",
        text(file_size),
        PROBLEM if bounded else OK,
        "A store is a file, with addresses for several times its capacity: ulimit -f unlimited"
        if bounded
        else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding("locked memory", f"{text(locked)} (not needed)")


def _leases() -> Iterator[Finding]:
    topic = "record locks"
    try:
        works = _lock_is_seen()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        yield Finding(
            topic,
            f"cannot be tried in {segment.DIRECTORY}: {error.strerror}",
            PROBLEM,
            "Free some of it: `shmreplay clean`."
            if full
            else f"This user must be able to make and lock files in {segment.DIRECTORY}.",
        )
        return
    yield Finding(
        topic,
        "work" if works else "are not seen by other processes",
        OK if works else PROBLEM,
        ""
        if works
        else f"{segment.DIRECTORY} must be a tmpfs: leases tell by record locks who lives.",
    )


def _lock_is_seen() -> bool:
    """Whether another process is refused a lock that this one holds."""
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=segment.DIRECTORY) as file:
        os.posix_fallocate(file.fileno(), 0, 4096)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        run = [sys.executable, "-c", _TRY_LOCK, file.name]
        return subprocess.run(run, check=False, timeout=60).returncode == 0


def _stores() -> Iterator[Finding]:
    names = recovery.names()
    if not names:
        yield Finding("stores", "none of this user")
    for name in names:
        topic = f"store {name}"
        with recovery.look(name) as found:
            if found.state == recovery.DAMAGED:
                yield Finding(
                    topic,
                    found.problem,
                    PROBLEM,
                    f"`shmreplay dump {name} -o DIR` reads out what can be read; `shmreplay clean"
                    f" {name}` removes it once no process uses it.",
                )
            elif found.state in (recovery.DEAD, recovery.STOPPED):
                yield Finding(
                    topic,
                    f"{found.state}, no living process uses it",
                    HINT,
                    f"Take it over with Server(name={name!r}, recover=True), or remove it:"
                    f" `shmreplay clean {name}`.",
                )
            else:
                yield Finding(topic, found.state)
