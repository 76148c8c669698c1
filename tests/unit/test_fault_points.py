"""What the system refuses while a server or a client is made: files, address space, file sizes.

A limit is set that allows nothing more, and raised step by step until all goes well. Then single
system calls fail, the first, the second and so on, until there is none that has not. After each
failure nothing is left behind, neither a descriptor nor a file, and without it all works. What
fails inside the core, mapping among it: `native/test_fault_points.c`.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

import shmreplay as reverb
from shmreplay import errors, ports, rate_limiters, selectors

MIB = 1 << 20
STARVED_SECONDS = 5.0
REFUSALS = (errors.ReverbError, OSError, MemoryError, RuntimeError)
"""What may be raised: our own errors, and the system's or the interpreter's where it says more."""

Run = Callable[[str, Sequence[tuple[Callable[..., None], tuple[Any, ...]]]], list[Any]]


def serve(name: str) -> reverb.Server:
    table = reverb.Table(
        "t", selectors.Uniform(), selectors.Fifo(), 100, rate_limiters.MinSize(1), stripes=1
    )
    return reverb.Server([table], name=name, capacity=2 * MIB)


def use(name: str) -> None:
    """Everything for which a client needs the system: attaching, mapping, memory."""
    with reverb.Client(f"shm://{name}") as client:
        client.insert({"x": np.arange(3)}, {"t": 1.0}, timeout=10)
        batch = client.sample_batch("t", 1, timeout=10)
        assert batch.data["x"].tolist() == [[[0, 1, 2]]]


@contextmanager
def limited(which: int, limit: int) -> Iterator[None]:
    old = resource.getrlimit(which)
    resource.setrlimit(which, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, old)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def first_free_descriptor() -> int:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    return fd


def left_of(name: str) -> list[str]:
    return [entry.name for entry in Path("/dev/shm").iterdir() if name in entry.name]


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Interrupts what takes longer, in the main thread, as Ctrl-C would.

    CPython's `Thread.start` waits for ever where the new thread finds no memory to begin.
    """

    def give_up(number: int, frame: object) -> None:
        raise MemoryError(f"interrupted after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def threads_alive() -> int:
    """Without those that were never seen to start."""
    return sum(thread.is_alive() for thread in threading.enumerate())


def climb(
    which: int, start: int, step: int, most: int, attempt: Callable[[], None], name: str | None
) -> list[str]:
    """Raises a limit until `attempt` succeeds. Gives what was raised on the way.

    Args:
        which: Limit of `resource`.
        start: Its first value.
        step: By how much it is raised.
        most: How often at most.
        attempt: Raises one of REFUSALS, or succeeds and leaves nothing.
        name: Store of which a failure must leave nothing, if the attempt creates it.
    """
    refused = []
    open_before = descriptors()
    threads_before = threads_alive()
    for number in range(most):
        try:
            with interrupted(STARVED_SECONDS), limited(which, start + number * step):
                attempt()
        except REFUSALS as error:
            refused.append(f"{type(error).__name__}: {error}")
            del error
            gc.collect()  # a traceback keeps what its frames hold
            assert descriptors() == open_before, refused
            assert threads_alive() == threads_before, refused
            assert name is None or not left_of(name), refused
            continue
        return refused
    raise AssertionError(f"no end after {most} failures, the last ones {refused[-3:]}")


# ---------------------------------------------------------------- in processes of their own


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def starting_limits(kind: str) -> tuple[int, int, int, int]:
    """What `climb` begins with, in a process that has imported and used everything."""
    return {
        "files": (resource.RLIMIT_NOFILE, first_free_descriptor(), 1, 40),
        "addresses": (resource.RLIMIT_AS, virtual_bytes(), MIB, 1000),
        "file size": (resource.RLIMIT_FSIZE, 0, MIB, 1000),
    }[kind]


def warm_up(name: str) -> None:
    threading.stack_size(64 * MIB)  # the C library keeps smaller ones for the next thread
    with serve(name):
        use(name)
    gc.collect()


def make_servers(result: Connection, name: str, kind: str) -> None:
    """Sends how many failures there were before the limit was high enough."""

    def make() -> None:
        with serve(name):
            pass

    warm_up(name)
    refused = climb(*starting_limits(kind), make, name)
    with serve(name):
        use(name)
    result.send(len(refused))


def make_clients(result: Connection, name: str, kind: str) -> None:
    """The same for clients of a server in another process."""
    warm_up(name + "-of-child")
    refused = climb(*starting_limits(kind), lambda: use(name), None)
    use(name)
    result.send(len(refused))


@pytest.mark.parametrize("kind", ["files", "addresses", "file size"])
def test_servers(kind: str, run_processes: Run, unique_name: Callable[[], str]) -> None:
    (failures,) = run_processes("spawn", [(make_servers, (unique_name(), kind))])
    assert failures > 0


@pytest.mark.parametrize("kind", ["files", "addresses"])
def test_clients(kind: str, run_processes: Run, unique_name: Callable[[], str]) -> None:
    name = unique_name()
    with serve(name) as server:
        (failures,) = run_processes("spawn", [(make_clients, (name, kind))])
        assert failures > 0
        server.check()
        use(name)


# ---------------------------------------------------------------- single system calls


FALLIBLE: Sequence[tuple[Any, str]] = (
    (posix_ipc, "SharedMemory"),  # shm_open and ftruncate
    (posix_ipc, "unlink_shared_memory"),
    *((os, name) for name in ("open", "lstat", "fstat", "pread", "fchmod", "statvfs", "listdir")),
    *((os, name) for name in ("unlink", "write", "fsync", "stat")),
    *((fcntl, name) for name in ("lockf", "fcntl", "flock")),
)
"""What creating a store and attaching to one ask of the system, outside of the core."""

HELP_ONLY = {"unlink", "unlink_shared_memory"}
"""Of what goes away at the end: the next one of its name replaces what is left."""


class Faults:
    """Makes the n-th of these calls of the main thread fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = 0
        self.passed = 0
        self.failed: str | None = None
        for module, name in FALLIBLE:
            patch.setattr(module, name, self._failing(name, getattr(module, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            if self.at and threading.current_thread() is threading.main_thread():
                self.passed += 1
                if self.passed == self.at:
                    self.failed = name
                    raise OSError(errno.EIO, f"{name} was made to fail")
            return call(*args, **options)

        return failing

    def arm(self, number: int) -> None:
        self.at, self.passed, self.failed = number, 0, None


def fail_each(faults: Faults, attempt: Callable[[], Any], left: Callable[[], Any]) -> list[str]:
    """Gives what failed on the way to the first attempt in which nothing does."""
    names: list[str] = []
    gc.collect()  # what tests before this one left to it
    expected = left()
    for number in range(1, 200):
        faults.arm(number)
        try:
            attempt()
        except REFUSALS as error:
            assert faults.failed is not None, "it failed by itself"
            del error
        failed = faults.failed
        faults.arm(0)
        gc.collect()
        assert left() == expected or failed in HELP_ONLY, f"{failed}, call {number}: {left()}"
        if failed is None:
            return names
        names.append(failed)
    raise AssertionError(f"no end after {names}")


@pytest.mark.parametrize("kind", ["shared memory", "file"])
def test_each_system_call_of_a_server(
    kind: str, monkeypatch: pytest.MonkeyPatch, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    name = unique_name()
    path = str(tmp_path / "store") if kind == "file" else None
    faults = Faults(monkeypatch)
    monkeypatch.setattr(ports, "stores_on", lambda *_: [])  # others come and go meanwhile

    def make() -> None:
        table = reverb.Table(
            "t", selectors.Uniform(), selectors.Fifo(), 100, rate_limiters.MinSize(1)
        )
        with reverb.Server([table], name=name, capacity=2 * MIB, path=path):
            faults.at = 0  # stopping it is no part of this
            if faults.failed is None:
                use(name)

    def left() -> tuple[int, list[str], list[str]]:
        # A lease that could not be locked may be another's: it stays, and is used by the next.
        files = [file for file in left_of(name) if not file.endswith(".lease")]
        return descriptors(), files, os.listdir(tmp_path)

    names = fail_each(faults, make, left)
    assert len(names) > 10
    assert {"SharedMemory", "lockf", "fstat"} <= set(names)
    make()


def test_each_system_call_of_a_client(
    monkeypatch: pytest.MonkeyPatch, run_processes: Run, unique_name: Callable[[], str]
) -> None:
    name = unique_name()
    with serve(name):
        (names,) = run_processes("spawn", [(attach_with_faults, (name,))])
        use(name)
    assert len(names) > 5
    assert {"SharedMemory", "lockf", "fstat", "pread"} <= set(names)


def attach_with_faults(result: Connection, name: str) -> None:
    """Sends which calls failed, until a client attached without a failure."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)

        def join() -> None:
            with reverb.Client(f"shm://{name}") as client:
                client.server_info()
                faults.at = 0  # leaving is no part of this

        names = fail_each(faults, join, descriptors)
    use(name)
    result.send(names)
