"""What all tests share: store names, servers that are stopped, processes that are waited for."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from shmreplay import Server

# Test modules import `tests.model.oracle`, and spawned processes import the test modules.
ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SHARED_MEMORY = Path("/dev/shm")
# Seconds after which a process that has not answered is taken to hang. Nothing is expected to
# come near it.
PROCESS_DEADLINE = 120.0

# Jobs get the sending end of a pipe first, and send exactly one result through it.
Job = tuple[Callable[..., None], tuple[Any, ...]]

settings.register_profile("dev", max_examples=32, deadline=None)
settings.register_profile(
    "ci",
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_serial = itertools.count()


def _segments_of_this_process() -> set[str]:
    """Entries of the shared-memory file system with this process's id in their name."""
    ours = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    return {entry.name for entry in SHARED_MEMORY.iterdir() if ours.search(entry.name)}


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    """Fails a test that leaves a store behind."""
    before = _segments_of_this_process()
    yield
    left = _segments_of_this_process() - before
    assert not left, f"left in {SHARED_MEMORY}: {sorted(left)}"


@pytest.fixture
def unique_name() -> Callable[[], str]:
    """Makes store names that nobody else on the machine uses."""
    return lambda: f"test-{os.getpid()}-{next(_serial)}"


def free_port() -> int:
    """A port of the loopback that nobody uses just now.

    None of those that the system gives to whoever connects: such a one could be gone before a
    server listens at it, or while one server takes another's place.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choose = random.SystemRandom()  # others choose, too
    while True:
        port = choose.randrange(10_000, first if first > 11_000 else 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@pytest.fixture
def make_server(unique_name: Callable[[], str]) -> Iterator[Callable[..., Server]]:
    """Makes servers, of 32 MiB unless told otherwise, which are stopped when the test is over."""
    import shmreplay

    with ExitStack() as stack:

        def make(tables: Sequence[Any], **options: Any) -> Server:
            options = {"name": unique_name(), "capacity": 32 << 20, **options}
            server = shmreplay.Server(tables, **options)
            stack.callback(server.stop)
            return server

        yield make


@pytest.fixture
def run_processes() -> Callable[[str, Sequence[Job]], list[Any]]:
    """Runs jobs side by side, each in a process of its own, and returns their results in order."""

    def run(start_method: str, jobs: Sequence[Job]) -> list[Any]:
        context = multiprocessing.get_context(start_method)
        processes: list[Any] = []
        receivers: list[Any] = []
        try:
            for function, arguments in jobs:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=function, args=(sender, *arguments)
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            return _results(processes, receivers)
        finally:
            for process, receiver in zip(processes, receivers, strict=True):
                if process.is_alive():
                    process.kill()
                process.join()
                receiver.close()

    return run


def _results(processes: Sequence[Any], receivers: Sequence[Any]) -> list[Any]:
    """One result a process; fails as soon as one of them dies without having sent its own."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {receivers[i]: i for i in range(len(processes)) if i not in results}
        ready: list[Any] = wait(list(waiting), timeout=PROCESS_DEADLINE)
        assert ready, f"processes {sorted(waiting.values())} hang"
        for receiver in ready:
            index = waiting[receiver]
            try:
                results[index] = receiver.recv()
            except EOFError:
                processes[index].join(PROCESS_DEADLINE)
                pytest.fail(f"process {index} ended with {processes[index].exitcode}, no result")
    for index, process in enumerate(processes):
        process.join(PROCESS_DEADLINE)
        assert process.exitcode == 0, f"process {index} ended with {process.exitcode}"
    return [results[index] for index in range(len(processes))]
