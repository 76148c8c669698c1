"""Stores within one process: names, files, capacity, references, failed creations."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmreplay import attachment, rate_limiters, segment, selectors
from shmreplay.errors import (
    ArenaFullError,
    ArgumentTypeError,
    InvalidArgumentError,
    ServerClosedError,
    StoreExistsError,
    StoreNotFoundError,
    StorePermissionError,
)
from shmreplay.limits import MAX_STORE_NAME_BYTES
from shmreplay.store import Store
from shmreplay.table import Table, TableConfig
from tests.conftest import free_port

MIB = 1 << 20
PORT = free_port()
OTHER_PORT = PORT + 1
SHARED_MEMORY = Path("/dev/shm")

Make = Callable[..., Store]


def config(name: str = "replay", **changes: Any) -> TableConfig:
    arguments: dict[str, Any] = {
        "sampler": selectors.Uniform(),
        "remover": selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": rate_limiters.MinSize(1),
    }
    return Table(name, **{**arguments, **changes}).config()


def files_of(name: str) -> tuple[Path, Path]:
    """The paths of a store's segment and lease."""
    path = SHARED_MEMORY / f"shmreplay.{os.geteuid()}.{name}"
    return path, path.with_name(path.name + ".lease")


@pytest.fixture
def make(unique_name: Callable[[], str]) -> Iterator[Make]:
    """Creates stores, which are released when the test is over if it did not do that."""
    made: list[Store] = []

    def create(name: str | None = None, **options: Any) -> Store:
        options = {"tables": [config()], "capacity": 2 * MIB, **options}
        made.append(Store.create(name or unique_name(), **options))
        return made[-1]

    yield create
    for each in made:
        while each in attachment._attached:
            each.release()


# --- creating and leaving -------------------------------------------------------------------------


def test_create_makes_two_private_files_and_release_removes_them(make: Make) -> None:
    old_umask = os.umask(0)
    try:
        created = make()
    finally:
        os.umask(old_umask)
    for path in files_of(created.name):
        status = path.lstat()
        assert (status.st_mode, status.st_uid) == (0o100600, os.geteuid())
    created.release()
    assert not any(path.exists() for path in files_of(created.name))


def test_what_a_created_store_says(make: Make) -> None:
    tables = [config("a", seed=5), config("b", max_times_sampled=1)]
    created = make(tables=tables, port=PORT, role="learner")
    assert created.address == f"shm://{created.name}"
    assert created.tables == tables
    assert (created.is_creator, created.forked, created.participant) == (True, False, 0)
    native = created.native
    assert (native.port, native.creator_pid, native.closed) == (PORT, os.getpid(), False)
    assert native.generation > 0
    assert native.stats()["capacity_bytes"] == 2 * MIB
    (me,) = created.participants()
    assert (me.number, me.pid, me.role, me.alive) == (0, os.getpid(), "learner", True)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert me.start_ticks == int(stat[22 - 3])
    assert me.pid_namespace == os.stat("/proc/self/ns/pid").st_ino


def test_generations_differ(make: Make, unique_name: Callable[[], str]) -> None:
    name = unique_name()
    generations = set()
    for _ in range(3):
        created = make(name)
        generations.add(created.native.generation)
        created.release()
    assert len(generations) == 3


def test_a_process_has_one_store_object_a_name(make: Make) -> None:
    created = make()
    assert Store.open(created.name) is created
    assert created.retain() is created
    for _ in range(2):
        created.release()
        assert files_of(created.name)[0].exists()
    created.release()
    assert not files_of(created.name)[0].exists()


def test_a_released_store_says_so(make: Make) -> None:
    created = make()
    created.release()
    for call in (
        created.retain,
        created.release,
        created.participants,
        created.reclaim_dead,
        lambda: created.native,
    ):
        with pytest.raises(ServerClosedError, match="was closed"):
            call()
    created.unlink()  # nothing to do any more


def test_unlink_frees_the_name_while_references_last(make: Make) -> None:
    first = make()
    first.retain()
    first.unlink()
    first.unlink()
    assert first.native.closed
    assert not any(path.exists() for path in files_of(first.name))
    with pytest.raises(StoreNotFoundError):
        Store.open(first.name)
    second = make(first.name)
    first.release()
    first.release()
    assert Store.open(first.name) is second
    second.release()
    assert all(path.exists() for path in files_of(first.name))


def test_a_name_taken_by_this_process(make: Make) -> None:
    created = make()
    with pytest.raises(StoreExistsError, match=rf"this one, {os.getpid()}.*another name"):
        make(created.name)
    assert not created.native.closed
    assert all(path.exists() for path in files_of(created.name))


def test_a_store_that_is_not_there(make: Make, unique_name: Callable[[], str]) -> None:
    created = make()
    with pytest.raises(StoreNotFoundError, match=rf"there is none.*'{created.name}'"):
        Store.open(unique_name())


def test_reclaiming_leaves_the_living_alone(make: Make) -> None:
    created = make()
    assert created.reclaim_dead() == 0
    assert [participant.number for participant in created.participants()] == [0]


def test_files_removed_by_hand(make: Make) -> None:
    created = make()
    files_of(created.name)[0].unlink()
    # The lease is not opened again: closing that would give up the lock on it.
    for call in (Store.open, make):
        with pytest.raises(StoreExistsError, match="its segment was removed"):
            call(created.name)
    assert [participant.alive for participant in created.participants()] == [True]
    files_of(created.name)[1].unlink()
    second = make(created.name)
    created.release()
    assert all(path.exists() for path in files_of(second.name))


def test_threads_may_open_and_release_at_once(make: Make) -> None:
    created = make()
    opened: list[Store] = []

    def work() -> None:
        for _ in range(50):
            opened.append(Store.open(created.name))
            created.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 400
    assert set(opened) == {created}
    created.release()
    assert not any(path.exists() for path in files_of(created.name))


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "/a", "a b", "ä", "a\0", "a\n", "a.lease", ".lease", "x" * 101, "../x"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"store name .* expected 1 to 100"):
        Store.create(name, [config()])
    with pytest.raises(InvalidArgumentError, match=r"store name .* expected 1 to 100"):
        Store.open(name)


def test_a_name_is_a_str() -> None:
    with pytest.raises(ArgumentTypeError, match="expected a str"):
        Store.create(b"x", [config()])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="expected a str"):
        Store.open(None)  # type: ignore[arg-type]


def test_the_longest_name_and_odd_ones(make: Make, unique_name: Callable[[], str]) -> None:
    base = unique_name()
    for name in (
        base.ljust(MAX_STORE_NAME_BYTES, "x"),
        f"..{base}",
        f"-{base}_.",
        f"{base}.leases",
    ):
        created = make(name)
        assert name in segment.store_names()
        created.release()


@pytest.mark.parametrize("capacity", [0, -1, MIB - 1, 1 << 44, 1 << 70])
def test_capacities_out_of_range(make: Make, capacity: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"capacity of {capacity} bytes; expected"):
        make(capacity=capacity)


@pytest.mark.parametrize("capacity", [2.0 * MIB, True, "2"])
def test_capacities_of_other_types(make: Make, capacity: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"capacity .*expected an int"):
        make(capacity=capacity)


@pytest.mark.parametrize(
    ("free", "expected"), [(100 * MIB, 50 * MIB), (20 * MIB, 10 * MIB), (9 * MIB, 8 * MIB)]
)
def test_default_capacity(
    make: Make, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    asked = []

    def statvfs(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    created = make(capacity=None)
    assert created.native.stats()["capacity_bytes"] == expected
    assert asked == ["/dev/shm"]


@pytest.mark.parametrize(
    ("capacity", "participants"), [(MIB, 32), (8 * MIB, 32), (64 * MIB, 256), (1 << 30, 1024)]
)
def test_participants_scale_with_capacity(make: Make, capacity: int, participants: int) -> None:
    assert make(capacity=capacity).native.n_participants == participants


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_out_of_range(make: Make, port: int) -> None:
    for call in (lambda: make(port=port), lambda: Store.find_by_port(port)):
        with pytest.raises(InvalidArgumentError, match=f"Got port {port}; expected"):
            call()


def test_ports_of_other_types(make: Make) -> None:
    for call in (lambda: make(port="80"), lambda: Store.find_by_port(80.0)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match=r"port .*expected an int"):
            call()


# --- finding by port ------------------------------------------------------------------------------


def test_find_by_port(make: Make) -> None:
    assert Store.find_by_port(PORT) is None
    first, second = make(port=PORT), make(port=OTHER_PORT)
    make(port=0)
    make(port=0)  # none is no port that two could share
    assert Store.find_by_port(PORT) == first.name
    assert Store.find_by_port(OTHER_PORT) == second.name
    with pytest.raises(InvalidArgumentError, match="Got port 0; expected"):
        Store.find_by_port(0)
    first.release()
    assert Store.find_by_port(PORT) is None


def test_a_port_that_is_taken(make: Make, unique_name: Callable[[], str]) -> None:
    first, name = make(port=PORT), unique_name()
    with pytest.raises(StoreExistsError, match=f"port {PORT} .*{first.name}.*another port"):
        make(name, port=PORT)
    assert not any(path.exists() for path in files_of(name))
    first.unlink()
    assert make(name, port=PORT).native.port == PORT


# --- names that are taken by something else -------------------------------------------------------


def plant_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def plant_directory(path: Path) -> None:
    path.mkdir()


def plant_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("plant", [plant_link, plant_directory, plant_pipe])
@pytest.mark.parametrize("which", [0, 1])
def test_a_name_taken_by_no_regular_file(
    make: Make, unique_name: Callable[[], str], plant: Callable[[Path], None], which: int
) -> None:
    name = unique_name()
    path = files_of(name)[which]
    other = files_of(name)[1 - which]
    plant(path)
    try:
        with pytest.raises(StorePermissionError, match="regular file of user"):
            make(name)
        if which == 1:
            with pytest.raises(StorePermissionError, match="regular file of user"):
                Store.open(name)
        assert path.is_symlink() or path.exists()
        assert not other.exists()
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    make(name)


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602, 0o640])
@pytest.mark.parametrize("which", [0, 1])
def test_a_name_taken_by_a_file_that_others_can_use(
    make: Make, unique_name: Callable[[], str], mode: int, which: int
) -> None:
    name = unique_name()
    path = files_of(name)[which]
    path.write_bytes(b"precious")
    path.chmod(mode)
    try:
        expected = rf"user {os.geteuid()} and has mode -rw.*{mode:#o}.*with mode 0o600"
        with pytest.raises(StorePermissionError, match=expected):
            make(name)
        assert path.read_bytes() == b"precious"
        assert not files_of(name)[1 - which].exists()
    finally:
        path.unlink()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", [0, 1])
def test_a_name_taken_by_another_users_file(
    make: Make, unique_name: Callable[[], str], which: int
) -> None:
    name = unique_name()
    path = files_of(name)[which]
    path.touch(0o600)
    os.chown(path, 65534, 65534)
    try:
        with pytest.raises(StorePermissionError, match=r"user 65534.*expected .* of user 0"):
            make(name)
        assert path.exists()
        assert not files_of(name)[1 - which].exists()
    finally:
        path.unlink()


# --- creations that fail --------------------------------------------------------------------------


def fails_to_map(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupted_creation_leaves_nothing(
    make: Make, unique_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique_name()
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(segment, "NativeStore", fails_to_map)
        with pytest.raises(KeyboardInterrupt):
            make(name)
    assert not any(path.exists() for path in files_of(name))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    make(name)


def test_no_room_for_an_empty_store(make: Make, unique_name: Callable[[], str]) -> None:
    name = unique_name()
    # The names of so many tables' columns alone fill a store of the least capacity.
    signature = {f"{'long' * 20}{i}": np.float32(i) for i in range(256)}
    tables = [config(f"t{i}", signature=signature) for i in range(64)]
    with pytest.raises(ArenaFullError, match=rf"'{name}' with a capacity of {MIB} bytes.*free: "):
        make(name, tables=tables, capacity=MIB)
    assert not any(path.exists() for path in files_of(name))
    assert make(name, tables=tables, capacity=8 * MIB).tables == tables


def test_tables_that_the_core_refuses(make: Make, unique_name: Callable[[], str]) -> None:
    name = unique_name()
    with pytest.raises(InvalidArgumentError):
        make(name, tables=[])
    assert not any(path.exists() for path in files_of(name))


def test_what_a_dead_creation_left_is_replaced(
    make: Make, unique_name: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = unique_name()
    for path in files_of(name):
        path.touch(0o600)
    with pytest.raises(StoreNotFoundError, match="all processes that used it have died"):
        Store.open(name)
    with caplog.at_level(logging.INFO, "shmreplay"):
        created = make(name)
    assert f"replacing store '{name}'" in caplog.text
    assert not created.native.closed
